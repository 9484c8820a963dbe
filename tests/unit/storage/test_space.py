"""A disk that is too small or fills up costs nothing that was there before.

Locks: space is checked before a checkpoint, a copy and a download, with both numbers in the message;
whichever write fails for lack of space, nothing that looks whole appears and the old checkpoint loads. The
size of a folder does not count a file that another process deletes meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system import files
from rlhf_core.system.machine import Disk
from tests.support.checkpoints import keep
from tests.support.file_systems import without_hard_links
from tests.support.scripted_machine import ScriptedMachine, on_machine


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def state(folder: Path, text: str) -> Path:
    (folder / "rank0").mkdir(parents=True)
    (folder / "rank0" / "optimizer.pt").write_text(f"optimizer {text}")
    (folder / "loop.json").write_text(f'"{text}"')
    return folder


def with_free(size: int) -> ScriptedMachine:
    return ScriptedMachine(disk=Disk(total=10**12, free=size))


def test_a_checkpoint_that_does_not_fit_is_refused_with_both_numbers(store: Store, tmp_path: Path) -> None:
    saver = CheckpointStore(store, "k", tmp_path / "work", keep(1))
    saver.save(1, state(tmp_path / "one", "1"))
    with on_machine(with_free(300_000_000)):
        with pytest.raises(
            StoreError, match=r"The checkpoint of step 2 needs 1\.20 GB, but /.* has 0\.30 GB free; free some"
        ):
            saver.prepare(2, tmp_path / "two", 1_200_000_000)
        with pytest.raises(StoreError, match=r"needs 0\.30 GB"):
            saver.prepare(2, tmp_path / "two", 299_000_000, own=2_000_000)
        saver.prepare(2, tmp_path / "two", 299_000_000)
    assert list((tmp_path / "two").iterdir()) == []
    found = saver.latest()
    assert found is not None and found[0] == 1


def test_copies_to_another_disk_are_checked_and_links_are_not(store: Store, tmp_path: Path) -> None:
    def upload(folder: Path, name: str) -> None:
        bundles.upload(store, folder, [FileEntry(name, 14, "")], "a")

    state(tmp_path / "one", "1")
    with on_machine(with_free(5)):
        upload(tmp_path / "one", "loop.json")
        assert (tmp_path / "one" / "loop.json").stat().st_nlink == 2
        with pytest.raises(StoreError, match=r"store/a needs 0\.00 MB, but"):
            upload(Path("/proc/self"), "status")
    assert store.list("a") == ["a/loop.json"]
    with on_machine(with_free(14)):
        upload(Path("/proc/self"), "status")
    assert store.list("a") == ["a/loop.json", "a/status"]


def test_folders_on_one_disk_are_recognised(tmp_path: Path) -> None:
    assert bundles.on_one_disk(tmp_path / "not" / "there", tmp_path)
    assert not bundles.on_one_disk(Path("/proc/self"), tmp_path)


def fail_the_nth(
    calls: list[tuple[Any, str]], nth: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """From the nth call of any of these on, the disk is full. Returns how many calls were made."""
    count = 0

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(*args, **kwargs)

        return call

    for owner, name in calls:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: count


@pytest.mark.parametrize("links", [True, False])
def test_full_disk_keeps_the_old_checkpoint(links: bool, tmp_path: Path) -> None:
    writes = [
        (os, "replace"),
        (os, "fsync"),
        (shutil, "copyfile"),
        (files, "_write_new"),
        (Path, "write_bytes"),
        (Path, "mkdir"),
        (os, "link"),
    ]
    nth = refused = 0
    while True:
        nth += 1
        place = tmp_path / str(nth)
        store = Store(place / "store")
        CheckpointStore(store, "k", place / "work", keep(1)).save(1, state(place / "one", "1"))
        folder = state(place / "two", "2")
        with pytest.MonkeyPatch.context() as patch:
            if not links:
                without_hard_links(patch)
            calls = fail_the_nth(writes, nth, patch)
            try:
                CheckpointStore(store, "k", place / "work", keep(1)).save(2, folder)
            except StoreError as error:
                assert "No space left on device; free some space" in error.message
                refused += 1
            done = calls() < nth
        found = CheckpointStore(store, "k", place / "work", keep(1)).latest()
        assert found is not None
        # Once its manifest is there, a checkpoint is whole, whatever fails afterwards.
        assert (found[1] / "rank0" / "optimizer.pt").read_text() == f"optimizer {found[0]}"
        # An error does not wait for the files that other threads write at that moment.
        for _ in range(100):
            left = [path for path in place.rglob("*") if path.name.startswith(".tmp-")]
            if not left:
                break
            time.sleep(0.1)
        assert left == []
        if done:
            assert found[0] == 2
            break
    # Six folders, and of two files, the manifest and the name of the newest: the content, its name, and an
    # fsync of each. The files are written in parallel, so two threads may try to create the same folder.
    assert refused == nth - 1
    assert refused >= 6 + 4 * 4


def test_a_file_that_disappears_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = tmp_path / "rank0" / "kept", tmp_path / "rank0" / "gone"
    kept.parent.mkdir()
    kept.write_bytes(bytes(100))
    gone.write_bytes(bytes(1000))
    stat = Path.stat

    def deleted_meanwhile(path: Path, **more: Any) -> os.stat_result:
        if path == gone:
            gone.unlink(missing_ok=True)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", deleted_meanwhile)
    assert bundles.bytes_below(tmp_path) == 100
