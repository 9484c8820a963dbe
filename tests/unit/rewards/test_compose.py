"""Locks the composition of reward sources.

- the total is the weighted sum, raw values are kept by name;
- batch normalisation: mean 0, population std 1, exactly 0 for equal values;
- missing model scores, wrong counts and values that are not finite name the source and the prompt.
"""

import pytest

from rlhf_core.config.rewards import KeywordsReward, LengthReward, ModelReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.compose import RewardComposer, normalize
from rlhf_core.types import RewardInput


def batch(*texts: str) -> list[RewardInput]:
    return [RewardInput(f"p{i}", "", text, (1,), (7,) * len(text.split()), True) for i, text in enumerate(texts)]


HAPPY = KeywordsReward(type="keywords", words=("happy",), weight=0.5)
SHORT = LengthReward(type="length", name="short", target=1, tolerance=2, weight=-2.0)


def test_the_total_is_the_weighted_sum_and_raw_values_are_kept_by_name() -> None:
    with RewardComposer((ModelReward(type="model", weight=3.0), HAPPY, SHORT)) as composer:
        scored = composer.score(batch("happy", "so happy", ""), [0.5, -1.0, 0.0])
    assert scored.by_source == {"model": [0.5, -1.0, 0.0], "keywords": [1.0, 1.0, 0.0], "short": [1.0, 0.5, 0.5]}
    # 3*0.5 + 0.5*1 - 2*1 = 0;  3*-1 + 0.5 - 1 = -3.5;  0 + 0 - 1 = -1
    assert scored.total == [0.0, -3.5, -1.0]


def test_batch_normalisation_comes_before_the_weight_and_leaves_the_raw_values() -> None:
    source = ModelReward(type="model", normalize="batch", weight=10.0)
    with RewardComposer((source,)) as composer:
        scored = composer.score(batch("a", "b", "c", "d"), [1.0, 1.0, 3.0, 3.0])
    # mean 2, population std 1
    assert scored.total == pytest.approx([-10.0, -10.0, 10.0, 10.0], rel=1e-6)
    assert scored.by_source["model"] == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize("value", [0.7, 0.1, -3.3, 0.0])
def test_equal_values_normalise_to_exactly_zero(value: float) -> None:
    assert normalize([value] * 7) == [0.0] * 7
    assert normalize([]) == []


def test_an_empty_batch_has_no_scores() -> None:
    with RewardComposer((HAPPY,)) as composer:
        assert composer.score([], None).total == []


def test_a_model_reward_without_scores_is_an_error() -> None:
    with RewardComposer((ModelReward(type="model"),)) as composer, pytest.raises(RewardError, match="reward model: no"):
        composer.score(batch("a"), None)


def test_a_wrong_count_of_scores_is_an_error() -> None:
    with (
        RewardComposer((ModelReward(type="model"),)) as composer,
        pytest.raises(RewardError, match=r"1 values .* 2 resp"),
    ):
        composer.score(batch("a", "b"), [1.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_names_source_and_prompt(bad: float) -> None:
    source = ModelReward(type="model", name="judge")
    with (
        RewardComposer((source,)) as composer,
        pytest.raises(RewardError, match=f"reward judge: .* prompt p1 is {bad}"),
    ):
        composer.score(batch("a", "b"), [0.0, bad])
