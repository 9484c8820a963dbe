"""A store in a local folder: every file appears whole, by a rename in its own folder after an fsync."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlhf_core.errors import StoreError
from rlhf_core.storage.store import SMALL_BYTES, TEMPORARY
from rlhf_core.system.files import UnfitFile, read_bounded

log = logging.getLogger(__name__)

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.EACCES, errno.ENOSYS)


class LocalFiles:
    """`Backend` over `root`; see `Store` for what the methods promise."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put_file(self, source: Path, key: str, *, link: bool) -> None:
        self._set_folder_aside(key)
        with self._errors("write", key), _writing(self._root / key) as temporary:
            if not (link and _linked(source, temporary)):
                shutil.copyfile(source, temporary)

    def get_file(self, key: str, target: Path, size: int | None = None) -> None:
        with self._errors("read", key), _writing(target) as temporary:
            shutil.copyfile(self._root / key, temporary)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._set_folder_aside(key)
        with self._errors("write", key), _writing(self._root / key) as temporary:
            temporary.write_bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        target = self._root / key
        self._set_folder_aside(key)
        temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        with self._errors("create", key):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                _fsync(temporary)
                return _created(temporary, target, data)
            finally:
                temporary.unlink(missing_ok=True)
                _fsync(target.parent)

    def read_bytes(self, key: str) -> bytes | None:
        path = self._root / key
        with self._errors("read", key):
            try:
                return read_bounded(path, SMALL_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except UnfitFile:
                if path.is_file():
                    raise
                return b""  # a folder, pipe or device instead of an object counts as damaged

    def sizes(self, prefix: str) -> Mapping[str, int]:
        start, found = self._root / prefix, {}
        with self._errors("list", prefix):
            if start.is_file():
                return {prefix: start.stat().st_size}
            for folder, _, names in os.walk(start):
                for name in names:
                    path = Path(folder, name)
                    # A file may vanish while we walk: another process prunes.
                    with contextlib.suppress(FileNotFoundError):
                        if not name.startswith(TEMPORARY):
                            found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._set_folder_aside(key)
            with self._errors("delete", key):
                (self._root / key).unlink(missing_ok=True)

    def forget_uploads(self, prefix: str) -> None:
        """There are none: a file is written beside its place, and moved."""

    def delete_prefix(self, prefix: str) -> None:
        path = self._root / prefix
        with self._errors("delete", prefix), contextlib.suppress(FileNotFoundError):
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)

    def uri(self, key: str) -> str:
        return str(self._root / key)

    def local_path(self, key: str) -> Path | None:
        return self._root / key

    def _set_folder_aside(self, key: str) -> None:
        """Rename a folder at the path of an object that will be written or deleted. The store never creates
        such folders.
        """
        path = self._root / key
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f"aside-{uuid.uuid4().hex[:8]}-{path.name}")
            with self._errors("rename", key):
                path.rename(aside)
            log.error("%s is a folder and not an object of the store; it was renamed to %s.", path, aside)

    @contextlib.contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StoreError(f"The store could not {action} {self._root / key}: {reason}{hint}.") from error


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target`; afterwards it is on disk and renamed to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
        _fsync(target.parent)
    finally:
        # Also after success: renaming a file onto a hard link of itself leaves both names.
        temporary.unlink(missing_ok=True)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def _created(temporary: Path, target: Path, data: bytes) -> bool:
    """`target` now has `data` by this call. A link is atomic; without links, exclusive creation is the next
    best.
    """
    try:
        if _linked(temporary, target):
            return True
        descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and container file systems refuse fsync on folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
