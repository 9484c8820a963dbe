"""Which sequences share a forward pass, and on which rank.

Rules:
- every index comes once; a micro-batch keeps its token budget, padding included, or is one sequence alone;
- every rank gets the same number of micro-batches, for any number of sequences on any number of ranks (9 on
  8, 3 on 8);
- no rank is without work while sequences suffice, and there are no more micro-batches than the budget asks
  for;
- packed: ranks, and micro-batches that run at the same time, differ by no more than one sequence's cost where
  the budget leaves room; attention counts, so one long sequence is as much work as many short ones (worked by
  hand);
- the heaviest micro-batch comes first, and in it the longest sequence; a list of thousands is planned in no
  time.
"""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.models.batching import estimated_cost, plan_ranks

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
Plan = list[list[list[int]]]


def indices(plan: Plan) -> list[int]:
    return sorted(i for micros in plan for micro in micros for i in micro)


def costs(plan: Plan, lengths: list[int]) -> list[list[int]]:
    """[rank][micro-batch]"""
    return [[sum(estimated_cost(lengths[i]) for i in micro) for micro in micros] for micros in plan]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 100), st.booleans())
def test_every_index_comes_once_within_the_budget_in_as_many_micro_batches_on_every_rank(
    lengths: list[int], ranks: int, budget: int, pack: bool
) -> None:
    plan = plan_ranks(lengths, ranks, budget, pack=pack)
    assert len(plan) == ranks
    (count,) = {len(micros) for micros in plan}
    assert count >= 1
    assert indices(plan) == list(range(len(lengths)))
    for micro in (micro for micros in plan for micro in micros if len(micro) > 1):
        tokens = sum(lengths[i] for i in micro) if pack else len(micro) * max(lengths[i] for i in micro)
        assert tokens <= budget
        assert [lengths[i] for i in micro] == sorted((lengths[i] for i in micro), reverse=True)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 100), st.booleans())
def test_no_rank_is_idle_while_sequences_suffice(
    lengths: list[int], ranks: int, budget: int, pack: bool
) -> None:
    plan = plan_ranks(lengths, ranks, budget, pack=pack)
    busy = sum(any(micros) for micros in plan)
    assert busy == min(ranks, len(lengths))


@given(LENGTHS, st.integers(1, 9))
def test_with_room_for_all_ranks_differ_by_at_most_one_sequence(lengths: list[int], ranks: int) -> None:
    plan = plan_ranks(lengths, ranks, 10**6, pack=True)
    assert all(len(micros) == 1 for micros in plan)
    loads = [sum(micros) for micros in costs(plan, lengths)]
    assert max(loads) - min(loads) <= max(map(estimated_cost, lengths), default=0)


@given(LENGTHS.filter(bool), st.integers(1, 9), st.integers(40, 100))
def test_packed_rows_are_nearly_as_few_as_can_be(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_ranks(lengths, ranks, budget, pack=True)
    # Two rows that are not full together hold more than one budget, unless there are as few as ranks.
    least = math.ceil(math.ceil(2 * sum(lengths) / budget) / ranks)
    assert len(plan[0]) <= least + 1


def test_nine_sequences_on_eight_ranks_and_three_on_eight() -> None:
    for pack in (True, False):
        nine = plan_ranks([10] * 9, 8, 1000, pack=pack)
        assert sorted(len(micros[0]) for micros in nine) == [1] * 7 + [2]
        three = plan_ranks([5, 7, 6], 8, 1000, pack=pack)
        assert [micros[0] for micros in three] == [[1], [2], [0], [], [], [], [], []]


def test_attention_makes_one_long_sequence_as_dear_as_many_short_ones() -> None:
    # cost(L) = L (24576 + L): 24576 tokens in one sequence cost 24576 x 49152 = 1208 million, and twelve of
    # 2048 only 12 x 2048 x 26624 = 654 million, though they are as many tokens. The thirteenth to twentieth
    # share the long one's price: 20 x 2048 x 26624 = 1090 million.
    plan = plan_ranks([24_576] + [2048] * 20, 2, 10**6, pack=True)
    assert [len(micros[0]) for micros in plan] == [1, 20]


def test_the_longest_sequence_and_the_heaviest_micro_batch_come_first_on_every_rank() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 500) for _ in range(300)]
    for pack in (True, False):
        plan = plan_ranks(lengths, 3, 2000, pack=pack)
        found = costs(plan, lengths)
        assert all(micros == sorted(micros, reverse=True) for micros in found)
        # On a long list, what runs at the same time is alike, and so are the sums.
        loads = [sum(micros) for micros in found]
        assert max(loads) / min(loads) < (1.001 if pack else 1.05)
    packed = costs(plan_ranks(lengths, 3, 2000, pack=True), lengths)
    assert all(max(together) / min(together) < 1.01 for together in zip(*packed, strict=True))


@pytest.mark.parametrize("pack", [True, False])
def test_thousands_of_sequences_are_planned_in_no_time(pack: bool) -> None:
    chance = random.Random(1)
    lengths = [min(8192, int(chance.lognormvariate(6.5, 1.0)) + 1) for _ in range(8192)]
    started = time.process_time()
    plan = plan_ranks(lengths, 64, 16_384, pack=pack)
    assert time.process_time() - started < 2.0
    assert indices(plan) == list(range(8192))


@pytest.mark.parametrize(("lengths", "ranks", "budget"), [([1], 1, 0), ([0], 1, 4), ([1], 0, 4)])
def test_empty_sequences_budgets_and_groups_are_refused(lengths: list[int], ranks: int, budget: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_ranks(lengths, ranks, budget)
