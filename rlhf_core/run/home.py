"""Files of a run: logs that are rotated, and `run.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.system.files import read_json


def read_run(path: Path) -> dict[str, Any] | None:
    """Return the content of a `run.json`, or None if the file does not exist or has an invalid format."""
    run = read_json(path)
    if run is None:
        return None
    stages, making, process = run.get("stages"), run.get("making", {}), run.get("process", [0, 0.0, ""])
    whole = (
        all(isinstance(run.get(name), str) for name in ("state", "config"))
        and isinstance(run.get("error", ""), str)
        and _is_number(run.get("updated"))
        and isinstance(stages, dict)
        and all(isinstance(stage, dict) and _is_number(stage.get("seconds")) for stage in stages.values())
        and isinstance(making, dict)
        and (not making or {"stage", "log"} <= making.keys())
        and isinstance(process, list)
        and len(process) == 3
        and all(map(_is_number, process[:2]))
        and isinstance(process[2], str)
        and isinstance(run.get("decided_by", {}), dict)
    )
    return run if whole else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12
