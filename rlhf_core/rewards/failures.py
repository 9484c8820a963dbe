"""Failures of external reward sources: retry a batch, find the samples that cause the failure, then mask or
abort.

the whole batch, 1 + retries times
  | raises each time                               | answers, some values not finite
halves of it, down to single samples: bad samples  |
the others once more, as one batch                 |
  +--------------------> Outcome <-----------------+
                           |
         on_error: abort -> RewardError      mask -> NaN, which the update leaves out
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tenacity import RetryCallState, Retrying, retry_if_exception_type, retry_if_result, stop_after_attempt

from rlhf_core.errors import RewardError
from rlhf_core.types import RewardInput

log = logging.getLogger(__name__)

_MAX_BAD_SAMPLES = 3
"""Approximate number of bad samples that the search finds in one batch. If there are more, all samples of the
parts that were not searched to the end count as failed.
"""

_LARGEST = 3.4028234663852886e38
"""The largest number of float32, in which PPO computes."""


class Failure(Exception):
    """A batch got no values.

    `searchable` means that single samples may be the cause, so smaller parts may work.
    """

    def __init__(self, message: str, *, searchable: bool = True) -> None:
        super().__init__(message)
        self.searchable = searchable


class Refused(Failure):
    """The batch was understood and refused. A retry cannot help, but a part of the batch may work."""


@dataclass(frozen=True)
class Outcome:
    """Values of one batch of n samples."""

    values: list[float]
    """(n,) NaN for a missing value."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Reason of each missing value, by index."""
    usage: dict[str, float] = field(default_factory=dict)
    """What the values cost, by name; see `RewardBatch.usage`."""

    @staticmethod
    def of(values: Sequence[float]) -> Outcome:
        """Return the outcome of n returned values. One that is not finite in float32 counts as missing."""
        finite, reasons = list(values), {}
        for index, value in enumerate(values):
            # Also false for NaN.
            if not abs(value) <= _LARGEST:
                finite[index] = math.nan
                where = " in float32" if math.isfinite(value) else ""
                reasons[index] = f"it returned {value}, but rewards must be finite{where}"
        return Outcome(finite, reasons)

    @staticmethod
    def failed(count: int, reason: str) -> Outcome:
        """Return the outcome without any value for `count` samples."""
        return Outcome([math.nan] * count, dict.fromkeys(range(count), reason))


Call = Callable[[Sequence[RewardInput]], Outcome]
"""Scores a batch; raises `Failure`."""


def score_with_retries(name: str, call: Call, samples: Sequence[RewardInput], attempts: int) -> Outcome:
    """Call with the whole batch until every value is finite, and return the last answer. If there is none,
    search for bad samples.

    Args:
        name: Name of the source, for the log.
        call: Scores a batch.
        samples: The batch.
        attempts: Maximum number of calls with the whole batch.
    """
    retrying = Retrying(
        retry=retry_if_exception_type(Failure) | retry_if_result(has_missing_values),
        stop=stop_after_attempt(attempts),
        after=lambda state: log_failure(f"reward {name}", state, attempts),
        retry_error_callback=last_result,
    )
    answers: list[Outcome] = []

    def attempt() -> Outcome:
        answers.append(call(samples))
        return answers[-1]

    try:
        return retrying(attempt)
    except Failure as failure:
        # An earlier try may have had values, of which some were missing.
        return answers[-1] if answers else isolate(call, samples, failure)


def has_missing_values(outcome: Outcome) -> bool:
    """Return whether a value is missing."""
    return bool(outcome.reasons)


def log_failure(name: str, state: RetryCallState, attempts: int) -> None:
    """Log an attempt that raised. `name` begins the line."""
    assert state.outcome is not None
    if state.outcome.failed:
        error = state.outcome.exception()
        log.warning("%s: try %d of %d failed: %s", name, state.attempt_number, attempts, error)


def last_result(state: RetryCallState) -> Any:
    """Return the result of the last attempt, or raise its error."""
    assert state.outcome is not None
    return state.outcome.result()


def isolate(call: Call, samples: Sequence[RewardInput], failure: Failure) -> Outcome:
    """Find the samples because of which `call` fails on the whole batch, and score the others.

    Halves are tried once each, down to single samples, until about 3 log2(n) calls have failed. The remaining
    samples are then scored in one call, because a function may compare the samples of its batch.
    """
    # On the way down to one bad sample, one half fails at each of the log2(n) levels.
    budget = _MAX_BAD_SAMPLES * math.ceil(math.log2(max(2, len(samples))))
    reasons: dict[int, str] = {}

    def search(part: Sequence[int], error: Failure) -> None:
        nonlocal budget
        is_final = len(part) == 1 or budget <= 0 or not error.searchable
        if is_final:
            reasons.update(dict.fromkeys(part, str(error)))
            return
        for half in (part[: len(part) // 2], part[len(part) // 2 :]):
            try:
                # Only whether it fails is used. Values of a part may differ from those of the whole batch.
                call([samples[i] for i in half])
            except Failure as failed:
                budget -= 1
                search(half, failed)

    search(range(len(samples)), failure)
    rest = [i for i in range(len(samples)) if i not in reasons]
    values = [math.nan] * len(samples)
    if rest:
        try:
            outcome = call([samples[i] for i in rest])
        except Failure as failed:
            outcome = Outcome.failed(len(rest), str(failed))
        for index, value in zip(rest, outcome.values, strict=True):
            values[index] = value
        for position, reason in outcome.reasons.items():
            reasons[rest[position]] = reason
    return Outcome(values, dict(sorted(reasons.items())))


def resolve_failures(
    name: str, on_error: Literal["abort", "mask"], outcome: Outcome, samples: Sequence[RewardInput]
) -> list[float]:
    """Return the (n,) values, NaN for those that the source masks.

    Raises `RewardError`, which names the first missing value, if the source aborts.
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
    log.warning("%s; left out", text)
    return outcome.values
