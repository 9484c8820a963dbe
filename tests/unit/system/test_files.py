"""Untrusted files are refused before they are opened unless regular and small; files are replaced
atomically.
"""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PosixPath

import pytest

from rlhf_core.system.files import (
    UnfitFile,
    create_once,
    open_regular,
    read_bounded,
    read_json,
    replacing,
    unfit,
    write_atomic,
    write_json,
)


def test_reads_a_regular_file_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_bounded(tmp_path / "a", 3) == b"abc"
    assert read_bounded(tmp_path / "link", 3) == b"abc"
    assert unfit(tmp_path / "a") is None


def test_refuses_what_is_not_a_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        server.bind("socket")
        for name, says in (
            ("fifo", "is a pipe"),
            ("loop", "leads to itself"),
            ("zero", "is a device"),
            ("socket", "is a socket"),
            (".", "is a folder"),
        ):
            with pytest.raises(UnfitFile, match=says):
                read_bounded(tmp_path / name, 100)


class ReplacedByFifo(PosixPath):
    """A path that leads to the file `fifo` next to it, except the first time."""

    uses = 0

    def __fspath__(self) -> str:
        self.uses += 1
        return str(self if self.uses == 1 else self.with_name("fifo"))


def test_file_that_becomes_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "a").write_bytes(b"abc")
    path = ReplacedByFifo(tmp_path / "a")
    with pytest.raises(UnfitFile, match="is a pipe"):
        open_regular(path)
    assert path.uses == 2, "it was regular when it was checked"


def test_names_the_target_of_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/1234")
    with pytest.raises(FileNotFoundError, match=r"a link to \.\./blobs/1234, which does not exist"):
        open_regular(tmp_path / "model.safetensors")


def test_refuses_more_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(UnfitFile, match="has 4 bytes, more than the 3 bytes"):
        read_bounded(tmp_path / "a", 3)
    # Files of /proc say that they have no bytes.
    with pytest.raises(UnfitFile, match="more than 3 bytes"):
        read_bounded("/proc/self/status", 3)


def test_reads_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    tracemalloc.start()
    try:
        assert len(read_bounded(tmp_path / "a", 1 << 30)) == 3_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


def test_a_nul_in_a_path_is_no_path() -> None:
    with pytest.raises(UnfitFile, match="not a path"):
        read_bounded("a\0b", 3)


def test_replaces_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(RuntimeError), replacing(path, sync=True) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"step": 1}
    write_atomic(path, "[2]")
    assert read_json(path) is None  # not an object
    assert [file.name for file in path.parent.iterdir()] == ["state.json"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "claim"
    assert create_once(path, b"1", private=True)
    assert not create_once(path, b"2", sync=True)
    assert path.read_bytes() == b"1" and path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["claim"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_json_is_read_from_regular_files_of_limited_size(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "state.json")
    assert read_json(tmp_path / "state.json") is None
    write_json(tmp_path / "large.json", {"step": 1})
    assert read_json(tmp_path / "large.json") == {"step": 1}
    # Spaces after an object are JSON.
    (tmp_path / "large.json").write_text('{"step": 1}'.ljust(2**24))
    assert read_json(tmp_path / "large.json") == {"step": 1}
    (tmp_path / "large.json").write_text('{"step": 1}'.ljust(2**24 + 1))
    assert read_json(tmp_path / "large.json") is None


def test_private_file_is_only_for_its_user(tmp_path: Path) -> None:
    write_atomic(tmp_path / "login", "secret", private=True)
    assert (tmp_path / "login").stat().st_mode & 0o777 == 0o600
