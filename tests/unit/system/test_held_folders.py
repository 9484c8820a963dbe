"""Scratch folders of processes that have ended are deleted, and no others.

- the end of a holder, also by SIGKILL, releases its folder
- a folder that a process holds stays, and one of another host, and one that nobody ever held
- the lock file is opened for writing, without which NFS refuses the lock
- a deletion is logged if there was a folder
- a holder that starts while the folder is deleted gets a lock of its own
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.system.files import delete_abandoned, held

HOLDER = """
import sys, time
from pathlib import Path
from rlhf_core.system.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "shard").write_text("x")
    return folder


def test_the_folder_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    folder = make(tmp_path / "work" / "sft-a")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    delete_abandoned(folder.parent)
    assert (folder / "shard").exists()
    process.kill()
    process.wait()
    process.stdout.close()
    delete_abandoned(folder.parent)
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_another_attempt_holds_as_well_stays(tmp_path: Path) -> None:
    folder = make(tmp_path / "work" / "sft-a")
    with held(folder):
        with held(folder):
            pass
        delete_abandoned(folder.parent)
        assert (folder / "shard").exists()
    delete_abandoned(folder.parent)
    assert not folder.exists()


def test_folders_of_other_hosts_and_without_a_lock_stay(tmp_path: Path) -> None:
    theirs, unknown = make(tmp_path / "work" / "sft-a"), make(tmp_path / "work" / "sft-b")
    (tmp_path / "work" / "sft-a.lock").write_text(f"not-{socket.gethostname()}")
    delete_abandoned(tmp_path / "work")
    assert theirs.exists() and unknown.exists()
    delete_abandoned(tmp_path / "nothing")


def test_a_holder_that_starts_during_a_deletion_gets_a_new_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "work" / "sft-a")
    lock, flock = tmp_path / "work" / "sft-a.lock", fcntl.flock
    opened: list[int] = []

    def deleted_meanwhile(file: int, operation: int) -> None:
        if not opened:
            lock.unlink()
        opened.append(file)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", deleted_meanwhile)
    with held(folder):
        with held(folder):
            pass
        delete_abandoned(folder.parent)
        assert (folder / "shard").exists()


def test_folders_are_deleted_where_the_lock_needs_a_file_opened_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, the kernel turns `flock` into a lock of a range, which has this condition."""
    folder = make(tmp_path / "work" / "sft-a")
    with held(folder):
        pass
    flock = fcntl.flock

    def as_on_nfs(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    delete_abandoned(folder.parent)
    assert list(folder.parent.iterdir()) == []


def test_a_deletion_is_logged_if_there_was_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("sft-a", "sft-b"):
        with held(tmp_path / name):
            pass
    make(tmp_path / "sft-b")
    with caplog.at_level(logging.INFO):
        delete_abandoned(tmp_path)
    [line] = caplog.messages
    assert "sft-b is deleted" in line
    assert list(tmp_path.iterdir()) == []
