"""The interface between `Store` and the kinds of storage, and storage in a local folder."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlhf_core.errors import StoreError
from rlhf_core.system.files import TEMPORARY, create_once, linked, read_bounded, replacing

SMALL_BYTES = 64 * 2**20
"""Size of the largest object that is read into memory. Manifests are much smaller."""


class ObjectStatus(NamedTuple):
    """What the storage says about one object."""

    size: int
    """Bytes."""
    modified: float
    """When it was written by the clock of the storage, in seconds since 1970."""


class Backend(Protocol):
    """Storage for objects under keys.

    `Store` documents the methods, and checks keys and prefixes before each call.
    """

    def put_file(self, source: Path, key: str, *, link: bool, sha256: str | None = None) -> None: ...
    def get_file(self, key: str, target: Path, size: int | None = None) -> None: ...
    def put_bytes(self, key: str, data: bytes) -> None: ...
    def put_if_absent(self, key: str, data: bytes) -> bool: ...
    def read_bytes(self, key: str) -> bytes | None: ...
    def status(self, key: str) -> ObjectStatus | None: ...
    def sizes(self, prefix: str) -> Mapping[str, int]: ...
    def folders(self, prefix: str) -> Sequence[str]: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def delete_prefix(self, prefix: str) -> None: ...
    def abort_multipart_uploads(self, prefix: str) -> None: ...
    def uri(self, key: str) -> str: ...
    def local_path(self, key: str) -> Path | None: ...


class LocalFiles:
    """`Backend` in the folder `root`.

    Each file appears complete: it is written under a temporary name, synced and renamed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def put_file(self, source: Path, key: str, *, link: bool, sha256: str | None = None) -> None:
        # A file that is only linked is synced as well: the manifest after it promises its content, also after
        # a power cut.
        with self._errors("write", key), replacing(self._root / key, sync=True) as temporary:
            if not (link and linked(source, temporary)):
                shutil.copyfile(source, temporary)

    def get_file(self, key: str, target: Path, size: int | None = None) -> None:
        with self._errors("read", key), replacing(target, sync=True) as temporary:
            shutil.copyfile(self._root / key, temporary)

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._errors("write", key), replacing(self._root / key, sync=True) as temporary:
            temporary.write_bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._errors("create", key):
            return create_once(self._root / key, data, sync=True)

    def read_bytes(self, key: str) -> bytes | None:
        with self._errors("read", key):
            try:
                return read_bounded(self._root / key, SMALL_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                # NotADirectoryError: a parent of the key is a file, so there is no object below it.
                return None

    def status(self, key: str) -> ObjectStatus | None:
        with self._errors("read", key):
            try:
                status = (self._root / key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        # A bucket has no folders: the beginning of other keys is no object there either.
        if stat.S_ISDIR(status.st_mode):
            return None
        return ObjectStatus(status.st_size, status.st_mtime)

    def sizes(self, prefix: str) -> Mapping[str, int]:
        start = self._root / prefix
        sizes: dict[str, int] = {}
        with self._errors("list", prefix):
            # As in a bucket, where the object at the prefix itself is listed, too.
            if start.is_file():
                return {prefix: start.stat().st_size}
            for folder, _, names in os.walk(start, onerror=_raise_unless_missing):
                for name in names:
                    if name.startswith(TEMPORARY):
                        continue
                    path = Path(folder, name)
                    # Another process may delete the file during the walk.
                    with contextlib.suppress(FileNotFoundError):
                        sizes[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return sizes

    def folders(self, prefix: str) -> Sequence[str]:
        with self._errors("list", prefix):
            try:
                return [path.name for path in (self._root / prefix).iterdir() if path.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._errors("delete", key):
                (self._root / key).unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        path = self._root / prefix
        with self._errors("delete", prefix):
            # As in a bucket, where a prefix can be a key itself.
            if path.is_file():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, onerror=_unless_it_is_gone)

    def abort_multipart_uploads(self, prefix: str) -> None:
        """Do nothing: a local file is never uploaded in parts."""

    def uri(self, key: str) -> str:
        return str(self._root / key)

    def local_path(self, key: str) -> Path | None:
        return self._root / key

    @contextlib.contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            # For callers this is the answer that there is no such object, and no failure of the store.
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StoreError(f"The store could not {action} {self._root / key}: {reason}{hint}.") from error


def _raise_unless_missing(error: OSError) -> None:
    """Raise an error that `os.walk` would otherwise ignore, such as ESTALE, with all files of the folder."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _unless_it_is_gone(function: object, path: str, failure: Any) -> None:
    """Raise the error of `shutil.rmtree`, unless another process has deleted the file."""
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
