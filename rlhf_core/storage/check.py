"""Check of the store's address before anything is started. `Store.check` later writes to it."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.storage.store import endpoint_problem, store_url_problem
from rlhf_core.system.files import unwritable


def check_storage(config: PipelineConfig) -> Iterator[Finding]:
    """Check the form of the addresses, and that a store on this machine can be written to."""
    endpoints = {"store.endpoint": config.store.endpoint, "AWS_ENDPOINT_URL_S3": s3_endpoint(None)}
    problem = None if config.store.url is None else store_url_problem(config.store.url)
    if problem is not None:
        yield ConfigError(f"store.url: {problem}")
    for name, endpoint in endpoints.items():
        problem = None if endpoint is None else endpoint_problem(endpoint)
        if problem is not None:
            yield ConfigError(f"{name}: {problem}")
    folder = config.store_folder
    problem = None if folder is None else unwritable(folder)
    if problem is not None:
        yield ConfigError(
            f"store.url: the folder {shown(str(folder), limit=200)} cannot be used: {problem}; choose another"
        )
