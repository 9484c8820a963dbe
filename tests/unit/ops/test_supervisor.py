"""Behaviours of the supervisor of `rlhf up`:

- servers use the ports of the last start if they are free
- Prefect starts one pipeline at a time, and a change of the champion does not wait for its end
- Prefect deletes old flow runs, and stores the leases of those that run
- external servers are used, and no local ones are started in their place
- the reason of a failed start is in the state file, where `rlhf up` reads it
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.errors import StageFailed
from rlhf_core.ops.servers.servers import ServersState
from rlhf_core.ops.servers.supervisor import QUEUE, Supervisor
from rlhf_core.system.files import shipped, write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import free_port


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A supervisor without external servers, which has started nothing."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return Supervisor(Home.of(tmp_path))


def test_servers_use_the_ports_of_the_last_start(own: Supervisor, tmp_path: Path) -> None:
    ports = {name: free_port(0) for name in ("prefect", "mlflow")}
    write_json(Home.of(tmp_path).servers_ports, ports)
    later = Supervisor(Home.of(tmp_path))
    assert {name: server.port for name, server in later.servers.items() if server.port} == ports
    assert later.api == later.environment["PREFECT_API_URL"] == f"http://127.0.0.1:{ports['prefect']}/api"


class Prefect:
    """Prefect's server, as the supervisor sees it."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, Any]] = []
        """Path and content of each PATCH request."""


@pytest.fixture
def prefect(own: Supervisor) -> Iterator[Prefect]:
    """A server at the address of `own`."""
    state = Prefect()

    class Handler(BaseHTTPRequestHandler):
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
    for deployment in yaml.safe_load(shipped("deployments/prefect.yaml").read_text())["deployments"]:
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
