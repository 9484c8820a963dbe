"""The second reward model of `reward.judge`.

- both models have disjoint pairs that are together all of them, and DPO has those of the reward model; the
  pairs of a prompt stay together, whatever the seed of the run
- pairs that a model has labelled do not train the judge
- without a judge, all pairs train the reward model
- settings that make no sense are refused
- the parameters of the judge's MLflow run are those of the reward model
- the judge is not a measure that the policy was trained with, unless it has labelled data
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled, stage_inputs
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, DataError, GateFailed
from rlhf_core.evaluation import scoring
from rlhf_core.pipeline import STAGES
from rlhf_core.run.attempt import _params
from rlhf_core.run.spec import StageSpec
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.pairs import training_pairs
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PairExample

PAIRS = [PairExample(f"p{i // 2}", "", (1,), (2, i), (3, i)) for i in range(400)]


def config_of(judge: dict[str, Any] | None, **sections: Any) -> PipelineConfig:
    return config_from_tree({"reward": {"judge": judge}, **sections}, "test")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_artifact(tmp_path_factory.mktemp("artifact") / "data", pairs=PAIRS)


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_both_models_have_disjoint_pairs(data: Path, fraction: float) -> None:
    halves = []
    for seed in (0, 1):
        config = config_of({"fraction": fraction}, run={"seed": seed})
        first, second = (training_pairs(config, data, stage) for stage in ("reward", "judge"))
        halves.append((first, second))
    assert halves[0] == halves[1]
    assert sorted([*first, *second], key=PAIRS.index) == PAIRS
    assert not {pair.prompt_id for pair in first} & {pair.prompt_id for pair in second}
    assert len(second) / len(PAIRS) == pytest.approx(fraction, abs=0.08)
    assert training_pairs(config, data, "dpo") == first


def test_pairs_that_a_model_has_labelled_do_not_train_the_judge(tmp_path: Path) -> None:
    pairs = [replace(pair, source=f"pairs.jsonl {i % 2}") for i, pair in enumerate(PAIRS)]
    mark = {"labelled_by": "reward", "name": "pairs.jsonl 1"}
    rows = [{"field": "data.sft[0]"} | mark | {"name": "pairs.jsonl 0"}, {"field": "data.preference[0]"}]
    sources = [*rows, {"field": "data.preference[1]"} | mark]
    data = write_data_artifact(tmp_path / "data", pairs=pairs, sources=sources)
    config = config_of({})
    first, second = (training_pairs(config, data, stage) for stage in ("reward", "judge"))
    assert {pair.source for pair in second} == {"pairs.jsonl 0"}
    assert sorted([*first, *second], key=pairs.index) == pairs
    assert {pair for pair in pairs if pair.source == "pairs.jsonl 1"} < set(first)


@pytest.mark.parametrize("field", ["sft", "preference"])
def test_a_judge_that_labelled_training_data_is_not_independent(field: str) -> None:
    for judge, trained in (("reward", False), ("judge_model", True)):
        source = {"path": "synthetic", "labelled_by": judge}
        assert scoring.trained_on(config_of({}, data={field: [source]}), "judge_model") is trained


def test_without_a_judge_all_pairs_train_the_reward_model(data: Path) -> None:
    config = config_of(None)
    assert training_pairs(config, data, "reward") == PAIRS
    assert not is_enabled(config, "judge") and "judge" not in stage_inputs(config, "ppo")
    assert "judge" in stage_inputs(config_of({}), "ppo")


def test_a_half_without_pairs_is_refused(tmp_path: Path) -> None:
    data = write_data_artifact(tmp_path / "data", pairs=PAIRS[:2])
    config = config_of({})
    with pytest.raises(DataError, match=r"reward.judge.fraction=0.5 leaves none of the 2 pairs"):
        for stage in ("reward", "judge"):
            training_pairs(config, data, stage)


def test_a_judge_needs_a_policy_that_is_trained_with_the_reward_model() -> None:
    rules = {"rewards": [{"type": "well_formed"}]}
    with pytest.raises(ConfigError, match=r"leave reward.judge out"):
        config_of({}, ppo=rules)


def test_the_judge_decides_before_the_reward_model() -> None:
    config = config_of({})
    assert scoring.choose_measure(config, gold_known=True) == "gold"
    assert scoring.choose_measure(config, gold_known=False) == "judge_model"
    assert not scoring.trained_on(config, "judge_model") and scoring.trained_on(config, "reward_model")
    assert scoring.choose_measure(config_of(None), gold_known=False) == "reward_model"


def test_a_judge_no_better_than_chance_fails_its_stage() -> None:
    with pytest.raises(GateFailed, match=r"judge: held-out accuracy 0.510"):
        check_gate(config_of({}), "judge", {"accuracy": 0.51})


def test_every_stage_has_the_parameters_of_its_section() -> None:
    params = {}
    for stage in STAGES:
        params[stage] = _params(StageSpec(stage, "key", config_of({}), {}, None, "pipeline", {}))
    assert params["judge"] == params["reward"]
    assert params["judge"]["reward.judge.fraction"] == 0.5
