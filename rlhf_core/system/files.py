"""Safe reading of untrusted files: only regular files of limited size are opened.

Opening a FIFO can wait for a writer forever, and reading a device such as /dev/zero never ends. Both can have
the name of a configuration, a data file or a model file.
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
    """The path is not a regular file, or the file is too large. The message starts with the path and
    describes the problem.
    """


def open_regular(path: Path | str, limit: int | None = None) -> BinaryIO:
    """Open `path` for reading bytes. This function never waits.

    Raises FileNotFoundError if the path or the target of a link does not exist, UnfitFile if it is not a
    regular file or has more than `limit` bytes, and OSError for other errors such as missing permissions.
    """
    problem = unfit(path, limit)
    if problem is not None:
        raise problem
    # O_NONBLOCK, because the file may have been replaced by a FIFO after the check.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    problem = _problem(path, os.fstat(descriptor), limit)
    if problem is not None:
        os.close(descriptor)
        raise problem
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path | str, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises the same exceptions as
    `open_regular`.
    """
    with open_regular(path, limit) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:  # the file grew while it was read
        raise UnfitFile(f"{path} has more than {_size(limit)}, the limit for such a file")
    return content


def unfit(path: Path | str, limit: int | None = None) -> OSError | None:
    """Return the reason for which `open_regular` would refuse `path`, or None. The file is not opened."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            return FileNotFoundError(f"{path} is a link to {os.readlink(path)[:200]}, which does not exist")
        return FileNotFoundError(f"{path} does not exist")
    except ValueError as error:  # the path contains a NUL character
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
        return UnfitFile(
            f"{path} has {_size(status.st_size)}, more than the {_size(limit)} allowed for such a file"
        )
    return None


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
