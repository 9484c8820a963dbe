"""Behaviours of `rlhf up` and `rlhf down`:

- a stale or damaged state file is not accepted as a running supervisor, and no foreign process is stopped
- a process is stopped only if it has the home in its environment and runs a program that `up` starts
- a pipe in place of the database of `rlhf run` is replaced and not waited for
- `up` refuses a second supervisor, also one that is just starting, an unknown database, and a folder without
  the project
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InputError
from rlhf_core.ops.servers.prefect_server import EmbeddedPrefect
from rlhf_core.ops.servers.servers import HOME_VARIABLE, down, is_started_by_up, status, supervisor_of, up
from rlhf_core.ops.servers.supervised import SupervisedProcess
from rlhf_core.system.files import write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import ProcessId

_SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.of(tmp_path)


@pytest.fixture
def supervisor(home: Home) -> Iterator[ProcessId]:
    """A process with the environment and the command line of the supervisor of `home`. It does nothing."""
    with _python(["-P", "-m", "rlhf_core.ops.servers.supervisor"], home) as process:
        yield process


@contextmanager
def _python(arguments: list[str], home: Home) -> Iterator[ProcessId]:
    """Run Python with these arguments in the environment of `up`. The modules that it finds only sleep."""
    modules = home.path / "modules"
    for name in ("rlhf_core/ops/servers/supervisor.py", "prefect/__main__.py"):
        file = modules / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(_SLEEP)
    environment = {**os.environ, HOME_VARIABLE: str(home.path), "PYTHONPATH": str(modules)}
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process_id = ProcessId.of(process.pid)
        assert process_id is not None
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


def test_down_does_not_stop_programs_of_a_flow_run(home: Home) -> None:
    shell_arguments = ["-c", _SLEEP, "/srv/mlflow/prefect.log"]
    worker_arguments = ["-P", "-m", "prefect", "worker", "start"]
    with _python(shell_arguments, home) as shell, _python(worker_arguments, home) as worker:
        assert down(home) == f"stopped the servers of {home.path}"
        assert shell.alive() and not worker.alive()


@pytest.mark.parametrize(
    "command",
    [
        "/x/.venv/bin/python -P -m rlhf_core.ops.servers.supervisor /x/.rlhf",
        (
            "/x/.venv/bin/python -P -m uvicorn --factory flows.application:create_app --log-level warning"
            " --port 4200"
        ),
        "/x/.venv/bin/python -P -m mlflow server --host 127.0.0.1 --port 5000",
        (
            "/x/.venv/bin/python -m uvicorn --host 127.0.0.1 --port 5000 --workers 1 --factory"
            " flows.application:create_mlflow_app"
        ),
        (
            "/x/.venv/bin/python -m uvicorn --log-config /x/mlflow/c.yaml --workers 1"
            " mlflow.server.fastapi_app:app"
        ),
        "/x/.venv/bin/python -P -m prefect worker start --pool rlhf --type process",
        "python3.11 -X dev -W error -m prefect.engine",
        "/x/.venv/bin/python -m prefect.flow_engine flows/rlhf.py:rlhf",
        "/x/.venv/bin/python /x/.venv/bin/prefect worker start",
        "/x/.venv/bin/python -P -m flows.isolated --no-prompt deploy --all",
        "/x/.venv/bin/python -P -m rlhf_core.tracking.database /x/mlflow.db",
        "/x/.venv/bin/python -P -m rlhf_core.run spec.json",
    ],
)
def test_programs_of_up_are_recognised(command: str) -> None:
    assert is_started_by_up(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "tail -f /x/.rlhf/servers/mlflow.log",
        "vim prefect.toml",
        "bash --rcfile /srv/mlflow",
        "grep -m mlflow",
        "python -c pass -m prefect",
        "python -m pytest tests/prefect",
        "python notes.py -m mlflow",
        "python prefect.py",
        "python -m uvicorn my:app --log-config /srv/mlflow.server.json",
        "python -m prefecture",
        "python -m rlhf_cli.main status",
    ],
)
def test_programs_with_similar_arguments_are_not_recognised(command: str) -> None:
    assert not is_started_by_up(command.split())


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


def test_a_pipe_in_place_of_prefects_database_is_replaced(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: object) -> None:
        raise KeyboardInterrupt

    home.prefect.mkdir(parents=True)
    os.mkfifo(home.prefect / "prefect.db")
    (home.prefect / "complete").touch()
    monkeypatch.setattr(SupervisedProcess, "ensure_running", killed)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(KeyboardInterrupt):
        EmbeddedPrefect(home)
    assert not (home.prefect / "prefect.db").exists()


def test_up_refuses_a_second_supervisor(
    home: Home, monkeypatch: pytest.MonkeyPatch, supervisor: ProcessId
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    write_json(home.servers_state, state_of(supervisor))
    with pytest.raises(InputError, match="are up already"):
        up(home, dict)


def test_up_refuses_to_disturb_another_one_that_starts_the_servers(home: Home) -> None:
    home.servers.mkdir()
    supervisor = ["-P", "-m", "rlhf_core.ops.servers.supervisor"]
    with home.servers_lock.open("w") as other, _python(supervisor, home) as new:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another `rlhf up` is starting the servers of"):
            up(home, dict)
        assert new.alive()


def test_up_refuses_a_database_other_than_postgresql(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "mysql://me:secret@host/db")
    words = r"must begin with postgresql\+asyncpg://; got mysql://\.\.\.; correct"
    with pytest.raises(InputError, match=words) as refused:
        up(home, dict)
    assert "secret" not in refused.value.message


def test_up_refuses_a_folder_without_the_project(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.path)
    with pytest.raises(InputError, match="project's folder"):
        up(home, dict)


def test_down_without_servers_has_nothing_to_stop(home: Home) -> None:
    assert "nothing to stop" in down(home)
