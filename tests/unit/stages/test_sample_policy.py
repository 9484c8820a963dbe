"""The model that answers in the stage `sample` (`sample.policy`).

- of PPO, DPO and SFT only the model that answers is an input, and its files are sampled
- the default is PPO's policy, and is in no key
- without the policy of PPO, the digests of the reward files are in the key of the stage
- a run that ends at `sample` has PPO only if its policy answers
- the artifact says which model answered, unless it is PPO's
- a language model whose grades are the scores is measured, because PPO has not measured it
- a policy that is not trained is an error, and answers of another policy than the registered one a warning
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import unusual_settings
from rlhf_core.config.keys import is_made, key_fields, stage_inputs, stage_key
from rlhf_core.data.dataset import write
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation.policy_files import PolicyFiles, files_made_with, trained_files
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.stages import sample
from rlhf_core.stages.gates import check_gate
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, scripted_engines
from rlhf_core.types import ArtifactRef, PairExample, PromptExample, StageContext, StageResult
from tests.support.chat_server import ChatServer

LENGTH = {"type": "length", "target": 4, "tolerance": 4}
TOKENIZER = train_tokenizer(["Name a colour."], 300)


def config_of(policy: str | None, tmp_path: Path = Path("none"), **sections: Any) -> PipelineConfig:
    tree: dict[str, Any] = {
        "run": {"device": "cpu", "home": str(tmp_path / "home")},
        "reward": {"enabled": False},
        "dpo": {"enabled": True},
        "ppo": {"rewards": [LENGTH]},
        "sample": {"answers": 2} if policy is None else {"answers": 2, "policy": policy},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree | sections))


def context_of(config: PipelineConfig, folder: Path) -> StageContext:
    """The inputs of the stage, with one training prompt and pairs of people whose chosen answer is longer."""

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(TOKENIZER.encode(text, add_special_tokens=False))

    pairs = [
        PairExample(str(number), "Name a town.", (1,), tokens(f"{number}, longer"), tokens(str(number)), "a")
        for number in range(20)
    ]
    data = write_data_artifact(folder / "data", eval_pairs=pairs, tokenizer=TOKENIZER)
    ids = Encoder(TOKENIZER, "chat", "test").prompt([Message("user", "Name a colour.")])
    write(data, "prompts", "train", [PromptExample("p0", "Name a colour.", ids, {}, "a")])
    inputs: dict[str, Path] = {name: folder / name for name in stage_inputs(config, "sample")}
    inputs["data"] = data
    return stage_context(folder, inputs=inputs)


def run_stage(config: PipelineConfig, context: StageContext) -> tuple[StageResult, Path]:
    """Return the result, and the folder of the model that answered."""
    letters = TOKENIZER.convert_tokens_to_ids(list("AB"))
    with scripted_engines(lambda request: Reply(letters[: request.sample_index + 1])) as engines:
        result = sample.run(config, context)
    [model] = {request.model for engine in engines for request in engine.requests}
    return result, model


@pytest.mark.parametrize(
    ("policy", "answers", "attribute"),
    [(None, "ppo/policy", None), ("ppo", "ppo/policy", None), ("dpo", "dpo/policy", "dpo"),
     ("sft", "sft/model", "sft")],
)  # fmt: skip
def test_only_the_model_that_answers_is_read(
    policy: str | None, answers: str, attribute: str | None, tmp_path: Path
) -> None:
    config = config_of(policy)
    trained = {name for name in stage_inputs(config, "sample") if name not in ("data", "sft")}
    assert trained == {answers.partition("/")[0]} - {"sft"}
    result, model = run_stage(config, context_of(config, tmp_path))
    assert model == tmp_path / answers
    assert result.attributes.get("policy") == attribute
    assert (result.metrics["pairs"], result.metrics["best"]) == (1.0, 1.0)


def test_an_adapter_of_dpo_answers_outside_float32() -> None:
    ppo = {"rewards": [LENGTH], "engine": {"dtype": "bfloat16"}}
    config = config_of("dpo", dpo={"enabled": True, "lora": {}}, ppo=ppo)
    inputs = {name: Path(name) for name in ("sft", "dpo")}
    assert trained_files(config, "dpo", inputs) == PolicyFiles(Path("sft/model"), Path("dpo/adapter"))
    assert trained_files(config, "sft", inputs) == PolicyFiles(Path("sft/model"))


def test_a_policy_of_an_earlier_release_is_read_without_the_fields_that_have_gone() -> None:
    made = PipelineConfig().model_dump(mode="json", by_alias=True)
    made["ppo"]["weight_sync"]["senders"] = "auto"
    made["ppo"]["engine"]["dispatch"] = "fixed"
    files = files_made_with(made, "ppo", Path("ppo"), lambda: Path("sft"))
    assert files == PolicyFiles(Path("ppo/policy"))


def test_the_default_is_in_no_key() -> None:
    plain, named, other = (config_of(policy) for policy in (None, "ppo", "sft"))
    assert "sample.policy" not in key_fields(plain, {}), "keys of releases without the field stay the same"
    assert key_fields(other, {})["sample.policy"] == "sft"
    assert stage_key(named, "sample", {}, {}) == stage_key(plain, "sample", {}, {})
    assert stage_key(other, "sample", {}, {}) != stage_key(plain, "sample", {}, {})


@pytest.mark.parametrize(("policy", "changed"), [("ppo", False), ("dpo", True), ("sft", True)])
def test_a_changed_reward_file_changes_the_key(policy: str, changed: bool, tmp_path: Path) -> None:
    """That of PPO's artifact contains it otherwise."""
    file = tmp_path / "rule.py"
    rewards = [{"type": "python", "function": "rule:f", "file": str(file)}]
    inputs = {name: ArtifactRef(name, "a" * 16, "digest", f"/store/{name}", {}) for name in STAGES}
    keys = []
    for value in (1.0, 2.0):
        file.write_text(f"def f(samples):\n    return [{value} for _ in samples]\n")
        run = PipelineRun(config_of(policy, tmp_path, ppo={"rewards": rewards}), "test")
        spec = run.spec("sample", inputs)
        assert "ppo.rewards.0" in spec.sources
        keys.append(spec.key)
    assert (keys[0] != keys[1]) == changed


@pytest.mark.parametrize(
    ("policy", "until", "has_ppo"),
    [("ppo", "sample", True), ("dpo", "sample", False), ("sft", "sample", False), ("sft", "ppo", True),
     ("dpo", "evaluate", True), ("sft", "register", True)],
)  # fmt: skip
def test_a_run_that_ends_at_sample_has_ppo_only_if_its_policy_answers(
    policy: str, until: StageName, has_ppo: bool
) -> None:
    made = [stage for stage in STAGES if is_made(config_of(policy), stage, until)]
    assert ("ppo" in made) == has_ppo
    assert made[:2] == ["data", "sft"] and "dpo" in made and made[-1] == until


def test_without_the_section_a_run_that_ends_at_sample_has_ppo() -> None:
    assert is_made(PipelineConfig(), "ppo", "sample") and not is_made(PipelineConfig(), "sample", "register")


@pytest.mark.parametrize("policy", ["ppo", "sft"])
def test_a_language_model_that_scores_is_measured_unless_ppo_has_measured_it(
    policy: str, tmp_path: Path
) -> None:
    def shorter_is_better(question: str) -> str:
        return "3" if "longer" in question else "9"

    with ChatServer(shorter_is_better) as server:
        grader = {"type": "language_model", "url": server.url, "model": "grader-1"}
        rewards = [{**grader, "retries": 0}]
        config = config_of(policy, tmp_path, ppo={"rewards": rewards})
        context = context_of(config, tmp_path)
        if policy == "ppo":
            assert run_stage(config, context)[0].metrics["score_mean"] > 0
            return
        with pytest.raises(GateFailed, match=r"sample: reward language_model \(grader-1\) agrees with 0.000"):
            run_stage(config, context)
        unlimited = config_of(policy, tmp_path, ppo={"rewards": [{**rewards[0], "weight": -1.0}]})
        metrics = run_stage(unlimited, replace(context, output=tmp_path))[0].metrics
    assert metrics["reward_agreement/language_model/mean"] == 1.0
    below = {**metrics, "reward_agreement/language_model/mean": 0.4}
    with pytest.raises(GateFailed, match="sample: reward language_model"):
        check_gate(unlimited, "sample", below)  # also of a reused artifact


def test_a_policy_that_is_not_trained_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample\.policy must .* got dpo, but dpo\.enabled is false"):
        config_of("dpo", dpo={"enabled": False})
    config_of("sft", dpo={"enabled": False})


@pytest.mark.parametrize(
    ("sampled", "registered", "warns"),
    [(None, "ppo", False), (None, "dpo", True), ("dpo", "dpo", False), ("dpo", "ppo", True),
     ("sft", "ppo", False), ("sft", "dpo", False)],
)  # fmt: skip
def test_answers_of_another_policy_than_the_registered_one_are_a_warning(
    sampled: str | None, registered: str, warns: bool
) -> None:
    config = config_of(sampled, register={"policy": registered})
    found = [each for each in unusual_settings(config) if each.startswith("sample.policy")]
    assert bool(found) == warns
    if warns:
        assert f"sample.policy is {sampled or 'ppo'}, but register.policy is {registered}" in found[0]
