"""Measures with exchanged prompts.

- no item is scored against a prompt equal to its own; every prompt is used as often as before; two calls
  agree
- where one prompt is that of more than half of the items there is no such exchange, and no number
- the exchanged accuracy of a reward model and the exchanged gold reward are those worked out by hand
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.data.synthetic import _RAW_STD, gold_reward
from rlhf_core.evaluation.scoring import exchange, exchange_pairs, exchanged_gold
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.types import PairExample, RewardInput


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_every_item_gets_another_prompt_than_its_own_or_there_is_no_exchange(prompts: list[str]) -> None:
    partner = exchange(prompts)
    if len(prompts) < 2 or 2 * Counter(prompts).most_common(1)[0][1] > len(prompts):
        assert partner is None
        return
    assert partner is not None and sorted(partner) == list(range(len(prompts)))
    assert all(prompts[i] != prompts[j] for i, j in enumerate(partner))
    assert exchange(prompts) == partner


def test_pairs_keep_their_responses_and_take_another_prompt() -> None:
    pairs = [
        PairExample(f"id {i}", f"prompt {i}", (i,), (10 + i,), (20 + i,), f"source {i}", 0.5)
        for i in range(5)
    ]
    exchanged = exchange_pairs(pairs)
    assert exchanged is not None
    for before, after in zip(pairs, exchanged, strict=True):
        assert (after.chosen_ids, after.rejected_ids, after.source) == (
            before.chosen_ids,
            before.rejected_ids,
            before.source,
        )
        assert after.prompt != before.prompt
        assert (after.prompt_id, after.prompt_ids) == (f"id {after.prompt[-1]}", (int(after.prompt[-1]),))
    assert exchange_pairs(pairs[:1]) is None


def test_the_gold_reward_falls_with_exchanged_prompts_for_the_model_that_reads_them_only() -> None:
    prompts = ["Tell me about a small fox in the garden.", "Describe a tall bear on the roof."]
    read = ["The small fox plays in the garden.", "The tall bear plays on the roof."]
    unread = ["It is kind and gentle."] * 2

    def samples(responses: list[str]) -> list[RewardInput]:
        return [RewardInput(p, p, r, (), (), True) for p, r in zip(prompts, responses, strict=True)]

    found = exchanged_gold({"sft": samples(unread), "ppo": samples(read)}, Intervals(PipelineConfig()))
    assert found is not None
    swapped = [gold_reward(p, r) for p, r in zip(prompts, reversed(read), strict=True)]
    assert found["ppo"]["mean"] == pytest.approx(sum(swapped) / 2)
    own = [gold_reward(p, r) for p, r in zip(prompts, read, strict=True)]
    # Without another animal, place and adjective there is nothing to lose; with them 0.9 + 0.7 + 0.3 + 0.4.
    assert sum(own) / 2 - found["ppo"]["mean"] == pytest.approx(2.3 / _RAW_STD)
    assert found["sft"]["mean"] == pytest.approx(gold_reward(prompts[0], unread[0]))
    assert exchanged_gold({"ppo": samples(read)[:1]}, Intervals(PipelineConfig())) is None
