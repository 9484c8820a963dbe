"""The second reward model of `reward.judge`.

- both models have disjoint pairs that are together all of them, and DPO has those of the reward model; the
  pairs of a prompt stay together, whatever the seed of the run
- pairs that a model has labelled do not train the judge
- without a judge, all pairs train the reward model
- settings that make no sense are refused
- the judge can have settings of its own, and another base model with the same tokens
- the parameters of the judge's MLflow run are those of the reward model
- the judge is not a measure that the policy was trained with, unless it has labelled data
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.keys import is_enabled, stage_inputs
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import JudgeConfig
from rlhf_core.data.check import check_further_model
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ConfigError, DataError, Finding, GateFailed, ModelError
from rlhf_core.evaluation import scoring
from rlhf_core.executors.spec import StageSpec
from rlhf_core.models.shape import tiny_shape
from rlhf_core.ops.plan.plan import fastest_settings
from rlhf_core.ops.plan.rows import batches
from rlhf_core.pipeline import STAGES
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.loads import device_loads
from rlhf_core.run.attempt import _params
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.stages import reward
from rlhf_core.stages.gates import check_gate
from rlhf_core.stages.training import training_pairs
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.trainer import scripted_trainers
from rlhf_core.types import PairExample
from tests.support.demo_data import GENERATED
from tests.support.tiny_llama import save_tiny_llama

PAIRS = [PairExample(f"p{i // 2}", "", (1,), (2, i), (3, i)) for i in range(400)]


def config_of(judge: dict[str, Any] | None, **sections: Any) -> PipelineConfig:
    return config_from_tree({"reward": {"judge": judge}, **sections}, "test")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_artifact(tmp_path_factory.mktemp("artifact") / "data", pairs=PAIRS)


def halves_of(config: PipelineConfig, data: Path, work: Path) -> tuple[list[PairExample], list[PairExample]]:
    """Return the pairs of the reward model and of the judge."""
    return (
        list(training_pairs(config, data, "reward", work)),
        list(training_pairs(config, data, "judge", work)),
    )


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_both_models_have_disjoint_pairs(data: Path, fraction: float, tmp_path: Path) -> None:
    halves = []
    for seed in (0, 1):
        config = config_of({"fraction": fraction}, run={"seed": seed})
        first, second = halves_of(config, data, tmp_path)
        halves.append((first, second))
    assert halves[0] == halves[1]
    assert sorted([*first, *second], key=PAIRS.index) == PAIRS
    assert not {pair.prompt_id for pair in first} & {pair.prompt_id for pair in second}
    assert len(second) / len(PAIRS) == pytest.approx(fraction, abs=0.08)
    assert list(training_pairs(config, data, "dpo", tmp_path)) == first


def test_all_pairs_of_a_group_train_the_same_model(tmp_path: Path) -> None:
    pairs = [replace(pair, group=f"g{index // 8}") for index, pair in enumerate(PAIRS)]
    artifact = write_data_artifact(tmp_path / "data", pairs=pairs)
    first, second = halves_of(config_of({}), artifact, tmp_path)
    assert first and second
    assert not {pair.group for pair in first} & {pair.group for pair in second}


def test_pairs_that_a_model_has_labelled_do_not_train_the_judge(tmp_path: Path) -> None:
    pairs = [replace(pair, source=f"pairs.jsonl {i % 2}") for i, pair in enumerate(PAIRS)]
    mark = {"labelled_by": "reward", "name": "pairs.jsonl 1"}
    rows = [{"field": "data.sft[0]"} | mark | {"name": "pairs.jsonl 0"}, {"field": "data.preference[0]"}]
    sources = [*rows, {"field": "data.preference[1]"} | mark]
    data = write_data_artifact(tmp_path / "data", pairs=pairs, sources=sources)
    config = config_of({})
    first, second = halves_of(config, data, tmp_path)
    assert {pair.source for pair in second} == {"pairs.jsonl 0"}
    assert sorted([*first, *second], key=pairs.index) == pairs
    assert {pair for pair in pairs if pair.source == "pairs.jsonl 1"} < set(first)


@pytest.mark.parametrize("field", ["sft", "preference"])
def test_a_judge_that_labelled_training_data_is_not_independent(field: str) -> None:
    for judge, trained in (("reward", False), ("judge_model", True)):
        source = {"path": "synthetic", "labelled_by": judge}
        assert scoring.trained_on(config_of({}, data={field: [source]}), "judge_model") is trained


def test_without_a_judge_all_pairs_train_the_reward_model(data: Path, tmp_path: Path) -> None:
    config = config_of(None)
    assert list(training_pairs(config, data, "reward", tmp_path)) == PAIRS
    assert not is_enabled(config, "judge") and "judge" not in stage_inputs(config, "ppo")
    assert "judge" in stage_inputs(config_of({}), "ppo")


def test_a_half_without_pairs_is_refused(tmp_path: Path) -> None:
    data = write_data_artifact(tmp_path / "data", pairs=PAIRS[:2])
    config = config_of({})
    with pytest.raises(DataError, match=r"reward.judge.fraction=0.5 leaves none of the 2 pairs"):
        for stage in ("reward", "judge"):
            training_pairs(config, data, stage, tmp_path)


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
        metrics = {"accuracy": 0.51, "accuracy_low": 0.47, "accuracy_high": 0.55}
        check_gate(config_of({}), "judge", metrics)


def test_every_stage_has_the_parameters_of_its_section() -> None:
    params = {}
    for stage in STAGES:
        params[stage] = _params(StageSpec(stage, "key", config_of({}), {}, None, "pipeline", {}))
    assert params["judge"] == params["reward"]
    assert params["judge"]["reward.judge.fraction"] == 0.5


def test_settings_of_the_judge_are_those_of_the_reward_model_unless_given() -> None:
    reward = {"epochs": 2, "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.1}}
    own = {"batch_size": 8, "optimizer": {"learning_rate": 1e-3}, "deepspeed": {"ranks": 2}}
    config = config_from_tree({"reward": {**reward, "judge": own}}, "test").reward
    trained = config.of_judge
    assert (trained.epochs, trained.batch_size, trained.deepspeed.ranks) == (2, 8, 2)
    assert (trained.optimizer.learning_rate, trained.optimizer.weight_decay) == (1e-3, 0.1)
    assert (config.batch_size, config.deepspeed.ranks, config.optimizer.learning_rate) == (64, 1, 1e-4)
    assert config.model_copy(update={"judge": JudgeConfig()}).of_judge.optimizer == config.optimizer


def test_only_a_judge_with_settings_of_its_own_is_a_row_of_the_plan() -> None:
    def stages(judge: dict[str, Any]) -> list[str]:
        config = config_of(judge, model={"tiny": {}})
        assert [each.model for each in batches(config)][:-2] == list(config.training_sections)
        hardware = parse_gpus("2xA100-80G")
        shape = tiny_shape(config.model.tiny)
        loads = {load.stage for load in device_loads(config, shape, hardware.device)}
        assert set(config.training_sections) <= loads
        fastest = fastest_settings(config, (), shape, hardware)
        assert set(config.training_sections) <= set(fastest)
        if "judge" in fastest:
            [(_, changes)] = fastest["judge"]
            assert changes and all(name.startswith("reward.judge.") for name in changes)
        return list(config.training_sections)

    assert stages({}) == stages({"fraction": 0.3}) == ["sft", "reward"]
    assert stages({"epochs": 2}) == ["sft", "reward", "judge"]
    with pytest.raises(ConfigError, match=r"reward.judge.deepspeed.ranks must be at most reward.judge.batch"):
        config_of({"batch_size": 1, "deepspeed": {"ranks": 2}})


def test_the_judge_can_start_from_another_model_with_the_same_tokens(tmp_path: Path) -> None:
    """Its training begins from this model, and not from the SFT model."""
    tokenizer, other = train_tokenizer(["some text"] * 9, 300), train_tokenizer([], 0)
    rows: dict[str, Any] = {"pairs": PAIRS[:40], "eval_pairs": PAIRS[:8]}
    data = write_data_artifact(tmp_path / "data", tokenizer=tokenizer, **rows)
    for name, seed, tokens in (("sft/model", 1, tokenizer), ("base", 2, tokenizer), ("other", 2, other)):
        save_tiny_llama(tmp_path / name, seed, vocab_size=512)
        tokens.save_pretrained(tmp_path / name)

    def run(path: str | None, sources: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
        judge = {"path": path and str(tmp_path / path)}
        tree = {"run": {"device": "cpu"}, "reward": {"judge": judge, "min_accuracy": 0.0}}
        limits = {"max_prompt_tokens": 32, "max_response_tokens": 32}
        config = config_from_tree(tree | {"data": limits, "ppo": {"max_new_tokens": 32}}, "test")
        digests = {name: it for name, it in external_digests(config).items() if name.startswith("reward")}
        inputs = {"data": data, "sft": tmp_path / "sft"}
        out = tmp_path / f"{path}-stage"
        context = stage_context(out, inputs=inputs, sources=digests if sources is None else sources)
        with scripted_trainers():
            reward.run_judge(config, context)
        weights: dict[str, torch.Tensor] = load_file(context.output / "model" / "model.safetensors")
        return weights

    def embedding(folder: Path) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        return weights["model.embed_tokens.weight"]

    for path, sources, start in (
        (None, None, "sft/model"),
        ("base", None, "base"),
        ("base", {}, "base"),
    ):
        trained = run(path, sources)["model.embed_tokens.weight"]
        assert torch.equal(trained, embedding(tmp_path / start))
    with pytest.raises(ModelError, match=r"reward.judge.path: .*other has other tokens than the policy"):
        run("other")
    with pytest.raises(DataError, match=r"reward.judge.path: .* was changed after the run began"):
        run("base", {"reward.judge.path": "another"})


def test_a_base_model_of_the_judge_that_cannot_be_used_is_found_before_the_start(tmp_path: Path) -> None:
    def found(judge: dict[str, str], **sections: Any) -> list[Finding]:
        config = config_of(judge, **sections)
        base = base_of(config, "judge")
        assert base is not None
        return list(check_further_model(config, base))

    def findings(path: str) -> list[str]:
        model = {"path": str(tmp_path / "policy")}
        data = {**GENERATED, "max_prompt_tokens": 64, "max_response_tokens": 64}
        return list(map(str, found({"path": str(tmp_path / path)}, model=model, data=data)))

    for name, texts in (("policy", ["text"] * 9), ("other", [])):
        train_tokenizer(texts, 300).save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    assert findings("policy") == []
    [missing] = findings("missing")
    assert missing.startswith("reward.judge.path: must be a folder") and "has no config.json" in missing
    [unpinned] = found({"path": "org/judge"})
    assert isinstance(unpinned, str) and "pin reward.judge.revision to a commit" in unpinned
    assert not found({"path": "org/judge", "revision": "a" * 40})
    [tokens] = findings("other")
    assert "has other tokens than the policy" in tokens
    (tmp_path / "policy" / "config.json").write_text('{"max_position_embeddings": 100}')
    [short] = findings("policy")
    assert short.startswith("reward.judge.path: the longest prompt and response are 128 tokens")


def test_a_teacher_reads_the_prompts_and_the_sampled_responses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')

    def found(new: int) -> list[str]:
        tree = {"ppo": {"teacher": {"path": str(tmp_path)}, "max_new_tokens": new}}
        tree |= {"data": {"max_prompt_tokens": 50, "max_response_tokens": 500, **GENERATED}}
        config = config_from_tree(tree | {"model": {"tiny": {"max_positions": 1000}}}, "test")
        base = base_of(config, "ppo")
        assert base is not None
        return list(map(str, check_further_model(config, base)))

    assert found(50) == []
    [problem] = found(51)
    assert problem.startswith("ppo.teacher.path: the longest prompt and response are 101 tokens")
