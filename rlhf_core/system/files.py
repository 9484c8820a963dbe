"""Reading untrusted files safely, replacing files atomically, folders that processes hold, and the files of
`deployments/`.

Only regular files of limited size are opened: opening a FIFO can wait for a writer forever, and reading a
device such as /dev/zero never ends. Both can have the name of a configuration, a data file or a model file.

A file that other processes read, or that a kill must not damage, is written under a temporary name in its own
folder and then renamed: a reader sees the old content or the new one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished writes. A kill can leave such files: readers skip them."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of the text file that Git LFS puts in place of a file that was not downloaded."""

_BLOCK_BYTES = 1 << 20
_JSON_LIMIT = 16 << 20
"""Maximum size of a JSON file of the pipeline in bytes. They have some KiB."""

# EMLINK: the file has its maximum number of links. EPERM is also Linux's answer for a file of another user
# that this one cannot write (fs.protected_hardlinks).
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS)
"""Errors of file systems that cannot link two paths."""

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
    content = bytearray()
    with open_regular(path, limit) as stream:
        # In blocks, because `read(n)` allocates n bytes, and a limit can be hundreds of MiB.
        while block := stream.read(_BLOCK_BYTES):
            content += block
            if len(content) > limit:  # the file grew while it was read
                raise UnfitFile(f"{path} has more than {_size(limit)}, the limit for such a file")
    return bytes(content)


def read_end(path: Path, size: int) -> str:
    """Return the text in the last `size` bytes of a log; empty if the file cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
    return ""


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


def exists(path: Path | str) -> bool:
    """Return whether there is a file or folder at `path`. False for a text that cannot be a path."""
    try:
        # In Python 3.11 it raises for a name that is too long and in a folder that cannot be searched. Texts
        # of a configuration can be both.
        return Path(path).exists()
    except (OSError, ValueError, RuntimeError):
        return False


def existing_parent(folder: Path) -> Path:
    """Return `folder` as an absolute path if it exists, otherwise the first of its parents that does."""
    path = folder.absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path


def no_folder(folder: Path) -> str | None:
    """Return why `folder` cannot be a folder, or None. Rights are not checked."""
    if "\0" in str(folder):
        return "a path has no NUL character"
    existing = existing_parent(folder)
    return None if existing.is_dir() else f"{existing} is a file"


def unwritable(folder: Path) -> str | None:
    """Return the reason for which `folder` cannot be created or written to, or None."""
    if problem := no_folder(folder):
        return problem
    existing = existing_parent(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable for this user"
    return None


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


@contextmanager
def replacing(path: Path, *, sync: bool = False, create_folder: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; afterwards it replaces `path` atomically.

    The folder is created if necessary, unless `create_folder` is false.

    With `sync`, the content is on the disk before it replaces the old one, and so is the new name. An
    exception leaves `path` unchanged.
    """
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_name(path) as temporary:
        yield temporary
        if sync:
            fsync(temporary)
        os.replace(temporary, path)
        if sync:
            fsync(path.parent)


def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace `path` atomically by a file with `content`; with `private` only this user can read it."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        _write_new(temporary, data, private=private)


def create_once(path: Path, data: bytes, *, sync: bool = False, private: bool = False) -> bool:
    """Create `path` with `data`, and its folder if necessary; return False if `path` exists.

    Exactly one of several concurrent callers succeeds. The file appears with all its data, except on a file
    system without hard links, where a kill can leave it incomplete.

    Args:
        path: The file.
        data: Its content.
        sync: Whether the content and the name are on the disk when this function returns.
        private: Whether only this user can read the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_name(path) as temporary:
        try:
            _write_new(temporary, data, sync=sync, private=private)
            if not linked(temporary, path):
                _write_new(path, data, sync=sync, private=private)
            return True
        except FileExistsError:
            return False
        finally:
            # Also the name that another process gave: it is not on the disk before its folder is.
            if sync:
                fsync(path.parent)


def linked(source: Path, target: Path) -> bool:
    """Create `target` as a hard link to `source`; return False if the file system cannot.

    Raises FileExistsError if `target` exists.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


@contextmanager
def _temporary_name(path: Path) -> Iterator[Path]:
    """Yield an unused name next to `path`, and afterwards remove the file that has it."""
    # Not from the pid: hosts and containers that share the folder can have processes with the same one.
    temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        # Also after it was renamed: renaming a file onto a hard link of itself leaves both names.
        temporary.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes, *, sync: bool = False, private: bool = False) -> None:
    """Create `path` with `data`. Raises FileExistsError if it exists; after another OSError it does not."""
    # The mode is set at the creation: a file that is restricted later can be opened before.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if sync:
            fsync(path)
    except OSError:
        # On a full disk an incomplete file would stay, and `create_once` would take it for that of another
        # process from then on.
        path.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Replace `path` atomically by a JSON file; without `indent`, it has one line."""
    write_atomic(path, json.dumps(content, indent=indent) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `path` atomically by a file with one line of JSON for each row."""
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of `path`; None if there is no such regular file, or it is not a JSON object or too
    large.
    """
    try:
        content = json.loads(read_bounded(path, _JSON_LIMIT).decode())
    except (OSError, ValueError, RecursionError):  # RecursionError: thousands of nested lists
        return None
    return content if isinstance(content, dict) else None


def json_sha256(content: Any) -> str:
    """Return the sha256 of JSON content, independent of formatting and of the order of keys, 64 hex digits.

    Stage keys and the checksums of manifests are made with it: another form of the text would change all of
    them. Raises ValueError for NaN and infinity.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fsync(path: Path) -> None:
    """Write a file's content, or a folder's entries, to the disk."""
    # Read-only, because a folder cannot be opened for writing. Linux syncs all that was written to a file
    # through such a descriptor, too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and container file systems refuse fsync on folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# -- scratch folders that a process holds, and that another one deletes after the holder's end --
#
# A holder has a shared lock (`flock`) of the file `{folder}.lock`, which the kernel releases when the process
# and its forked children have ended, however they end. The file contains the hostname of the holder: other
# hosts delete nothing, because the locks of a network file system can be local to a host.

_SUFFIX = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`, which need not exist, in this context. Raises OSError if the lock cannot be created.

    Several processes can hold one folder.
    """
    # Beside the folder and not in it: `delete_abandoned` deletes the folder while it holds the lock.
    lock = folder.with_name(folder.name + _SUFFIX)
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                # It can wait, but only for a deletion that is under way.
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
                # Last: after a kill in between, the lock is found again, and with it what is left of the
                # folder.
                lock.unlink()


def _is_current(file: int, path: Path) -> bool:
    """Return whether `path` is still the open `file`."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


# -- files of `deployments/`, which is installed next to `rlhf_core` --

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
CONFIGS = {file.stem: file for file in sorted((DEPLOYMENTS / "configs").glob("*.yaml"))}
"""The configurations, by their names."""


def shipped(path: str | Path) -> Path:
    """Return `path`, or if there is no such file below the working folder, the installed one of this name.

    >>> shipped("deployments/configs/demo.yaml").is_file()
    True
    """
    given = Path(path)
    if exists(given) or given.parts[:1] != (DEPLOYMENTS.name,):
        return given
    return DEPLOYMENTS.joinpath(*given.parts[1:])
