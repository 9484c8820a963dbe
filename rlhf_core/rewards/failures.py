"""What is done when code that is not ours fails on a batch: try again, find the samples at fault, then mask
or abort.

the whole batch, 1 + retries times
  | raises                                        | answers, some values not finite
halves of it, down to single samples: culprits    |
the others once more, as one batch                |
  +-------------------> Outcome <-----------------+
                           |
         on_error: abort -> RewardError      mask -> NaN, which the update leaves out
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf_core.errors import RewardError
from rlhf_core.types import RewardInput

logger = logging.getLogger(__name__)

_CULPRITS = 3
"""So many single samples at fault are found in one batch; with more, those not yet told apart all count as
failed.
"""


class Failure(Exception):
    """A batch got no values. `searchable`: one of its samples may be why, so that parts of it are worth a
    try.
    """

    def __init__(self, message: str, *, searchable: bool = True) -> None:
        super().__init__(message)
        self.searchable = searchable


class Refused(Failure):
    """The batch was understood and turned down: the same again cannot help, a part of it may."""


@dataclass(frozen=True)
class Outcome:
    """Of one batch of n samples."""

    values: list[float]
    """(n,) NaN where there is none."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why, by index, for each value that is missing."""

    @staticmethod
    def of(values: Sequence[float]) -> Outcome:
        """What came back: a value that is not finite is none."""
        reasons = {
            index: f"it returned {value}, but rewards must be finite"
            for index, value in enumerate(values)
            if not math.isfinite(value)
        }
        return Outcome(
            [math.nan if index in reasons else value for index, value in enumerate(values)], reasons
        )

    @staticmethod
    def failed(count: int, reason: str) -> Outcome:
        """No value for any of `count` samples."""
        return Outcome([math.nan] * count, dict.fromkeys(range(count), reason))


Call = Callable[[Sequence[RewardInput]], Outcome]
"""Scores a batch; raises `Failure`."""


def attempt(name: str, call: Call, samples: Sequence[RewardInput], tries: int) -> Outcome:
    """The whole batch until every value is finite, `tries` times at most; then the search for the samples at
    fault.
    """
    last: Outcome | Failure = Failure("it was never tried")
    for number in range(1, tries + 1):
        try:
            last = outcome = call(samples)
        except Failure as failure:
            logger.warning("reward %s: try %d of %d failed: %s", name, number, tries, failure)
            last = failure
        else:
            if not outcome.reasons:
                break
    return isolate(call, samples, last) if isinstance(last, Failure) else last


def isolate(call: Call, samples: Sequence[RewardInput], failure: Failure) -> Outcome:
    """The samples because of which `call` fails on the whole, and the values of the others.

    Halves are tried once each, down to single samples, until about 3 log2(n) tries have failed. The others
    are then called once more together, because a function may compare the samples of its batch.
    """
    budget = _CULPRITS * math.ceil(math.log2(max(2, len(samples))))
    blamed: dict[int, str] = {}

    def search(part: Sequence[int], why: Failure) -> None:
        nonlocal budget
        if len(part) == 1 or budget <= 0 or not why.searchable:
            blamed.update(dict.fromkeys(part, str(why)))
            return
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            try:
                call([samples[i] for i in half])
            except Failure as failed:
                budget -= 1
                search(half, failed)

    search(range(len(samples)), failure)
    rest = [i for i in range(len(samples)) if i not in blamed]
    outcome = Outcome([])
    if rest:
        try:
            outcome = call([samples[i] for i in rest])
        except Failure as failed:
            outcome = Outcome.failed(len(rest), str(failed))
    values = dict(zip(rest, outcome.values, strict=True))
    reasons = blamed | {rest[place]: reason for place, reason in outcome.reasons.items()}
    return Outcome([values.get(i, math.nan) for i in range(len(samples))], dict(sorted(reasons.items())))


def settle(
    name: str, on_error: Literal["abort", "mask"], outcome: Outcome, samples: Sequence[RewardInput]
) -> list[float]:
    """(n,) values, NaN where the source masks what failed. Raises `RewardError` that names the first if it
    aborts.
    """
    if not outcome.reasons:
        return outcome.values
    first = min(outcome.reasons)
    text = (
        f"reward {name}: {len(outcome.reasons)} of {len(samples)} responses have no value; the first is that"
        f" to prompt {samples[first].prompt_id} (index {first}): {outcome.reasons[first]}"
    )
    if on_error == "abort":
        raise RewardError(f"{text}; on_error=mask would leave such responses out")
    logger.warning("%s; left out", text)
    return outcome.values
