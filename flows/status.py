"""`rlhf status`: servers, flow runs, pipeline runs and file locations, as text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from flows.prefect_server import read_auth_string
from flows.servers import ServersState, supervisor_of
from rlhf_core.config.redact import printable
from rlhf_core.run.home import read_run
from rlhf_core.run.summary import duration
from rlhf_core.system.home import Home
from rlhf_core.system.local_http import post, responds
from rlhf_core.system.processes import lives

_MAX_RUNS = 5


def describe(home: Home) -> str:
    """Return the status of the servers, the last runs and the relevant addresses for `home`.

    Names may come from files and servers and are printed without control characters.
    """
    lines = [*_servers(home), "", *_pipeline_runs(home), "", *_locations(home)]
    return "\n".join(map(printable, lines))


def _servers(home: Home) -> list[str]:
    state = ServersState.read(home)
    if state is None or supervisor_of(home) is None:
        return ["servers: none; start them with `rlhf up` (`rlhf run` needs none)"]
    lines = [f"servers: {state.status} (supervisor pid {state.pid})"]
    for name, url in (("prefect", state.prefect), ("mlflow", state.mlflow)):
        page = url.removesuffix("/api")
        if name in state.servers:
            status = "up" if responds(f"{url}/health") else "NO ANSWER"
            lines.append(f"  {name:<8} {status:<10} {page}{_restarts(state, name)}")
        else:
            lines.append(f"  {name:<8} {'yours':<10} {page}")
    worker = state.servers.get("worker")
    status = "up" if worker and worker.pid else "down"
    lines.append(f"  {'worker':<8} {status:<10} {_restarts(state, 'worker')}")
    if "prefect" in state.servers:
        lines.append(f"  password of Prefect's UI: the line in {home.servers_login}")
        lines += _flow_runs(home, state.prefect)
    return lines


def _restarts(state: ServersState, name: str) -> str:
    server = state.servers.get(name)
    return f"  restarted {server.restarts} times" if server and server.restarts else ""


def _flow_runs(home: Home, api: str) -> list[str]:
    body = {"sort": "EXPECTED_START_TIME_DESC", "limit": _MAX_RUNS}
    lines = ["flow runs, newest first:"]
    try:
        for run in post(f"{api}/flow_runs/filter", body, auth=read_auth_string(home)):
            lines.append(
                f"  {run['state_name']:<14} {run['name']:<32} {run['id']}  started {run['run_count']} time(s)"
            )
    except (OSError, ValueError, TypeError, KeyError):  # no response, or not a Prefect server
        return ["flow runs: Prefect does not answer"]
    return lines if len(lines) > 1 else [*lines, "  none yet"]


def _pipeline_runs(home: Home) -> list[str]:
    files = sorted(home.run_states(), key=lambda path: path.stat().st_mtime, reverse=True)
    lines = []
    shown = 0
    for file in files:
        run = read_run(file)
        if run is not None and shown < _MAX_RUNS:
            lines += _pipeline_run(file.parent.name, run)
            shown += 1
    return ["pipeline runs, newest first:", *lines] if lines else ["pipeline runs: none yet"]


def _pipeline_run(name: str, run: dict[str, Any]) -> list[str]:
    state, stage = run["state"], run.get("making")
    # A killed process could not write its end. On another host its state is unknown (None).
    if state == "running" and lives(*run.get("process", (0, 0.0, ""))) is False:
        state = "killed; the same command continues it"
    finished = []
    for stage_name, record in run["stages"].items():
        finished.append(f"{stage_name} {'reused' if record.get('reused') else duration(record['seconds'])}")
    lines = [
        f"  {name}: {state}, {duration(time.time() - run['updated'])} ago, config {run['config']}",
        f"    finished: {', '.join(finished) or 'none'}",
    ]
    if stage:
        lines.append(f"    {'now' if state == 'running' else 'was at'}: {stage['stage']}, log {stage['log']}")
    if run.get("error"):
        lines.append(f"    {run['error'][:300]}")
    return lines


def _locations(home: Home) -> list[str]:
    mlflow = Path(sys.executable).parent / "mlflow"
    return [
        f"logs:      {home.logs}",
        f"summaries: {home.runs}/*/summary.json",
        f"MLflow:    {mlflow} ui --backend-store-uri sqlite:///{home.mlflow_database}",
    ]
