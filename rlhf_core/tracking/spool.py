"""What a run has still to tell its tracker, on the local disk: numbers in a JSON-lines file, files in a folder.

    {folder}/points.jsonl     {"step": 7, "metrics": {"loss/policy": 0.1}}
    {folder}/files/...        under the path they will have among the run's artifacts

A killed process leaves its spool; the next attempt at the same stage reads it and sends the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rlhf_core.errors import InputError

TEMPORARY = ".tmp-"


class Spool:
    """The spool of one stage run. Not for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where it all lies."""
        self._points = folder / "points.jsonl"
        self._files = folder / "files"
        folder.mkdir(parents=True, exist_ok=True)
        self.pending: dict[tuple[str, int], float] = self._read()
        """(metric, step) -> value, in the order of logging; the last value of a step counts."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep these numbers, on disk before this returns to the caller."""
        line = json.dumps({"step": step, "metrics": dict(metrics)})
        with self._points.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        for name, value in metrics.items():
            # A repeated point goes to the end, or its steps would no longer ascend.
            self.pending.pop((name, step), None)
            self.pending[name, step] = value

    def sent(self) -> None:
        """All pending numbers have reached the tracker."""
        self._points.unlink(missing_ok=True)
        self.pending.clear()

    def add_file(self, source: Path, path: str) -> None:
        """Keep a copy of a small file, to be sent as `path`."""
        target, temporary = self._place(path), self._temporary()
        shutil.copyfile(source, temporary)
        os.replace(temporary, target)

    def add_text(self, text: str, path: str) -> None:
        """Keep a text file, to be sent as `path`."""
        self.add_bytes(text.encode(), path)

    def add_bytes(self, data: bytes, path: str) -> None:
        """Keep a file with this content, to be sent as `path`."""
        target, temporary = self._place(path), self._temporary()
        temporary.write_bytes(data)
        os.replace(temporary, target)

    def files(self) -> list[tuple[Path, str]]:
        """(local file, path among the run's artifacts) of every file still to be sent."""
        found = (path for path in sorted(self._files.rglob("*")) if path.is_file())
        return [(path, path.relative_to(self._files).as_posix()) for path in found]

    def remove(self) -> None:
        """Delete the spool if it is empty."""
        if not self.pending and not self.files():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self, path: str) -> Path:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise InputError(f"The artifact path {path!r} must be relative and must not contain '..'.")
        target = self._files / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _temporary(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{TEMPORARY}{uuid.uuid4().hex}"

    def _read(self) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        if not self._points.exists():
            return found
        for line in self._points.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                points = {(str(name), int(entry["step"])): float(value) for name, value in entry["metrics"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the line that a kill cut short: its step will be redone
            for point, value in points.items():
                found.pop(point, None)
                found[point] = value
        return found
