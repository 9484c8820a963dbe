"""Groups of related values: values of different groups are independent, those of one group are not.

The functions take lists of Python floats. They are here because PPO and the evaluation both use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")


def by_group(values: Sequence[T], groups: Sequence[str] | None) -> list[list[T]]:
    """Return the values (n,) of each group, in the order of their first values. None: each is its own.

    >>> by_group([1, 2, 3], ["a", "b", "a"])
    [[1, 3], [2]]
    """
    if groups is None:
        return [[value] for value in values]
    found: dict[str, list[T]] = {}
    for value, group in zip(values, groups, strict=True):
        found.setdefault(group, []).append(value)
    return list(found.values())


def effective_count(values: Sequence[float], groups: Sequence[str] | None, confidence: float = 0.95) -> float:
    """Return the number of independent values whose mean has the same standard error: n divided by the design
    effect (Kish 1965) and by the squared `widening`. If all values are equal, or there is one group, the
    result is the number of groups.

    The design effect, at least 1, is the variance of the mean of the groups' sums over that of single values.

    >>> values = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    >>> round(effective_count(values, ["a", "a", "b", "b", "c", "c", "d", "d"]), 1)
    1.9
    """
    grouped = by_group(values, groups)
    if len(grouped) == len(values):
        return float(len(values))
    mean = fmean(values)
    single = sum((value - mean) ** 2 for value in values)
    if len(grouped) == 1 or single == 0:
        return float(len(grouped))
    summed = sum((sum(group) - len(group) * mean) ** 2 for group in grouped)
    # Few groups can vary less than single values by chance. That must not give more values than there are.
    design_effect = max(1.0, summed / single)
    return len(values) / design_effect / widening(len(values), len(grouped), confidence) ** 2


def widening(count: int, groups: int, confidence: float) -> float:
    """Return the factor by which an interval over few groups is wider than one over as many values: the
    variance has groups - 1 degrees of freedom in place of count - 1.

    >>> round(widening(count=100, groups=5, confidence=0.95), 2)
    1.56
    """
    # Here, because importing scipy takes about a second of CPU time, and many callers have no groups.
    from scipy.special import stdtrit

    quantile = (1 + confidence) / 2
    # Each sample variance has its own correction: groups / (groups - 1), and count / (count - 1) for single
    # values. This is the root of their quotient.
    unbiased = math.sqrt(groups * (count - 1) / ((groups - 1) * count))
    return unbiased * float(stdtrit(groups - 1, quantile) / stdtrit(count - 1, quantile))
