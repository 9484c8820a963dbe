"""The supervisor process of `rlhf up`. It runs Prefect's server, MLflow and a worker, and resumes lost flow
runs.

    supervisor --+-- prefect server    SQLite under {home}/servers/prefect, loopback, requires a password
                 +-- mlflow server     the same SQLite file that `rlhf run` writes, loopback, one process
                 +-- prefect worker    pool `rlhf`, one flow run at a time of its queue `default`
                 +-- reconciler        runs every 2 s (rlhf_core/ops/servers/reconcile.py)

The servers end when the supervisor ends (parent-death signal). The supervisor restarts a server that has
ended, writes the current state to {home}/servers/state.json, and rotates the logs by size. On SIGTERM it
stops the flow runs first, so that they can still report their end to Prefect.

If PREFECT_API_URL or MLFLOW_TRACKING_URI is set, the supervisor uses that server and does not start its own.
With an external Prefect server the reconciler is disabled: it only finds the processes of this machine, and
other machines may execute runs of that server. For the same reason its queue `default` is not limited, and
the worker starts one flow run at a time, of all queues.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rlhf_core.config.redact import LOG_FORMAT, ScrubbingFormatter
from rlhf_core.errors import RLHFError, StageFailed
from rlhf_core.executors.spec import past_proxies
from rlhf_core.logs import rotate_logs
from rlhf_core.ops.servers.prefect_server import (
    DATABASE_VARIABLES,
    FLOW_SETTINGS,
    ensure_auth_string,
    external_database_url,
    server_command,
    server_environment,
)
from rlhf_core.ops.servers.reconcile import FLOW_STOP_SECONDS, Reconciler
from rlhf_core.ops.servers.servers import (
    HOME_VARIABLE,
    READY_SECONDS,
    ServersState,
    ServerState,
    flow_processes,
)
from rlhf_core.system.environment import NO_TELEMETRY
from rlhf_core.system.files import read_json, shipped, write_atomic, write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import (
    SAFE_PATH,
    ProcessId,
    SupervisedProcess,
    free_port,
    launch,
    python_module,
    stop,
)
from rlhf_core.system.serving import patch, responds

log = logging.getLogger(__name__)

POOL = "rlhf"
QUEUE = "default"
"""Queue of the deployments that run the pipeline. Those that change the champion have a queue of their own,
so that they do not wait for the end of a pipeline.
"""
POLL_SECONDS = 2.0
_PREFECT_DEFAULTS = {
    # In memory, as by default, a restart of the server would lose the leases of running flows. Prefect ends a
    # flow that cannot renew its lease.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # By default, all flow runs are kept: 52,000 a year if the data are looked at every ten minutes.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(90 * 86_400),
}
"""Settings of Prefect's server that the environment can change."""
_MAX_START_RESTARTS = 3
"""A server that ends more often during the start cannot run here."""


class Supervisor:
    """Starts the servers in order, creates the deployments, and keeps everything running."""

    def __init__(self, home: Home) -> None:
        self.stopping = False
        self._home = home
        home.servers.mkdir(parents=True, exist_ok=True)
        # The same after a restart, and another for each host and home.
        digest = hashlib.sha256(str(home.servers.resolve()).encode()).hexdigest()[:8]
        self._worker_name = f"rlhf-{socket.gethostname()}-{digest}"
        self._auth = ensure_auth_string(home)
        self._external_prefect = os.environ.get("PREFECT_API_URL")
        self._external_mlflow = os.environ.get("MLFLOW_TRACKING_URI")
        self._create_servers()

    def _create_servers(self) -> None:
        """Choose free ports, and build the commands and settings that depend on them."""
        # Those of the last start, so that bookmarks and exported addresses stay valid.
        ports = {"prefect": 4200, "mlflow": 5000, **(read_json(self._home.servers_ports) or {})}
        prefect_port, mlflow_port = free_port(ports["prefect"]), free_port(ports["mlflow"])
        self.api = self._external_prefect or f"http://127.0.0.1:{prefect_port}/api"
        self.mlflow_url = self._external_mlflow or f"http://127.0.0.1:{mlflow_port}"
        self._plain_environment = {**os.environ, **NO_TELEMETRY, **SAFE_PATH}
        self.environment = {
            **self._plain_environment,
            **past_proxies(),
            HOME_VARIABLE: str(self._home.path),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            **FLOW_SETTINGS,
            # The default of Prefect is 10 s, which a run that was lost would wait in addition.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # What a process prints just before it is killed is then in its log.
            "PYTHONUNBUFFERED": "1",
        }
        self.servers: dict[str, SupervisedProcess] = {}
        if not self._external_prefect:
            self.environment |= server_environment(self._home.servers / "prefect", self._auth, prefect_port)
            self.servers["prefect"] = self._prefect(prefect_port)
        if not self._external_mlflow:
            self.servers["mlflow"] = self._mlflow(mlflow_port)
        self.servers["worker"] = self._worker()

    def _prefect(self, port: int) -> SupervisedProcess:
        # As `prefect server start` sets it, which is not used here. It lets Prefect free memory.
        environment = {**_PREFECT_DEFAULTS, **self.environment, "PREFECT__SERVER_FINAL": "1"}
        database_url = external_database_url()
        if database_url is not None:
            # Set for this server only, because the address may contain a password.
            environment |= dict.fromkeys(DATABASE_VARIABLES, database_url)
        log_file = self._home.servers / "prefect.log"
        return SupervisedProcess("prefect", server_command(port), environment, log_file, port)

    def _mlflow(self, port: int) -> SupervisedProcess:
        command = [
            # An entry point of this package: MLflow itself accepts requests of every origin on this machine.
            *python_module("mlflow"), "server", "--app-name", "rlhf",
            # By default, `mlflow server` 3.17 has 15 processes with 2.4 GB. With one worker and no jobs it
            # has 2 with 0.4 GB.
            "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self._home.mlflow_database}",
            "--default-artifact-root", str(self._home.mlflow_artifacts),
            # With the port, as in the Host header. Since 3.5, MLflow answers 403 to every other one.
            "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}",
        ]  # fmt: skip
        environment = {
            **self._plain_environment,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # no processes for jobs, which nothing here uses
            HOME_VARIABLE: str(self._home.path),
        }
        return SupervisedProcess("mlflow", command, environment, self._home.servers / "mlflow.log", port)

    def _worker(self) -> SupervisedProcess:
        command = [
            *python_module("prefect"), "worker", "start", "--name", self._worker_name,
            "--pool", POOL, "--type", "process",
        ]  # fmt: skip
        if self._external_prefect:
            command += ["--limit", "1"]
        log_file = self._home.servers / "worker.log"
        # Prefect starts flow runs in the group of its worker, and they go on while it is started again.
        return SupervisedProcess("worker", command, self.environment, log_file, owns_group=False)

    def run(self) -> None:
        """Run until SIGTERM. Raises StageFailed if the servers do not start."""
        self._write_state("starting")
        status, problem = "stopping", ""
        try:
            self._start()
            self._write_state("ready")
            ports = {name: server.port for name, server in self.servers.items() if server.port}
            # Only of servers that were ready: ports of a failed start are chosen anew.
            write_json(self._home.servers_ports, ports)
            log.info("ready: %s", self.api)
            reconciler = None
            if not self._external_prefect:
                reconciler = Reconciler(self.api, self._worker_name, auth=self._auth)
            while not self.stopping:
                try:
                    self._poll(reconciler)
                except Exception:  # a full disk or an incomplete response must not end the servers
                    log.exception("tried again in %g s", POLL_SECONDS)
                self._pause(POLL_SECONDS)
        except RLHFError as error:
            status, problem = "failed", error.message
            raise
        finally:
            # Written before the servers are stopped, and kept: `rlhf up` reads the problem from this file.
            with suppress(OSError):  # a full disk must not leave servers behind
                self._write_state(status, problem)
            self._stop()
            # Prefect's commands would otherwise ask a server that does not exist any more.
            self._home.prefect_profiles.unlink(missing_ok=True)

    def _poll(self, reconciler: Reconciler | None) -> None:
        for server in self.servers.values():
            server.ensure_running()
        if reconciler is not None:
            reconciler.poll()
        for folder in (self._home.servers, self._home.logs):
            rotate_logs(folder)
        self._write_state("ready")

    def _start(self) -> None:
        if "prefect" in self.servers:
            self.servers["prefect"].ensure_running()
        if "mlflow" in self.servers:
            # MLflow's server would create its database in place. If it were killed at that time, the database
            # would be unusable. This program creates it in a temporary file and renames it.
            create = [*python_module("rlhf_core.tracking.database"), str(self._home.mlflow_database)]
            self._call(create, "mlflow.log", self._plain_environment)
            self.servers["mlflow"].ensure_running()
        if self._external_prefect:
            # The worker would create it too, but a deployment cannot be created before.
            create = [*python_module("flows.isolated"), "--no-prompt", "work-pool", "create", POOL]
            with suppress(StageFailed):  # it may exist
                self._call([*create, "--type", "process"], "deploy.log", self.environment)
            self.servers["worker"].ensure_running()
        else:
            self._await("Prefect's server", "prefect", lambda: self._serves("prefect", self.api))
            self.servers["worker"].ensure_running()
            # The worker creates the pool with its queue. A deployment cannot be created before.
            self._await(f"the queue {QUEUE}", "worker", self._limit_queue)
        if not self.stopping:
            deploy = [*python_module("flows.deploy"), str(shipped("deployments/prefect.yaml"))]
            self._call(deploy, "deploy.log", self.environment)
        if "mlflow" in self.servers:
            self._await("MLflow's server", "mlflow", lambda: self._serves("mlflow", self.mlflow_url))
        if not self._external_prefect:
            write_atomic(
                self._home.prefect_profiles,
                'active = "rlhf"\n\n[profiles.rlhf]\n'
                f'PREFECT_API_URL = "{self.api}"\nPREFECT_API_AUTH_STRING = "{self._auth}"\n',
                private=True,
            )

    def _await(self, what: str, name: str, is_ready: Callable[[], bool]) -> None:
        server = self.servers[name]
        deadline = time.monotonic() + READY_SECONDS
        while not self.stopping and not is_ready():
            if time.monotonic() > deadline or server.restarts > _MAX_START_RESTARTS:
                raise StageFailed(f"{what} did not come up; see {server.log_file}")
            server.ensure_running()
            self._pause(0.3)

    def _serves(self, name: str, url: str) -> bool:
        # Another program may have taken the port in the meantime, and answer there.
        return self.servers[name].has_its_port() and responds(f"{url}/health")

    def _call(self, command: Sequence[str], log_name: str, environment: Mapping[str, str]) -> None:
        """Run a command. Raises StageFailed if it fails, or takes more than READY_SECONDS."""
        log_file = self._home.servers / log_name
        process = launch(command, environment, log_file=log_file, parent_death_signal=signal.SIGKILL)
        name = shlex.join(command)
        try:
            code = process.wait(timeout=READY_SECONDS)
        except subprocess.TimeoutExpired:
            # Otherwise it could still change a server while the servers are stopped.
            process.kill()
            raise StageFailed(f"{name} did not end within {READY_SECONDS:.0f} s; see {log_file}") from None
        if code != 0:
            raise StageFailed(f"{name} failed with exit code {code}; see {log_file}")

    def _pause(self, seconds: float) -> None:
        # In short steps, because the signal handler only sets `stopping`.
        deadline = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < deadline:
            time.sleep(0.1)

    def _stop(self) -> None:
        """Stop the flow runs, then the servers, to which the flow runs report their end."""
        stop(flow_processes(self._home), FLOW_STOP_SECONDS)
        # In reverse, so that the worker ends before the server that it asks.
        for server in reversed(self.servers.values()):
            if process := server.id():
                stop([process], 10.0)

    def _limit_queue(self) -> bool:
        """Have Prefect's server start one flow run of `QUEUE` at a time. Return whether it has the queue."""
        try:
            url = f"{self.api}/work_pools/{POOL}/queues/{QUEUE}"
            patch(url, {"concurrency_limit": 1}, auth=self._auth)
        except OSError:
            return False
        return True

    def _write_state(self, status: str, message: str = "") -> None:
        process = ProcessId.of(os.getpid())
        servers = {}
        for name, server in self.servers.items():
            pid = server.process.pid if server.process else None
            servers[name] = ServerState(pid=pid, restarts=server.restarts, last_end=server.last_end)
        ServersState(
            status=status,
            message=message,
            pid=os.getpid(),
            started=process.started if process else 0.0,
            prefect=self.api,
            mlflow=self.mlflow_url,
            servers=servers,
        ).write(self._home)


def main() -> int:
    """Run the supervisor's process: `python -m rlhf_core.ops.servers.supervisor HOME`."""
    handler = logging.StreamHandler()
    # Messages of requests and commands can contain addresses with passwords.
    handler.setFormatter(ScrubbingFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    supervisor = Supervisor(Home.of(sys.argv[1]))

    # Only a flag: a handler can interrupt any line, such as one that writes the state.
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
