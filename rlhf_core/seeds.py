"""Seeds are functions of what they are for, never state that must be carried along."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A 63-bit seed: blake2b of the run's seed and the parts, such as (stage, step, prompt id, sample index).

    >>> derive_seed(0, "ppo", 3, "p17", 0) == derive_seed(0, "ppo", 3, "p17", 0)
    True
    """
    text = "\x1f".join([str(run_seed), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
