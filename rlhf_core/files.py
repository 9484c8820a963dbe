"""Reading a file that somebody else wrote: it must be a regular file of a bounded size before it is opened.

Opening a FIFO waits for a writer for ever, and reading a device such as /dev/zero never ends. Both can stand under the
name of a configuration, a data file or a model's file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe (FIFO)"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


class UnfitFile(OSError):
    """Not a regular file, or too large. The message starts with the path and says what it is instead."""


def open_regular(path: Path | str, limit: int | None = None) -> BinaryIO:
    """`path` opened for reading bytes; never waits.

    Raises FileNotFoundError for a path that does not exist or a link whose target does not; UnfitFile for what is not a
    regular file or has more than `limit` bytes; OSError otherwise (no permission).
    """
    problem = unfit(path, limit)
    if problem is not None:
        raise problem
    # O_NONBLOCK: the file may have been replaced by a FIFO since it was looked at.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    problem = _problem(path, os.fstat(descriptor), limit)
    if problem is not None:
        os.close(descriptor)
        raise problem
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path | str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises as `open_regular` does."""
    with open_regular(path, limit) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:  # it grew while it was read
        raise UnfitFile(f"{path} has more than {_size(limit)}, the limit for such a file")
    return content


def unfit(path: Path | str, limit: int | None = None) -> OSError | None:
    """Why `open_regular` would refuse `path`, or None. Opens nothing."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            return FileNotFoundError(f"{path} is a link to {os.readlink(path)[:200]}, which does not exist")
        return FileNotFoundError(f"{path} does not exist")
    except ValueError as error:  # a NUL in the path
        return UnfitFile(f"{str(path)!r} is not a path ({error})")
    except OSError as error:
        if error.errno == errno.ELOOP:
            return UnfitFile(f"{path} is a link that leads to itself")
        return error
    return _problem(path, status, limit)


def _problem(path: Path | str, status: os.stat_result, limit: int | None) -> OSError | None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for test, words in _KINDS if test(status.st_mode)), "is not a regular file")
        return UnfitFile(f"{path} {kind}, not a regular file")
    if limit is not None and status.st_size > limit:
        return UnfitFile(f"{path} has {_size(status.st_size)}, more than the {_size(limit)} allowed for such a file")
    return None


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
