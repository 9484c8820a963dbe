"""`run.json`: the state of a run, for `rlhf status` and for the next run of the same configuration."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.redact import scrubbed
from rlhf_core.run.summary import duration, verdict
from rlhf_core.system.files import read_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import RecordedProcess

_MAX_RUNS = 5
_MAX_DIFFERENCES = 3
_UNKNOWN = [0, 0.0, ""]
"""Process of a run that has recorded none."""


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the content of a `run.json`, or None if there is none."""
    run = read_json(path)
    return run if run and "state" in run else None


def describe_runs(home: Home) -> list[str]:
    """Return lines about the last runs of `home`."""
    found = [(run, file.parent) for file in home.run_states() if (run := read_state(file)) is not None]
    found.sort(key=lambda each: each[0]["updated"], reverse=True)
    lines = []
    for run, folder in found[:_MAX_RUNS]:
        lines += _describe_run(folder.name, run, read_json(home.progress(folder.name)) or {})
        if run["state"] == "finished" and (line := verdict(read_json(folder / "summary.json") or {})):
            lines.append(f"    {line}")
    return ["pipeline runs, newest first:", *lines] if lines else ["pipeline runs: none yet"]


def describe_unfinished(home: Home, config_path: str, key_fields: Mapping[str, Any]) -> str:
    """Describe the last unfinished run of this configuration file and how its settings differ.

    Args:
        home: Home of the runs.
        config_path: The configuration file, as it was given.
        key_fields: What is in the key of the new run, by name. See `rlhf_core.config.keys.key_fields`.

    Returns an empty text if the last run finished, may still be running, or is too old to be compared.
    """
    last = last_run_of(home, config_path)
    if last is None or not is_unfinished(last) or "decided_by" not in last:
        return ""
    changes = first_of(describe_changes(last["decided_by"], key_fields))
    stage = last.get("making", {}).get("stage")
    where = f" in {stage}" if stage else ""
    return scrubbed(
        f"the last run of {config_path} stopped{where}; this is another run, because {', '.join(changes)}."
        " Stages that this does not affect are reused or continued. With the settings, data and code of that"
        " run, all of it continues"
    )


def last_run_of(home: Home, config_path: str) -> dict[str, Any] | None:
    """Return the state of the last run of a configuration file, or None if there was none."""
    runs = []
    for file in home.run_states():
        run = read_state(file)
        if run is not None and run["config"] == config_path:
            runs.append(run)
    return max(runs, key=lambda run: run["updated"], default=None)


def is_unfinished(run: Mapping[str, Any]) -> bool:
    """Return whether a run ended before its last stage."""
    if run["state"] == "running":
        # Only a process that is known to be dead has stopped. One on another host may be alive: None.
        return process_of(run).alive() is False
    return bool(run["state"] != "finished")


def process_of(run: Mapping[str, Any]) -> RecordedProcess:
    """Return the process that has written the state of a run."""
    return RecordedProcess(*run.get("process", _UNKNOWN))


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each field whose value has changed."""
    changes = []
    for name in {**before, **now}:
        old, new = before.get(name, "unset"), now.get(name, "unset")
        if before.get(name) == now.get(name):
            continue
        if _is_digest(old) and _is_digest(new):
            digests = f"sha256 {_short(old)}, now {_short(new)}"
            changes.append(f"the content of {name.removeprefix('sources.')} has changed ({digests})")
        else:
            changes.append(f"{name} was {_short(old)} and is {_short(new)}")
    return changes


def first_of(changes: Sequence[str]) -> list[str]:
    """Return the first phrases, and the number of the others."""
    others = len(changes) - _MAX_DIFFERENCES
    return [*changes[:_MAX_DIFFERENCES], f"{others} more"] if others > 0 else list(changes)


def _short(value: Any) -> Any:
    return value[:8] if _is_digest(value) else value


def _describe_run(name: str, run: dict[str, Any], progress: dict[str, Any]) -> list[str]:
    state, stage = run["state"], run.get("making")
    # A killed process could not write its end. On another host its state is unknown (None).
    if state == "running" and is_unfinished(run):
        state = "killed; the same command continues it"
    finished = []
    for stage_name, record in run["stages"].items():
        how = "reused" if record.get("reused") else duration(record["seconds"])
        finished.append(f"{stage_name} {how}")
    # The state is written when a stage begins or ends.
    passed = duration(max(0.0, time.time() - run["updated"]))
    age, when, done = f"{passed} ago, ", "was at", ""
    if state == "running":
        age, when = "", f"now, for {passed}"
        # The progress can be that of an earlier stage: this one may not have reported any.
        if stage and progress.get("stage") == stage["stage"]:
            done = _describe_progress(progress)
    lines = [
        f"  {name}: {state}, {age}config {run['config']}",
        f"    finished: {', '.join(finished) or 'none'}",
    ]
    if stage:
        lines.append(f"    {when}: {stage['stage']}{done}, log {stage['log']}")
    if run.get("error"):
        lines.append(f"    {run['error'][:300]}")
    return lines


def _describe_progress(progress: Mapping[str, Any]) -> str:
    """Return `, sft 45 % (9 of 20 steps), 3 min left`."""
    done, total, left = progress["done"], progress["total"], progress["left"]
    text = f", {progress['task']} {100 * done / max(1, total):.0f} % ({done} of {total} {progress['unit']})"
    return text if left is None else f"{text}, {duration(left)} left"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
