"""Behaviours of the supervisor of `rlhf up`:

- servers use other ports if theirs are taken during the start, and those of the last start if they are free
- a worker is healthy while it sends heartbeats
- Prefect starts one pipeline at a time, and a change of the champion does not wait for its end
- Prefect deletes old flow runs, and stores the leases of those that run
- external servers are used, and no local ones are started in their place
- the reason of a failed start is in the state file, where `rlhf up` reads it
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.errors import StageFailed
from rlhf_core.ops.servers.servers import DEPLOYMENTS, ServersState
from rlhf_core.ops.servers.supervisor import QUEUE, PortTaken, Supervisor
from rlhf_core.system.home import Home


class PortsTaken(Supervisor):
    """Another process takes the ports while the servers start for the first time. Nothing is started."""

    def __init__(self, home: Home) -> None:
        self.attempts: list[tuple[str, str, int, int]] = []
        self._others = ExitStack()
        super().__init__(home)

    def _start(self) -> None:
        prefect, mlflow = self.servers["prefect"].port, self.servers["mlflow"].port
        assert prefect is not None and mlflow is not None
        self.attempts.append((self.api, self.environment["PREFECT_API_URL"], prefect, mlflow))
        if len(self.attempts) == 1:
            for port in (prefect, mlflow):
                with suppress(OSError):  # another test has taken it already
                    self._others.enter_context(socket.create_server(("127.0.0.1", port)))
            raise PortTaken(f"port {prefect} was taken")
        self.stopping = True
        self._others.close()


def test_servers_are_restarted_on_other_ports_if_theirs_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    own = PortsTaken(Home.of(tmp_path))
    own.run()
    first, second = own.attempts
    for api, environment, port, _ in own.attempts:
        assert api == environment == f"http://127.0.0.1:{port}/api"
    assert not set(first[2:]) & set(second[2:])
    later = Supervisor(Home.of(tmp_path))
    assert tuple(server.port for server in later.servers.values() if server.port) == second[2:]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A supervisor without external servers, which has started nothing."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return Supervisor(Home.of(tmp_path))


class Prefect:
    """Prefect's server, as the supervisor sees it."""

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = []
        self.changes: list[tuple[str, Any]] = []
        """Path and content of each PATCH request."""


@pytest.fixture
def prefect(own: Supervisor) -> Iterator[Prefect]:
    """A server at the address of `own`."""
    state = Prefect()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(state.workers).encode())

        def do_PATCH(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.changes.append((self.path, content))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Write nothing to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", own.servers["prefect"].port or 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield state
        server.shutdown()


def test_one_pipeline_runs_at_a_time_and_the_champion_can_be_changed_meanwhile(
    own: Supervisor, prefect: Prefect
) -> None:
    assert own._limit_queue()
    assert prefect.changes == [("/api/work_pools/rlhf/queues/default", {"concurrency_limit": 1})]
    assert "--limit" not in own.servers["worker"].command, "it would count flow runs of all queues"
    queues = {}
    for deployment in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]:
        queues[deployment["name"]] = deployment["work_pool"].get("work_queue_name", QUEUE)
    assert {name for name, queue in queues.items() if queue != QUEUE} == {"rollback", "promote"}


def test_queue_is_limited_once_the_server_responds(own: Supervisor) -> None:
    assert not own._limit_queue()


def test_leases_of_flow_runs_are_stored(own: Supervisor) -> None:
    storage = own.servers["prefect"].environment["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    assert storage == "prefect.server.concurrency.lease_storage.filesystem"


def test_prefect_deletes_old_flow_runs(own: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    vacuum = "PREFECT_SERVER_SERVICES_DB_VACUUM"
    settings = own.servers["prefect"].environment
    assert settings[f"{vacuum}_ENABLED"] == "events,flow_runs"
    assert settings[f"{vacuum}_RETENTION_PERIOD"] == str(90 * 86_400)
    monkeypatch.setenv(f"{vacuum}_RETENTION_PERIOD", "604800")
    own._create_servers()
    assert own.servers["prefect"].environment[f"{vacuum}_RETENTION_PERIOD"] == "604800"


def test_worker_is_healthy_while_it_sends_heartbeats(own: Supervisor, prefect: Prefect) -> None:
    workers = prefect.workers
    now = datetime.now(UTC)
    workers.append({"last_heartbeat_time": (now - timedelta(days=1)).isoformat()})
    workers.append({"last_heartbeat_time": None})
    assert not own._worker_is_healthy()
    workers.append({"last_heartbeat_time": (now - timedelta(seconds=20)).isoformat()})
    assert own._worker_is_healthy()


def test_worker_is_healthy_while_the_server_does_not_respond(own: Supervisor) -> None:
    assert own._worker_is_healthy(), "the server failed, not the worker"


def test_external_servers_are_used_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    own = Supervisor(Home.of(tmp_path))
    assert list(own.servers) == ["worker"]
    assert own.servers["worker"].command[-2:] == ["--limit", "1"], "its queues may have other workers"
    worker = own.servers["worker"].environment
    assert worker["PREFECT_API_URL"] == "https://prefect.example/api"
    assert worker["MLFLOW_TRACKING_URI"] == "https://mlflow.example"
    assert "PREFECT_API_AUTH_STRING" not in worker, "the local password must not be sent to other servers"


class CannotStart(Supervisor):
    """Prefect's server does not come up."""

    def _start(self) -> None:
        raise StageFailed("Prefect's server did not come up; see the log")


def test_failed_start_is_in_the_state_file(tmp_path: Path) -> None:
    own = CannotStart(Home.of(tmp_path))
    with pytest.raises(StageFailed):
        own.run()
    state = ServersState.read(Home.of(tmp_path))
    assert state is not None
    assert (state.status, state.message) == ("failed", "Prefect's server did not come up; see the log")


def test_the_log_has_the_messages_of_flows_deploy(
    own: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_file = Home.of(tmp_path).servers / "deploy.log"
    log_file.write_text("flows.deploy: of an earlier start\n")

    def call(*_: Any) -> int:
        with log_file.open("a") as file:
            file.write("flows.deploy: x/y: its parameters do not fit\noutput of Prefect\n")
        return 0

    monkeypatch.setattr(own, "_call", call)
    own._deploy()
    assert caplog.messages == ["flows.deploy: x/y: its parameters do not fit"]
