"""What is not a regular file of bounded size is refused before it is opened; nothing waits and nothing is
read without end.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlhf_core.system import files
from rlhf_core.system.files import UnfitFile, open_regular, read_bounded, unfit


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


def test_a_file_that_becomes_a_fifo_after_it_was_looked_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(files, "unfit", lambda *_: None)
    with pytest.raises(UnfitFile, match="is a pipe"):
        open_regular(tmp_path / "fifo")


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


def test_a_nul_in_a_path_is_no_path() -> None:
    with pytest.raises(UnfitFile, match="not a path"):
        read_bounded("a\0b", 3)
