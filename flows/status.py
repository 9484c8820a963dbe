"""`rlhf status`: servers, flow runs, pipeline runs and where things are, as text."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from flows.local_http import answers, post
from flows.login import login_file, read_login
from flows.servers import read_state, supervisor_of
from rlhf_core.config.redact import printable
from rlhf_core.run.home import read_run
from rlhf_core.run.summary import duration
from rlhf_core.system.processes import lives

_SHOWN = 5


def describe(home: Path) -> str:
    """Return the status of the servers, the last runs and the relevant addresses for `home`.

    Names may come from files and servers and are printed without control characters.
    """
    return "\n".join(map(printable, [*_servers(home), "", *_runs(home), "", *_places(home)]))


def _servers(home: Path) -> list[str]:
    state = read_state(home)
    if state is None or supervisor_of(home) is None:
        return ["servers: none; start them with `rlhf up` (`rlhf run` needs none)"]
    lines = [f"servers: {state['status']} (supervisor pid {state['pid']})"]
    for name in ("prefect", "mlflow"):
        page = state[name].removesuffix("/api")
        if name not in state["servers"]:
            lines.append(f"  {name:<8} {'yours':<10} {page}")
            continue
        up = answers(f"{state[name]}/health")
        lines.append(f"  {name:<8} {'up' if up else 'NO ANSWER':<10} {page}{_restarts(state, name)}")
    worker = state["servers"].get("worker", {})
    lines.append(f"  {'worker':<8} {'up' if worker.get('pid') else 'down':<10} {_restarts(state, 'worker')}")
    if "prefect" not in state["servers"]:
        return lines
    return [
        *lines,
        f"  password of Prefect's UI: the line in {login_file(home)}",
        *_flow_runs(home, state["prefect"]),
    ]


def _restarts(state: dict[str, Any], name: str) -> str:
    count = state["servers"].get(name, {}).get("restarts")
    return f"  restarted {count} times" if count else ""


def _flow_runs(home: Path, api: str) -> list[str]:
    body = {"sort": "EXPECTED_START_TIME_DESC", "limit": _SHOWN}
    try:
        runs = post(f"{api}/flow_runs/filter", body, login=read_login(home))
        lines = [
            f"  {run['state_name']:<14} {run['name']:<32} {run['id']}  started {run['run_count']} time(s)"
            for run in runs
        ]
    except (OSError, ValueError, TypeError, KeyError):  # no answer, or not a Prefect server
        return ["flow runs: Prefect does not answer"]
    return ["flow runs, newest first:", *(lines or ["  none yet"])]


def _runs(home: Path) -> list[str]:
    files = sorted((home / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    lines = ["pipeline runs, newest first:"]
    readable = ((path, run) for path in files if (run := read_run(path)) is not None)
    for path, run in islice(readable, _SHOWN):
        since = duration(time.time() - run["updated"])
        state, making, error = run["state"], run.get("making"), run.get("error")
        if state == "running" and lives(*run.get("process", (0, 0.0, ""))) is False:
            state = "killed; the same command continues it"
        lines.append(f"  {path.parent.name}: {state}, {since} ago, config {run['config']}")
        stages = [
            f"{name} {'reused' if s.get('reused') else duration(s['seconds'])}"
            for name, s in run["stages"].items()
        ]
        lines.append(f"    finished: {', '.join(stages) or 'none'}")
        if making:
            lines.append(
                f"    {'now' if state == 'running' else 'was at'}: {making['stage']}, log {making['log']}"
            )
        if error:
            lines.append(f"    {error[:300]}")
    return lines if len(lines) > 1 else ["pipeline runs: none yet"]


def _places(home: Path) -> list[str]:
    return [
        f"logs:      {home / 'logs'}",
        f"summaries: {home / 'runs'}/*/summary.json",
        (
            f"MLflow:    {Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri"
            f" sqlite:///{home / 'mlflow.db'}"
        ),
    ]
