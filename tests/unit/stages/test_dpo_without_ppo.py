"""A pipeline that trains DPO and no PPO (`ppo.enabled: false`).

- it has no stage `ppo`; evaluation and registration read the policy of DPO
- the samples of DPO's policy have the same key with and without PPO
- the digests of reward files are in the key of the evaluation, which no artifact of PPO contains
- combinations without a policy, or that name one that is not trained, are errors that name the fields
- no reward model is needed, unless it scores samples, and an evaluation without any judge is an error
- settings of PPO cause no warnings and need no devices; those that seem to choose a policy are named
- the plan has no PPO, and the engines of the evaluation have its memory
- summary and tables name DPO
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import check_consistency, unusual_settings
from rlhf_core.config.keys import pipeline_key, stage_inputs, stage_key, stages_made
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation.check import check_judge
from rlhf_core.executors.spec import StageRecord
from rlhf_core.models.shape import known_shape
from rlhf_core.ops.plan.rows import batches
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.check import check_gpu_counts
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.loads import checkpoint_sizes
from rlhf_core.planning.search import advise, compare_memory
from rlhf_core.preflight import check
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.summary import headline, results, summarize
from rlhf_core.types import ArtifactRef
from tests.support.demo_data import GENERATED, LIMITS

ALONE: dict[str, Any] = {
    "run": {"device": "cpu"},
    "ppo": {"enabled": False},
    "dpo": {"enabled": True},
    "register": {"policy": "dpo"},
}


def config_of(**sections: Any) -> PipelineConfig:
    return config_from_tree(ALONE | sections, "test")


def test_the_stage_ppo_is_not_part_of_the_run() -> None:
    config = config_of(sample={"policy": "dpo"})
    made = ["data", "sft", "reward", "dpo", "sample", "evaluate", "register"]
    assert stages_made(config, "data", "register") == made
    assert stage_inputs(config, "evaluate") == ("data", "sft", "reward", "dpo")
    assert stage_inputs(config, "register") == ("data", "sft", "reward", "dpo", "sample", "evaluate")


def test_samples_have_the_same_key_with_and_without_ppo() -> None:
    sample = {"policy": "dpo"}
    alone, both = config_of(sample=sample), config_of(sample=sample, ppo={})
    assert stage_key(alone, "sample", {}, {}) == stage_key(both, "sample", {}, {})
    assert pipeline_key(alone, {}) != pipeline_key(both, {})


@pytest.mark.parametrize("enabled", [False, True])
def test_a_changed_reward_file_changes_the_key_of_the_evaluation(enabled: bool, tmp_path: Path) -> None:
    """That of PPO's artifact contains it otherwise."""
    file = tmp_path / "rule.py"
    rewards = [{"type": "python", "function": "rule:f", "file": str(file)}]
    run = {"device": "cpu", "home": str(tmp_path / "home")}
    config = config_of(run=run, reward={"enabled": False}, ppo={"enabled": enabled, "rewards": rewards})
    inputs = {name: ArtifactRef(name, "a" * 16, "digest", f"/store/{name}", {}) for name in STAGES}
    keys = set()
    for value in (1.0, 2.0):
        file.write_text(f"def f(samples):\n    return [{value} for _ in samples]\n")
        keys.add(PipelineRun(config, "test").spec("evaluate", inputs).key)
    assert len(keys) == (1 if enabled else 2)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"dpo": {}},
            ("ppo.enabled and dpo.enabled are false", "set dpo.enabled=true and register.policy=dpo"),
        ),
        (
            {"register": {"policy": "ppo"}},
            ("register.policy must name", "got ppo, but ppo.enabled is false", "=dpo, or"),
        ),
        (
            {"register": {"policy": "ppo"}, "sample": {"policy": "ppo"}},
            ("register.policy and sample.policy must name", "register.policy=dpo and sample.policy=dpo, or"),
        ),
        (
            {"sample": {"policy": "ppo"}},
            ("sample.policy must name", "set sample.policy=dpo, or ppo.enabled=true"),
        ),
        (
            {"reward": {"enabled": False}, "sample": {"policy": "dpo"}},
            ("ppo.rewards has a source of type `model`", "sample.judge", "reward.enabled=true"),
        ),
        ({"reward": {"enabled": False, "judge": {}}}, ("reward.judge", "reward.enabled is false")),
    ],
)
def test_wrong_combinations_name_the_fields(sections: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(**sections)
    (line,) = error.value.message.splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "sections",
    [
        {},  # the true reward of the demo's task
        {"ppo": {"enabled": False, "rewards": [{"type": "relevance"}]}, "evaluate": {"judge": "rules"}},
        {"evaluate": {"language_model": {"path": "judge"}}},
        {"sample": {"policy": "dpo", "judge": "people"}},
    ],
)
def test_no_reward_model_is_needed(sections: dict[str, Any]) -> None:
    config = config_of(reward={"enabled": False}, **sections)
    assert "reward" not in stages_made(config, "data", "register")
    assert [str(each) for each in check_consistency(config)] == []


def test_a_reward_model_that_only_judges_is_warned_of_if_there_is_another_judge() -> None:
    [found] = check_consistency(config_of())
    own = {"data": {name: [{"path": "rows.jsonl"}] for name in ("sft", "preference", "prompts")}}
    assert list(check_consistency(config_of(**own))) == [], "nothing else could judge"
    assert "reward.enabled: a reward model is trained, but ppo.enabled is false: it only judges" in str(found)
    assert list(check_consistency(config_of(sample={"policy": "dpo"}))) == [], "it scores the samples"
    assert list(check_consistency(config_of(reward={"judge": {}}))) == [], "the judge needs it"


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {}},
        {"reward": {}},
        {"evaluate": {"language_model": {"path": "judge"}}},
        {"ppo": {"enabled": False, "rewards": [{"type": "relevance"}]}},
    ],
)
def test_an_evaluation_without_a_judge_is_an_error(sections: dict[str, Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"  # their true reward is not known
    prompts.write_text("".join(f'{{"prompt": "Question {number}"}}\n' for number in range(1000)))
    without: dict[str, Any] = {
        "run": {"device": "cpu", "home": str(tmp_path / "home")},
        "data": {**GENERATED, "prompts": [{"path": str(prompts)}]},
        "reward": {"enabled": False},
    }
    with pytest.raises(ConfigError, match="auto finds no judge"):
        check(config_of(**without))
    check(config_of(**without), stages=["data", "sft", "dpo"])  # nothing is evaluated
    assert list(check_judge(config_of(**without | sections))) == []


def test_settings_of_ppo_are_not_doubtful_without_it() -> None:
    doubtful = {"enabled": False, "kl": {"estimator": "k3"}, "rewards": [{"type": "relevance", "weight": 0}]}
    assert list(unusual_settings(config_of(ppo=doubtful))) == []
    [found] = unusual_settings(config_of(ppo={"enabled": False, "temperature": 0.7}))
    assert "evaluate.temperature is 0.7, but the policy is trained at 1:" in found
    assert (
        list(
            unusual_settings(
                config_of(ppo={"enabled": False, "temperature": 0.7}, evaluate={"temperature": 1.0})
            )
        )
        == []
    )


def test_the_plan_has_no_ppo_and_the_engines_of_the_evaluation() -> None:
    shape, hardware = known_shape("qwen2.5-7b"), parse_gpus("1xA100-80G")
    assert shape is not None
    sharded = {"deepspeed": {"dtype": "bfloat16", "zero_stage": 1}, "lora": {"r": 8}}
    engine = {"count": 8, "dtype": "bfloat16", "gpu_memory_utilization": 0.15}
    config = config_of(
        run={"device": "cuda"}, model={"path": "a/model"}, data={**GENERATED, **LIMITS},
        sft=sharded, reward=sharded, dpo={"enabled": True, **sharded},
        ppo={
            "enabled": False, "max_new_tokens": 64, "engine": engine,
            "policy_deepspeed": {"ranks": 4, "dtype": "bfloat16"},
        },
    )  # fmt: skip
    assert [each.model for each in batches(config)] == ["sft", "reward", "dpo"]
    assert set(checkpoint_sizes(config, shape)) == {"sft", "reward", "dpo"}
    assert [str(each) for each in check_gpu_counts(config, 1)] == []
    verdict = compare_memory(config, shape, hardware)
    loads = {(load.stage, load.what) for load in verdict.loads}
    assert "ppo" not in {stage for stage, _ in loads} and ("evaluate", "engine") in loads
    # The weights alone do not fit into the share of the engine.
    assert [(each.stage, each.what) for each in verdict.problems] == [("evaluate", "engine")]
    changes = advise(config, shape, hardware)
    assert changes is not None and changes[0].startswith("ppo.engine.gpu_memory_utilization=")


def test_summary_and_tables_name_dpo() -> None:
    metrics = {"kl_dpo": 1.5, "eos_rate/sft": 0.5, "eos_rate/dpo": 1.0}
    for name in ("gold_reward/sft", "gold_reward/dpo", "gold_reward/difference_dpo", "win_rate_dpo"):
        metrics |= {f"{name}/mean": 0.6, f"{name}/low": 0.5, f"{name}/high": 0.7}
    facts = {"judge": "reward model", "judge_trained_on_dpo": "True"}
    made = ArtifactRef("evaluate", "b" * 16, "d", "/store/e", metrics, None, facts)
    trained = ArtifactRef("dpo", "b" * 16, "d", "/store/d", {}, None, {"weights_sha256": "w" * 64})
    records: dict[StageName, StageRecord] = {
        "dpo": StageRecord(trained, 1.0, False),
        "evaluate": StageRecord(made, 1.0, False),
    }
    summary = summarize(records, 1.0, {})
    rows = dict(results(summary))
    judge = "(judge: reward model, which is not independent of DPO's training)"
    assert rows[f"win rate, DPO over SFT {judge}"] == rows["gold reward, DPO"] == "0.600  [0.500, 0.700]"
    assert "gold reward, difference by prompt, DPO" in rows
    assert not any("PPO" in name for name in rows) and "ppo" not in json.dumps(summary)
    assert summary["evaluate"]["policies"]["dpo"]["judge_trained_on"] is True
    assert summary["weights_sha256"] == "w" * 64
    assert headline("evaluate", metrics) == "win_rate_dpo=0.6  kl_dpo=1.5  eos_rate/sft=0.5  eos_rate/dpo=1"
