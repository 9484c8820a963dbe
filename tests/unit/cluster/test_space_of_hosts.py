"""The free space of a host, and what its message says.

- a file that another process deletes meanwhile is not counted
- copies on another disk than the scratch files are compared with that disk
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.disk_space import Space, bytes_below, space_of, space_problem
from rlhf_core.system.machine import Disk
from tests.support.scripted_machine import ScriptedMachine, on_machine


def fill(file: Path, size: int) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def test_a_file_that_disappears_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "rank0" / "kept", 100)
    gone = fill(tmp_path / "rank0" / "gone", 1000)
    stat = Path.stat

    def deleted_meanwhile(path: Path, **more: Any) -> os.stat_result:
        if path == gone:
            gone.unlink(missing_ok=True)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", deleted_meanwhile)
    assert bytes_below(tmp_path) == 100


def test_copies_may_be_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to("/proc/self/ns")
    with on_machine(ScriptedMachine(disk=Disk(10**12, 300_000_000))):
        space = space_of(tmp_path, {"data-k-1": 300_000})
    assert space == Space(300_000_000, 300_000, 300_000_000)
    assert space_problem("/home", Space(0, 10**9, 10**9)).endswith("200 for logs and other files")
    assert not space_problem("/home", Space(10**9, 10**9, 10**9), 8 * 10**8)
    assert space_problem("/home", Space(10**9, 2 * 10**9, 10**9)) == (
        "run.home=/home: 1000 MB free in cache, at least 2000 are needed for the inputs of the stage"
    )
