"""What a run has still to tell its tracker, on the local disk: numbers in a JSON-lines file, files in a
folder.

    {root}/attempt-%06d/points.jsonl     {"step": 7, "metrics": {"loss/policy": 0.1}}
    {root}/attempt-%06d/files/...        under the path they will have among the run's artifacts

A killed process leaves its spool; the next attempt at the same stage takes it over and sends the rest. An
attempt that was only thought dead finds its folder gone and can mix nothing into its successor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rlhf_core.errors import InputError
from rlhf_core.system.files import TEMPORARY, replacing, write_atomic


class Spool:
    """The spool of one attempt at one stage; `root` is the stage's. Not for several processes at once."""

    def __init__(self, root: Path, attempt: int) -> None:
        self.folder = root / f"attempt-{attempt:06d}"
        """Where it all lies."""
        self._points = self.folder / "points.jsonl"
        self._files = self.folder / "files"
        root.mkdir(parents=True, exist_ok=True)
        for number, earlier in sorted(_attempts(root).items()):
            if number < attempt:
                self._take_over(earlier)
        self.folder.mkdir(exist_ok=True)
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

    def sync(self) -> None:
        """Have the disk itself hold the numbers, before a checkpoint after which nobody would log them
        again.
        """
        if self._points.exists():
            with self._points.open("rb") as file:
                os.fsync(file.fileno())

    def sent(self) -> None:
        """All pending numbers have reached the tracker."""
        self._points.unlink(missing_ok=True)
        self.pending.clear()

    def add_file(self, source: Path, path: str) -> None:
        """Keep a copy of a small file, to be sent as `path`."""
        with replacing(self._place(path)) as temporary:
            shutil.copyfile(source, temporary)

    def add_text(self, text: str, path: str) -> None:
        """Keep a text file, to be sent as `path`."""
        self.add_bytes(text.encode(), path)

    def add_bytes(self, data: bytes, path: str) -> None:
        """Keep a file with this content, to be sent as `path`."""
        write_atomic(self._place(path), data)

    def files(self) -> list[tuple[Path, str]]:
        """(local file, path among the run's artifacts) of every file still to be sent."""
        return [(path, path.relative_to(self._files).as_posix()) for path in _finished(self._files)]

    def remove(self) -> None:
        """Delete the spool if it is empty."""
        if not self.pending and not self.files():
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()

    def _take_over(self, earlier: Path) -> None:
        """A kill anywhere in here loses nothing: what was taken twice counts once."""
        if not self.folder.exists():
            earlier.rename(self.folder)
            return
        points = earlier / self._points.name
        if points.exists():
            with self._points.open("a", encoding="utf-8") as file:
                file.write("\n" + points.read_text(encoding="utf-8", errors="replace"))
        files = earlier / self._files.name
        for path in _finished(files):
            os.replace(path, self._place(path.relative_to(files).as_posix()))
        shutil.rmtree(earlier)

    def _place(self, path: str) -> Path:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise InputError(f"The artifact path {path!r} must be relative and must not contain '..'.")
        target = self._files / path
        self._files.mkdir(exist_ok=True)  # fails where a later attempt has taken the folder
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _read(self) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        if not self._points.exists():
            return found
        for line in self._points.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                points = {
                    (str(name), int(entry["step"])): float(value) for name, value in entry["metrics"].items()
                }
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the line that a kill cut short: its step will be redone
            for point, value in points.items():
                found.pop(point, None)
                found[point] = value
        return found


def _finished(folder: Path) -> list[Path]:
    """Return the files below `folder` that were written completely, sorted."""
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(TEMPORARY)
    )


def next_attempt(root: Path) -> int:
    """A number above those of all spools of the stage, whose attempts have ended."""
    return max(_attempts(root), default=0) + 1


def _attempts(root: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in root.glob("attempt-*")
        if (match := re.fullmatch(r"attempt-(\d+)", path.name))
    }
