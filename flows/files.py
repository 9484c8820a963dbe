"""The folder of a run, and small JSON files in it that other processes read while they are written: always whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import InputError


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of `path`; None if there is no such file or it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def make_home(home: Path) -> Path:
    """`home`, made if it is not there: then for this user alone, because logs and databases hold the training data."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.home: the folder {home} cannot be made: {error.strerror}; choose another") from error
    return home
