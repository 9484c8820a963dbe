"""Which engine samples which prompt: the whole rollout batch at once, least loaded engine first. Pure and
repeatable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core.seeds import derive_seed, permutation


def prompts_of_step(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the prompts of PPO step `step` (1-based): a walk over one fresh permutation after the
    other.
    """
    indices = []
    start = (step - 1) * per_step
    for position in range(start, start + per_step):
        epoch, place = divmod(position, count)
        indices.append(permutation(count, derive_seed(seed, "prompts", epoch))[place])
    return indices


def assign(lengths: Sequence[int], engines: int) -> list[list[int]]:
    """Prompt indices for each engine: longest first to the engine with the fewest tokens, then in the given
    order.
    """
    shares: list[list[int]] = [[] for _ in range(engines)]
    load = [0] * engines
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        engine = min(range(engines), key=lambda e: (load[e], e))
        shares[engine].append(i)
        load[engine] += lengths[i]
    return [sorted(share) for share in shares]


def reassign(shares: Mapping[int, Sequence[int]], serving: Sequence[int]) -> dict[int, list[int]]:
    """Shares that are to be sampled again, by engine: each stays where it was, that of an engine which does
    not serve any more goes as a whole to one that has nothing to do or else the least.
    """
    kept = {engine: list(share) for engine, share in shares.items() if engine in serving}
    for engine, share in shares.items():
        if engine not in serving:
            target = min(serving, key=lambda e: (len(kept.get(e, ())), e))
            kept[target] = kept.get(target, []) + list(share)
    return kept
