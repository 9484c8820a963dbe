"""Objects under keys, in a local folder or in a bucket: the only access to data that outlives a process.

A key is a relative POSIX path. An object becomes visible at its key when it is complete. Decisions that must
be made only once (a manifest, the number of an attempt) use `put_if_absent`.

A listing (`sizes`, `list`, `folders`) proves that an object exists, and not that one is missing: some servers
list late. An object is missing if `size` says so, which asks for it by its key.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlhf_core.config.base import server_problem
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import credential_problem, scrubbed, shown
from rlhf_core.errors import ConfigError, Finding, InputError, StoreError, StoreUnavailable
from rlhf_core.storage.backend import Backend, LocalFiles
from rlhf_core.storage.s3 import S3_LIMITS, S3Limits, S3Objects, s3_endpoint
from rlhf_core.system.files import TEMPORARY, unwritable

_CHECK_SECONDS = 2.0
"""Short, because a person waits for the check before a run."""
# S3 allows 1024 bytes for a key together with the prefix of the store, file systems 255 for one name.
_MAX_KEY_BYTES, _MAX_NAME_BYTES = 900, 255

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# `?`, because s3fs takes `?versionId=` out of a path. Surrogates, because UTF-8 cannot encode them.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\?\ud800-\udfff]")


def check_key(key: str) -> str:
    """Return `key`. Raises InputError if it could leave the store, or be refused, on some backend."""
    names = key.split("/")
    if (
        not key
        # `replace`, because the surrogates that the next line refuses would raise an error here.
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

    def __init__(
        self,
        url: str | Path,
        endpoint: str | None = None,
        retry_seconds: float = 60.0,
        s3_limits: S3Limits = S3_LIMITS,
    ) -> None:
        """Parse the address; nothing is read or written yet. Raises ConfigError for an unusable address.

        Args:
            url: Address of the store.
            endpoint: Address of an S3-compatible server; None for AWS_ENDPOINT_URL_S3 or AWS.
            retry_seconds: How long temporary failures of a bucket are retried.
            s3_limits: Limits of requests to a bucket.
        """
        self.url = str(url)
        self._endpoint = endpoint
        self._s3_limits = s3_limits
        self._backend = _open(self.url, endpoint, retry_seconds, s3_limits)

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine's disks."""
        return self.local_path("any") is not None

    def put_file(self, local: Path, key: str, *, link: bool = False, sha256: str | None = None) -> None:
        """Copy a complete local file to `key`, replacing an existing object.

        With `link`, both may share their disk blocks: only for files that are never written to again. With
        `sha256`, a bucket raises CorruptArtifact if what was sent differs.
        """
        self._backend.put_file(local, check_key(key), link=link, sha256=sha256)

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

    def size(self, key: str) -> int | None:
        """Return the bytes of the object at `key`; None if it does not exist."""
        status = self._backend.status(check_key(key))
        return None if status is None else status.size

    def exists(self, key: str) -> bool:
        """Return whether there is an object at `key`."""
        return self.size(key) is not None

    def time(self) -> float:
        """Return the time of the storage's clock, in seconds since 1970: that of an object written now."""
        key = f"probe-{uuid.uuid4().hex}"
        self.put_bytes(key, b"probe")
        status = self._backend.status(key)
        self.delete([key])
        if status is None:
            raise StoreError(f"The store did not keep {self.uri(key)}.")
        return status.modified

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the bytes of each object at or below the folder `prefix`, by full key."""
        return self._backend.sizes(check_key(prefix))

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys at or below the folder `prefix`."""
        return sorted(self.sizes(prefix))

    def folders(self, prefix: str) -> Sequence[str]:
        """Return the names of the folders directly below `prefix`, without listing their objects."""
        return self._backend.folders(check_key(prefix))

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
        check_backend(_open(self.url, self._endpoint, retry_seconds, self._s3_limits), self.url)


def check_backend(backend: Backend, url: str) -> None:
    """Write, list, read and delete a small object. `url` is for messages; the exceptions are those of
    `Store.check`.
    """
    key, data = f"probe-{uuid.uuid4().hex}", b"probe"
    try:
        backend.put_bytes(key, data)
        backend.sizes(key)  # the right to list
        status = backend.status(key)
        intact = status is not None and status.size == len(data) and backend.read_bytes(key) == data
        backend.delete([key])
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"store.url={url!r} cannot be used now: {error.message}; correct its address, or wait"
            " until it answers"
        ) from error
    except StoreError as error:
        raise ConfigError(f"store.url={url!r} cannot be used: {error.message}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"store.url={url!r} cannot be used: no folder can be made there.") from error
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        # Unexpected exceptions of a library. The same command would raise them again.
        raise ConfigError(
            f"store.url={url!r} cannot be used: {type(error).__name__}:"
            f" {scrubbed(str(error))[:200]}; correct store.url or store.endpoint"
        ) from error
    if not intact:
        raise ConfigError(f"store.url={url!r} cannot be used: it did not give back what was written to it.")


def open_store(config: PipelineConfig) -> Store:
    """Return the store of a configuration; nothing is read or written yet."""
    return Store(config.store_url, config.store.endpoint, config.store.retry_seconds)


def _open(url: str, endpoint: str | None, retry_seconds: float, s3_limits: S3Limits) -> Backend:
    if problem := store_url_problem(url):
        raise ConfigError(f"store.url: {problem}")
    if endpoint is not None and (problem := endpoint_problem(endpoint)):
        raise ConfigError(f"store.endpoint: {problem}")
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        return S3Objects(bucket, prefix.strip("/"), s3_endpoint(endpoint), retry_seconds, s3_limits)
    # Absolute from here on, because ranks, agents and servers have other working folders.
    return LocalFiles(Path(url.removeprefix("file://")).expanduser().absolute())


# -- addresses --

_AWS_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or a role"


def store_url_problem(url: str) -> str | None:
    """Return the reason for which `url` cannot be the address of a store, with a fix, or None."""
    if problem := credential_problem(url, _AWS_CREDENTIALS):
        return problem
    if not url.strip() or "\0" in url:
        return f"must name a folder or s3://bucket/prefix; got {shown(url)}; name one"
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    if scheme == "s3":
        return _s3_problem(url, rest)
    if scheme != "file":
        return f"must be a folder, file:// or s3://bucket/prefix; got scheme {scheme[:20]}://; use s3://"
    if not rest.startswith("/"):
        return f"must be file:///path, without a host; got {shown(url)}; write that, or a plain path"
    return None


def _s3_problem(url: str, rest: str) -> str | None:
    bucket, _, prefix = rest.partition("/")
    if _BUCKET.fullmatch(bucket) is None:
        return (
            "must be s3://bucket/prefix with a bucket name of 3 to 63 a-z, 0-9, `.` and `-`;"
            f" got {shown(url)}; name a bucket"
        )
    try:
        if prefix.strip("/"):
            check_key(prefix.strip("/"))
    except InputError as error:
        return f"has a prefix that cannot be used: {error.message}"
    return None


def endpoint_problem(endpoint: str) -> str | None:
    """Return the reason for which `endpoint` cannot be the address of an S3 server, with a fix, or None."""
    if problem := credential_problem(endpoint, _AWS_CREDENTIALS):
        return problem
    if problem := server_problem(endpoint):
        return f"must be http(s)://host:port: {problem}; got {shown(endpoint)}; correct it"
    return None


def check_storage(config: PipelineConfig) -> Iterator[Finding]:
    """Check, before anything is started, the form of the addresses, and that a store on this machine can be
    written to. `Store.check` later writes to it.
    """
    endpoints = {"store.endpoint": config.store.endpoint, "AWS_ENDPOINT_URL_S3": s3_endpoint(None)}
    if config.store.url is not None and (problem := store_url_problem(config.store.url)):
        yield ConfigError(f"store.url: {problem}")
    for name, endpoint in endpoints.items():
        if endpoint is not None and (problem := endpoint_problem(endpoint)):
            yield ConfigError(f"{name}: {problem}")
    folder = config.store_folder
    if folder is not None and (problem := unwritable(folder)):
        yield ConfigError(
            f"store.url: the folder {shown(str(folder), limit=200)} cannot be used: {problem}; choose another"
        )
