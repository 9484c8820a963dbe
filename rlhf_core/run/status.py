"""The last runs below a home, as text for `rlhf status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlhf_core.run.state import is_unfinished, read_state
from rlhf_core.run.summary import duration
from rlhf_core.system.home import Home

_MAX_RUNS = 5


def describe_runs(home: Home) -> list[str]:
    """Return lines about the last runs of `home`. Damaged files are skipped."""
    files = sorted(home.run_states(), key=_changed, reverse=True)
    lines = []
    shown = 0
    for file in files:
        run = read_state(file)
        if run is None:
            continue
        lines += _describe_run(file.parent.name, run)
        shown += 1
        if shown == _MAX_RUNS:
            break
    return ["pipeline runs, newest first:", *lines] if lines else ["pipeline runs: none yet"]


def _changed(file: Path) -> float:
    """Return when a file was changed; 0 if it was deleted in the meantime."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _describe_run(name: str, run: dict[str, Any]) -> list[str]:
    state, stage = run["state"], run.get("making")
    # A killed process could not write its end. On another host its state is unknown (None).
    if state == "running" and is_unfinished(run):
        state = "killed; the same command continues it"
    finished = []
    for stage_name, record in run["stages"].items():
        finished.append(f"{stage_name} {'reused' if record.get('reused') else duration(record['seconds'])}")
    # The state is written when a stage begins or ends.
    passed = duration(max(0.0, time.time() - run["updated"]))
    is_running = state == "running"
    lines = [
        f"  {name}: {state}, {'' if is_running else f'{passed} ago, '}config {run['config']}",
        f"    finished: {', '.join(finished) or 'none'}",
    ]
    if stage:
        when = f"now, for {passed}" if is_running else "was at"
        lines.append(f"    {when}: {stage['stage']}, log {stage['log']}")
    if run.get("error"):
        lines.append(f"    {run['error'][:300]}")
    return lines
