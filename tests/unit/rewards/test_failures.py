"""Failures of a reward source on a batch.

- a batch is tried until every value is finite; a value that is not finite in the last try is missing
- a value that PPO cannot store in float32 is missing as well
- a try that fails does not lose the values of an earlier one
- bad samples are found by halving, and the others are scored once more together
- the search ends after a bounded number of failures; samples of parts that were not searched have no value
- failures that no sample can cause are not searched
- `abort` names the first sample by prompt and index; `mask` gives NaN and a warning
"""

import math
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.failures import (
    CodeError,
    Failure,
    Outcome,
    isolate,
    resolve_failures,
    score_with_retries,
)
from rlhf_core.types import RewardInput


def batch(count: int) -> list[RewardInput]:
    return [RewardInput(f"p{i}", "", str(i), (1,), (2,), True) for i in range(count)]


class Scripted:
    """Values are the place among the samples of the call; the whole call fails if it holds a sample of
    `bad`.
    """

    def __init__(self, *bad: int, searchable: bool = True) -> None:
        self.bad = {str(i) for i in bad}
        self.searchable = searchable
        self.calls: list[int] = []

    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        self.calls.append(len(samples))
        if found := [s.response for s in samples if s.response in self.bad]:
            raise Failure(f"cannot read {found[0]}", searchable=self.searchable)
        return Outcome.of([float(place) for place in range(len(samples))])


def test_a_batch_is_tried_until_every_value_is_finite() -> None:
    answers: list[Failure | Outcome] = [
        Failure("busy"),
        Outcome.of([1.0, math.nan]),
        Outcome.of([1.0, 2.0]),
        Outcome.of([9.0, 9.0]),
    ]

    def call(samples: Sequence[RewardInput]) -> Outcome:
        answer = answers.pop(0)
        if isinstance(answer, Failure):
            raise answer
        return answer

    assert score_with_retries("r", call, batch(2), attempts=5) == Outcome([1.0, 2.0])
    assert len(answers) == 1


def test_non_finite_value_of_the_last_try_is_missing() -> None:
    outcome = score_with_retries(
        "r", lambda samples: Outcome.of([0.5, math.inf, -math.inf]), batch(3), attempts=2
    )
    assert outcome.values[0] == 0.5
    assert [math.isnan(value) for value in outcome.values] == [False, True, True]
    assert outcome.reasons[1] == "it returned inf, but rewards must be finite"


def test_a_value_beyond_float32_is_missing() -> None:
    largest = float(np.finfo(np.float32).max)
    outcome = Outcome.of([largest, -largest, 2 * largest, -sys.float_info.max])
    assert outcome.values[:2] == [largest, -largest]
    assert all(map(math.isnan, outcome.values[2:]))
    assert outcome.reasons[3] == (
        "it returned -1.7976931348623157e+308, but rewards must be finite in float32"
    )


@pytest.mark.parametrize("searchable", [True, False])
def test_a_try_that_fails_keeps_the_values_of_an_earlier_one(searchable: bool) -> None:
    tries = []

    def call(samples: Sequence[RewardInput]) -> Outcome:
        tries.append(len(samples))
        if len(tries) == 3:
            raise Failure("busy", searchable=searchable)
        return Outcome([0.5, math.nan, 2.0], {1: "too long"})

    outcome = score_with_retries("r", call, batch(3), attempts=3)
    assert tries == [3, 3, 3]
    assert outcome.reasons == {1: "too long"}
    assert outcome.values[0] == 0.5 and outcome.values[2] == 2.0


def test_bad_samples_are_found_and_others_scored_together() -> None:
    call = Scripted(3, 12)
    outcome = score_with_retries("r", call, batch(16), attempts=2)
    assert outcome.reasons == {3: "cannot read 3", 12: "cannot read 12"}
    # The values count the places within one call of 14: a function that compares its batch sees all of it.
    assert [v for v in outcome.values if not math.isnan(v)] == [float(i) for i in range(14)]
    assert call.calls[:2] == [16, 16] and call.calls[-1] == 14


def test_search_is_bounded_and_the_rest_fails() -> None:
    call = Scripted(*range(256))
    outcome = isolate(call, batch(256), Failure("all"))
    assert len(outcome.reasons) == 256
    # 3 log2(256) = 24 failures; the halves of those on the way down are still tried.
    assert len(call.calls) <= 24 + 8


class WithCodeErrors(Scripted):
    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        try:
            return super().__call__(samples)
        except Failure:
            raise CodeError("it raised AttributeError: no respons (r.py:3)") from None


def test_a_function_with_an_error_in_its_code_is_not_called_again_and_again() -> None:
    call = WithCodeErrors(*range(64))
    outcome = score_with_retries("r", call, batch(64), attempts=3)
    assert call.calls == [64, 1, 1, 1]
    assert outcome.is_broken and set(outcome.reasons.values()) == {
        "it raised AttributeError: no respons (r.py:3)"
    }


def test_an_error_in_the_code_that_some_samples_show_is_searched_for() -> None:
    call = WithCodeErrors(5)
    outcome = score_with_retries("r", call, batch(64), attempts=3)
    assert list(outcome.reasons) == [5] and not outcome.is_broken
    assert call.calls.count(64) == 1, "a retry cannot help"


def test_a_failure_that_only_the_whole_batch_shows_leaves_no_values() -> None:
    def call(samples: Sequence[RewardInput]) -> Outcome:
        if len(samples) == 4:
            raise Failure("too many at once")
        return Outcome.of([0.0] * len(samples))

    outcome = score_with_retries("r", call, batch(4), attempts=1)
    assert outcome.reasons == dict.fromkeys(range(4), "too many at once")


def test_failure_that_is_not_searchable_is_not_searched() -> None:
    call = Scripted(0, searchable=False)
    outcome = score_with_retries("r", call, batch(8), attempts=3)
    assert call.calls == [8, 8, 8]
    assert len(outcome.reasons) == 8


def test_abort_names_the_first_sample_by_prompt_and_index() -> None:
    outcome = Outcome([0.0, math.nan, math.nan], {1: "it raised", 2: "later"})
    with pytest.raises(
        RewardError, match=r"reward r: 2 of 3 .* prompt p1 \(index 1\): it raised; on_error=mask would"
    ):
        resolve_failures("r", "abort", outcome, batch(3))


def test_mask_keeps_the_gap_and_names_it(caplog: pytest.LogCaptureFixture) -> None:
    outcome = Outcome([0.0, math.nan], {1: "it raised"})
    values = resolve_failures("r", "mask", outcome, batch(2))
    assert values[0] == 0.0 and math.isnan(values[1])
    assert "prompt p1 (index 1): it raised; left out" in caplog.text
    assert resolve_failures("r", "abort", Outcome([1.0]), batch(1)) == [1.0]
