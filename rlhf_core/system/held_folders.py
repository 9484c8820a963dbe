"""Scratch folders that a process holds, and that another one deletes after the holder's end.

A holder has a shared lock (`flock`) of the file `{folder}.lock`, which the kernel releases when the process
and its forked children have ended, however they end. The file contains the hostname of the holder: other
hosts delete nothing, because the locks of a network file system can be local to a host.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_SUFFIX = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`, which need not exist, in this context. Raises OSError if the lock cannot be created.

    Several processes can hold one folder.
    """
    lock = folder.with_name(folder.name + _SUFFIX)
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
            except OSError as error:
                # `delete_abandoned` cannot lock the file either, and leaves the folder.
                log.info("%s cannot be locked: %s", lock, error)
            if not _is_current(file, lock):
                continue  # `delete_abandoned` has deleted it in the meantime
            host = socket.gethostname().encode()
            os.pwrite(file, host, 0)
            os.ftruncate(file, len(host))
            yield
            return
        finally:
            os.close(file)


def delete_abandoned(parent: Path, names: str = "*") -> None:
    """Delete the folders below `parent` that processes of this host held, none of which is alive.

    `names` is a pattern for their names.
    """
    for lock in sorted(parent.glob(f"{names}{_SUFFIX}")):
        # OSError: a process holds it, or has deleted it.
        with suppress(OSError), lock.open("rb+") as file:  # on NFS, LOCK_EX needs a writable one
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read() == socket.gethostname().encode() and _is_current(file.fileno(), lock):
                folder = lock.with_name(lock.name.removesuffix(_SUFFIX))
                if folder.exists():
                    log.info("%s is deleted: the processes that used it have ended", folder)
                    shutil.rmtree(folder, ignore_errors=True)
                lock.unlink()


def _is_current(file: int, path: Path) -> bool:
    """Return whether `path` is still the open `file`."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
