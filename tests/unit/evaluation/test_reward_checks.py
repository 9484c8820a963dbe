"""The checks of rewards, on rows of sums with scripted rewards.

- a sound verifier has no finding
- each failure of a call is named by its kind, and a source that hangs is not called again
- values that change from call to call, with the order or with the batch are found
- wrong, several and no answers that are accepted are found, with the response
- a reward that spoiled texts drive up, or that prefers rejected responses, is found in the sum only
- without a source with a weight, the sum is not checked
- sources that are asked get few rows, and two judges are compared
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from rlhf_core.config.rewards import (
    AnswerReward,
    AnyReward,
    KeywordsReward,
    LanguageModelReward,
    ModelReward,
    PythonReward,
    RemoteReward,
)
from rlhf_core.evaluation.reward_checks import score_card
from rlhf_core.evaluation.reward_checks.bench import ASKED_ROWS, Card
from rlhf_core.evaluation.reward_checks.material import Row
from rlhf_core.evaluation.reward_checks.score_card import check_sources
from rlhf_core.rewards.failures import Outcome
from rlhf_core.rewards.rules import evaluate_rule
from rlhf_core.types import PromptExample, RewardInput

Call = Callable[[Sequence[RewardInput]], Outcome]
ROWS = [
    Row(
        PromptExample(str(i), f"What is {i} plus {i + 20}?", (1,), {"answer": str(2 * i + 20)}),
        (f"We add {i} and {i + 20}.\n#### {2 * i + 20}",),
        (f"We add {i} and {i + 20}.\n#### {2 * i + 21}",),
        str(2 * i + 20),
    )
    for i in range(30, 60)
]
PYTHON = PythonReward(function="mine:score")


def right(sample: RewardInput) -> bool:
    found = re.findall(r"#### (\d+)", sample.response)
    return bool(found) and found[-1] == sample.meta["answer"]


def encode(text: str) -> list[int]:
    return [*text.encode(), 0]


def checked(monkeypatch: pytest.MonkeyPatch, call: Call, *sources: AnyReward) -> Card:
    monkeypatch.setattr(score_card, "_call_of", lambda source, model, opened: call)
    return check_sources(sources or (PYTHON,), ROWS, encode)


def scores(monkeypatch: pytest.MonkeyPatch, score: Callable[[RewardInput], float]) -> dict[str, str]:
    """Return the evidence of the findings by check."""
    card = checked(monkeypatch, lambda samples: Outcome.of([float(score(sample)) for sample in samples]))
    return {row.check: row.evidence for row in card.findings}


def test_a_sound_verifier_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scores(monkeypatch, right) == {}
    card = check_sources([AnswerReward()], ROWS, encode)
    assert (card.findings, card.verdict) == ([], "passes: 1 rewards on 30 prompts")
    assert {row.check for row in card.rows if row.result == "passes"} >= {
        "gold",
        "wrong",
        "hedge",
        "junk",
        "gameable",
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("it raised ValueError: no number (mine.py:3)", "crash"),
        ("its process ended with exit status -9 (closed)", "crash"),
        ("it gave no answer within 3 s", "hang"),
        ("it returned nan, but rewards must be finite", "finite"),
        ("it returned 3 values for 4 responses (list [])", "count"),
    ],
)
def test_a_failure_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch, reason: str, kind: str) -> None:
    calls = []

    def call(samples: Sequence[RewardInput]) -> Outcome:
        calls.append(samples)
        empty = [i for i, sample in enumerate(samples) if not sample.response]
        values = [math.nan if i in empty else float(right(sample)) for i, sample in enumerate(samples)]
        return Outcome(values, dict.fromkeys(empty, reason))

    card = checked(monkeypatch, call)
    assert [row.check for row in card.findings] == [kind]
    assert card.findings[0].evidence.startswith(f"{reason}: response ''")
    hung = [n for n, samples in enumerate(calls) if any(not sample.response for sample in samples)]
    assert (hung == [len(calls) - 1]) == (kind == "hang")


def test_values_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counting(samples: Sequence[RewardInput]) -> Outcome:
        seen.append(1)
        return Outcome([float(len(seen))] * len(samples))

    assert "repeatable" in {row.check for row in checked(monkeypatch, counting).findings}

    def by_place(samples: Sequence[RewardInput]) -> Outcome:
        return Outcome([right(sample) + 0.5 * (i == 0) for i, sample in enumerate(samples)])

    assert {"order", "batch"} <= {row.check for row in checked(monkeypatch, by_place).findings}


def test_accepted_wrong_answers_are_found_with_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    substring = scores(monkeypatch, lambda sample: sample.meta["answer"] in sample.response)
    assert set(substring) >= {"wrong", "hedge"}
    assert "with a digit before it" in substring["wrong"] and "#### 180" in substring["wrong"]
    empty = scores(monkeypatch, lambda sample: right(sample) or "####" not in sample.response)
    assert "accepted" in empty["junk"]
    clipped = scores(monkeypatch, lambda sample: right(sample) and len(sample.response) < 400)
    assert set(clipped) == {"text_around"}
    assert set(scores(monkeypatch, lambda sample: right(sample) and sample.prompt_id != "41")) == {"gold"}


def test_values_that_do_not_depend_on_the_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(scores(monkeypatch, lambda _: 1.0)) == {"constant", "unused"}
    assert "whitespace" in scores(monkeypatch, lambda sample: sample.response.endswith("\n"))
    assert "cut" in scores(monkeypatch, lambda sample: right(sample) + (not sample.finished))


def test_what_a_sum_pays_for_is_judged_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_of(source: AnyReward, model: object, opened: object) -> Call:
        score = right if source is PYTHON else partial(evaluate_rule, source)
        return lambda samples: Outcome.of([float(score(sample)) for sample in samples])

    monkeypatch.setattr(score_card, "_call_of", call_of)
    more = KeywordsReward(words=("we",), cap=1000)
    card = check_sources([PYTHON, more], ROWS, encode)
    found = {row.check: row for row in card.findings}
    assert found["gameable"].source == "total" and "repeats itself" in found["gameable"].evidence
    bounded = KeywordsReward(words=("we",), per_word=0.1, cap=1)
    assert check_sources([PYTHON, bounded], ROWS, encode).findings == []
    backwards = checked(monkeypatch, lambda samples: Outcome.of([-float(right(each)) for each in samples]))
    assert "total" in {row.source for row in backwards.findings if row.check == "pairs"}


def test_without_a_counted_source_the_sum_is_not_checked() -> None:
    card = check_sources([ModelReward(), KeywordsReward(words=("we",), cap=1000)], ROWS, encode)
    assert "gameable" not in {row.check for row in card.rows}
    assert card.verdict.endswith("model was not checked: its model is not trained yet")


def test_judges_get_few_rows_and_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RewardInput] = []

    def call_of(source: AnyReward, model: object, opened: object) -> Call:
        def call(samples: Sequence[RewardInput]) -> Outcome:
            asked.extend(samples)
            sign = 1 if source.used_name == "one" else -1
            return Outcome(
                [0.5 + sign * (0.5 if right(sample) else len(sample.response) / 1e4) for sample in samples]
            )

        return call

    monkeypatch.setattr(score_card, "_call_of", call_of)
    judges = [LanguageModelReward(name=name, url="http://a/v1", model="m") for name in ("one", "two")]
    card = check_sources(judges, ROWS, encode)
    assert len({sample.prompt_id for sample in asked}) == ASKED_ROWS
    found = {(row.check, row.source) for row in card.findings}
    assert {("judges", "total"), ("pairs", "two")} <= found
    assert ("pairs", "one") not in found
    assert check_sources(judges, ROWS, encode, ask=False).skipped == dict.fromkeys(
        ("one", "two"), "it is asked over the network"
    )


@pytest.mark.parametrize(
    "source",
    [PYTHON.model_copy(update={"needs_group": True}), RemoteReward(urls=("http://a/v1",), needs_group=True)],
)
def test_values_that_depend_on_the_group_are_no_dependence_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, source: AnyReward
) -> None:
    def rank(samples: Sequence[RewardInput]) -> Outcome:
        values = [float(right(each)) for each in samples]
        return Outcome.of([value - sum(values) / len(values) for value in values])

    checks = {row.check: row for row in checked(monkeypatch, rank, source).rows}
    assert checks["batch"].result == "not measured" and "needs_group" in checks["batch"].evidence


def test_a_judge_that_compares_is_skipped_because_it_has_no_value_for_one_response() -> None:
    judge = LanguageModelReward(url="http://a/v1", model="m", compare="pairs", max_tokens=64)
    card = check_sources([judge, AnswerReward()], ROWS, encode)
    assert {row.source for row in card.rows} == {"answer"} and not card.findings
    assert "a response has no value of its own" in card.skipped["language_model"]
