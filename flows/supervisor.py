"""The one process behind `rlhf up`: keeps Prefect's server, MLflow and a worker running, and lost flow runs coming back.

    supervisor --+-- prefect server    SQLite under {home}/servers/prefect, loopback
                 +-- mlflow server     the same SQLite file that `rlhf run` writes, loopback, one process
                 +-- prefect worker    pool `rlhf`, one flow run at a time
                 +-- reconciler        a look every 2 s (flows/reconcile.py)

The servers die with the supervisor (parent-death signal); a server that dies alone is started again, and so is one that
is there but has not answered for a minute and a half. What is up is written to {home}/servers/state.json. SIGTERM stops
flow runs first, so that Prefect still hears of their end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.environment import DATABASE_VARIABLES, NO_TELEMETRY, prefect_environment
from flows.files import write_json
from flows.local_http import answers, post
from flows.reconcile import ENGINE_VARIABLE, Reconciler
from rlhf_core.config.redact import ScrubbingFormatter
from rlhf_core.errors import InputError, RLHFError, StageFailed
from rlhf_core.processes import ProcessId, carriers, die_with_parent, free_port, listens, stop

log = logging.getLogger(__name__)

POOL = "rlhf"
DEPLOYMENTS = Path("deployments/prefect.yaml")
MARK = "RLHF_SERVERS"
"""Carried by everything that `up` started, flow runs and their stages included; the value is the home folder."""
READY_SECONDS = 120.0
FLOW_STOP_SECONDS = 40.0
"""A stage may take 20 s to stop, and its flow some more to report."""
SILENT_SECONDS = 90.0
"""A server that is merely busy answers within some seconds."""
_HEARTBEAT_SECONDS = 30.0
"""Of a worker, as Prefect has it."""
_KILL_SECONDS = 10.0
LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_BACKOFF = (0.0, 2.0, 10.0, 30.0)
_SETTLED_SECONDS = 120.0


@dataclass
class Server:
    """One child of the supervisor."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log_file: Path
    answers: Callable[[], bool] = lambda: True
    """Whether it does its work; asked in every look."""
    port: int | None = None
    """On which it listens, if it does."""
    owns_group: bool = True
    """Whether all processes of its group are parts of it; the worker's flow runs are not."""
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    """In a row: one that stayed up for a while starts a new count."""
    started: float = 0.0
    next_start: float = field(default=0.0)
    silent: float = 0.0
    """Seconds for which it has not answered; while this process itself was halted, nobody asked."""
    looked: float = 0.0

    def look_after(self) -> None:
        """Kill it if it runs and has not answered for `SILENT_SECONDS`: it is halted, or waits for itself."""
        if self.process is None or self.process.poll() is not None:
            return
        answered, now = self.answers(), time.monotonic()
        self.silent = 0.0 if answered else self.silent + min(now - self.looked, 2 * _ANSWER_SECONDS)
        self.looked = now
        if self.silent > SILENT_SECONDS:
            log.warning("%s has not answered for %.0f s and is killed; see %s", self.name, self.silent, self.log_file)
            if self.owns_group:  # MLflow's command only starts the server, which would keep the port
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait(timeout=_KILL_SECONDS)

    def keep_running(self) -> None:
        """Start it if it is not running; each time in a row later, up to half a minute."""
        if self.process is not None and self.process.poll() is None:
            return
        now = time.monotonic()
        if self.process is not None:
            log.warning("%s ended with exit code %s; see %s", self.name, self.process.returncode, self.log_file)
            self.process = None
            self.restarts = self.restarts + 1 if now - self.started < _SETTLED_SECONDS else 1
            self.next_start = now + _BACKOFF[min(self.restarts, len(_BACKOFF)) - 1]
        if now < self.next_start:
            return
        self.started = self.looked = now
        self.silent = 0.0
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def id(self) -> ProcessId | None:
        return None if self.process is None else ProcessId.of(self.process.pid)

    def serves(self) -> bool:
        """Whether it is the one that answers: another's server may have taken its port since it was chosen."""
        return self._listens() and self.answers()

    def lost_its_port(self) -> bool:
        """Whether it ended, and somebody else has its port."""
        if self.port is None or self.restarts == 0:
            return False
        return free_port(self.port) != self.port and not self._listens()

    def _listens(self) -> bool:
        me = self.id()
        return me is not None and self.port is not None and listens(me, self.port)


class PortTaken(Exception):
    """A port was free when it was chosen, and is not any more."""


def own_database() -> str | None:
    """The user's own database for Prefect's server, if the environment names one. Raises InputError if it is no
    PostgreSQL with the driver that Prefect needs."""
    url = next((os.environ[name] for name in DATABASE_VARIABLES if os.environ.get(name)), None)
    if url is not None and not url.startswith("postgresql+asyncpg://"):
        raise InputError(
            f"{DATABASE_VARIABLES[0]} must begin with postgresql+asyncpg://; got {url.partition('://')[0]}://...; correct "
            "it, or unset it to have SQLite in the home"
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
        self._choose_ports()

    def _choose_ports(self) -> None:
        """The usual ones where they are free, and with them all that depends on them."""
        prefect_port, mlflow_port = free_port(4200), free_port(5000)
        self.api = f"http://127.0.0.1:{prefect_port}/api"
        self.mlflow_url = f"http://127.0.0.1:{mlflow_port}"
        self.environment = {
            **prefect_environment(self.folder / "prefect"),
            MARK: str(self._home),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "PREFECT_API_URL": self.api,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,rlhf_core",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONUNBUFFERED": "1",
        }
        self.servers = self._servers(prefect_port, mlflow_port)

    def _servers(self, prefect_port: int, mlflow_port: int) -> dict[str, Server]:
        tool = [sys.executable, "-m"]
        prefect = [*tool, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
        mlflow = [
            *tool, "mlflow", "server", "--host", "127.0.0.1", "--port", str(mlflow_port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.database}",
            "--default-artifact-root", str(self._home / "mlartifacts"),
            "--allowed-hosts", f"localhost:{mlflow_port},127.0.0.1:{mlflow_port}",
        ]  # fmt: skip
        worker = [*tool, "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--limit", "1"]
        lean = {**NO_TELEMETRY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", MARK: str(self._home)}
        # For the server alone: its address may hold a password.
        database = dict.fromkeys(DATABASE_VARIABLES, url) if (url := own_database()) else {}
        return {
            "prefect": Server(
                "prefect",
                prefect,
                {**self.environment, **database},
                self.folder / "prefect.log",
                lambda: answers(f"{self.api}/health", _ANSWER_SECONDS),
                port=prefect_port,
            ),
            "mlflow": Server(
                "mlflow",
                mlflow,
                lean,
                self.folder / "mlflow.log",
                lambda: answers(f"{self.mlflow_url}/health", _ANSWER_SECONDS),
                port=mlflow_port,
            ),
            "worker": Server(
                "worker",
                worker,
                self.environment,
                self.folder / "worker.log",
                # While a run goes on, another worker would start the next one beside it.
                lambda: _worker_lives(self.api) or bool(flow_processes(self.environment[MARK])),
                owns_group=False,
            ),
        }

    def run(self) -> None:
        """Until SIGTERM. Raises StageFailed if the servers do not come up."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_state("starting")
        try:
            while not self._started():
                stop(flow_processes(self.environment[MARK]), FLOW_STOP_SECONDS)
                self._stop_servers()
                self._choose_ports()
            self._write_state("ready")
            log.info("ready: %s", self.api)
            reconciler = Reconciler(self.api)
            while not self.stopping:
                try:
                    for server in self.servers.values():
                        server.look_after()
                        server.keep_running()
                    reconciler.look()
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
        """Start all; False where a port was taken on the way: try again with others, they are not announced yet."""
        try:
            self._start()
        except PortTaken as error:
            log.warning("%s: starting again on another one", error)
            return False
        return True

    def _start(self) -> None:
        self.servers["prefect"].keep_running()
        self._make_database()
        self.servers["mlflow"].keep_running()
        self._await("Prefect's server", "prefect", self.servers["prefect"].serves)
        self.servers["worker"].keep_running()
        # Deploying before the pool exists creates nothing; the worker makes the pool.
        self._await("the work pool", "worker", lambda: _pool_exists(self.api))
        self._deploy()
        self._await("MLflow's server", "mlflow", self.servers["mlflow"].serves)
        self.profiles.parent.mkdir(parents=True, exist_ok=True)
        self.profiles.write_text(f'active = "rlhf"\n\n[profiles.rlhf]\nPREFECT_API_URL = "{self.api}"\n')

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
        with (self.folder / "mlflow.log").open("ab") as output:
            command = [sys.executable, "-m", "rlhf_core.tracking.database", str(self.database)]
            done = subprocess.run(
                command,
                env={**os.environ, **NO_TELEMETRY},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=READY_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise StageFailed(f"MLflow's database {self.database} could not be made; see {self.folder / 'mlflow.log'}")

    def _deploy(self) -> None:
        if self.stopping:
            return
        with (self.folder / "deploy.log").open("ab") as output:
            done = subprocess.run(
                [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS)],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=READY_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise StageFailed(
                f"prefect deploy failed with exit code {done.returncode}; see {self.folder / 'deploy.log'}"
            )

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
        for name in ("worker", "mlflow", "prefect"):
            process = self.servers[name].id()
            stop([process] if process else [], 10.0)

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


def _worker_lives(api: str) -> bool:
    """Whether a worker was heard of lately; True as well where the server cannot be asked."""
    try:
        workers = post(f"{api}/work_pools/{POOL}/workers/filter", {})
    except (OSError, ValueError):
        return True
    now = datetime.now(UTC)
    heard = [datetime.fromisoformat(last) for worker in workers if (last := worker.get("last_heartbeat_time"))]
    return any((now - last).total_seconds() < 2 * _HEARTBEAT_SECONDS for last in heard)


def _pool_exists(api: str) -> bool:
    try:
        return any(pool["name"] == POOL for pool in post(f"{api}/work_pools/filter", {}))
    except (OSError, ValueError):
        return False


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
