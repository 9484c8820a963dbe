"""The folder of a run, and small JSON files in it that other processes read while they are written: always
whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def replace_private(path: Path, text: str) -> None:
    """Replace `path` atomically by a file that only this user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


LOG_BYTES = 10_000_000
"""Maximum size of a log file before it is rotated. One old file is kept, because `rlhf up` may run for
months.
"""


def rotate_logs(folder: Path, most: int = LOG_BYTES) -> None:
    """Rotate the logs in `folder` that have more than `most` bytes.

    The content is copied and the file is truncated. Its writer keeps the file open in append mode and
    therefore continues at the beginning. Files that cannot be read or written are not changed.
    """
    for file in folder.glob("*.log"):
        with suppress(OSError):
            if file.stat().st_size > most:
                shutil.copyfile(file, file.with_suffix(".log.1"))
                os.truncate(file, 0)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of `path`; None if there is no such file or it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


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
