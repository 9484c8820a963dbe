"""`rlhf up` and `rlhf down`: start the supervisor in the background, wait for it, and stop it.

Processes are identified by pid and start time (state.json), by an environment variable that all processes
started by `up` have, and by their command lines. No other process receives a signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flows.login import login_file, read_login
from flows.supervisor import DEPLOYMENTS, FLOW_STOP_SECONDS, MARK, READY_SECONDS, flow_processes, own_database
from flows.team import mlflow_address, prefect_address, prefect_answers
from rlhf_core.errors import InputError, StageFailed
from rlhf_core.run.environment import past_proxies
from rlhf_core.system.files import read_json
from rlhf_core.system.launch import SAFE_PATH, launch, python_module
from rlhf_core.system.processes import ProcessId, carriers, stop, wait_gone

_MODULES = ("flows.supervisor", "flows.isolated", "rlhf_core.run", "rlhf_core.tracking.database")
"""Modules of this project that `up` and its flow runs start with `python -m`."""
_PACKAGES = ("mlflow", "prefect")
"""Their modules are started with `python -m` too, and their scripts have the same names."""
_APPLICATIONS = ("flows.application:", "mlflow.server.")
"""Web applications of Prefect and MLflow. Their servers run as `python -m uvicorn APPLICATION`."""
_HOW_TO_RUN = "prefect deployment run rlhf/full-pipeline --param ppo_steps=5"


def up(home: Path) -> str:
    """Start the servers for `home` and return what to tell the user.

    Raises InputError where they run already or the project's files are not here, StageFailed if they do not
    come up.
    """
    if not DEPLOYMENTS.is_file():
        raise InputError(f"{DEPLOYMENTS} is not in {Path.cwd()}; type `rlhf up` in the project's folder")
    folder = home / "servers"
    if (running := supervisor_of(home)) is not None:
        raise InputError(
            f"servers for {home} are up already (supervisor pid {running.pid}); see `rlhf status`, or `rlhf"
            " down` first"
        )
    own_database()
    mlflow_address()
    os.environ.update(past_proxies())
    if (url := prefect_address()) and not prefect_answers(url):
        raise InputError(
            f"PREFECT_API_URL: no Prefect server answers at {url}; start it, or unset the variable so that"
            " `rlhf up` starts one"
        )
    _sweep(home)
    folder.mkdir(parents=True, exist_ok=True)
    supervisor = launch(
        [*python_module("flows.supervisor"), str(home)],
        {**os.environ, **SAFE_PATH, MARK: str(home)},
        log_file=folder / "supervisor.log",
    )
    state = _await_ready(home, supervisor)
    return _announce(home, state)


def _await_ready(home: Path, supervisor: subprocess.Popen[bytes]) -> dict[str, Any]:
    log_file = home / "servers" / "supervisor.log"
    deadline = time.monotonic() + 3 * READY_SECONDS
    try:
        while time.monotonic() < deadline:
            state = read_state(home)
            if state is not None and state["pid"] == supervisor.pid:
                if state["status"] == "ready":
                    return state
                if state["message"]:
                    raise StageFailed(f"{state['message']}; the supervisor's log is {log_file}")
            if supervisor.poll() is not None:
                raise StageFailed(
                    f"the supervisor ended with exit code {supervisor.returncode}; see {log_file}"
                )
            time.sleep(0.2)
    except BaseException:
        supervisor.terminate()
        raise
    supervisor.terminate()
    raise StageFailed(f"the servers were not ready within {3 * READY_SECONDS:g} s; see {log_file}")


def _announce(home: Path, state: dict[str, Any]) -> str:
    ours = state["servers"]
    lines = [f"Prefect  {state['prefect'].removesuffix('/api')}"]
    if "prefect" in ours:
        lines.append(f"         its UI asks for a password once: the line in {login_file(home)}")
        if not state["prefect"].endswith(":4200/api"):
            lines.append("         (port 4200 is in use: Prefect uses another one)")
    else:
        lines.append("         (the server of PREFECT_API_URL; lost runs are not restarted automatically)")
    lines.append(f"MLflow   {state['mlflow']}")
    if "mlflow" not in ours:
        lines.append("         (the tracker of MLFLOW_TRACKING_URI)")
    elif not state["mlflow"].endswith(":5000"):
        lines.append("         (port 5000 is in use: MLflow uses another one)")
    lines.append(f"logs     {home / 'servers'}")
    if "prefect" in ours and home != Path(".rlhf").resolve():
        lines.append(f"next     export PREFECT_PROFILES_PATH={home / 'prefect' / 'profiles.toml'}")
    lines.append(f"next     {Path(sys.executable).parent / _HOW_TO_RUN}")
    return "\n".join(lines)


def use_login(home: Path, url: str) -> None:
    """If `url` is the Prefect server that `up` started for `home`, set its password for Prefect clients in
    this process.
    """
    state, login = read_state(home), read_login(home)
    if state is not None and login is not None and url == state["prefect"] and "prefect" in state["servers"]:
        os.environ.setdefault("PREFECT_API_AUTH_STRING", login)


def down(home: Path) -> str:
    """Stop what `up` started for `home`, flow runs included, and return what to tell the user."""
    supervisor = supervisor_of(home)
    runs = flow_processes(str(home))
    if supervisor is None and not _ours(home):
        _forget(home)
        return f"nothing to stop: no servers of {home} are up"
    if supervisor is not None:
        supervisor.send(signal.SIGTERM)
        wait_gone([supervisor], FLOW_STOP_SECONDS + 40.0)
    _sweep(home)
    _forget(home)
    interrupted = (
        f"; {len(runs)} flow run(s) were interrupted and go on if `rlhf up` is typed within a day (later:"
        " start the deployment again, and it continues from the last checkpoint)"
        if runs
        else ""
    )
    return f"stopped the servers of {home}{interrupted}"


def read_state(home: Path) -> dict[str, Any] | None:
    """Return the last state written by the supervisor of `home`, or None if there is none or its format is
    invalid.
    """
    state = read_json(home / "servers" / "state.json")
    if state is None:
        return None
    texts = [state.get(name) for name in ("status", "message", "prefect", "mlflow")]
    numbers = [state.get("pid"), state.get("started")]
    servers = state.get("servers")
    whole = (
        all(isinstance(text, str) for text in texts)
        and all(type(number) in (int, float) for number in numbers)
        and isinstance(servers, dict)
        and all(
            isinstance(server, dict) and {"pid", "restarts"} <= server.keys() for server in servers.values()
        )
    )
    return state if whole else None


def supervisor_of(home: Path) -> ProcessId | None:
    """Return the running supervisor of `home`, or None.

    A stale or modified state file is detected by comparing the pid, the start time and the environment
    variable.
    """
    state = read_state(home)
    if state is None:
        return None
    process = ProcessId(int(state["pid"]), float(state["started"]))
    return process if process.alive() and process in _ours(home) else None


def _ours(home: Path) -> list[ProcessId]:
    """Return the processes that `up` started for `home`.

    Shells and other programs that a flow run started also have the variable, so the program is checked as
    well.
    """
    marked = [
        process for process, value in carriers(MARK) if value == str(home) and process.pid != os.getpid()
    ]
    return [process for process in marked if _is_ours(_command(process))]


def _is_ours(command: Sequence[str]) -> bool:
    """Return whether this is the command line of a program that `up` starts.

    Only the program counts. The name of a file or a folder in its arguments can be any word.
    """
    if not command:
        return False
    program = Path(command[0]).name
    if not program.startswith("python"):
        return program in _PACKAGES
    module, script = _python_program(command)
    if module == "uvicorn":
        return any(word.startswith(_APPLICATIONS) for word in command)
    return module in _MODULES or module.partition(".")[0] in _PACKAGES or Path(script).name in _PACKAGES


def _python_program(command: Sequence[str]) -> tuple[str, str]:
    """Return the module and the script that a Python command line runs. At least one of them is empty."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, ""), ""
        if word in ("-W", "-X"):
            next(words, "")  # the value of this option
        elif word == "-c":
            return "", ""
        elif not word.startswith("-"):
            return "", word
    return "", ""


def _command(process: ProcessId) -> list[str]:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).cmdline()
    return []


def _sweep(home: Path) -> None:
    """Stop what a killed supervisor left behind."""
    stop(_ours(home), 5.0)


def _forget(home: Path) -> None:
    """Prefect's commands must not look for a server that is gone."""
    (home / "servers" / "state.json").unlink(missing_ok=True)
    (home / "prefect" / "profiles.toml").unlink(missing_ok=True)
