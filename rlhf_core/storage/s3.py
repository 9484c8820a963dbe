"""A store in an S3 bucket, or in one of a compatible server.

Files are finished on the local disk before they are uploaded: an upload that a signal interrupts then leaves either
nothing or the whole object, because a single put carries its length and a multipart one must be completed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import RLHFError
from rlhf_core.storage.store import TEMPORARY

log = logging.getLogger(__name__)

CONNECT_SECONDS, READ_SECONDS = 5, 30
SETTLE_SECONDS = 0.5
"""How long writers of one key wait before they look who won, on servers without conditional puts."""

_PART_BYTES = 16 * 2**20


class S3Objects:
    """`Backend` over `s3://bucket/prefix`; see `Store` for what the methods promise."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        self._root = f"{bucket}/{prefix}" if prefix else bucket
        self._endpoint = endpoint

    @functools.cached_property
    def _fs(self) -> Any:
        import s3fs

        filesystem = s3fs.S3FileSystem(
            endpoint_url=self._endpoint,
            use_listings_cache=False,
            skip_instance_cache=True,
            max_concurrency=8,
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"max_attempts": 3, "mode": "standard"},
                # Compatible servers corrupt uploads with checksum trailers; the manifests' sha256 is our check.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        )
        filesystem.retries = 4
        return filesystem

    @functools.cached_property
    def _conditional(self) -> bool:
        """Whether this server refuses to create what exists; found out once, with a probe object."""
        probe = f"{self._root}/probe-{uuid.uuid4().hex}"
        refused = False
        with self._errors("create", "probe"):
            try:
                self._fs.pipe_file(probe, b"first", mode="create")
                self._fs.pipe_file(probe, b"second", mode="create")
            except FileExistsError:
                refused = True
            except OSError as error:
                log.debug("conditional put: %s", error)
                # A plain put tells "no conditional puts" from "no access at all".
                self._fs.pipe_file(probe, b"plain")
            self._fs.rm_file(probe)
        if not refused:
            log.warning(
                "The server of s3://%s ignores conditional puts: races are decided by reading back.", self._root
            )
        return refused

    def put_file(self, source: Path, key: str, *, link: bool) -> None:
        with self._errors("write", key):
            self._fs.put_file(str(source), self._path(key), chunksize=_PART_BYTES)

    def get_file(self, key: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with self._errors("read", key):
                self._fs.get_file(self._path(key), str(temporary))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._errors("write", key):
            self._fs.pipe_file(self._path(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.read_bytes(key) is not None:
            return False
        conditional = self._conditional
        # After a lost answer the client's own retry meets its own object; reading back tells.
        with self._errors("create", key), contextlib.suppress(FileExistsError):
            self._fs.pipe_file(self._path(key), data, mode="create" if conditional else "overwrite")
        if not conditional:
            time.sleep(SETTLE_SECONDS)
        return self.read_bytes(key) == data

    def read_bytes(self, key: str) -> bytes | None:
        with self._errors("read", key):
            try:
                content: bytes = self._fs.cat_file(self._path(key))
            except FileNotFoundError:
                return None
            return content

    def sizes(self, prefix: str) -> Mapping[str, int]:
        with self._errors("list", prefix):
            found = self._fs.find(self._path(prefix), detail=True)
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def delete(self, keys: Sequence[str]) -> None:
        # One by one: the bulk call of s3fs does not report what could not be deleted.
        for key in keys:
            with self._errors("delete", key), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def delete_prefix(self, prefix: str) -> None:
        self.delete(sorted(self.sizes(prefix)))

    def uri(self, key: str) -> str:
        return f"s3://{self._path(key)}"

    def local_path(self, key: str) -> Path | None:
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (FileNotFoundError, FileExistsError) as error:
            if "bucket" in str(error).lower():
                raise RLHFError(
                    f"The bucket of {self.uri(key)} does not exist; create it or correct store.url."
                ) from error
            raise
        except PermissionError as error:
            raise RLHFError(
                f"The store could not {action} {self.uri(key)}: access denied ({_reason(error)}); check the credentials "
                "and the bucket's policy."
            ) from error
        except (OSError, TimeoutError, BotoCoreError, ClientError) as error:
            raise RLHFError(f"The store could not {action} {self.uri(key)}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return type(error).__name__ if has_credentials(text) else f"{type(error).__name__}: {text}"
