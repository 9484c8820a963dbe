"""Assignment of sequences to micro-batches and ranks, from their lengths alone.

Every rank gets the same number of micro-batches, because collectives inside a forward pass (ZeRO-3) and at
its end need equal counts. Micro-batches that run at the same time have nearly the same cost, and so have the
ranks in total.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

_ATTENTION_EQUALS_LINEAR = 24_576
"""Tokens of a sequence at which causal attention costs as much as all linear layers: six times the width of
the model (Kaplan et al. 2020, table 1), here 4096. It only spreads the work, so it need not be exact.
"""


def plan_ranks(
    lengths: Sequence[int], ranks: int, budget: int, *, pack: bool = False
) -> list[list[list[int]]]:
    """Return the indices of `lengths` by rank and micro-batch, each once. The heaviest micro-batches and the
    longest sequences come first.

    A micro-batch holds at most `budget` tokens, padding included unless `pack`; a longer sequence is alone in
    its own. Any number of sequences goes on any number of ranks: where there are too few, micro-batches are
    empty.
    """
    if budget < 1 or ranks < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"ranks, budget and lengths must be at least 1; got {ranks}, {budget}, {min(lengths, default=1)}"
        )
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups = (_packed if pack else _padded)([lengths[i] for i in order], ranks, budget)
    costs = [estimated_cost(lengths[i]) for i in order]
    groups.sort(key=lambda group: sum([costs[place] for place in group]), reverse=True)
    # In snake order: groups that run at the same time have similar costs, and the rank with the most
    # expensive group of a round has the cheapest one of the next round.
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn, start in enumerate(range(0, len(groups), ranks)):
        row = groups[start : start + ranks]
        if turn % 2 == 1:
            row.reverse()
        for rank, group in enumerate(row):
            plan[rank].append([order[place] for place in group])
    return plan


def estimated_cost(length: int) -> int:
    """Return the cost of one sequence, in the unit of one token's linear layers."""
    return length * (_ATTENTION_EQUALS_LINEAR + length)


def _packed(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Return groups of nearly equal cost, as few as possible, in a multiple of `ranks`."""
    # No two sequences that are longer than half the budget fit into one group.
    long_sequences = sum([2 * length > budget for length in lengths])
    least = max(1, long_sequences, math.ceil(sum([min(length, budget) for length in lengths]) / budget))
    count = math.ceil(least / ranks)
    costs = [estimated_cost(length) for length in lengths]
    while True:
        groups = _filled(lengths, costs, count * ranks, budget)
        if groups is not None:
            return groups
        count += 1 + count // 100


def _filled(lengths: Sequence[int], costs: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Put each sequence, longest first, into the cheapest of `count` groups that has room. Return the groups,
    or None if one finds no room.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, index) for index in range(count)]  # (cost, tokens, group)
    for place, length in enumerate(lengths):
        full = []
        # An empty group has room for a sequence of any length.
        while heap and heap[0][1] and heap[0][1] + length > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, tokens, index = heap[0]
        groups[index].append(place)
        heapq.heapreplace(heap, (cost + costs[place], tokens + length, index))
        # They may have room for a shorter sequence.
        for entry in full:
            heapq.heappush(heap, entry)
    return groups


def _padded(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Return groups of neighbours in length, so that there is little padding; the largest are halved up to a
    multiple of `ranks`.
    """
    groups: list[list[int]] = []
    for place in range(len(lengths)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(place)
        else:
            groups.append([place])
    while not groups or len(groups) % ranks:
        splittable = [group for group in groups if len(group) > 1]
        if not splittable:
            groups.append([])
            continue
        group = max(splittable, key=lambda group: len(group) * lengths[group[0]])
        cut = min(
            range(1, len(group)),
            key=lambda cut: max(cut * lengths[group[0]], (len(group) - cut) * lengths[group[cut]]),
        )
        groups.remove(group)
        groups += [group[:cut], group[cut:]]
    return groups
