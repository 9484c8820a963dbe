"""Check of the store's address before anything is started. `Store.check` later writes to it."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.storage.store import endpoint_problem, store_url_problem
from rlhf_core.system.files import unwritable


def check_store(config: PipelineConfig) -> Iterator[Finding]:
    """Check the form of `store.url` and `store.endpoint`."""
    url, endpoint = config.store.url, config.store.endpoint
    problem = None if url is None else store_url_problem(url)
    if problem is not None:
        yield ConfigError(f"store.url: {problem}")
    problem = None if endpoint is None else endpoint_problem(endpoint)
    if problem is not None:
        yield ConfigError(f"store.endpoint: {problem}")


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
    endpoint = s3_endpoint(None)
    problem = None if endpoint is None else endpoint_problem(endpoint)
    if problem is not None:
        yield ConfigError(f"AWS_ENDPOINT_URL_S3: {problem}")
