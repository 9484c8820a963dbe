"""The helpers for tests of reward functions.

- a reward input has the fields of a real one
- the result of a function is checked as in a run
"""

from __future__ import annotations

import pytest

from rlhf_core.testing import reward_input, run_reward
from rlhf_core.types import RewardInput


def exact_match(samples: list[RewardInput]) -> list[float]:
    return [float(sample.response == sample.meta["answer"]) for sample in samples]


def test_reward_function_is_called_with_reward_inputs() -> None:
    samples = [
        reward_input("What is 2 + 2?", "4", meta={"answer": "4"}),
        reward_input("What is 2 + 3?", "4", meta={"answer": "5"}, finished=False),
    ]
    assert run_reward(exact_match, samples) == [1.0, 0.0]
    assert samples[0].response_ids == (ord("4"),) and samples[0].prompt_id == "What is 2 + 2?"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "1 values for 2 responses"),
        ("ab", "a list of 2 floats is needed"),
        ([1.0, "b"], "for response 1"),
        ([float("nan"), 1.0], "it returned nan for response 0"),
    ],
)
def test_invalid_results_are_refused(result: object, message: str) -> None:
    samples = [reward_input("a", "b"), reward_input("a", "c")]
    with pytest.raises(ValueError, match=message):
        run_reward(lambda _: result, samples)
