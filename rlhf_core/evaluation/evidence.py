"""Anytime-valid evidence that one policy beats another, and the budget of errors that tests of it share.

A match gives one outcome for each prompt: x_i = 1 if the candidate wins, -1 if it loses, 0 for a tie. The
null hypothesis is that the candidate is not better: E[x_i | x_1 ... x_(i-1)] <= 0. The capital of a gambler
who bets the share lambda on each win, as a mean over several lambda, is

    E_n = mean over lambda of  prod_(i <= n) (1 + lambda x_i)

This is a test supermartingale with E_0 = 1, so that P(max_n E_n >= 1 / level) <= level for any number of
prompts (Ville 1939; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting";
Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference"). A match can therefore be
continued with further prompts at the same level.

Levels of different matches add up (union bound), also where matches use the same prompts. `next_level`
assigns them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BETS = (0.1, 0.2, 0.4)
"""Values of lambda. Each is the best bet on a win rate of (1 + lambda) / 2 among prompts without a tie."""

YEAR = 365 * 86400.0
"""Seconds in which all levels add up to at most the budget."""

_AT_ONCE = 0.2
"""Share of the year's budget that is available at once. The rest accrues evenly over the year."""

_PER_TEST = 0.25
"""Share of what is available that one test spends. With weekly tests it converges to 1/65 of the budget."""


@dataclass(frozen=True)
class Spent:
    """A test that was made."""

    time: float
    """Seconds since 1970."""
    level: float


def log_evidence(outcomes: Sequence[float]) -> float:
    """Return max_n log E_n of `outcomes` (n,), each in [-1, 1]; 0 if there are none.

    Ties do not change the evidence.
    """
    x = np.asarray(outcomes, dtype=np.float64)
    if not x.size:
        return 0.0
    # In logarithms, because the capital of a long match exceeds the range of a float.
    capitals = np.stack([np.log1p(bet * x).cumsum() for bet in BETS])
    mixture = np.logaddexp.reduce(capitals, axis=0) - math.log(len(BETS))
    # 0 is the logarithm of E_0, which the maximum includes.
    return max(0.0, float(mixture.max()))


def prompts_for_evidence(win_rate: float, level: float) -> int | None:
    """Return the number of prompts with which this win rate has evidence of 1 / level; None if no number has.
    Both are without ties.

    The capital of the bet that suits the win rate best must be 1 / level times the number of bets, because
    the evidence is their mean.
    """
    gain = max(win_rate * math.log1p(bet) + (1 - win_rate) * math.log1p(-bet) for bet in BETS)
    return math.ceil((math.log(len(BETS)) - math.log(level)) / gain) if gain > 0 else None


def prompts_for_level(rate: float, level: float) -> int | None:
    """Return the number of prompts without a tie with which a win rate can be significant; None if it is not
    above one half.

    A win rate w increases the logarithm of the evidence by at most w ln 2w + (1 - w) ln 2(1 - w) for each
    prompt. With so many prompts, the p-value of an exact sign test is at most the level (Chernoff).
    """
    if rate <= 0.5:
        return None
    gain = sum(share * math.log(2 * share) for share in (rate, 1 - rate) if share > 0)
    return math.ceil(math.log(1 / level) / gain)


def next_level(spent: Iterable[Spent], now: float, budget: float) -> float:
    """Return the level of a test at time `now`, in seconds.

    The levels in any 365 days add up to at most `budget`, for any number of tests: a fifth of it is available
    at once, the rest accrues evenly, and each test spends a quarter of what is available.

    Args:
        spent: All earlier tests.
        now: Seconds since 1970.
        budget: Probability of a false rejection in a year.
    """
    capacity = _AT_ONCE * budget
    per_second = (1 - _AT_ONCE) * budget / YEAR
    available, last = capacity, -math.inf
    # A test of a host whose clock is ahead counts as made now. Otherwise the time until then would accrue.
    for tested, level in sorted((min(test.time, now), test.level) for test in spent):
        if last > -math.inf:
            available = min(capacity, available + (tested - last) * per_second)
        available = max(0.0, available - level)
        last = tested
    if last > -math.inf:
        available = min(capacity, available + max(0.0, now - last) * per_second)
    return _PER_TEST * available
