"""A store in an S3 bucket, or in one of a compatible server.

Files are finished on the local disk before they are uploaded: an upload that a signal interrupts then leaves
either nothing or the whole object, because a single put carries its length and a multipart one must be
completed.

    answer                                   what happens
    5xx, SlowDown, timeout, reset, cut body  tried again, with pauses of random length, until `patience` seconds have
                                             passed since the first failure; then StoreUnavailable
    403, expired credentials, no bucket      StoreError at once: only a person can help
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import StoreError, StoreUnavailable
from rlhf_core.storage.store import SMALL_BYTES, TEMPORARY

log = logging.getLogger(__name__)

CONNECT_SECONDS, READ_SECONDS = 5, 20
REQUEST_SECONDS = 300.0
"""For one request that sends, up to the head of its answer: `_AT_ONCE` parts share the line, and less than
0.25 MB/s is none.
"""
LISTED = 100_000
"""Maximum number of objects below one folder. The checkpoints of a stage are a few hundred files."""
SETTLE_SECONDS = 0.5
"""How long writers of one key wait before they look who won, on servers without conditional puts."""

_LEAST_SECONDS = 10.0
"""Minimum time limit for a small call, even with short patience, because the first call initializes the
client.
"""
_BYTES_PER_SECOND = 250_000
_PART_BYTES = 16 * 2**20
_AT_ONCE = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS)
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "UnauthorizedSSOTokenError",
             "SSOTokenLoadError", "TokenRetrievalError", "ParamValidationError")  # fmt: skip
"""Errors of the client itself that no second try can change, by name: some of its versions lack some of them.
"""
_REFUSED = (
    "400",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
    "301",
)
"""Codes of answers that are about who asks and where; a bare 400 is what a HEAD gets for an expired token."""

_T = TypeVar("_T")
_jitter = random.Random()
"""Apart from the generator that everybody shares: an outage must not change what a run draws."""


def filesystem(endpoint: str | None) -> Any:
    """An `s3fs.S3FileSystem` whose every request is bounded; see `patiently` for what may fail and pass.

    `endpoint`: address of an S3-compatible server; None: AWS.
    """
    import s3fs

    class Bounded(s3fs.S3FileSystem):  # type: ignore[misc]  # untyped
        async def _call_s3(self, *method: Any, **arguments: Any) -> Any:
            # A server that stops reading would hold a request for ever: the client bounds its silence only.
            # `wait_for` is not used: in Python 3.11 it loses a cancellation that arrives at the same time as
            # the answer.
            async with asyncio.timeout(REQUEST_SECONDS):
                return await super()._call_s3(*method, **arguments)

        async def _get_file(self, rpath: str, lpath: str, *, limit: int | None = None, **more: Any) -> None:
            # A server that sends one byte at a time would otherwise block the client forever.
            clock = asyncio.get_running_loop().time
            async with asyncio.timeout(REQUEST_SECONDS) as end:
                arriving = _arriving(
                    limit, lambda seconds: end.reschedule(clock() + REQUEST_SECONDS + seconds)
                )
                await super()._get_file(rpath, lpath, **{**more, "callback": arriving})

        async def _iterdir(self, *given: Any, **more: Any) -> AsyncIterator[Any]:
            count = 0
            async for entry in super()._iterdir(*given, **more):
                count += 1
                if count > LISTED:
                    raise _TooMuch(f"it lists more than {LISTED} objects")
                yield entry

        async def small(self, path: str) -> bytes:
            """Return the content of an object of at most SMALL_BYTES."""
            bucket, key, _ = self.split_path(path)
            body = (await self._call_s3("get_object", Bucket=bucket, Key=key))["Body"]
            content = bytearray()
            try:
                while part := await body.read(2**16):
                    content += part
                    if len(content) > SMALL_BYTES:
                        raise _TooMuch(
                            f"it sends more than {SMALL_BYTES} bytes for an object that must be small"
                        )
            finally:
                body.close()
            return bytes(content)

    bounded = Bounded(
        endpoint_url=endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,
        max_concurrency=_AT_ONCE,
        config_kwargs={
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # One quick try more for a part of a large file; the patience is in `patiently`.
            "retries": {"total_max_attempts": 2, "mode": "standard"},
            # Compatible servers corrupt uploads with checksum trailers; the manifests' sha256 is our check.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    bounded.retries = 2
    return bounded


def _arriving(limit: int | None, allow: Callable[[float], None]) -> Any:
    """Callback for downloads. It calls `allow` with the seconds for the announced size, and stops downloads
    above `limit`.
    """
    from fsspec.callbacks import Callback

    class Arriving(Callback):  # type: ignore[misc]  # untyped
        came = 0

        def set_size(self, size: int | None) -> None:
            refuse(size or 0)
            allow((size or 0) / _BYTES_PER_SECOND)

        def relative_update(self, inc: int = 1) -> None:
            self.came += inc
            refuse(self.came)

    def refuse(size: int) -> None:
        if limit is not None and size > limit:
            raise _TooMuch(f"it sends {size} bytes or more, where {limit} were expected")

    return Arriving()


class S3Objects:
    """`Backend` over `s3://bucket/prefix`; see `Store` for what the methods promise."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None, patience: float) -> None:
        """`patience`: seconds for which a failing call is tried again."""
        self._root = f"{bucket}/{prefix}" if prefix else bucket
        self._endpoint = endpoint
        self._patience = patience
        self._seconds = max(patience, _LEAST_SECONDS)
        """Time limit for one attempt of a small call."""

    @functools.cached_property
    def _fs(self) -> Any:
        return filesystem(self._endpoint)

    @functools.cached_property
    def _conditional(self) -> bool:
        """Whether this server refuses to create what exists; found out once, with a probe object."""
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
            # An outage says nothing about what the server can do.
            if error.errno not in _NOT_SUPPORTED:
                raise
            log.debug("conditional put: %s", error)
            # A plain put tells "no conditional puts" from "no access at all".
            self._pipe(probe, b"plain")
        self._remove(probe)
        return refused

    def put_file(self, source: Path, key: str, *, link: bool) -> None:
        def put() -> None:
            try:
                self._fs.put_file(str(source), self._path(key), chunksize=_PART_BYTES)
            except FileNotFoundError as error:
                if _code(error) != "NoSuchUpload":
                    raise
                # The answer to the end of a multipart upload was lost, and it cannot be ended twice.
                raise ConnectionResetError(f"lost the answer to the end of an upload: {error}") from error

        self._call("write", key, put)

    def get_file(self, key: str, target: Path, size: int | None = None) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._call("read", key, lambda: self._fs.get_file(self._path(key), str(temporary), limit=size))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda: self._pipe(self._path(key), data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.read_bytes(key) is not None:
            return False
        mode = "create" if self._conditional else "overwrite"
        # After a lost answer a second try meets its own object; reading back tells.
        with contextlib.suppress(FileExistsError):
            self._call("create", key, lambda: self._pipe(self._path(key), data, mode))
        if mode == "overwrite":
            time.sleep(SETTLE_SECONDS)
        return self.read_bytes(key) == data

    def read_bytes(self, key: str) -> bytes | None:
        try:
            content: bytes = self._call(
                "read", key, lambda: self._within(lambda: self._fs.small(self._path(key)))
            )
        except FileNotFoundError:
            return None
        return content

    def sizes(self, prefix: str) -> Mapping[str, int]:
        found = self._call(
            "list", prefix, lambda: self._within(lambda: self._fs._find(self._path(prefix), detail=True))
        )
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def delete(self, keys: Sequence[str]) -> None:
        # One by one: the bulk call of s3fs does not report what could not be deleted.
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._call("delete", key, functools.partial(self._remove, self._path(key)))

    def delete_prefix(self, prefix: str) -> None:
        self.delete(sorted(self.sizes(prefix)))

    def forget_uploads(self, prefix: str) -> None:
        bucket, _, _ = self._root.partition("/")
        start = self._path(prefix).removeprefix(f"{bucket}/") + "/"

        def abort() -> int:
            ask = functools.partial(self._fs.call_s3, Bucket=bucket, timeout=REQUEST_SECONDS)
            found = ask("list_multipart_uploads", Prefix=start).get("Uploads") or []
            for upload in found:
                ask("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
            return len(found)

        try:  # once: not every server can, and nothing depends on it
            if count := abort():
                log.info("dropped what %d interrupted uploads had left below %s", count, self.uri(prefix))
        except _errors_of_the_client() as error:
            log.info("what interrupted uploads may have left below %s stays: %s", self.uri(prefix), error)

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
        """Run a coroutine of the client with all its requests and retries within the time limit for `size`
        bytes.

        Raises TimeoutError.
        """
        from fsspec.asyn import sync

        seconds = self._seconds + size / _BYTES_PER_SECOND

        async def bounded() -> _T:
            async with asyncio.timeout(seconds):
                return await call()

        try:
            done: _T = sync(self._fs.loop, bounded)
        except TimeoutError as error:
            raise TimeoutError(f"no whole answer within {seconds:.0f} s") from error
        return done

    def _call(self, action: str, key: str, call: Callable[[], _T]) -> _T:
        try:
            return patiently(f"The store could not {action} {self.uri(key)}", self._patience, call)
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket" or "bucket does not exist" in str(error):
                raise StoreError(
                    f"The bucket of {self.uri(key)} does not exist; create it or correct store.url."
                ) from error
            raise


def patiently(what: str, patience: float, call: Callable[[], _T]) -> _T:
    """`call()`, tried again while its failure may pass, for `patience` seconds.

    Raises StoreUnavailable, beginning with `what`, where it does not pass, StoreError where it never will;
    lets FileNotFoundError and FileExistsError through.
    """
    failed, since = 0, 0.0
    while True:
        try:
            return call()
        except (FileNotFoundError, FileExistsError):
            raise
        except _errors_of_the_client() as error:
            if isinstance(error, PermissionError) or _code(error) in _REFUSED:
                raise StoreError(
                    f"{what}: access denied ({_reason(error)}); check the credentials and the bucket's"
                    " policy."
                ) from error
            if type(error).__name__ in _HOPELESS or isinstance(error, _TooMuch):
                raise StoreError(f"{what}: {_reason(error)}") from error
            failed, since = failed + 1, since or time.monotonic()
            pause = _jitter.uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**failed))
            if time.monotonic() + pause - since > patience:
                raise StoreUnavailable(
                    f"{what}, in {failed} tries over {time.monotonic() - since:.0f} s: {_reason(error)}"
                ) from error
            log.log(
                logging.WARNING if failed == 1 else logging.DEBUG,
                "%s (%s); trying again.",
                what,
                _reason(error),
            )
            time.sleep(pause)


class _TooMuch(OSError):
    """The amount of data exceeds that of any valid store."""


@functools.cache
def _errors_of_the_client() -> tuple[type[Exception], ...]:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError
    from s3fs.core import S3_RETRYABLE_ERRORS

    return (OSError, TimeoutError, BotoCoreError, ClientError, aiohttp.ClientError, *S3_RETRYABLE_ERRORS)


def _code(error: BaseException) -> str:
    """The code of the server's answer; '' if there was none."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ if has_credentials(text) else f"{type(error).__name__}: {text}"
