"""What is looked at before anything heavy starts."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.errors import checking
from rlhf_core.planning.fit import check_memory
from rlhf_core.preflight import check
from rlhf_core.storage.store import open_store
from rlhf_core.system.home import Home


def checked_config(
    path: str, overrides: Sequence[str], *, retry_store: bool = False
) -> tuple[PipelineConfig, list[str]]:
    """The configuration and what the user should know of it; its home is made, its store answers.

    `retry_store`: retry temporary failures of the store for `store.retry_seconds`, because no user is waiting.
    Raises InputError with everything that is wrong, StoreUnavailable if only the store does not answer.
    """
    with checking(path):
        config = load_config(path, overrides)
        warnings = check(config)
        check_memory(config)
    Home.of(config.run.home).make()
    store = open_store(config)
    if retry_store:
        store.check(config.store.retry_seconds)
    else:
        store.check()
    return config, warnings
