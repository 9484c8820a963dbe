"""Regression sets.

- a set falls unless the lower bound of the paired difference is above -margin
- a set of right or wrong answers that is too small for its margin is a warning, before the run and in the
  result
- its rows are read as prompts, each text once, and every row must be usable; the artifact has the prompts
- the policy of DPO has a column of its own, and can fail a set that PPO's policy passes
- the reward source of the set scores both models' answers, and prompts without a value are left out
- sources and code of a set are in the keys of the evaluation and of no earlier stage
- settings without effect are refused
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stage_key
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.data.dataset import write
from rlhf_core.data.prompt_sets import with_room
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import DataError
from rlhf_core.evaluation.regression import compare_on_sets, load_sets, prepare_sets
from rlhf_core.evaluation.statistics import failed_sets, regression_differences
from rlhf_core.evaluation.summary import Intervals, interval_metrics
from rlhf_core.pipeline import STAGES
from rlhf_core.preflight import check
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.testing import stage_context
from rlhf_core.types import PromptExample, RewardInput, SFTExample, StageContext

RECORD = AnswerRecord("evaluation", RecordConfig(level="none"), int)
ROWS = [{"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(40)]


def config_of(path: Path, **item: Any) -> PipelineConfig:
    each = {"name": "sums", "path": str(path), "reward": {"type": "answer"}, "margin": 0.1} | item
    tree = {"run": {"home": str(path.parent), "device": "cpu"}, "evaluate": {"regression": [each]}}
    return PipelineConfig.model_validate_json(json.dumps(tree))


def rows_file(folder: Path, rows: list[Any]) -> Path:
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    train_tokenizer([row["prompt"] for row in ROWS], 300).save_pretrained(tmp_path / "data" / "tokenizer")
    write(tmp_path / "data", "prompts", "train", [PromptExample("other", "Another prompt", (1,))])
    (tmp_path / "data" / "data_card.json").write_text(json.dumps({"limits": {"longest_prompt": 64}}))
    write(tmp_path / "data", "pairs", "train", [])
    write(tmp_path / "data", "sft", "train", [])
    return stage_context(tmp_path, inputs={"data": tmp_path / "data", "evaluate": tmp_path / "output"})


def answers(correct: int, rows: list[dict[str, str]] = ROWS) -> list[RewardInput]:
    """The first answers are correct."""
    return [
        RewardInput(str(i), row["prompt"], row["answer"] if i < correct else "no", (), (1,), True, row)
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("ours", "margin", "falls"),
    [
        (40, 0.1, False),
        (30, 0.1, False),  # the same answers: no difference on any prompt
        (29, 0.1, False),  # -0.025, interval to -0.075
        (26, 0.1, True),  # -0.1
        (26, 0.3, False),
    ],
)
def test_a_set_falls_if_the_lower_bound_reaches_the_margin(
    ours: int, margin: float, falls: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path / "sums.jsonl", margin=margin)
    responses = {"sft": {"sums": answers(30)}, "ppo": {"sums": answers(ours)}}
    found = compare_on_sets(config, responses, "sft", {}, Intervals(config), RECORD)
    assert found["sums"]["sft"]["mean"] == 0.75 and found["sums"]["ppo"]["mean"] == ours / 40
    difference = found["sums"]["difference"]["ppo"]
    assert difference["mean"] == pytest.approx((ours - 30) / 40)
    names = failed_sets(regression_differences(found, "ppo"))
    assert bool(names) == falls
    if falls:
        assert names[0].startswith("sums -0.100 [-0.2") and names[0].endswith("(margin 0.1)")
    metrics = interval_metrics("sums", found["sums"])
    assert metrics["sums/difference/mean"] == difference["mean"]
    assert {name.split("/")[1] for name in metrics} == {"sft", "ppo", "difference"}


def small_sets(config: PipelineConfig) -> list[str]:
    return [warning for warning in check(config) if "needs about" in warning]


@pytest.mark.parametrize(("count", "is_small"), [(36, True), (37, False)])
def test_a_set_that_is_too_small_for_its_margin_is_a_warning(
    count: int, is_small: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ln(2 / 0.05) / 0.1 = 36.9."""
    config = config_of(rows_file(tmp_path, [*ROWS[:count], ROWS[0]]))
    warnings = small_sets(config)
    assert len(warnings) == is_small
    if is_small:
        assert warnings[0].startswith("evaluate.regression.0.margin: 0.1 needs about 37 prompts, but ")
        assert f"sums.jsonl has {count}: a policy" in warnings[0]
    responses = {name: {"sums": answers(30, ROWS[:count])} for name in ("sft", "ppo")}
    assert (
        compare_on_sets(config, responses, "sft", {}, Intervals(config), RECORD)["sums"]["too_few"]
        is is_small
    )
    assert ("36 prompts are too few for its margin of 0.1" in caplog.text) is is_small
    shares = config_of(tmp_path / "sums.jsonl", reward={"type": "relevance"})
    assert not small_sets(shares), "a loss can be smaller than a whole answer"


def test_the_policy_of_dpo_has_a_column_and_a_difference_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path / "sums.jsonl", margin=0.1)
    responses = {"sft": {"sums": answers(30)}, "ppo": {"sums": answers(36)}}
    two = compare_on_sets(config, responses, "sft", {}, Intervals(config), RECORD)["sums"]
    three = compare_on_sets(
        config, {**responses, "dpo": {"sums": answers(24)}}, "sft", {}, Intervals(config), RECORD
    )["sums"]
    own, difference = two.pop("difference"), three["difference"]
    assert {name: three[name] for name in two} == two, "the results of PPO's policy do not change"
    assert difference["ppo"] == own["ppo"] and set(difference) == {"ppo", "dpo"}
    assert three["dpo"]["mean"] == 24 / 40 and difference["dpo"]["mean"] == pytest.approx(-6 / 40)
    fallen = {}
    for model in ("ppo", "dpo"):
        fallen[model] = failed_sets(regression_differences({"sums": three}, model))
    assert not fallen["ppo"] and fallen["dpo"][0].startswith("sums -0.150")
    assert interval_metrics("sums", three)["sums/difference_dpo/low"] == difference["dpo"]["low"]


def test_the_artifact_has_the_prompts_of_each_set(
    context: StageContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(rows_file(tmp_path, [*ROWS, ROWS[3]]))
    with caplog.at_level(logging.WARNING):
        sets = prepare_sets(config, context)
    assert [prompt.prompt for prompt in sets["sums"]] == [row["prompt"] for row in ROWS]
    assert sets["sums"][2].meta["answer"] == "4" and load_sets(config, context.output) == sets
    assert not caplog.records
    trained = stage_context(tmp_path / "again", inputs=context.inputs)
    write(context.inputs["data"], "prompts", "train", sets["sums"][:5])
    demonstrated = sets["sums"][4:7]
    demonstrations = [
        SFTExample((*prompt.input_ids, 5), (*[0] * len(prompt.input_ids), 1)) for prompt in demonstrated
    ]
    write(context.inputs["data"], "sft", "train", demonstrations)
    prepare_sets(config, trained)
    assert "evaluate.regression[0]: 7 of 40 prompts are in the training data" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, r"regression\[0\]: .*sums.jsonl:41: "),
        (
            {"prompt": "word " * 500, "answer": "1"},
            r"sums.jsonl:41: prompt longer than data.max_prompt_tokens",
        ),
        ({"prompt": "What is it?"}, r"regression\[0\].reward: type answer needs the field 'answer'"),
    ],
)
def test_every_row_must_be_usable(
    row: dict[str, str], message: str, context: StageContext, tmp_path: Path
) -> None:
    config = config_of(rows_file(tmp_path, [*ROWS, row]))
    with pytest.raises(DataError, match=message):
        prepare_sets(config, context)


def test_a_prompt_may_be_longer_than_those_of_the_data_if_the_context_has_room(
    context: StageContext, tmp_path: Path
) -> None:
    config = config_of(rows_file(tmp_path, ROWS))
    config = config.with_limits(config.limits._replace(prompt=3))
    sets = prepare_sets(config, context)
    longest = max(len(prompt.input_ids) for prompt in sets["sums"])
    assert longest > 3 and with_room(config, sets).limits == config.limits._replace(prompt=longest)
    assert with_room(config, {}).limits == config.limits


def test_a_file_that_changes_during_the_run_is_detected(context: StageContext, tmp_path: Path) -> None:
    config = config_of(rows_file(tmp_path, ROWS))
    before = replace(context, sources=external_digests(config))
    rows_file(tmp_path, ROWS[1:])
    with pytest.raises(DataError, match=r"evaluate.regression\[0\]: .* was changed after the run began"):
        prepare_sets(config, before)


def test_a_set_is_in_the_key_of_the_evaluation_only(tmp_path: Path) -> None:
    def keys(config: PipelineConfig) -> dict[str, str]:
        digests = external_digests(config)
        found: dict[str, str] = {}
        for stage, row in STAGES.items():
            own = {name: each for name, each in digests.items() if name.startswith(row.sources)}
            own = {name: each for name, each in own.items() if not name.startswith(row.sources_of_inputs)}
            found[stage] = stage_key(config, stage, {}, own)
        return found

    without = keys(PipelineConfig.model_validate({"run": {"home": str(tmp_path), "device": "cpu"}}))
    one = keys(config_of(rows_file(tmp_path, ROWS)))
    other = keys(config_of(rows_file(tmp_path, ROWS[1:])))
    assert {stage for stage in STAGES if without[stage] != one[stage]} == {"evaluate"}
    assert {stage for stage in STAGES if one[stage] != other[stage]} == {"evaluate"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"reward": {"type": "model"}}, "which judges no regression set"),
        ({"reward": {"type": "answer", "weight": 2.0}}, "weight and normalize have no effect"),
        ({"path": "synthetic"}, "makes the prompts of training"),
        (
            {"reward": {"type": "remote", "urls": ["http://a"], "on_error": "mask"}},
            "leave responses out",
        ),
        ({"margin": 0.0}, r"margin\n  Input should be greater than 0"),
        ({"name": "held-out"}, r"name\n  String should match"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    item: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(Path(item.pop("path", tmp_path / "sums.jsonl")), **item)


def test_files_of_sets_are_checked_before_the_run(tmp_path: Path) -> None:
    reward = {"type": "python", "function": "f:f", "file": str(tmp_path / "missing.py")}
    with pytest.raises(DataError) as caught:
        check(config_of(tmp_path / "sums.jsonl", reward=reward))
    assert "evaluate.regression.0.reward.file: file not found" in str(caught.value)
    assert "evaluate.regression.0.path" in str(caught.value)
