"""The choice of the best policy version.

- evaluations are due before the first step, after the last one and every `ppo.evaluate_every` steps between
- a version replaces the best one if its objective is higher by more than the standard error of the difference
  over the same prompts; never version 0, which is the SFT model, and none above the KL limit or without a
  finite objective
- no version is the best after reward model and judge did not agree any more
- the highest of many noisy means does not replace an earlier version that is as good
- training ends after `ppo.stop_patience` evaluations without a gain
- a restart keeps evaluations, best version and counter
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.watching.selection import HeldOutResult, Selection, paired_change


def selection(**ppo: Any) -> Selection:
    return Selection(config_from_tree({"ppo": {"steps": 25, **ppo}}, "test").ppo)


def evaluation(objective: float, kl: float | None = 1.0, noise: Sequence[float] = ()) -> HeldOutResult:
    """The evaluation of a version over four prompts; `noise` is added to their values."""
    values = [objective + error for error in noise or (0.0, 0.0, 0.0, 0.0)]
    metrics = {"eval/objective": sum(values) / len(values)}
    return HeldOutResult(metrics if kl is None else {**metrics, "eval/kl": kl}, values)


@pytest.mark.parametrize(
    ("ppo", "due"),
    [
        ({"evaluate_every": 0}, []),
        ({}, [*range(0, 25, 2), 25]),
        ({"evaluate_every": 10}, [0, 10, 20, 25]),
        ({"evaluate_every": 100}, [0, 25]),
    ],
)
def test_when_an_evaluation_is_due(ppo: dict[str, Any], due: list[int]) -> None:
    chosen = selection(**ppo)
    assert [version for version in range(26) if chosen.is_due(version)] == due


def test_a_version_is_evaluated_once() -> None:
    chosen = selection(publish="best")
    chosen.add(2, evaluation(0.0))
    assert not chosen.is_due(2)


def test_the_best_has_the_highest_objective_and_ties_go_to_the_earlier() -> None:
    chosen = selection(publish="best")
    steps = [(0, 9.0), (2, 0.5), (4, 0.7), (6, 0.7), (8, math.nan), (10, 0.6)]
    assert [chosen.add(version, evaluation(objective)) for version, objective in steps] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    assert chosen.best == 4


def test_a_gain_within_the_standard_error_does_not_replace_an_earlier_version() -> None:
    noise = (0.3, -0.3, 0.1, -0.1)  # the differences have a standard error of 0.129
    chosen = selection(publish="best")
    chosen.add(2, evaluation(0.5))
    assert not chosen.add(4, evaluation(0.62, noise=noise)) and chosen.best == 2
    assert chosen.add(6, evaluation(0.64, noise=noise)) and chosen.best == 6


def test_the_same_noise_on_the_same_prompts_hides_no_gain() -> None:
    noise = (3.0, -3.0, 1.0, -1.0)
    chosen = selection(publish="best")
    chosen.add(2, evaluation(0.5, noise=noise))
    assert chosen.add(4, evaluation(0.51, noise=noise))


def test_the_highest_of_many_noisy_means_is_not_later_than_the_gain() -> None:
    """The objective rises until version 10 and then stays; the highest mean is usually much later."""
    draws, chosen = np.random.default_rng(0), selection(publish="best", evaluate_every=1)
    highest = 1
    for version in range(1, 26):
        found = evaluation(0.1 * min(version, 10), noise=draws.normal(0.0, 0.5, 400).tolist())
        chosen.add(version, found)
        objectives = {step: metrics["eval/objective"] for step, metrics in chosen.evaluations.items()}
        highest = max(objectives, key=lambda step: objectives[step])
    assert chosen.best is not None and 9 <= chosen.best <= 12 < highest


def with_correlation(version: int, objective: float, value: float) -> HeldOutResult:
    found = evaluation(objective, kl=float(version**2))
    agreement = {"eval/judge_correlation": value, "eval/judge_correlation_error": 0.02}
    return HeldOutResult({**found.metrics, **agreement}, found.objectives)


def test_versions_after_a_divergence_are_not_the_best_although_the_judge_scores_them_higher() -> None:
    rows = [(0, 0.0, 0.8), (2, 0.5, 0.6), (4, 0.7, 0.2), (6, 1.2, 0.2), (8, 1.5, 0.7)]
    first, off = selection(publish="best"), selection(publish="best", publish_min_agreement=0.0)
    for version, objective, value in rows:
        first.add(version, with_correlation(version, objective, value))
        off.add(version, with_correlation(version, objective, value))
        if version == 6:
            state = json.loads(json.dumps(first.state_dict()))
            first = selection(publish="best")
            first.load_state_dict(state)
    assert (first.best, off.best) == (4, 8)


def test_the_earliest_version_is_the_best_if_all_over_optimise() -> None:
    chosen = selection(publish="best")
    for version, value in ((0, 0.8), (2, 0.1), (4, 0.1), (6, 0.7)):
        chosen.add(version, with_correlation(version, float(version), value))
    assert chosen.best == 2


def test_a_difference_is_over_the_prompts_that_both_versions_have() -> None:
    nan = math.nan
    # Differences 1, 2 and 3: mean 2, standard deviation 1.
    assert paired_change([0.0, 0.0, 0.0, nan, 9.0], [1.0, 2.0, 3.0, 9.0, nan]) == (2.0, 1 / math.sqrt(3))
    assert all(math.isnan(value) for value in paired_change([0.0, nan], [1.0, 1.0]))
    apart = paired_change([0.0, 0.0, 0.0, nan, 9.0], [1.0, 2.0, 3.0, 9.0, nan], list("abcde"))
    assert apart == (2.0, 1 / math.sqrt(3))


def test_a_gain_on_related_prompts_counts_once() -> None:
    # Differences 4 and -1, eight times each: the error is 2.5 for two prompts, and 0.65 for 16 of them.
    before, after = evaluation(0.0, noise=[0.0] * 16), evaluation(0.0, noise=[4.0] * 8 + [-1.0] * 8)
    for groups, best in ((None, 4), (["a"] * 8 + ["b"] * 8, 2)):
        chosen = selection(publish="best")
        chosen.add(2, before)
        chosen.add(4, replace(after, groups=groups))
        assert chosen.best == best


def test_a_version_whose_kl_is_not_known_is_not_the_best() -> None:
    chosen = selection(publish="best")
    assert not chosen.add(2, evaluation(9.0, kl=None))
    assert chosen.add(4, evaluation(0.0)) and chosen.best == 4


@pytest.mark.parametrize(
    ("ppo", "best"), [({}, 3), ({"publish_max_kl": 8.0}, 2), ({"kl": {"target": 2.0}}, 2)]
)
def test_a_version_above_the_kl_limit_is_not_the_best(ppo: dict[str, Any], best: int) -> None:
    chosen = selection(publish="best", **ppo)
    for version, kl in ((1, 1.0), (2, 8.0), (3, 12.0)):
        chosen.add(version, evaluation(float(version), kl))
    assert chosen.best == best


def test_without_an_acceptable_version_there_is_no_best() -> None:
    chosen = selection(publish="best", publish_max_kl=1.0)
    chosen.add(1, evaluation(1.0, kl=2.0))
    chosen.add(2, evaluation(1.0, kl=float("nan")))
    assert chosen.best is None


def test_training_ends_after_evaluations_without_a_gain() -> None:
    chosen = selection(publish="best", stop_patience=2)
    finished = []
    for version, objective in enumerate([5.0, 0.1, 0.0, 0.2, 0.2, 0.1]):
        chosen.add(version, evaluation(objective))
        finished.append(chosen.is_finished)
    assert finished == [False, False, False, False, False, True]


def test_a_restart_keeps_the_selection(tmp_path: Path) -> None:
    first, second = (selection(publish="best", stop_patience=2) for _ in range(2))
    for version, objective in ((0, 0.0), (1, 0.4), (2, 0.3)):
        found = evaluation(objective)
        first.add(version, replace(found, columns={"judge": found.objectives}))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert not second.add(3, evaluation(0.4)) and second.is_finished
    second.write(tmp_path / "evaluations.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["version"], row["best"]) for row in rows] == [(0, False), (1, True), (2, False), (3, False)]


def test_the_scores_of_each_prompt_are_written_also_after_a_restart(tmp_path: Path) -> None:
    first, second = selection(), selection()
    first.add(0, replace(evaluation(0.0), columns={"score": [1.0, math.nan], "kl": [0.0, 0.5]}))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.add(3, replace(evaluation(0.0), columns={"score": [2.0, 3.0], "kl": [1.0, 1.5]}))
    second.write_columns(tmp_path / "columns.jsonl")
    assert [json.loads(line) for line in (tmp_path / "columns.jsonl").read_text().splitlines()] == [
        {"version": 0, "score": [1.0, None], "kl": [0.0, 0.5]},
        {"version": 3, "score": [2.0, 3.0], "kl": [1.0, 1.5]},
    ]


def test_the_error_of_a_change_is_paired_with_the_version_where_the_measure_was_highest() -> None:
    chosen = selection(publish="best")
    judge = [[0.0, 5.0], [1.0, 6.0], [0.0, 5.5], [0.9, 6.0]]
    for version, values in enumerate(judge):
        chosen.add(version, replace(evaluation(0.0), columns={"judge": values}))
    errors = [found["eval/judge_change_error"] for found in chosen.evaluations.values()]
    # Of the differences to version 1, (-1, -0.5) and (-0.1, 0): half of their distance.
    assert errors == pytest.approx([0.0, 0.0, 0.25, 0.05])


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"stop_patience": 2, "evaluate_every": 0}, "need evaluations; got ppo.evaluate_every=0"),
        ({"publish": "best", "evaluate_every": 0}, "need evaluations; got ppo.evaluate_every=0"),
        ({"publish": "best", "ema_decay": 0.9}, "leave one of them out"),
        ({"publish": "average"}, "got no ppo.ema_decay"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(ppo: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selection(**ppo)
