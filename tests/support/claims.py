"""Claims of stage keys without a wait for the holder."""

from __future__ import annotations

from rlhf_core.storage.fencing import Fence, _create, _latest
from rlhf_core.storage.store import Store


def claim(store: Store, stage_key: str) -> Fence:
    """Become the newest attempt at `stage_key`. No earlier attempt, even a running one, can commit."""
    attempt = _latest(store, stage_key) + 1
    while not _create(store, stage_key, attempt):
        attempt += 1
    return Fence(store, stage_key, attempt)
