"""Which engine samples which prompt: the whole rollout batch at once, least loaded engine first. Pure and repeatable."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlhf_core.seeds import derive_seed


def prompts_of_step(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of PPO step `step` (1-based): a walk over one fresh permutation after the other."""
    indices = []
    start = (step - 1) * per_step
    for position in range(start, start + per_step):
        epoch, place = divmod(position, count)
        indices.append(_permutation(count, seed, epoch)[place])
    return indices


_cache: dict[tuple[int, int, int], list[int]] = {}


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    key = (count, seed, epoch)
    if key not in _cache:
        _cache.clear()
        order = list(range(count))
        random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
        _cache[key] = order
    return _cache[key]


def assign(lengths: Sequence[int], engines: int) -> list[list[int]]:
    """Prompt indices for each engine: longest first to the engine with the fewest tokens, then in the given order."""
    shares: list[list[int]] = [[] for _ in range(engines)]
    load = [0] * engines
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        engine = min(range(engines), key=lambda e: (load[e], e))
        shares[engine].append(i)
        load[engine] += lengths[i]
    return [sorted(share) for share in shares]
