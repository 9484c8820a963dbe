"""Which files are opened, as Linux reports it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_OPEN = 0x20
_IN_ISDIR = 0x40000000
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(folder: Path) -> Iterator[list[str]]:
    """Yield a list, which has the names of the files in `folder` that were opened when the body ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    names: list[str] = []
    try:
        if libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        yield names
        names += _names(descriptor)
    finally:
        os.close(descriptor)


def _names(descriptor: int) -> list[str]:
    try:
        data = os.read(descriptor, 2**16)
    except BlockingIOError:
        return []
    names = []
    while data:
        _, mask, _, length = _EVENT.unpack_from(data)
        name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
        if not mask & _IN_ISDIR:
            names.append(os.fsdecode(name))
        data = data[_EVENT.size + length :]
    return names
