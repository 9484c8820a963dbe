"""Measures with exchanged prompts, which show how much a score depends on the prompt.

Every item is scored against the prompt of another item. If a policy or a reward model uses its prompts, the
result is lower. If it does not, or if a bug assigns responses to the wrong prompts, there is no difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core.evaluation.scoring import score_gold
from rlhf_core.evaluation.summary import ByModel, Intervals
from rlhf_core.types import PairExample, RewardInput


def exchange(prompts: Sequence[str]) -> list[int] | None:
    """Return for each item the index of the item whose prompt it gets, (n,): a permutation, the same on every
    call.

    No item gets a prompt equal to its own. Returns None if that is impossible, because more than half of the
    items have the same prompt.
    """
    count = len(prompts)
    if count < 2:
        return None
    largest = Counter(prompts).most_common(1)[0][1]
    if 2 * largest > count:
        return None
    # Equal prompts are adjacent, and the order is otherwise arbitrary. In alphabetical order, neighbours
    # would be similar.
    order = sorted(range(count), key=lambda i: (hashlib.sha256(prompts[i].encode()).digest(), i))
    partner = [0] * count
    for position, item in enumerate(order):
        # A shift by the size of the largest group leaves every group of equal prompts.
        partner[item] = order[(position + largest) % count]
    return partner


def exchange_pairs(pairs: Sequence[PairExample]) -> list[PairExample] | None:
    """Return the pairs with exchanged prompts, or None if `exchange` returns None."""
    partner = exchange([pair.prompt for pair in pairs])
    if partner is None:
        return None
    exchanged = []
    for pair, i in zip(pairs, partner, strict=True):
        other = pairs[i]
        exchanged.append(
            replace(pair, prompt_id=other.prompt_id, prompt=other.prompt, prompt_ids=other.prompt_ids)
        )
    return exchanged


def exchanged_gold(
    responses: Mapping[str, Sequence[RewardInput]], interval: Intervals
) -> dict[str, Any] | None:
    """Return the mean gold reward of each model with exchanged prompts and its interval. None if `exchange`
    returns None.
    """
    by_model: ByModel = {}
    for model, samples in responses.items():
        partner = exchange([sample.prompt for sample in samples])
        if partner is None:
            return None
        exchanged = []
        for sample, i in zip(samples, partner, strict=True):
            exchanged.append(replace(sample, prompt=samples[i].prompt))
        by_model[model] = score_gold(exchanged)
    return interval.by_model("gold_exchanged", by_model, interval.groups(samples))
