"""Behaviours of the supervisor of `rlhf up`:

- servers use other ports if theirs are taken during the start
- a worker is healthy while it sends heartbeats
- external servers are used, and no local ones are started in their place
- the reason of a failed start is in the state file, where `rlhf up` reads it
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import supervisor
from rlhf_cli.servers import ServersState
from rlhf_cli.supervisor import Supervisor
from rlhf_core.errors import StageFailed
from rlhf_core.system.home import Home


def test_servers_are_restarted_on_other_ports_if_theirs_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter((11, 12, 13, 14))
    monkeypatch.setattr(supervisor, "free_port", lambda preferred: next(ports))
    own = Supervisor(Home.of(tmp_path))
    attempts = []

    def start() -> None:
        attempts.append((own.api, own.environment["PREFECT_API_URL"], own.servers["mlflow"].port))
        if len(attempts) == 1:
            raise supervisor.PortTaken("port 11 was taken")
        own.stopping = True

    monkeypatch.setattr(own, "_start", start)
    own.run()
    first, second = "http://127.0.0.1:11/api", "http://127.0.0.1:13/api"
    assert attempts == [(first, first, 12), (second, second, 14)]


def test_worker_is_healthy_while_it_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Supervisor(Home.of(tmp_path))
    now = datetime.now(UTC)
    workers = [{"last_heartbeat_time": (now - timedelta(days=1)).isoformat()}, {"last_heartbeat_time": None}]
    monkeypatch.setattr(supervisor, "post", lambda url, body, auth: workers)
    assert not own._worker_is_healthy()
    workers.append({"last_heartbeat_time": (now - timedelta(seconds=20)).isoformat()})
    assert own._worker_is_healthy()

    def refuse(url: str, body: Any, auth: str) -> Any:
        raise ConnectionRefusedError

    monkeypatch.setattr(supervisor, "post", refuse)
    assert own._worker_is_healthy(), "the server is to blame, not the worker"


def test_external_servers_are_used_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    own = Supervisor(Home.of(tmp_path))
    assert list(own.servers) == ["worker"]
    worker = own.servers["worker"].environment
    assert worker["PREFECT_API_URL"] == "https://prefect.example/api"
    assert worker["MLFLOW_TRACKING_URI"] == "https://mlflow.example"
    assert "PREFECT_API_AUTH_STRING" not in worker, "the local password must not be sent to other servers"


def test_failed_start_is_in_the_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Supervisor(Home.of(tmp_path))

    def fail() -> None:
        raise StageFailed("Prefect's server did not come up; see the log")

    monkeypatch.setattr(own, "_start", fail)
    with pytest.raises(StageFailed):
        own.run()
    state = ServersState.read(Home.of(tmp_path))
    assert state is not None
    assert (state.status, state.message) == ("failed", "Prefect's server did not come up; see the log")
