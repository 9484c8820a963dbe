"""Seeds and orders, computed from their purpose.

There is no generator whose state a checkpoint must contain.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from functools import lru_cache


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed: blake2b of the run's seed and of parts such as (stage, step, prompt id, sample
    index).

    >>> derive_seed(0, "ppo", 3, "p17", 0) == derive_seed(0, "ppo", 3, "p17", 0)
    True
    """
    # Separator and types keep parts apart that would give the same text: ("a", "1") and ("a1",), 1 and "1".
    text = "\x1f".join([str(run_seed), *(f"{type(part).__name__}:{part}" for part in parts)])
    # 63 bits, so that arrays and columns of int64 can hold it.
    # Not `hash`, which differs between processes for a text.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=4)  # training loops ask for the order of their epoch in every step
def permutation(count: int, seed: int) -> Sequence[int]:
    """Return 0..count-1 in an order that follows from `seed`, 8 bytes each."""
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


def epoch_batch(count: int, batch_size: int, seed: int, epoch: int, index: int) -> tuple[int, ...]:
    """Return batch `index` of an epoch: a part of a permutation of 0..count-1. The last one may be smaller.

    The time does not depend on `count`, but for the first batch of an epoch.

    Args:
        count: Number of rows.
        batch_size: Rows of a batch.
        seed: Seed of the training.
        epoch: Number of the epoch.
        index: Number of the batch in its epoch.
    """
    order = permutation(count, derive_seed(seed, "epoch", epoch))
    return tuple(order[index * batch_size : (index + 1) * batch_size])
