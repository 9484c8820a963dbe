"""Behaviours of `rlhf up` and `rlhf down`:

- a stale or damaged state file is not accepted as a running supervisor, and no foreign process is stopped
- a process is stopped only if it has the home in its environment
- `up` refuses a second supervisor and an unknown database
- commands use the server of `up` for their home, and a terminal shows the link that logs in
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InputError
from rlhf_core.ops.servers import servers
from rlhf_core.ops.servers.prefect_server import ensure_auth_string
from rlhf_core.ops.servers.servers import (
    HOME_VARIABLE,
    ServersState,
    ServerState,
    down,
    next_step,
    status,
    supervisor_of,
    up,
    use_servers,
)
from rlhf_core.system.files import write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import ProcessId


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.of(tmp_path)


@pytest.fixture
def supervisor(home: Home) -> Iterator[ProcessId]:
    """A process with the environment of the supervisor of `home`. It does nothing."""
    with _sleeping(home) as process:
        yield process


@contextmanager
def _sleeping(home: Home) -> Iterator[ProcessId]:
    """Run a process with the environment of `up`."""
    environment = {**os.environ, HOME_VARIABLE: str(home.path)}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        process_id = ProcessId.of(process.pid)
        assert process_id is not None
        while not Path(f"/proc/{process.pid}/environ").read_bytes():
            time.sleep(0.01)  # Linux sets it a moment after the start has succeeded
        try:
            yield process_id
        finally:
            process.kill()


def state_of(process: ProcessId, **changes: Any) -> dict[str, Any]:
    """Return the state that a supervisor with this process writes."""
    texts = {
        "status": "ready",
        "message": "",
        "prefect": "http://127.0.0.1:9/api",
        "mlflow": "http://127.0.0.1:9",
    }
    return {**texts, "pid": process.pid, "started": process.started, "servers": {}, **changes}


def test_stale_state_file_is_not_a_running_supervisor(home: Home, supervisor: ProcessId) -> None:
    write_json(home.servers_state, state_of(supervisor))
    assert supervisor_of(home) == supervisor
    # The pid was used again by another process.
    write_json(home.servers_state, state_of(supervisor, started=supervisor.started - 100))
    assert supervisor_of(home) is None
    home.servers_state.write_text("{")
    assert supervisor_of(home) is None


def test_foreign_process_in_the_state_file_is_not_stopped(home: Home) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        foreign = ProcessId.of(process.pid)
        assert foreign is not None
        write_json(home.servers_state, state_of(foreign))
        assert "nothing to stop" in down(home)
        assert foreign.alive()
        process.kill()


def test_down_stops_what_the_processes_of_up_started_and_nothing_else(home: Home) -> None:
    with _sleeping(home) as of_a_flow_run, _sleeping(Home.of("other")) as other:
        assert down(home) == f"stopped the servers of {home.path}"
        assert not of_a_flow_run.alive() and other.alive()


STATES: list[Any] = [
    {},
    [],
    None,
    {"pid": "x"},
    {"pid": 1, "started": None},
    {"servers": []},
    {"servers": {"worker": 1}},
]


@pytest.mark.parametrize("content", STATES, ids=json.dumps)
def test_invalid_state_file_is_ignored(home: Home, content: Any, supervisor: ProcessId) -> None:
    if isinstance(content, dict) and content:
        content = state_of(supervisor, **content)
    home.servers.mkdir()
    home.servers_state.write_text(json.dumps(content))
    assert "servers: none" in status(home)
    assert supervisor_of(home) is None


def test_up_refuses_a_second_supervisor(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    write_json(home.servers_state, state_of(supervisor))
    with pytest.raises(InputError, match="are up already"):
        up(home, dict)


def test_up_refuses_a_database_other_than_postgresql(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "mysql://me:secret@host/db")
    words = r"must begin with postgresql\+asyncpg://; got mysql://\.\.\.; correct"
    with pytest.raises(InputError, match=words) as refused:
        up(home, dict)
    assert "secret" not in refused.value.message


def api() -> str:
    return os.environ["PREFECT_API_URL"]


def test_commands_use_the_server_of_up_for_their_home_while_it_is_up(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PREFECT_API_URL": ""})
    prefect = {"prefect": {"pid": 1, "restarts": 0, "last_end": ""}}
    home.servers.mkdir()
    auth = ensure_auth_string(home)
    write_json(home.servers_state, state_of(supervisor, status="starting", servers=prefect))
    use_servers(home)
    assert api() == ""
    write_json(home.servers_state, state_of(supervisor, servers=prefect))
    use_servers(Home.of("other"))
    assert api() == ""
    use_servers(home)
    assert api() == "http://127.0.0.1:9/api"
    assert os.environ["PREFECT_API_AUTH_STRING"] == auth
    os.environ["PREFECT_API_URL"] = "https://mine.example/api"
    use_servers(home)
    assert api() == "https://mine.example/api", "the user's own server"


def test_commands_use_the_external_server_of_up(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PREFECT_API_URL": ""})
    write_json(home.servers_state, state_of(supervisor, prefect="https://prefect.example/api"))
    use_servers(home)
    assert api() == "https://prefect.example/api"


def test_login_link_is_shown_on_a_terminal_only(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    prefect = {"prefect": {"pid": 1, "restarts": 0, "last_end": ""}}
    write_json(home.servers_state, state_of(supervisor, servers=prefect))
    auth = ensure_auth_string(home)
    assert f"the line in {home.servers_login}" in status(home)
    assert auth not in status(home)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    link = f"open http://127.0.0.1:9/rlhf-login#{base64.b64encode(auth.encode()).decode()}"
    assert link in status(home)


def test_status_lists_deployments_of_configurations_and_links_to_trainings(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    server = {"pid": 1, "restarts": 0, "last_end": ""}
    write_json(home.servers_state, state_of(supervisor, servers={"prefect": server, "mlflow": server}))
    weekly = {"schedule": {"cron": "0 2 * * 0", "timezone": "Europe/Berlin"}, "active": True}
    common = {"flow_id": "f", "paused": False, "parameters": {"config": "my.yaml"}, "schedules": []}
    answers = {
        "flows": [{"id": "f", "name": "rlhf-retrain"}],
        "deployments": [
            {**common, "name": "full-pipeline", "parameters": {}},
            {**common, "name": "by-hand"},
            {**common, "name": "my", "schedules": [weekly]},
            {**common, "name": "held", "schedules": [weekly], "paused": True},
        ],
    }
    monkeypatch.setattr(servers, "post", lambda url, *_, **__: answers[url.split("/")[-2]])
    text = status(home)
    assert [line.strip() for line in text.splitlines() if "deployment rlhf" in line] == [
        "deployment rlhf-retrain/by-hand  no schedule",
        'deployment rlhf-retrain/my  "0 2 * * 0" in Europe/Berlin  active',
        'deployment rlhf-retrain/held  "0 2 * * 0" in Europe/Berlin  paused',
    ]
    assert "http://127.0.0.1:9/#/experiments?workflowType=machine_learning" in text
    assert "mlflow ui" not in text, "the server is up"


def test_down_without_servers_has_nothing_to_stop(home: Home) -> None:
    assert "nothing to stop" in down(home)


def test_the_next_command_works_in_a_new_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home, server = Home.of("my home").make(), ServerState(pid=1, restarts=0)
    state = ServersState(
        status="ready", message="", pid=1, started=0.0, prefect="http://127.0.0.1:1/api", mlflow="",
        servers={"prefect": server},
    )  # fmt: skip
    state.write(home)
    profiles = tmp_path / "my home" / "prefect" / "profiles.toml"
    prefix = f"next     PREFECT_PROFILES_PATH='{profiles}' "
    assert next_step("rlhf/mine", home).startswith(prefix)
    assert next_step("rlhf/mine", home).endswith("prefect deployment run rlhf/mine")
    state.model_copy(update={"servers": {}}).write(home)
    assert "PREFECT_PROFILES_PATH" not in next_step("rlhf/mine", home), (
        "the server is that of the environment"
    )
