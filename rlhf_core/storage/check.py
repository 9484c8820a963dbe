"""Check of the store's address before anything is started. `Store.check` later writes to it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import HIDDEN, has_credentials, shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.system.files import unwritable

_ENDPOINT = re.compile(r"https?://[^/\s]+")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def check_store(config: PipelineConfig) -> Iterator[Finding]:
    """Check the form of `store.url` and `store.endpoint`."""
    url, endpoint = config.store.url, config.store.endpoint
    if url is not None and url.startswith("s3://"):
        bucket = url.removeprefix("s3://").split("/")[0]
        if _BUCKET.fullmatch(bucket) is None:
            yield ConfigError(
                "store.url: must be s3://bucket/prefix with a bucket name of 3 to 63 a-z, 0-9, `.` and `-`; "
                f"got {shown(url)}; name a bucket"
            )
    elif url is not None and "://" in url and not url.startswith("file://"):
        yield ConfigError(
            "store.url: must be a folder, file:// or s3://bucket/prefix; got scheme"
            f" {url.split('://')[0][:20]}://; use s3://"
        )
    if endpoint is not None and _ENDPOINT.match(endpoint) is None:
        yield ConfigError(
            f"store.endpoint: must be http(s)://host:port; got {shown(endpoint)}; add the scheme and host"
        )


def check_store_folder(config: PipelineConfig) -> Iterator[Finding]:
    """Check that a store on this machine can be written to."""
    folder = config.store_folder
    problem = None if folder is None else unwritable(folder)
    if problem is not None:
        yield ConfigError(
            f"store.url: the folder {shown(str(folder), limit=200)} cannot be used: {problem}; choose another"
        )


def check_store_environment() -> Iterator[Finding]:
    """Check the variable that replaces `store.endpoint`."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3")
    if not endpoint:
        return
    if has_credentials(endpoint):
        yield ConfigError(
            f"AWS_ENDPOINT_URL_S3: credentials in a URL are refused; got {HIDDEN}; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or use a role"
        )
    elif _ENDPOINT.match(endpoint) is None:
        yield ConfigError(
            f"AWS_ENDPOINT_URL_S3: must be http(s)://host:port; got {shown(endpoint)}; add the scheme and"
            " host"
        )
