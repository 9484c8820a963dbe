"""Numbers of ranks, ways to shard and sizes of micro-batches that the search for a split tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from rlhf_core.config.consistency import sharding_problems
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.planning.hardware import Hardware

_MAX_TOKENS = 1 << 18
"""Largest micro-batch that is tried, in tokens."""


def rank_counts(limit: int, per_host: int) -> list[int]:
    """Return the numbers of ranks that are tried: all up to a host's devices, then halves of hosts."""
    half = max(1, per_host // 2)
    return [count for count in range(1, limit + 1) if count <= per_host or count % half == 0]


def shardings(
    base: DeepSpeedConfig, ranks: int, hardware: Hardware, lora: LoraConfig | None
) -> Iterator[DeepSpeedConfig]:
    """Yield ways to distribute a model over `ranks`, the simplest first."""
    lowest = lowest_stage(base)
    for stage, offload, hpz, checkpoints in product(
        (0, 1, 2, 3), ("none", "optimizer", "all"), (1, hardware.per_host), (False, True)
    ):
        if ranks == 1 and offload == "none" and stage > lowest:
            continue  # there is nothing to share
        if hpz > 1 and (offload != "none" or ranks <= hpz or ranks % hpz):
            continue
        if stage == 3 and lora is not None and lora.quantize is not None:
            continue  # ZeRO cannot shard packed weights
        sharding = base.model_copy(
            update={
                "ranks": ranks,
                "zero_stage": stage,
                "offload": offload,
                "hpz": hpz,
                "gradient_checkpointing": checkpoints,
            }
        )
        if not any(sharding_problems("", sharding)):
            yield sharding


def lowest_stage(base: DeepSpeedConfig) -> int:
    """Return the lowest ZeRO stage with the data types of `base`. float16 and float32 sums of gradients need
    one above 0, also on one rank.
    """
    stage = 0
    while any(
        sharding_problems("", base.model_copy(update={"zero_stage": stage, "offload": "none", "hpz": 1}))
    ):
        stage += 1
    return stage


def micro_batches(configured: int, longest: int, largest: int) -> list[int]:
    """Return the tokens of a micro-batch that are tried, in falling order: powers of two of sequences."""
    limit = max(longest, min(largest, _MAX_TOKENS))
    sizes = {longest, limit}
    if longest <= configured <= limit:
        sizes.add(configured)
    size = longest
    while size <= limit:
        sizes.add(size)
        size *= 2
    return sorted(sizes, reverse=True)
