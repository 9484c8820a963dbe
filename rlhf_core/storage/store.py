"""Objects under keys, in a local folder or in a bucket: the only door to what outlives a process.

A key is a relative POSIX path. Data is written whole and then becomes visible at its key; what must be
decided once for all (a manifest, the number of an attempt) goes through `put_if_absent`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rlhf_core.config import PipelineConfig
from rlhf_core.config.redact import has_credentials, scrubbed
from rlhf_core.errors import ConfigError, InputError, StoreError, StoreUnavailable

TEMPORARY = ".tmp-"
"""File names that begin so are unfinished writes: never listed, never allowed in a key."""

SMALL_BYTES = 64 * 2**20
"""Size of the largest object that is read into memory. Manifests are much smaller."""

_CHECK_PATIENCE = 2.0

_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\?\ud800-\udfff]")


def open_store(config: PipelineConfig) -> Store:
    """Return the store of `config`. Its backend is opened at the first use."""
    return Store(config.store_url, config.store.endpoint, config.store.retry_seconds)


class Backend(Protocol):
    """What `Store` needs of a place. Keys and prefixes are checked before they come here."""

    def put_file(self, source: Path, key: str, *, link: bool) -> None: ...
    def get_file(self, key: str, target: Path, size: int | None = None) -> None: ...
    def put_bytes(self, key: str, data: bytes) -> None: ...
    def put_if_absent(self, key: str, data: bytes) -> bool: ...
    def read_bytes(self, key: str) -> bytes | None: ...
    def sizes(self, prefix: str) -> Mapping[str, int]: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def delete_prefix(self, prefix: str) -> None: ...
    def forget_uploads(self, prefix: str) -> None: ...
    def uri(self, key: str) -> str: ...
    def local_path(self, key: str) -> Path | None: ...


def check_key(key: str) -> str:
    """`key` itself, if it stays inside the store on every backend; else InputError."""
    parts = key.split("/")
    inside = key and len(key.encode(errors="replace")) <= 900 and not _UNSAFE.search(key)
    if not inside or any(not part or part in (".", "..") or part.startswith(TEMPORARY) for part in parts):
        raise InputError(
            f"The storage key {key[:80]!r} must be a relative path of at most 900 bytes without empty parts,"
            f" '.', '..', control characters, '?', backslashes or names starting with {TEMPORARY!r}; rename"
            " the file."
        )
    if any(len(part.encode()) > 255 for part in parts):
        raise InputError(f"A name in the storage key {key[:80]!r} is longer than 255 bytes; shorten it.")
    return key


class Store:
    """A folder (`path` or `file:///path`) or `s3://bucket/prefix`. Every method raises StoreError if the
    place fails.
    """

    def __init__(self, url: str | Path, endpoint: str | None = None, patience: float = 60.0) -> None:
        """`endpoint`: address of an S3-compatible server; None: AWS, or what AWS_ENDPOINT_URL_S3 says.
        `patience`: seconds for which a bucket's passing failures are tried again.

        Raises ConfigError for an address that cannot be a store; touches nothing yet.
        """
        self.url = str(url)
        self._endpoint = endpoint
        self._backend = _open(self.url, endpoint, patience)

    @property
    def is_local(self) -> bool:
        """Whether its files lie on this machine's disks."""
        return self.local_path("any") is not None

    def put_file(self, local: Path, key: str, *, link: bool = False) -> None:
        """Copy a finished local file to `key`, replacing what was there. `link` may share the file's disk
        blocks: only for files that nobody will write to any more.
        """
        self._backend.put_file(local, check_key(key), link=link)

    def get_file(self, key: str, local: Path, size: int | None = None) -> None:
        """Copy an object to a local file atomically. Raises FileNotFoundError if there is no such object.

        `size` is the expected number of bytes. If a bucket sends more, the download stops.
        """
        self._backend.get_file(check_key(key), local, size)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Write a small object, replacing what was there."""
        self._backend.put_bytes(check_key(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; False if it exists already, whoever made it. Of racing callers with different
        data one wins.
        """
        return self._backend.put_if_absent(check_key(key), data)

    def read_bytes(self, key: str) -> bytes | None:
        """A small object's content, None if it does not exist."""
        return self._backend.read_bytes(check_key(key))

    def exists(self, key: str) -> bool:
        """Whether there is an object at `key`."""
        return key in self._backend.sizes(check_key(key))

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Bytes of each object at or below the folder `prefix`, by full key."""
        return self._backend.sizes(check_key(prefix))

    def list(self, prefix: str) -> list[str]:
        """Sorted keys at or below the folder `prefix`."""
        return sorted(self.sizes(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are passed over."""
        self._backend.delete([check_key(key) for key in keys])

    def delete_prefix(self, prefix: str) -> None:
        """Delete everything at or below the folder `prefix`, unfinished writes as well."""
        self._backend.delete_prefix(check_key(prefix))

    def forget_uploads(self, prefix: str) -> None:
        """Drop the parts of uploads below the folder `prefix` that were killed: a bucket keeps them, and no
        listing shows them. Only for who alone writes there. A bucket that does not allow it is left as it is,
        and that is said.
        """
        self._backend.forget_uploads(check_key(prefix))

    def uri(self, key: str) -> str:
        """Full address for people and for lineage: an absolute path or `s3://...`."""
        return self._backend.uri(check_key(key))

    def local_path(self, key: str) -> Path | None:
        """Where `key` lies on this machine's disk; None if the store is remote."""
        return self._backend.local_path(check_key(key))

    def check(self, patience: float = _CHECK_PATIENCE) -> None:
        """Write, list, read and delete a small object. Raises ConfigError if that does not work,
        StoreUnavailable if that may pass and has not within `patience` seconds.
        """
        key, data = f"probe-{uuid.uuid4().hex}", b"probe"
        place = _open(self.url, self._endpoint, patience)
        try:
            place.put_bytes(key, data)
            whole = place.sizes(key) == {key: len(data)} and place.read_bytes(key) == data
            place.delete([key])
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
        if not whole:
            raise ConfigError(
                f"store.url={self.url!r} cannot be used: it did not give back what was written to it."
            )


def _open(url: str, endpoint: str | None, patience: float) -> Backend:
    for name, value in (("store.url", url), ("store.endpoint", endpoint or "")):
        if has_credentials(value):
            raise ConfigError(
                f"{name} must not contain credentials (value hidden); give them as AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile or a role."
            )
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme == "s3":
        return _open_s3(url, endpoint, patience)
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
    from rlhf_core.storage.local import LocalFiles

    return LocalFiles(Path(url).expanduser().absolute())


def _open_s3(url: str, endpoint: str | None, patience: float) -> Backend:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not _BUCKET.match(bucket):
        raise ConfigError(
            f"store.url={url!r} must be s3://bucket/prefix; {bucket!r} is not a bucket name (3 to 63 of a-z,"
            " 0-9, '.', '-')."
        )
    if prefix := prefix.strip("/"):
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
    from rlhf_core.storage.s3 import S3Objects

    return S3Objects(bucket, prefix, endpoint or os.environ.get("AWS_ENDPOINT_URL_S3"), patience)
