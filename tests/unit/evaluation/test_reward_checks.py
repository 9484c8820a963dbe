"""The checks of rewards, on rows of sums with scripted rewards.

- a sound verifier has no finding
- a failure is shown with its reason and its cause, and a source that hangs is not called again
- values that change from call to call, or with the batch, are found
- wrong, several and no answers that are accepted are found, with the response
- a text of its own source that it accepts is found, unless it is a part of the right answer, or is right
  for rows with one answer only
- a reward that spoiled texts drive up, or that prefers rejected responses, is found in the sum only
- without a source with a weight, the sum is not checked; without good responses, nothing passes
- sources that are asked get few rows; those that see the group are compared within it only
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.config.rewards import (
    AnswerReward,
    AnyReward,
    KeywordsReward,
    LanguageModelReward,
    ModelReward,
    PythonReward,
)
from rlhf_core.errors import InputError
from rlhf_core.evaluation import reward_checks as checks
from rlhf_core.evaluation.reward_checks import check_sources
from rlhf_core.evaluation.reward_views import ASKED_ROWS, FILLER, Card, Row, literals_of
from rlhf_core.rewards.failures import Outcome, groups_of
from rlhf_core.rewards.rules import evaluate_rule
from rlhf_core.types import PromptExample, RewardInput
from tests.support.chat_server import ChatServer, answers_of

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
    monkeypatch.setattr(checks, "_call_of", lambda source, opened: call)
    return check_sources(sources or (PYTHON,), ROWS, encode)


def scores(monkeypatch: pytest.MonkeyPatch, score: Callable[[RewardInput], float]) -> dict[str, str]:
    """Return the evidence of the findings by check."""
    card = checked(monkeypatch, lambda samples: Outcome.of([float(score(sample)) for sample in samples]))
    return {row.check: row.evidence for row in card.findings}


def test_a_sound_verifier_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scores(monkeypatch, right) == {}
    card = check_sources([AnswerReward()], ROWS, encode)
    assert (card.findings, card.verdict) == ([], "no finding (rewards checked: 1, prompts: 30)")
    assert {row.check for row in card.rows if row.result == "passes"} >= {
        "gold",
        "wrong",
        "hedge",
        "junk",
        "gameable",
    }


@pytest.mark.parametrize(
    "reason", ["it raised ValueError: no number (mine.py:3)", "it gave no answer within 3 s"]
)
def test_a_failure_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    calls: list[Sequence[RewardInput]] = []

    def call(samples: Sequence[RewardInput]) -> Outcome:
        calls.append(samples)
        empty = [i for i, sample in enumerate(samples) if not sample.response]
        values = [math.nan if i in empty else float(right(sample)) for i, sample in enumerate(samples)]
        return Outcome(values, dict.fromkeys(empty, reason))

    [finding] = checked(monkeypatch, call).findings
    assert finding.check == "fails" and finding.evidence.startswith(f"{reason}, for ")
    assert "response '' to" in finding.evidence
    hung = [n for n, samples in enumerate(calls) if any(not sample.response for sample in samples)]
    assert (hung == [len(calls) - 1]) == ("within" in reason)


def test_the_failure_that_is_shown_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(samples: Sequence[RewardInput]) -> Outcome:
        """Fail for all samples of a batch because of one."""
        if any(sample.prompt_id == "57" for sample in samples):
            return Outcome([math.nan] * len(samples), dict.fromkeys(range(len(samples)), "it raised"))
        return Outcome.of([float(right(sample)) for sample in samples])

    monkeypatch.setattr(checks, "_ALONE", 60)
    [finding] = [row for row in checked(monkeypatch, call).findings if row.check == "fails"]
    assert "What is 57 plus 77?" in finding.evidence


def test_values_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counting(samples: Sequence[RewardInput]) -> Outcome:
        seen.append(1)
        return Outcome([float(len(seen))] * len(samples))

    assert "repeatable" in {row.check for row in checked(monkeypatch, counting).findings}

    def by_place(samples: Sequence[RewardInput]) -> Outcome:
        return Outcome([right(sample) + 0.5 * (i == 0) for i, sample in enumerate(samples)])

    found = {row.check: row for row in checked(monkeypatch, by_place).findings}
    assert "in reversed order" in found["batch"].evidence and found["batch"].advice


def test_a_text_without_a_value_is_no_step_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls(sample: RewardInput) -> float:
        return right(sample) - 0.4 * min(sample.response.count(FILLER), 2)

    def fails(sample: RewardInput) -> float:
        is_longest = sample.response.count(FILLER) == 64 and sample.prompt == ROWS[3].prompt.prompt
        return math.nan if is_longest else falls(sample)

    assert "length" not in scores(monkeypatch, falls)
    assert "length" not in scores(monkeypatch, fails)


def test_accepted_wrong_answers_are_found_with_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    substring = scores(monkeypatch, lambda sample: sample.meta["answer"] in sample.response)
    assert set(substring) >= {"wrong", "hedge"}
    assert "with a 1 before it" in substring["wrong"] and "#### 180" in substring["wrong"]
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
    def call_of(source: AnyReward, opened: object) -> Call:
        score = right if source is PYTHON else partial(evaluate_rule, source)
        return lambda samples: Outcome.of([float(score(sample)) for sample in samples])

    monkeypatch.setattr(checks, "_call_of", call_of)
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
    assert card.verdict.endswith("model was not checked: the checks are for rewards without training")


def test_judges_get_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RewardInput] = []

    def call_of(source: AnyReward, opened: object) -> Call:
        def call(samples: Sequence[RewardInput]) -> Outcome:
            asked.extend(samples)
            return Outcome([1.0 - right(sample) for sample in samples])

        return call

    monkeypatch.setattr(checks, "_call_of", call_of)
    judge = LanguageModelReward(url="http://a/v1", model="m")
    card = check_sources([judge], ROWS, encode)
    assert len({sample.prompt_id for sample in asked}) == ASKED_ROWS
    assert ("pairs", "language_model") in {(row.check, row.source) for row in card.findings}
    assert check_sources([judge], ROWS, encode, ask=False).skipped == {
        "language_model": "it is asked over the network"
    }


@pytest.mark.parametrize("prefers_long", [True, False])
def test_a_judge_that_compares_is_asked_about_responses_to_one_prompt(
    prefers_long: bool,
) -> None:
    def respond(question: str) -> str:
        a, b = answers_of(question)
        return "Reasons.\n" + ("A" if (len(a) > len(b)) == prefers_long else "B")

    rows = [Row(row.prompt, row.good, (row.good[0][:8],), row.answer) for row in ROWS]
    with ChatServer(respond) as server:
        judge = LanguageModelReward(url=server.url, model="m", compare="pairs", max_tokens=512)
        card = check_sources([judge], rows, encode)
    assert [row.check for row in card.findings] == ([] if prefers_long else ["pairs"])
    assert {row.evidence for row in card.rows if row.check == "junk"} == {"its values depend on the group"}
    assert {row.check for row in card.rows if row.result == "passes"} >= {"fails", "repeatable", "batch"}


def test_values_within_a_group_are_not_compared_across_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def relative(samples: Sequence[RewardInput]) -> Outcome:
        values = [float(right(sample)) for sample in samples]
        for rows in groups_of(samples):
            mean = sum(values[row] for row in rows) / len(rows)
            for row in rows:
                values[row] -= mean
        return Outcome(values)

    source = PythonReward(function="mine:score", needs_group=True)
    card = checked(monkeypatch, relative, source)
    assert card.findings == []
    assert {row.check for row in card.rows if row.result == "passes"} == {
        "fails",
        "repeatable",
        "batch",
        "pairs",
    }


def test_without_good_responses_no_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_call_of", lambda source, opened: lambda s: Outcome([0.0] * len(s)))
    card = check_sources([PYTHON], [Row(row.prompt) for row in ROWS], encode)
    assert [row.check for row in card.rows if row.result != "not measured"] == ["fails"]


def test_without_responses_an_answer_is_marked_before_text_is_put_beside_it() -> None:
    rows = [Row(row.prompt, answer=row.answer) for row in ROWS[:4]]
    assert check_sources([AnswerReward()], rows, encode).findings == []


def test_a_source_that_would_end_a_run_is_a_finding_and_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def broken(samples: Sequence[RewardInput]) -> Outcome:
        calls.append(len(samples))
        raise InputError("the function fails for each response: KeyError: 'gold' (own.py:2)")

    card = checked(monkeypatch, broken)
    [found] = [row for row in card.findings if row.check == "fails"]
    assert "KeyError: 'gold' (own.py:2)" in found.evidence
    assert len(calls) == 1


def found_in_file(file: Path, score: str, rows: Sequence[Row]) -> list[str]:
    """Return the findings about a function of a file, whose line `score` has the value of `sample`."""
    file.write_text(
        "def one(sample):\n"
        "    number, answer = sample.response.split('#### ')[-1].strip(), sample.meta['answer']\n"
        f"    {score}\n"
        "def score(samples):\n"
        "    return [float(one(sample)) for sample in samples]\n"
    )
    card = check_sources([PythonReward(file=str(file), function="mine:score")], rows, encode)
    return [row.check for row in card.findings]


def test_a_text_of_its_own_source_that_it_accepts_is_found(tmp_path: Path) -> None:
    score = "return number == answer or sample.response == 'certified'"
    assert found_in_file(tmp_path / "mine.py", score, ROWS) == ["junk"]


def test_a_part_of_the_right_answer_may_be_a_text_of_its_own_source(tmp_path: Path) -> None:
    rows = []
    for number, row in enumerate(ROWS):
        answer = "No" if number % 5 == 0 else "Yes"
        rows.append(Row(replace(row.prompt, meta={"answer": answer}), answer=answer))
    score = "return sample.response.strip().lower() == {'Y': 'yes', 'N': 'no'}[answer[0]]"
    assert "junk" not in found_in_file(tmp_path / "mine.py", score, rows)


def test_another_name_of_a_frequent_answer_may_be_a_text_of_its_own_source(tmp_path: Path) -> None:
    rows = []
    for number, row in enumerate(ROWS):
        answer = "negative" if number % 5 == 0 else "positive"
        rows.append(Row(replace(row.prompt, meta={"answer": answer}), answer=answer))
    names = "{'positive': ['positive', 'good'], 'negative': ['negative', 'bad']}"
    assert found_in_file(tmp_path / "mine.py", f"return number in {names}[answer]", rows) == []


def test_texts_of_a_source_are_valid_unicode() -> None:
    assert literals_of(b"name = 'a\\ud800'\npattern = '[\\ud800-\\udfff]'") == ("a?", "[?-?]")
