"""`rlhf status`: servers, flow runs, pipeline runs and where things are, as text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from flows.files import read_json
from flows.local_http import answers, post
from flows.report import duration
from flows.servers import supervisor_of
from rlhf_core.config.redact import printable
from rlhf_core.processes import lives

_SHOWN = 5


def describe(home: Path) -> str:
    """What is up, what ran last and where to look, for `home`."""
    return "\n".join([*_servers(home), "", *_runs(home), "", *_places(home)])


def _servers(home: Path) -> list[str]:
    state = read_json(home / "servers" / "state.json")
    if state is None or supervisor_of(home) is None:
        return ["servers: none; start them with `rlhf up` (`rlhf run` needs none)"]
    lines = [f"servers: {state['status']} (supervisor pid {state['pid']})"]
    for name, address, health in (("prefect", state["prefect"], "/health"), ("mlflow", state["mlflow"], "/health")):
        up = answers(address + health)
        page = address.removesuffix("/api")
        lines.append(f"  {name:<8} {'up' if up else 'NO ANSWER':<10} {page}{_restarts(state, name)}")
    lines.append(
        f"  {'worker':<8} {'up' if state['servers']['worker']['pid'] else 'down':<10} {_restarts(state, 'worker')}"
    )
    return [*lines, *_flow_runs(state["prefect"])]


def _restarts(state: dict[str, Any], name: str) -> str:
    count = state["servers"][name]["restarts"]
    return f"  restarted {count} times" if count else ""


def _flow_runs(api: str) -> list[str]:
    try:
        runs = post(f"{api}/flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC", "limit": _SHOWN})
    except (OSError, ValueError):
        return ["flow runs: Prefect does not answer"]
    lines = [
        f"  {run['state_name']:<14} {run['name']:<32} {run['id']}  started {run['run_count']} time(s)" for run in runs
    ]
    return ["flow runs, newest first:", *(lines or ["  none yet"])]


def _runs(home: Path) -> list[str]:
    files = sorted((home / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    lines = ["pipeline runs, newest first:"]
    for path in files[:_SHOWN]:
        run = read_json(path)
        if run is None:
            continue
        since = duration(time.time() - run["updated"])
        state, making, error = run["state"], run.get("making"), run.get("error")
        if state == "running" and lives(*run.get("process", (0, 0.0, ""))) is False:
            state = "killed; the same command continues it"
        lines.append(f"  {path.parent.name}: {state}, {since} ago, config {run['config']}")
        stages = [f"{name} {'reused' if s['reused'] else duration(s['seconds'])}" for name, s in run["stages"].items()]
        lines.append(f"    finished: {', '.join(stages) or 'none'}")
        if making:
            lines.append(f"    {'now' if state == 'running' else 'was at'}: {making['stage']}, log {making['log']}")
        if error:
            lines.append(f"    {printable(error)[:300]}")
    return lines if len(lines) > 1 else ["pipeline runs: none yet"]


def _places(home: Path) -> list[str]:
    return [
        f"logs:      {home / 'logs'}",
        f"summaries: {home / 'runs'}/*/summary.json",
        f"MLflow:    {Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri sqlite:///{home / 'mlflow.db'}",
    ]
