"""What the registry records of a match.

- related prompts, and several answers to a prompt, are one outcome: their mean
- the record and the reason of a decision name groups only if prompts are related
- a match with further prompts continues an earlier one only if no group has changed
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.evaluation.match import MatchResult
from rlhf_core.evaluation.statistics import Comparison, Interval
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.stages.register import match_record
from rlhf_core.tracking.gate import Evaluation, Gate, Match, decide, log_evidence
from rlhf_core.types import PromptExample, RewardInput
from tests.support.evaluation_config import config_of

GATE = Gate(0.5, min_prompts=4)
CANDIDATE = Evaluation(0.9, 90, 10, judge="gold", judge_digest="synthetic-1")


def result_of(preferences: list[float], prompts: list[str], groups: dict[str, str]) -> MatchResult:
    interval = Intervals(
        config_of(), [PromptExample(name, "", (), group=groups.get(name, "")) for name in prompts]
    )
    of_prompts = interval.groups(RewardInput(name, "", "", (), (), True) for name in prompts)
    comparison = Comparison(interval.win_rate(preferences, of_prompts), tuple(preferences), of_prompts)
    return MatchResult(
        "gold", "synthetic-1", tuple(prompts), comparison, None, Interval(0.5, 0.4, 0.6), {}, {}, ()
    )


def reason(match: Match) -> str:
    return decide(CANDIDATE, CANDIDATE, match, gate=GATE, level=0.01).text


def test_a_group_is_one_outcome() -> None:
    preferences = [1.0, 0.0, 1.0, 1.0, 0.5, 0.0]
    prompts = ["p0", "p1", "p2", "p3", "p4", "p5"]
    record = match_record(
        result_of(preferences, prompts, {"p0": "a", "p2": "a", "p3": "a", "p1": "b", "p4": "b"})
    )
    # a: 1, 1, 1; b: -1, 0; p5: -1
    assert record.log_evidence == log_evidence([1.0, -0.5, -1.0])
    assert (record.prompts, record.wins, record.losses, record.grouped_prompts) == (3, 1, 2, 6)
    assert record.win_rate == pytest.approx(3.5 / 6)
    assert record.outcomes == ("p0 1 p2 1 p3 1", "p1 -1 p4 0", "p5 -1")
    assert "on 3 groups of 6 held-out prompts" in reason(record)
    assert decide(CANDIDATE, CANDIDATE, record, gate=GATE, level=0.01).rule == "min_prompts"
    assert Match(**record.record()).grouped_prompts == 6


def test_groups_of_one_prompt_leave_the_record_as_it_was() -> None:
    preferences, prompts = [1.0, 0.0, 1.0, 0.5], ["p0", "p1", "p2", "p3"]
    alone = match_record(result_of(preferences, prompts, {}))
    assert alone == match_record(
        result_of(preferences, prompts, {name: f"group of {name}" for name in prompts})
    )
    assert alone.outcomes == ("p0 1", "p1 -1", "p2 1", "p3 0")
    assert "grouped_prompts" not in alone.record()
    assert "on 4 held-out prompts" in reason(alone)


def test_several_answers_to_a_prompt_are_one_outcome() -> None:
    """The first answers to all prompts, then the second ones."""
    record = match_record(result_of([1.0, 0.0, 1.0, 0.5], ["p0", "p1", "p0", "p1"], {}))
    assert record.outcomes == ("p0 1 p0 1", "p1 -1 p1 0")
    assert record.log_evidence == log_evidence([1.0, -0.5])
    assert (record.prompts, record.wins, record.losses, record.grouped_prompts) == (2, 1, 1, 0)


@pytest.mark.parametrize(("group", "continues"), [("c", True), ("b", False)])
def test_a_match_is_continued_only_if_no_group_has_changed(group: str, continues: bool) -> None:
    groups = {"p0": "a", "p1": "a", "p2": "b", "p3": group}
    first = match_record(result_of([1.0, 1.0, 0.0], ["p0", "p1", "p2"], groups))
    longer = match_record(result_of([1.0, 1.0, 0.0, 1.0], ["p0", "p1", "p2", "p3"], groups))
    assert (longer.digest(first.prompts) == first.digest(first.prompts)) is continues


def test_the_first_champion_is_tested_by_group() -> None:
    table = {"win_rate": {"mean": 0.7}, "verdicts": {"wins": 5, "losses": 0, "ties": 1}}
    content: dict[str, Any] = {"policies": {"ppo": table}, "prompts": 48}
    grouped = Evaluation.of(content, "ppo")
    decision = decide(grouped, None, gate=GATE, level=0.01)
    # 1 / 32 for five wins of five
    assert not decision.champion and "on 6 groups of 48 prompts" in decision.text
    assert "p=0.031" in decision.text and "groups of prompts are needed" in decision.text
    assert Evaluation.from_json(grouped.to_json()) == grouped
    alone = Evaluation.of(content | {"prompts": 6}, "ppo")
    assert alone == replace(grouped, grouped_prompts=0) and "grouped_prompts" not in alone.to_json()
