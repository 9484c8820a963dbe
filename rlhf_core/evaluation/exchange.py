"""Measures with exchanged prompts: how much of a score depends on the prompt.

Every item is scored against the prompt of another one. A policy or a reward model that reads its prompts does worse
there; one that does not, or a bug that hands responses to the wrong prompts, shows no difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_core.evaluation.scoring import score_gold
from rlhf_core.evaluation.summary import ByModel, Intervals
from rlhf_core.types import PairExample, RewardInput


def exchange(prompts: Sequence[str]) -> list[int] | None:
    """(n,) for each item the index of the item whose prompt it gets: a permutation, the same on every call.

    No item gets a prompt equal to its own. None where that is impossible: one prompt is that of more than half of them.
    """
    count = len(prompts)
    if count < 2:
        return None
    largest = Counter(prompts).most_common(1)[0][1]
    if 2 * largest > count:
        return None
    # Equal prompts side by side, otherwise in no order: neighbours in the alphabet would ask for similar things.
    order = sorted(range(count), key=lambda i: (hashlib.sha256(prompts[i].encode()).digest(), i))
    partner = [0] * count
    for place, item in enumerate(order):
        partner[item] = order[(place + largest) % count]
    return partner


def exchange_pairs(pairs: Sequence[PairExample]) -> list[PairExample] | None:
    """The pairs, each with the prompt of another; None where `exchange` has no answer."""
    partner = exchange([pair.prompt for pair in pairs])
    if partner is None:
        return None
    return [
        replace(pair, prompt_id=pairs[i].prompt_id, prompt=pairs[i].prompt, prompt_ids=pairs[i].prompt_ids)
        for pair, i in zip(pairs, partner, strict=True)
    ]


def exchanged_gold(
    responses: Mapping[str, Sequence[RewardInput]], interval: Intervals
) -> dict[str, dict[str, float]] | None:
    """Each model's mean gold reward where every response is judged as an answer to the prompt of another, with its
    interval; None where `exchange` has no answer."""
    pair: ByModel = {}
    for model, samples in responses.items():
        partner = exchange([sample.prompt for sample in samples])
        if partner is None:
            return None
        pair[model] = score_gold(
            [replace(sample, prompt=samples[i].prompt) for sample, i in zip(samples, partner, strict=True)]
        )
    return interval.pair("gold_exchanged", pair)
