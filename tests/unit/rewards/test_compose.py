"""Composition of reward sources.

- the total is the weighted sum; raw values are kept by name
- batch normalisation: mean 0, population std 1, exactly 0 for equal values
- values of a model or a rule that are not finite are masked, and the log names the source and the prompt
- a masked response has no score, affects no other response, and is counted
- only scores of the reward model are clipped, and the clipped share is reported
- a source of weight 0 is measured and affects nothing, even if it fails
- a function that needs the group gets all responses to a prompt in one call
- responses with known values are checked before all others
- the metrics of a source cover the values that it has
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.rewards import KeywordsReward, LengthReward, ModelReward, PythonReward, SmokeRow
from rlhf_core.errors import ConfigError, InputError, RewardError
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, clipped_share, code_digests, normalize
from rlhf_core.types import RewardInput


def batch(*texts: str) -> list[RewardInput]:
    return [
        RewardInput(f"p{i}", "", text, (1,), (7,) * len(text.split()), True) for i, text in enumerate(texts)
    ]


HAPPY = KeywordsReward(type="keywords", words=("happy",), weight=0.5)
SHORT = LengthReward(type="length", name="short", target=1, tolerance=2, weight=-2.0)


def test_total_is_the_weighted_sum() -> None:
    with RewardComposer((ModelReward(type="model", weight=3.0), HAPPY, SHORT)) as composer:
        scored = composer.score(batch("happy", "so happy", ""), [0.5, -1.0, 0.0])
    assert scored.by_source == {
        "model": [0.5, -1.0, 0.0],
        "keywords": [1.0, 1.0, 0.0],
        "short": [1.0, 0.5, 0.5],
    }
    # 3*0.5 + 0.5*1 - 2*1 = 0;  3*-1 + 0.5 - 1 = -3.5;  0 + 0 - 1 = -1
    assert scored.total == [0.0, -3.5, -1.0]


def test_batch_normalisation_comes_before_the_weight_and_leaves_the_raw_values() -> None:
    source = ModelReward(type="model", normalize="batch", weight=10.0)
    with RewardComposer((source,)) as composer:
        scored = composer.score(batch("a", "b", "c", "d"), [1.0, 1.0, 3.0, 3.0])
    # mean 2, population std 1
    assert scored.total == pytest.approx([-10.0, -10.0, 10.0, 10.0], rel=1e-6)
    assert scored.by_source["model"] == [1.0, 1.0, 3.0, 3.0]


def test_only_reward_model_scores_are_clipped() -> None:
    rule = KeywordsReward(type="keywords", words=("happy",), cap=8)
    sources = (ModelReward(type="model", weight=2.0), rule)
    texts = batch(*["happy " * n for n in (3, 6, 8)])
    with RewardComposer(sources, score_clip=5.0) as composer:
        scored = composer.score(texts, [9.0, -6.0, 5.0])
    assert scored.total == [2 * 5.0 + 3, 2 * -5.0 + 6, 2 * 5.0 + 8]
    assert scored.by_source["model"] == [9.0, -6.0, 5.0], "what is logged is the output of the model"
    assert clipped_share(sources, scored.by_source, 5.0) == pytest.approx(2 / 3)
    assert (
        clipped_share((rule,), scored.by_source, 5.0) is None
        and clipped_share(sources, scored.by_source, None) is None
    )


def test_a_score_that_is_missing_is_not_clipped_to_one() -> None:
    with RewardComposer((ModelReward(type="model"),), score_clip=5.0) as composer:
        assert math.isnan(composer.score(batch("a", "b"), [math.nan, 1.0]).total[0])


def test_failure_of_weight_zero_removes_no_score() -> None:
    with RewardComposer((ModelReward(type="model", weight=0.0), HAPPY)) as composer:
        scored = composer.score(batch("happy", "so"), [math.nan, 3.0])
    assert scored.total == [0.5, 0.0]
    assert scored.metrics()["model/failed"] == 1.0


@pytest.mark.parametrize("value", [0.7, 0.1, -3.3, 0.0])
def test_equal_values_normalise_to_exactly_zero(value: float) -> None:
    assert normalize([value] * 7) == [0.0] * 7
    assert normalize([]) == []


def test_an_empty_batch_has_no_scores() -> None:
    with RewardComposer((HAPPY,)) as composer:
        assert composer.score([], None).total == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_masked(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    # The configuration refuses such a weight of a word.
    rule = KeywordsReward(type="keywords", name="long", words=("b",)).model_copy(update={"per_word": bad})
    sources = (ModelReward(type="model", name="judge"), rule)
    with RewardComposer(sources) as composer:
        found = composer.score(batch("a", "b"), [0.5, bad]).by_source
    assert found["judge"][0] == 0.5 and math.isnan(found["judge"][1]) and math.isnan(found["long"][1])
    for name in ("judge", "long"):
        assert re.search(
            rf"reward {name}: .* of 2 responses have no value; .* prompt p\d \(index \d\): it returned",
            caplog.text,
        )


def python(tmp_path: Path, **fields: Any) -> PythonReward:
    """Words of a response; one that says "bad" cannot be scored."""
    file = tmp_path / "r.py"
    file.write_text(
        "def f(samples):\n    return [{'bad': float('nan')}.get(s.response, len(s.response.split())) for s in"
        " samples]\n"
    )
    return PythonReward(type="python", function="r:f", file=str(file), retries=0, **fields)


def test_a_masked_response_has_no_score_and_changes_no_one_elses(tmp_path: Path) -> None:
    masking = python(tmp_path, on_error="mask", normalize="batch", weight=2.0)
    with RewardComposer((ModelReward(type="model"), masking)) as composer:
        scored = composer.score(batch("a", "bad", "a b c"), [0.5, 0.25, 0.0])
        only = composer.score(batch("a", "a b c"), [0.5, 0.0])
    assert math.isnan(scored.total[1])
    # Mean 2, population std 1 over the two that are known.
    assert [scored.total[0], scored.total[2]] == only.total == pytest.approx([-1.5, 2.0], rel=1e-6)
    assert scored.by_source["model"] == [0.5, 0.25, 0.0]


def test_abort_names_source_prompt_and_index(tmp_path: Path) -> None:
    with (
        RewardComposer((python(tmp_path, name="words"),)) as composer,
        pytest.raises(RewardError, match=r"reward words: 1 of 2 .* prompt p1 \(index 1\): it returned nan"),
    ):
        composer.score(batch("a", "bad"), None)


def test_source_of_weight_zero_cannot_fail_the_run(tmp_path: Path) -> None:
    watched = python(tmp_path, on_error="abort", weight=0.0)
    with RewardComposer((SHORT, watched)) as composer:
        scored = composer.score(batch("a", "bad"), None)
    with RewardComposer((SHORT,)) as composer:
        assert scored.total == composer.score(batch("a", "bad"), None).total
    assert math.isnan(scored.by_source["python"][1])


def test_a_function_that_needs_the_group_gets_all_responses_to_a_prompt_in_one_call(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text(
        "def f(samples):\n"
        "    if any(s.response == 'bad' for s in samples):\n        raise ValueError('bad')\n"
        "    return [max(len(s.response) for s in samples) - len(s.response) for s in samples]\n"
    )
    source = PythonReward(
        type="python", function="r:f", file=str(file), retries=0, needs_group=True, on_error="mask"
    )
    samples = [
        RewardInput(prompt, "", response, (1,), (2,), True)
        for prompt, response in (("p", "a"), ("q", "bad"), ("p", "abc"), ("q", "abc"), ("r", "ab"))
    ]
    with RewardComposer((source,)) as composer:
        found = composer.score(samples, None).total
    assert [found[i] for i in (0, 2, 4)] == [2.0, 0.0, 0.0]
    # A part of the group of q would get other values, so none is looked for.
    assert math.isnan(found[1]) and math.isnan(found[3])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"score": 2}, None),
        ({"min": 1, "max": 2.5}, None),
        ({"score": 3}, r"reward python: smoke\.1, the response 'a b', must get score 3; got 2; correct"),
        ({"min": 2.5}, "must get min 2.5; got 2"),
        ({"max": 1, "min": 0}, "must get min 0 and max 1; got 2"),
        ({"score": 0, "response": "bad"}, r"must get score 0; got nan \(it returned nan, but"),
    ],
)
def test_a_response_with_a_known_value_is_checked_before_all_others(
    tmp_path: Path, row: dict[str, Any], problem: str | None
) -> None:
    rows = [{"prompt": "p", "response": "a", "score": 1}, {"prompt": "p", "response": "a b", **row}]
    source = python(tmp_path, smoke=tuple(SmokeRow.model_validate(each) for each in rows))
    if problem is None:
        RewardComposer((source,)).close()
        return
    with pytest.raises(ConfigError, match=problem):
        RewardComposer((source,))


def test_the_metrics_of_a_source_are_over_the_values_it_has() -> None:
    nan = math.nan
    scored = RewardBatch([0.0] * 4, {"a": [1.0, nan, 3.0, nan], "b": [nan] * 4})
    assert scored.metrics() == {
        "a/failed": 2.0, "a/mean": 2.0, "a/std": 1.0, "a/min": 1.0, "a/max": 3.0, "b/failed": 4.0,
    }  # fmt: skip


def test_deviation_of_an_ensemble_is_the_mean_over_the_responses_it_is_known_of() -> None:
    scored = RewardBatch([0.0] * 3, {}, ensemble_std=[0.25, math.nan, 0.75])
    assert scored.metrics() == {"ensemble_std": 0.5}


def test_the_digest_of_a_source_is_found_by_its_place(tmp_path: Path) -> None:
    sources = (SHORT, python(tmp_path, name="words"))
    digests = {"ppo.rewards.1": "abc", "data.sft.0": "def"}
    assert code_digests(sources, digests) == {"words": "abc"}
    with pytest.raises(InputError, match=r"ppo\.rewards\.words: .* has changed since this run began"):
        RewardComposer(sources, code_digests(sources, digests))
