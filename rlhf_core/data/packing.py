"""Which sequences share a row or a rank: pure functions on lengths."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths`, grouped into rows of at most `budget` tokens; a longer sequence gets a row of its own.

    First fit in the given order: each sequence goes into the first row with room. Every index occurs once.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 token; got {budget}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"lengths must be at least 1 token; got {min(lengths)}")
    rows: list[list[int]] = []
    size = 1
    while size < len(lengths):
        size *= 2
    # A tree over the rows' free tokens finds the first row with room in O(log n); row i is leaf size + i.
    free = [0] * size + [budget] * len(lengths) + [0] * (size - len(lengths))
    for node in range(size - 1, 0, -1):
        free[node] = max(free[2 * node], free[2 * node + 1])
    for index, length in enumerate(lengths):
        wanted = min(length, budget)
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= wanted else 2 * node + 1
        row = node - size
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[node] -= wanted
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists whose summed lengths are nearly equal, each in ascending order.

    Longest first onto the lightest part. No part is empty while there are at least `parts` sequences.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1; got {parts}")
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, part = heapq.heappop(heap)
        groups[part].append(index)
        heapq.heappush(heap, (load + lengths[index], count + 1, part))
    return [sorted(group) for group in groups]
