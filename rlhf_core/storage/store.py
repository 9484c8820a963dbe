"""Objects under keys, in a local folder or in a bucket: the only access to data that outlives a process.

A key is a relative POSIX path. An object becomes visible at its key when it is complete. Decisions that must
be made only once (a manifest, the number of an attempt) use `put_if_absent`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import has_credentials, scrubbed
from rlhf_core.errors import ConfigError, InputError, StoreError, StoreUnavailable
from rlhf_core.storage.backend import Backend
from rlhf_core.storage.local import LocalFiles
from rlhf_core.storage.s3 import S3Objects
from rlhf_core.system.files import TEMPORARY

_CHECK_SECONDS = 2.0
_MAX_KEY_BYTES, _MAX_NAME_BYTES = 900, 255

_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\?\ud800-\udfff]")


def check_key(key: str) -> str:
    """Return `key`. Raises InputError if it could leave the store, or be refused, on some backend."""
    names = key.split("/")
    if (
        not key
        or len(key.encode(errors="replace")) > _MAX_KEY_BYTES
        or _UNSAFE.search(key)
        or any(not name or name in (".", "..") or name.startswith(TEMPORARY) for name in names)
    ):
        raise InputError(
            f"The storage key {key[:80]!r} must be a relative path of at most {_MAX_KEY_BYTES} bytes without"
            f" empty parts, '.', '..', control characters, '?', backslashes or names starting with"
            f" {TEMPORARY!r}; rename the file."
        )
    if any(len(name.encode()) > _MAX_NAME_BYTES for name in names):
        raise InputError(
            f"A name in the storage key {key[:80]!r} is longer than {_MAX_NAME_BYTES} bytes; shorten it."
        )
    return key


class Store:
    """A folder (`path` or `file:///path`) or `s3://bucket/prefix`.

    Every method raises StoreError if the storage fails.
    """

    def __init__(self, url: str | Path, endpoint: str | None = None, retry_seconds: float = 60.0) -> None:
        """Parse the address; nothing is read or written yet. Raises ConfigError for an unusable address.

        Args:
            url: address of the store.
            endpoint: address of an S3-compatible server; None for AWS_ENDPOINT_URL_S3 or AWS.
            retry_seconds: how long temporary failures of a bucket are retried.
        """
        self.url = str(url)
        self._endpoint = endpoint
        self._backend = _open(self.url, endpoint, retry_seconds)

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine's disks."""
        return self.local_path("any") is not None

    def put_file(self, local: Path, key: str, *, link: bool = False) -> None:
        """Copy a complete local file to `key`, replacing an existing object.

        With `link`, both may share their disk blocks: only for files that are never written to again.
        """
        self._backend.put_file(local, check_key(key), link=link)

    def get_file(self, key: str, local: Path, size: int | None = None) -> None:
        """Copy an object to a local file atomically. Raises FileNotFoundError if it does not exist.

        `size` is the expected number of bytes; a download of more is stopped.
        """
        self._backend.get_file(check_key(key), local, size)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Write a small object, replacing an existing one."""
        self._backend.put_bytes(check_key(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; return False if it exists already.

        Exactly one of several concurrent callers with different data succeeds.
        """
        return self._backend.put_if_absent(check_key(key), data)

    def read_bytes(self, key: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        return self._backend.read_bytes(check_key(key))

    def exists(self, key: str) -> bool:
        """Return whether there is an object at `key`."""
        return key in self._backend.sizes(check_key(key))

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the bytes of each object at or below the folder `prefix`, by full key."""
        return self._backend.sizes(check_key(prefix))

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys at or below the folder `prefix`."""
        return sorted(self.sizes(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Keys without an object are ignored."""
        self._backend.delete([check_key(key) for key in keys])

    def delete_prefix(self, prefix: str) -> None:
        """Delete everything at or below the folder `prefix`, unfinished writes included."""
        self._backend.delete_prefix(check_key(prefix))

    def abort_multipart_uploads(self, prefix: str) -> None:
        """Delete the parts of interrupted uploads below the folder `prefix`.

        A bucket keeps and bills them, but does not list them. Only for the sole writer at `prefix`. If the
        bucket does not allow it, the parts stay, which is logged.
        """
        self._backend.abort_multipart_uploads(check_key(prefix))

    def uri(self, key: str) -> str:
        """Return the full address for users and lineage: an absolute path or `s3://...`."""
        return self._backend.uri(check_key(key))

    def local_path(self, key: str) -> Path | None:
        """Return the path of `key` on this machine's disk; None if the store is remote."""
        return self._backend.local_path(check_key(key))

    def check(self, retry_seconds: float = _CHECK_SECONDS) -> None:
        """Write, list, read and delete a small object.

        Raises StoreUnavailable for a failure that may be temporary and lasts `retry_seconds`, ConfigError for
        any other.
        """
        key, data = f"probe-{uuid.uuid4().hex}", b"probe"
        backend = _open(self.url, self._endpoint, retry_seconds)
        try:
            backend.put_bytes(key, data)
            intact = backend.sizes(key) == {key: len(data)} and backend.read_bytes(key) == data
            backend.delete([key])
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"store.url={self.url!r} cannot be used now: {error.message}; correct its address, or wait"
                " until it answers"
            ) from error
        except StoreError as error:
            raise ConfigError(f"store.url={self.url!r} cannot be used: {error.message}") from error
        except FileNotFoundError as error:
            raise ConfigError(
                f"store.url={self.url!r} cannot be used: no folder can be made there."
            ) from error
        except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            # Unexpected exceptions of a library. The same command would raise them again.
            raise ConfigError(
                f"store.url={self.url!r} cannot be used: {type(error).__name__}:"
                f" {scrubbed(str(error))[:200]}; correct store.url or store.endpoint"
            ) from error
        if not intact:
            raise ConfigError(
                f"store.url={self.url!r} cannot be used: it did not give back what was written to it."
            )


def open_store(config: PipelineConfig) -> Store:
    """Return the store of a configuration; nothing is read or written yet."""
    return Store(config.store_url, config.store.endpoint, config.store.retry_seconds)


def _open(url: str, endpoint: str | None, retry_seconds: float) -> Backend:
    for name, value in (("store.url", url), ("store.endpoint", endpoint or "")):
        if has_credentials(value):
            raise ConfigError(
                f"{name} must not contain credentials (value hidden); give them as AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile or a role."
            )
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme == "s3":
        return _open_s3(url, endpoint, retry_seconds)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"store.url={url!r} names the host {parts.netloc!r}; write file:///path or a plain path."
            )
        url = parts.path
    elif scheme:
        raise ConfigError(
            f"store.url={url!r} must be a folder or s3://bucket/prefix; got the scheme {scheme!r}."
        )
    if not url.strip() or "\0" in url:
        raise ConfigError(f"store.url={url!r} must name a folder or s3://bucket/prefix.")
    return LocalFiles(Path(url).expanduser().absolute())


def _open_s3(url: str, endpoint: str | None, retry_seconds: float) -> Backend:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not _BUCKET.match(bucket):
        raise ConfigError(
            f"store.url={url!r} must be s3://bucket/prefix; {bucket!r} is not a bucket name (3 to 63 of a-z,"
            " 0-9, '.', '-')."
        )
    prefix = prefix.strip("/")
    if prefix:
        try:
            check_key(prefix)
        except InputError as error:
            raise ConfigError(
                f"store.url={url!r} has a prefix that cannot be used: {error.message}"
            ) from error
    if endpoint is not None and not re.match(r"^https?://[^/]+", endpoint):
        raise ConfigError(
            f"store.endpoint={endpoint!r} must be the address of a server; write it like"
            " http://127.0.0.1:9000."
        )
    return S3Objects(bucket, prefix, endpoint or os.environ.get("AWS_ENDPOINT_URL_S3"), retry_seconds)
