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
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rlhf_core.config.rewards import SmokeRow
from rlhf_core.data.examples import prompt_id
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.types import RewardInput

log = logging.getLogger(__name__)

T = TypeVar("T")

_random = random.SystemRandom()
"""Without a state: the number of failures must not change what a run draws from `random`."""

_MAX_BAD_SAMPLES = 3
"""Approximate number of bad samples that the search finds in one batch. If there are more, all samples of the
parts that were not searched to the end count as failed.
"""

PAUSE_SECONDS = 1.0
"""Seconds before the first retry of a request to a service."""

_LARGEST = 3.4028234663852886e38
"""The largest number of float32, in which PPO computes."""


class Failure(Exception):
    """A call got no values.

    `searchable` means that single samples may be the cause, so smaller parts may work. A retry waits for at
    least `retry_after` seconds.
    """

    def __init__(self, message: str, *, searchable: bool = True, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.searchable = searchable
        self.retry_after = retry_after


class Refused(Failure):
    """The call was understood and refused. A retry cannot help, but a part of the batch may work."""

    def __init__(self, message: str, body: bytes = b"") -> None:
        super().__init__(message)
        self.body = body


class CodeError(Refused):
    """The user's function has raised an error that is in its code, such as an unknown name. If it does so for
    each of a few samples, no other one is tried.
    """


@dataclass(frozen=True)
class Outcome:
    """Values of one batch of n samples."""

    values: list[float]
    """(n,) NaN for a missing value."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Reason of each missing value, by index."""
    usage: dict[str, float] = field(default_factory=dict)
    """What the values cost, by name; see `RewardBatch.usage`."""
    is_broken: bool = False
    """Whether the function fails for every sample, because of an error in its code."""

    @staticmethod
    def of(values: Sequence[float]) -> Outcome:
        """Return the outcome of n returned values. One that is not finite in float32 counts as missing."""
        finite, reasons = list(values), {}
        for index, value in enumerate(values):
            # Also false for NaN.
            if not abs(value) <= _LARGEST:
                finite[index] = math.nan
                reasons[index] = f"it returned {value}, but rewards must be finite"
                if math.isfinite(value):
                    reasons[index] += " in float32"
        return Outcome(finite, reasons)

    def first(self, count: int) -> Outcome:
        """Return the outcome of the first samples, with the usage of all."""
        reasons = {index: reason for index, reason in self.reasons.items() if index < count}
        return Outcome(self.values[:count], reasons, self.usage)

    @staticmethod
    def of_groups(groups: Sequence[Sequence[int]], outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of a batch from those of its groups. `groups` has the indices of each group in
        the batch.
        """
        values = [math.nan] * sum(map(len, groups))
        reasons: dict[int, str] = {}
        for rows, outcome in zip(groups, outcomes, strict=True):
            for row, value in zip(rows, outcome.values, strict=True):
                values[row] = value
            reasons |= {rows[index]: reason for index, reason in outcome.reasons.items()}
        # One or two are too few to know, as in `_fails_always`.
        is_broken = len(outcomes) > 2 and all(each.is_broken for each in outcomes)
        return Outcome(values, reasons, is_broken=is_broken and len(set(reasons.values())) == 1)


def groups_of(samples: Sequence[RewardInput]) -> list[list[int]]:
    """Return the indices of the responses to each prompt, in the order of the prompts' first responses."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_id, []).append(index)
    return list(groups.values())


Call = Callable[[Sequence[RewardInput]], Outcome]
"""Scores a batch; raises `Failure`."""


def call_with_retries(
    name: str,
    call: Callable[[], T],
    attempts: int,
    *,
    pause: float = 0.0,
    is_incomplete: Callable[[T], bool] = lambda _: False,
) -> T:
    """Call until a result is complete, at most `attempts` times, and return the last result or raise its
    `Failure`. What is `Refused` is not repeated.

    Args:
        name: Begins the log line of a failed attempt.
        call: Is called without arguments.
        attempts: Maximum number of calls.
        pause: Seconds before the first retry, doubled for each further one, times a random factor.
        is_incomplete: Whether a result is worth another attempt.
    """
    attempt = 1
    while True:
        retry_after = 0.0
        try:
            result = call()
        except Refused:
            raise
        except Failure as failure:
            log.warning("%s: try %d of %d failed: %s", name, attempt, attempts, failure)
            if attempt == attempts:
                raise
            retry_after = failure.retry_after
        else:
            if attempt == attempts or not is_incomplete(result):
                return result
        # Clients that failed together must not retry together.
        wait = pause * 2.0 ** min(attempt - 1, 60) * _random.uniform(0.5, 1.5)
        time.sleep(max(wait, retry_after))
        attempt += 1


def score_with_retries(
    name: str,
    call: Call,
    samples: Sequence[RewardInput],
    attempts: int,
    *,
    pause: float = 0.0,
    search: Call | None = None,
) -> Outcome:
    """Call with the whole batch until every value is finite, and return the last answer. If there is none,
    search for bad samples.

    Args:
        name: Name of the source, for the log.
        call: Scores a batch.
        samples: The batch.
        attempts: Maximum number of calls with the whole batch.
        pause: As in `call_with_retries`.
        search: Is called in the search instead of `call`.
    """
    answers: list[Outcome] = []

    def attempt() -> Outcome:
        answers.append(call(samples))
        return answers[-1]

    try:
        return call_with_retries(
            f"reward {name}", attempt, attempts, pause=pause, is_incomplete=lambda found: bool(found.reasons)
        )
    except Failure as failure:
        if answers:  # an earlier try had values, of which some were missing
            return answers[-1]
        return isolate(search or call, samples, failure)


def isolate(call: Call, samples: Sequence[RewardInput], failure: Failure) -> Outcome:
    """Find the samples because of which `call` fails on the whole batch, and score the others.

    Halves are tried once each, down to single samples, until about 3 log2(n) calls have failed. The remaining
    samples are then scored in one call, because a function may compare the samples of its batch.
    """
    if isinstance(failure, CodeError) and _fails_always(call, samples, failure):
        always = dict.fromkeys(range(len(samples)), str(failure))
        return Outcome([math.nan] * len(samples), always, is_broken=True)
    # On the way down to one bad sample, one half fails at each of the log2(n) levels.
    budget = _MAX_BAD_SAMPLES * math.ceil(math.log2(max(2, len(samples))))
    reasons: dict[int, str] = {}

    def search(part: Sequence[int], error: Failure) -> None:
        nonlocal budget
        is_final = len(part) == 1 or budget <= 0 or not error.searchable
        if is_final:
            reasons.update(dict.fromkeys(part, str(error)))
            return
        # Without retries: the whole batch has had all of them, and a
        # function that hangs costs its whole `timeout` for each call.
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
            reasons |= dict.fromkeys(rest, str(failed))
        else:
            for position, index in enumerate(rest):
                values[index] = outcome.values[position]
            reasons |= {rest[position]: reason for position, reason in outcome.reasons.items()}
    return Outcome(values, dict(sorted(reasons.items())))


def _fails_always(call: Call, samples: Sequence[RewardInput], failure: CodeError) -> bool:
    """Return whether the first, the middle and the last sample fail with the same error. A call that must
    stay whole has failed as one.
    """
    if not failure.searchable:
        return True
    if len(samples) < 3:  # too few to know
        return False
    # Three and not all: a broken function must not be called hundreds of times (decision 8).
    for index in {0, len(samples) // 2, len(samples) - 1}:
        try:
            call([samples[index]])
        except Failure as failed:
            if str(failed) != str(failure):
                return False
        else:
            return False
    return True


def check_smoke(name: str, rows: Sequence[SmokeRow], call: Call) -> None:
    """Score the responses with known values.

    Raises:
        ConfigError: One has a wrong value.
        RewardError: One has no value, which another attempt may give it.
    """
    samples = []
    for row in rows:
        identity = prompt_id(row.prompt)
        samples.append(RewardInput(identity, row.prompt, row.response, (), (), row.finished, row.meta))
    outcome = call(samples) if samples else Outcome([])
    for index, (row, value) in enumerate(zip(rows, outcome.values, strict=True)):
        place = f"reward {name}: smoke.{index}, the response {row.response[:60]!r},"
        if index in outcome.reasons:
            raise RewardError(f"{place} has no value: {outcome.reasons[index]}")
        if not row.accepts(value):
            raise ConfigError(
                f"{place} must get {row.expected}; got {value:g}; correct the reward or the row"
            )


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
