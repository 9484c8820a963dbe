"""The supervisor process of `rlhf up`. It runs Prefect's server, MLflow and a worker, and resumes lost flow
runs.

    supervisor --+-- prefect server    SQLite under {home}/servers/prefect, loopback, requires a password
                 +-- mlflow server     the same SQLite file that `rlhf run` writes, loopback, one process
                 +-- prefect worker    pool `rlhf`, one flow run at a time
                 +-- reconciler        runs every 2 s (flows/reconcile.py)

The servers end when the supervisor ends (parent-death signal). The supervisor restarts a server that has
ended or that has not answered for 90 seconds. It writes the current state to {home}/servers/state.json and
rotates the logs by size. On SIGTERM it stops the flow runs first, so that they can still report their end to
Prefect.

If PREFECT_API_URL or MLFLOW_TRACKING_URI is set, the supervisor uses that server and does not start its own.
With an external Prefect server the reconciler is disabled: it only knows the processes of this machine, and
other machines may execute runs of that server.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.local_http import answers, post
from flows.login import ensure_login
from flows.managed import ANSWER_SECONDS, Server
from flows.reconcile import ENGINE_VARIABLE, Reconciler
from rlhf_core.config.redact import ScrubbingFormatter
from rlhf_core.errors import InputError, RLHFError, StageFailed
from rlhf_core.run.environment import DATABASE_VARIABLES, NO_TELEMETRY, past_proxies, prefect_environment
from rlhf_core.run.home import rotate_logs
from rlhf_core.system.files import write_atomic, write_json
from rlhf_core.system.launch import SAFE_PATH, python_module
from rlhf_core.system.processes import ProcessId, carriers, free_port, stop

log = logging.getLogger(__name__)

POOL = "rlhf"
DEPLOYMENTS = Path("deployments/prefect.yaml")
MARK = "RLHF_SERVERS"
"""Carried by everything that `up` started, flow runs and their stages included; the value is the home folder.
"""
READY_SECONDS = 120.0
FLOW_STOP_SECONDS = 40.0
"""A stage may take 20 s to stop, and its flow some more to report."""
_HEARTBEAT_SECONDS = 30.0
"""Of a worker, as Prefect has it."""
LOOK_SECONDS = 2.0


class PortTaken(Exception):
    """A port was free when it was chosen, and is not any more."""


def own_database() -> str | None:
    """The user's own database for Prefect's server, if the environment names one. Raises InputError if it is
    no PostgreSQL with the driver that Prefect needs.
    """
    url = next((os.environ[name] for name in DATABASE_VARIABLES if os.environ.get(name)), None)
    if url is not None and not url.startswith("postgresql+asyncpg://"):
        raise InputError(
            f"{DATABASE_VARIABLES[0]} must begin with postgresql+asyncpg://; got"
            f" {url.partition('://')[0]}://...; correct it, or unset it to have SQLite in the home"
        )
    return url


class Supervisor:
    """Starts the servers in order, deploys, then watches."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "servers"
        self.database = home / "mlflow.db"
        self.profiles = home / "prefect" / "profiles.toml"
        self.stopping = False
        self._home = home
        self.folder.mkdir(parents=True, exist_ok=True)
        self._login = ensure_login(home)
        self._team_api = os.environ.get("PREFECT_API_URL")
        self._team_mlflow = os.environ.get("MLFLOW_TRACKING_URI")
        self._choose_ports()

    def _choose_ports(self) -> None:
        """The usual ones where they are free, and with them all that depends on them."""
        prefect_port, mlflow_port = free_port(4200), free_port(5000)
        self.api = self._team_api or f"http://127.0.0.1:{prefect_port}/api"
        self.mlflow_url = self._team_mlflow or f"http://127.0.0.1:{mlflow_port}"
        own = (
            {} if self._team_api else prefect_environment(self.folder / "prefect", self._login, prefect_port)
        )
        self.environment = {
            **NO_TELEMETRY,
            **SAFE_PATH,
            **past_proxies(),
            **own,
            MARK: str(self._home),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "5",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,rlhf_core",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONUNBUFFERED": "1",
        }
        self.servers = {"worker": self._worker()}
        if not self._team_mlflow:
            self.servers = {"mlflow": self._mlflow(mlflow_port), **self.servers}
        if not self._team_api:
            self.servers = {"prefect": self._prefect(prefect_port), **self.servers}

    def _prefect(self, port: int) -> Server:
        command = [
            *python_module("uvicorn"), "--factory", "flows.application:create_app", "--log-level", "warning",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        # Set for this server only, because the address may contain a password.
        database = dict.fromkeys(DATABASE_VARIABLES, url) if (url := own_database()) else {}
        return Server(
            "prefect",
            command,
            {**self.environment, **database, "PREFECT__SERVER_FINAL": "1"},
            self.folder / "prefect.log",
            lambda: answers(f"{self.api}/health", ANSWER_SECONDS),
            port=port,
        )

    def _mlflow(self, port: int) -> Server:
        command = [
            *python_module("mlflow"), "server", "--app-name", "rlhf", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.database}",
            "--default-artifact-root", str(self._home / "mlartifacts"),
            "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}",
        ]  # fmt: skip
        return Server(
            "mlflow",
            command,
            {
                **NO_TELEMETRY,
                **SAFE_PATH,
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                MARK: str(self._home),
            },
            self.folder / "mlflow.log",
            lambda: answers(f"{self.mlflow_url}/health", ANSWER_SECONDS),
            port=port,
        )

    def _worker(self) -> Server:
        return Server(
            "worker",
            [
                *python_module("prefect"),
                "worker",
                "start",
                "--pool",
                POOL,
                "--type",
                "process",
                "--limit",
                "1",
            ],
            self.environment,
            self.folder / "worker.log",
            # During a flow run, a second worker would start the next run at the same time.
            lambda: (
                bool(self._team_api) or self._worker_lives() or bool(flow_processes(self.environment[MARK]))
            ),
            owns_group=False,
        )

    def run(self) -> None:
        """Until SIGTERM. Raises StageFailed if the servers do not come up."""
        self._write_state("starting")
        try:
            while not self._started():
                stop(flow_processes(self.environment[MARK]), FLOW_STOP_SECONDS)
                self._stop_servers()
                self._choose_ports()
            self._write_state("ready")
            log.info("ready: %s", self.api)
            reconciler = None if self._team_api else Reconciler(self.api, login=self._login)
            while not self.stopping:
                try:
                    for server in self.servers.values():
                        server.look_after()
                        server.keep_running()
                    if reconciler is not None:
                        reconciler.look()
                    rotate_logs(self.folder)
                    self._write_state("ready")
                except Exception:  # a full disk, half an answer: what runs must not be stopped for it
                    log.exception("tried again in %g s", LOOK_SECONDS)
                self._pause(LOOK_SECONDS)
        except RLHFError as error:
            self._write_state("failed", error.message)
            raise
        finally:
            self._stop()

    def _started(self) -> bool:
        """Start all; False where a port was taken on the way: try again with others, they are not announced
        yet.
        """
        try:
            self._start()
        except PortTaken as error:
            log.warning("%s: starting again on another port", error)
            return False
        return True

    def _start(self) -> None:
        for name in ("prefect", "mlflow"):
            if name == "mlflow" and name in self.servers:
                self._make_database()
            if name in self.servers:
                self.servers[name].keep_running()
        if self._team_api:
            self._ensure_pool()
            self.servers["worker"].keep_running()
        else:
            self._await("Prefect's server", "prefect", self.servers["prefect"].serves)
            self.servers["worker"].keep_running()
            # A deployment cannot be created before its work pool exists. The worker creates the pool.
            self._await("the work pool", "worker", self._pool_exists)
        self._deploy()
        if not self._team_mlflow:
            self._await("MLflow's server", "mlflow", self.servers["mlflow"].serves)
        if not self._team_api:
            write_atomic(
                self.profiles,
                'active = "rlhf"\n\n[profiles.rlhf]\n'
                f'PREFECT_API_URL = "{self.api}"\nPREFECT_API_AUTH_STRING = "{self._login}"\n',
                private=True,
            )

    def _await(self, what: str, server: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.stopping and not ready():
            if self.servers[server].lost_its_port():
                raise PortTaken(f"port {self.servers[server].port} of {what} was taken by another process")
            if time.monotonic() > deadline or self.servers[server].restarts > 3:
                raise StageFailed(f"{what} did not come up; see {self.servers[server].log_file}")
            self.servers[server].keep_running()
            self._pause(0.3)

    def _make_database(self) -> None:
        """MLflow's server would make it in place, where a kill leaves it broken for good."""
        command = [*python_module("rlhf_core.tracking.database"), str(self.database)]
        if self._call(command, {**NO_TELEMETRY, **SAFE_PATH}, "mlflow.log") != 0:
            raise StageFailed(
                f"MLflow's database {self.database} could not be created; see {self.folder / 'mlflow.log'}"
            )

    def _ensure_pool(self) -> None:
        """Create the work pool on an external server if necessary.

        The worker would create it as well, but the supervisor could not detect when it exists.
        """
        prefect = [*python_module("flows.isolated"), "--no-prompt", "work-pool"]
        if self._call([*prefect, "inspect", POOL], self.environment, "deploy.log") == 0:
            return
        if self._call([*prefect, "create", POOL, "--type", "process"], self.environment, "deploy.log") != 0:
            raise StageFailed(
                f"the Prefect server of PREFECT_API_URL has no work pool {POOL}, and creating one failed; see"
                f" {self.folder / 'deploy.log'}"
            )

    def _deploy(self) -> None:
        if self.stopping:
            return
        command = [
            *python_module("flows.isolated"),
            "--no-prompt",
            "deploy",
            "--all",
            "--prefect-file",
            str(DEPLOYMENTS),
        ]
        if (code := self._call(command, self.environment, "deploy.log")) != 0:
            raise StageFailed(
                f"prefect deploy failed with exit code {code}; see {self.folder / 'deploy.log'}"
            )

    def _call(self, command: Sequence[str], environment: dict[str, str], log_file: str) -> int:
        """Run a command and return its exit code."""
        with (self.folder / log_file).open("ab") as output:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=READY_SECONDS,
                check=False,
            )
        return done.returncode

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stop(self) -> None:
        self._write_state("stopping")
        stop(flow_processes(self.environment[MARK]), FLOW_STOP_SECONDS)
        self._stop_servers()
        self.profiles.unlink(missing_ok=True)

    def _stop_servers(self) -> None:
        for server in reversed(self.servers.values()):
            process = server.id()
            stop([process] if process else [], 10.0)

    def _worker_lives(self) -> bool:
        """Return whether a worker has sent a heartbeat recently. Also True if the server does not answer."""
        try:
            workers = post(f"{self.api}/work_pools/{POOL}/workers/filter", {}, login=self._login)
        except (OSError, ValueError):
            return True
        now = datetime.now(UTC)
        heard = [
            datetime.fromisoformat(last) for worker in workers if (last := worker.get("last_heartbeat_time"))
        ]
        return any((now - last).total_seconds() < 2 * _HEARTBEAT_SECONDS for last in heard)

    def _pool_exists(self) -> bool:
        try:
            pools = post(f"{self.api}/work_pools/filter", {}, login=self._login)
        except (OSError, ValueError):
            return False
        return any(pool["name"] == POOL for pool in pools)

    def _write_state(self, status: str, message: str = "") -> None:
        me = ProcessId.of(os.getpid())
        servers: dict[str, Any] = {
            name: {"pid": server.process.pid if server.process else None, "restarts": server.restarts}
            for name, server in self.servers.items()
        }
        content = {
            "status": status,
            "message": message,
            "pid": os.getpid(),
            "started": me.started if me else 0.0,
            "prefect": self.api,
            "mlflow": self.mlflow_url,
            "servers": servers,
        }
        write_json(self.folder / "state.json", content)


def flow_processes(home: str) -> list[ProcessId]:
    """The flow runs started by the worker of `home`."""
    ours = {process for process, value in carriers(MARK) if value == home}
    return [process for process, _ in carriers(ENGINE_VARIABLE) if process in ours]


def main() -> int:
    """Entry point of the supervisor's process: `python -m flows.supervisor HOME`."""
    handler = logging.StreamHandler()
    handler.setFormatter(ScrubbingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    supervisor = Supervisor(Path(sys.argv[1]))

    def on_signal(signum: int, frame: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        supervisor.run()
    except RLHFError as error:
        log.error("%s", error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
