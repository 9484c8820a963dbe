"""Storage in a bucket of S3 or of a compatible server.

A file is complete on the local disk before its upload starts. An upload that a signal interrupts therefore
leaves nothing or the complete object: a single put announces its length, and a multipart upload must be
completed.

    answer                                   result
    5xx, SlowDown, timeout, reset, cut body  retried with random back-off until `retry_seconds` have passed
                                             since the first failure; then StoreUnavailable. A part of a
                                             large file is retried in the same way before the whole file is
    403, expired credentials, no bucket      StoreError at once: a retry cannot help
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import logging
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import CorruptArtifact, StoreError, StoreUnavailable
from rlhf_core.storage.backend import SMALL_BYTES, ObjectStatus
from rlhf_core.system.files import replacing
from rlhf_core.system.waiting import backoff, stop_after_failing

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5
"""Time before concurrent writers of one key read back which of them won, on servers without conditional puts.
"""

ADDRESS_VARIABLES = ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_REGION")
"""Environment variables that say where the store is. Other hosts get them. Credentials are not among them."""

_BYTES_PER_SECOND = 250_000
_CONCURRENCY = 4
_LONGEST_PAUSE = 5.0
_PART_TRIES = 5
"""Attempts at one part of a large file, each with the retries of botocore and s3fs."""
# s3fs makes EINVAL of InvalidRequest and InvalidArgument, and ENOSYS of NotImplemented: servers differ in how
# they refuse a conditional put.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound",
                   "UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError")  # fmt: skip
"""Names of the client's own errors about credentials, which a retry cannot change. By name, because not all
versions have all.
"""
_REFUSED = (
    "400",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
    "301",
)
"""Codes of answers about credentials or the region. A HEAD request with an expired token gets a bare 400."""

_FULL = (
    "InsufficientStorage",
    "QuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
)
"""Codes of answers of compatible servers without space."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class S3Limits:
    """Limits of requests to a bucket; times in seconds."""

    connect_seconds: float = 5.0
    read_seconds: float = 20.0
    """Longest time without a byte of the answer."""
    request_seconds: float = 300.0
    """Time limit from the start of a request to the head of its answer. `_CONCURRENCY` parts share the
    bandwidth; slower than 0.25 MB/s counts as an outage.
    """
    least_seconds: float = 10.0
    """Minimum time limit for a small call, even with a small `retry_seconds`: the first call initializes the
    client.
    """
    first_pause: float = 0.4
    """Longest pause before the first retry."""
    small_bytes: int = SMALL_BYTES
    """Size of the largest object that is read into memory."""
    part_bytes: int = 16 * 2**20
    """Least size of the parts in which a large file is uploaded."""


S3_LIMITS = S3Limits()
_MOST_PARTS = 10_000
"""S3 takes no more parts of an object. s3fs only raises the size of parts if none is given."""


def s3_endpoint(given: str | None) -> str | None:
    """Return the given address of an S3-compatible server, else AWS_ENDPOINT_URL_S3, else None for AWS."""
    return given or os.environ.get("AWS_ENDPOINT_URL_S3") or None


def filesystem(endpoint: str | None, limits: S3Limits = S3_LIMITS, part_retry_seconds: float = 0.0) -> Any:
    """Return an `s3fs.S3FileSystem` that limits the time and size of every request; combine with
    `with_retries`.

    Args:
        endpoint: Address of an S3-compatible server; None is AWS.
        limits: Limits of each request.
        part_retry_seconds: How long a part of a large file is retried, from its first failure.
    """
    bounded = _bounded_class(limits, part_retry_seconds)(
        endpoint_url=endpoint,
        # Other processes write to the bucket, and a cached listing would hide their claims and manifests.
        use_listings_cache=False,
        skip_instance_cache=True,
        max_concurrency=_CONCURRENCY,
        config_kwargs={
            "connect_timeout": limits.connect_seconds,
            "read_timeout": limits.read_seconds,
            # One quick retry of each request; `with_retries` handles longer outages.
            "retries": {"total_max_attempts": 2, "mode": "standard"},
            # Compatible servers corrupt uploads with checksum trailers; the manifests' sha256 is our check.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    # Attempts of s3fs itself, in addition to those of botocore. The default is 5.
    bounded.retries = 2
    return bounded


def _bounded_class(limits: S3Limits, part_retry_seconds: float) -> Any:
    """Return the subclass of `s3fs.S3FileSystem` whose requests have these limits. s3fs is imported here."""
    import s3fs

    class Bounded(s3fs.S3FileSystem):  # type: ignore[misc]  # untyped
        async def _put_file(self, *paths: str, digest: Any = None, **more: Any) -> None:
            _digest_of_upload.set(digest)
            await super()._put_file(*paths, **more)

        async def _call_s3(self, method: str, *more: Any, **arguments: Any) -> Any:
            digest = _digest_of_upload.get()
            if digest is not None and method in ("put_object", "upload_part"):
                # The parts come in their order, and each once: their retries are below.
                digest.update(arguments["Body"])
            if method != "upload_part":
                return await self._request(method, *more, **arguments)
            # A failed part makes s3fs upload the whole file again. Of a file of a thousand parts, one would
            # fail almost every time.
            has_failed_for_long = stop_after_failing(part_retry_seconds)
            retrying = AsyncRetrying(
                retry=retry_if_exception(_is_temporary),
                wait=backoff(limits.first_pause, _LONGEST_PAUSE),
                stop=lambda state: state.attempt_number >= _PART_TRIES or has_failed_for_long(state),
                before_sleep=functools.partial(_log_retry, f"A part of {arguments['Key']} was not stored"),
                reraise=True,
            )
            return await retrying(self._request, method, *more, **arguments)

        async def _request(self, *method: Any, **arguments: Any) -> Any:
            # A server that stops reading blocks a request forever: the client limits only the time between
            # reads. `wait_for` is not used: in Python 3.11 it loses a cancellation that arrives at the same
            # time as the answer.
            async with asyncio.timeout(limits.request_seconds):
                return await super()._call_s3(*method, **arguments)

        async def _get_file(self, rpath: str, lpath: str, *, limit: int | None = None, **more: Any) -> None:
            # A server that sends one byte at a time would otherwise block the client forever.
            clock = asyncio.get_running_loop().time
            async with asyncio.timeout(limits.request_seconds) as end:
                callback = _size_limit(
                    limit, lambda seconds: end.reschedule(clock() + limits.request_seconds + seconds)
                )
                await super()._get_file(rpath, lpath, **{**more, "callback": callback})

        async def small(self, path: str) -> bytes:
            """Return the content of an object of at most `limits.small_bytes`."""
            bucket, key, _ = self.split_path(path)
            body = (await self._call_s3("get_object", Bucket=bucket, Key=key))["Body"]
            # Counted while it comes: an endless answer would use all memory (decision 6).
            content = bytearray()
            try:
                while part := await body.read(2**16):
                    content += part
                    if len(content) > limits.small_bytes:
                        raise _TooMuch(
                            f"it sends more than {limits.small_bytes} bytes for an object that must be small"
                        )
            finally:
                body.close()
            return bytes(content)

        async def status(self, path: str) -> ObjectStatus:
            bucket, key, _ = self.split_path(path)
            # Not `head_object`: an error of it has no text that names the reason, such as an expired token.
            answer = await self._call_s3("get_object", Bucket=bucket, Key=key)
            answer["Body"].close()
            return ObjectStatus(answer["ContentLength"], answer["LastModified"].timestamp())

    return Bounded


def _size_limit(limit: int | None, allow: Callable[[float], None]) -> Any:
    """Return a callback that stops a download above `limit` bytes.

    It calls `allow` with the additional seconds for the announced size.
    """
    from fsspec.callbacks import Callback

    class SizeLimit(Callback):  # type: ignore[misc]  # untyped
        received = 0

        def set_size(self, size: int | None) -> None:
            refuse(size or 0)
            allow((size or 0) / _BYTES_PER_SECOND)

        def relative_update(self, inc: int = 1) -> None:
            self.received += inc
            refuse(self.received)

    def refuse(size: int) -> None:
        if limit is not None and size > limit:
            raise _TooMuch(f"it sends {size} bytes or more, where {limit} were expected")

    return SizeLimit()


# Not an attribute of the client, through which several threads upload. fsspec runs each upload as a task, and
# the tasks of its parts begin with a copy of its context.
_digest_of_upload: ContextVar[Any] = ContextVar("digest_of_upload", default=None)


class S3Objects:
    """`Backend` at `s3://bucket/prefix`."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        endpoint: str | None,
        retry_seconds: float,
        limits: S3Limits = S3_LIMITS,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            bucket: Name of the bucket.
            prefix: Beginning of all keys, without slashes around it; "" for none.
            endpoint: Address of an S3-compatible server; None for AWS.
            retry_seconds: How long temporary failures are retried.
            limits: Limits of each request.
        """
        self._root = f"{bucket}/{prefix}" if prefix else bucket
        self._endpoint = endpoint
        self._retry_seconds = retry_seconds
        self._limits = limits

    @functools.cached_property
    def _fs(self) -> Any:
        return filesystem(self._endpoint, self._limits, self._retry_seconds)

    @functools.cached_property
    def _conditional(self) -> bool:
        """Whether this server refuses to create an existing object; determined once, with a probe object."""
        probe = f"{self._root}/probe-{uuid.uuid4().hex}"
        refused = self._call("create", "probe", lambda: self._refuses(probe))
        if not refused:
            log.warning(
                "The server of s3://%s ignores conditional puts: races are decided by reading back.",
                self._root,
            )
        return refused

    def _refuses(self, probe: str) -> bool:
        refused = False
        try:
            self._pipe(probe, b"first", "create")
            self._pipe(probe, b"second", "create")
        except FileExistsError:
            refused = True
        except OSError as error:
            # After any other error, such as an outage, the answer is still unknown.
            if error.errno not in _NOT_SUPPORTED:
                raise
            log.debug("conditional put: %s", error)
            # A plain put distinguishes "no conditional puts" from "no access at all".
            self._pipe(probe, b"plain")
        self._remove(probe)
        return refused

    def put_file(self, source: Path, key: str, *, link: bool, sha256: str | None = None) -> None:
        def put() -> None:
            digest = hashlib.sha256()
            try:
                size = max(self._limits.part_bytes, math.ceil(source.stat().st_size / _MOST_PARTS))
                self._fs.put_file(str(source), self._path(key), chunksize=size, digest=digest)
            except FileNotFoundError as error:
                if _code(error) != "NoSuchUpload":
                    raise
                # The answer to the completion of a multipart upload was lost, and the client completed it
                # again.
                raise ConnectionResetError(f"lost the answer to the end of an upload: {error}") from error
            if sha256 is not None and digest.hexdigest() != sha256:
                raise CorruptArtifact(f"{source} has other content than its manifest says.")

        self._call("write", key, put)

    def get_file(self, key: str, target: Path, size: int | None = None) -> None:
        with replacing(target) as temporary:
            # Not `_within`: the time limit of a download follows from its announced size, see `_get_file`.
            self._call("read", key, lambda: self._fs.get_file(self._path(key), str(temporary), limit=size))

    def put_bytes(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda: self._pipe(self._path(key), data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        # Without conditional puts, the put below would replace an existing object.
        if self.read_bytes(key) is not None:
            return False
        mode = "create" if self._conditional else "overwrite"
        # After a lost answer, the retry finds its own object. Reading it back decides.
        with contextlib.suppress(FileExistsError):
            self._call("create", key, lambda: self._pipe(self._path(key), data, mode))
        if mode == "overwrite":
            time.sleep(SETTLE_SECONDS)
        return self.read_bytes(key) == data

    def read_bytes(self, key: str) -> bytes | None:
        return self._if_present(key, lambda path: self._fs.small(path))

    def status(self, key: str) -> ObjectStatus | None:
        return self._if_present(key, lambda path: self._fs.status(path))

    def _if_present(self, key: str, read: Callable[[str], Awaitable[_T]]) -> _T | None:
        """Return what `read` returns for the path of an object; None if there is no object."""
        try:
            return self._call("read", key, lambda: self._within(lambda: read(self._path(key))))
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str) -> Mapping[str, int]:
        # The coroutines of s3fs, because its public methods wait for them without a limit of time.
        listed = self._call(
            "list", prefix, lambda: self._within(lambda: self._fs._find(self._path(prefix), detail=True))
        )
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in listed.items() if info["type"] == "file"}

    def folders(self, prefix: str) -> Sequence[str]:
        listed = self._call(
            "list", prefix, lambda: self._within(lambda: self._fs._lsdir(self._path(prefix), refresh=True))
        )
        return [info["name"].rsplit("/", 1)[-1] for info in listed if info["type"] == "directory"]

    def delete(self, keys: Sequence[str]) -> None:
        # One by one: the bulk call of s3fs does not report the objects that it could not delete.
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._call("delete", key, functools.partial(self._remove, self._path(key)))

    def delete_prefix(self, prefix: str) -> None:
        self.delete(sorted(self.sizes(prefix)))

    def abort_multipart_uploads(self, prefix: str) -> None:
        bucket, _, _ = self._root.partition("/")
        start = self._path(prefix).removeprefix(f"{bucket}/") + "/"
        # `timeout` is an argument of fsspec, which limits the wait for the coroutine, and not of the request.
        request = functools.partial(self._fs.call_s3, Bucket=bucket, timeout=self._limits.request_seconds)
        # Without retries: not every server supports it, and nothing depends on it.
        try:
            uploads = request("list_multipart_uploads", Prefix=start).get("Uploads") or []
            for upload in uploads:
                request("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        except _client_errors() as error:
            log.info("parts of interrupted uploads may remain below %s: %s", self.uri(prefix), error)
            return
        if uploads:
            log.info("deleted the parts of %d interrupted uploads below %s", len(uploads), self.uri(prefix))

    def uri(self, key: str) -> str:
        return f"s3://{self._path(key)}"

    def local_path(self, key: str) -> Path | None:
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _remove(self, path: str) -> None:
        self._within(lambda: self._fs._rm_file(path))

    def _pipe(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._within(lambda: self._fs._pipe_file(path, data, mode=mode), len(data))

    def _within(self, call: Callable[[], Awaitable[_T]], size: int = 0) -> _T:
        return run_bounded(self._fs, self._retry_seconds, call, size, self._limits.least_seconds)

    def _call(self, action: str, key: str, call: Callable[[], _T]) -> _T:
        try:
            return with_retries(
                f"The store could not {action} {self.uri(key)}",
                self._retry_seconds,
                call,
                self._limits.first_pause,
            )
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket" or "bucket does not exist" in str(error):
                raise StoreError(
                    f"The bucket of {self.uri(key)} does not exist; create it or correct store.url."
                ) from error
            raise


def run_bounded(
    client: Any,
    retry_seconds: float,
    call: Callable[[], Awaitable[_T]],
    size: int = 0,
    least_seconds: float = S3_LIMITS.least_seconds,
) -> _T:
    """Run a coroutine of `client`, with all its requests, within the time limit for `size` bytes.

    Raises TimeoutError.

    Args:
        client: What `filesystem` returned.
        retry_seconds: The time limit.
        call: Returns the coroutine.
        size: Number of bytes that it sends; they get additional time.
        least_seconds: The time limit if `retry_seconds` is less.
    """
    from fsspec.asyn import sync

    seconds = max(retry_seconds, least_seconds) + size / _BYTES_PER_SECOND

    async def bounded() -> _T:
        async with asyncio.timeout(seconds):
            return await call()

    try:
        result: _T = sync(client.loop, bounded)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer within {seconds:.0f} s") from error
    return result


def with_retries(
    what: str, retry_seconds: float, call: Callable[[], _T], first_pause: float = S3_LIMITS.first_pause
) -> _T:
    """Return `call()`, retried after temporary failures for `retry_seconds` from the first one.

    Raises StoreUnavailable if the failure persists and StoreError if a retry cannot help; both messages start
    with `what`. FileNotFoundError and FileExistsError pass through.
    """

    def attempt() -> _T:
        try:
            return call()
        except _client_errors() as error:
            reason = _permanent(error)
            if reason is None:
                raise
            raise StoreError(f"{what}: {reason}") from error

    retrying = Retrying(
        retry=retry_if_exception(_is_temporary),
        wait=backoff(first_pause, _LONGEST_PAUSE),
        stop=stop_after_failing(retry_seconds),
        before_sleep=functools.partial(_log_retry, what),
        retry_error_callback=functools.partial(_raise_unavailable, what),
    )
    return retrying(attempt)


def _permanent(error: BaseException) -> str | None:
    """Return what is wrong and how to correct it if a retry cannot help; else None."""
    if isinstance(error, PermissionError) or _code(error) in _REFUSED:
        return f"access denied ({_reason(error)}); check the credentials and the bucket's policy."
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        return (
            f"{_reason(error)}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this"
            " machine a role"
        )
    if name == "ParamValidationError" or isinstance(error, _TooMuch):
        return _reason(error)
    return None


def _is_temporary(error: BaseException) -> bool:
    # A StoreError, with which `with_retries` ends the retries, is not one of these errors.
    if not isinstance(error, _client_errors()) or isinstance(error, FileNotFoundError | FileExistsError):
        return False
    return _permanent(error) is None


def _log_retry(what: str, state: RetryCallState) -> None:
    # Warnings reach the user's terminal. An outage of minutes would fill it.
    level = logging.WARNING if state.attempt_number == 1 else logging.DEBUG
    log.log(level, "%s (%s); trying again.", what, _reason(_error_of(state)))


def _raise_unavailable(what: str, state: RetryCallState) -> NoReturn:
    error = _error_of(state)
    fix = "; free space in the bucket, or raise its quota" if _code(error) in _FULL else ""
    tries = f"{state.attempt_number} tries over {state.seconds_since_start:.0f} s"
    raise StoreUnavailable(f"{what}, in {tries}: {_reason(error)}{fix}") from error


def _error_of(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


# An OSError, because `with_retries` handles only the exceptions of `_client_errors`.
class _TooMuch(OSError):
    """The amount of data exceeds that of any valid store."""


@functools.cache
def _client_errors() -> tuple[type[Exception], ...]:
    # Not at the top: a run with a local store needs none of these.
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError
    from s3fs.core import S3_RETRYABLE_ERRORS

    return (OSError, TimeoutError, BotoCoreError, ClientError, aiohttp.ClientError, *S3_RETRYABLE_ERRORS)


def _code(error: BaseException) -> str:
    """Return the code of the server's answer; '' if there was none."""
    # s3fs converts the client's error to an OSError without the response, and sets it as the cause.
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ if has_credentials(text) else f"{type(error).__name__}: {text}"
