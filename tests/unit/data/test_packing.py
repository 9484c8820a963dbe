"""Packing and balancing.

Locked here:
- every sequence is in exactly one row, and no row is over the budget, but for a sequence longer than it, alone;
- packing is first fit in the given order (worked example by hand, and a slow reference);
- balancing loses nothing, leaves no part empty while sequences suffice, and is within one sequence of even.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.packing import balance, pack_rows

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def slow_first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[i] for i in row) + length <= budget:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


def test_a_sequence_goes_into_the_first_row_with_room() -> None:
    # Budget 10: 6 opens row 0; 5 opens row 1; 4 fits row 0 (6+4); 12 is alone; 5 fits row 1 (5+5); 1 opens row 3.
    assert pack_rows([6, 5, 4, 12, 5, 1], 10) == [[0, 2], [1, 4], [3], [5]]


@given(LENGTHS, st.integers(1, 50))
def test_packing_equals_a_slow_first_fit_and_keeps_the_budget(lengths: list[int], budget: int) -> None:
    rows = pack_rows(lengths, budget)
    assert rows == slow_first_fit(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= budget for row in rows)


@given(LENGTHS, st.integers(1, 8))
def test_parts_hold_every_sequence_once_and_are_nearly_even(lengths: list[int], parts: int) -> None:
    groups = balance(lengths, parts)
    assert len(groups) == parts
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in groups)
    if len(lengths) >= parts:
        assert all(groups)
    loads = [sum(lengths[i] for i in group) for group in groups]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize(("lengths", "budget"), [([1], 0), ([0], 4)])
def test_empty_sequences_and_budgets_are_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        pack_rows(lengths, budget)
    with pytest.raises(ValueError, match="parts"):
        balance(lengths, 0)
