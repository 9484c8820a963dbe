"""Stage keys.

- a setting changes the keys of its own stages only; later stages follow through the digests of their inputs
- fields that do not affect results are in no key; they are listed here, and every other field is in a key
- what is read from outside counts by content: a folder can be moved, and changes in it are noticed
- keys that users choose, such as those of `rename`, are part of the stage key under any name
- a registration belongs to one registry
- settings that affect rounding only are recorded for a checkpoint, among them the ranks of each trained model
- a field that was added later is in a key only where it has another value than its default
- the keys of existing configurations are the pinned ones; only `version` of a stage may change them
- `device: auto` has the key of the device that it resolves to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.config import PipelineConfig, keys
from rlhf_core.config.base import Section, result
from rlhf_core.config.keys import changed, pipeline_key, rounding_settings, stage_key
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.messages import all_fields, is_section, locate, variants
from rlhf_core.config.pipeline import ResourcesConfig
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.system.home import Home
from tests.support.demo_data import config_with_demo_data, with_demo_data
from tests.support.scripted_machine import ScriptedMachine, on_machine


def set_version(monkeypatch: pytest.MonkeyPatch, stage: StageName, version: int) -> None:
    monkeypatch.setitem(STAGES, stage, replace(STAGES[stage], version=version))


def _keys(tree: dict[str, Any], sources: dict[str, str] | None = None) -> dict[str, str]:
    config = config_from_tree(tree, "test")
    return {stage: stage_key(config, stage, {}, sources or {}) for stage in STAGES}


SECTIONS: dict[str, set[str]] = {
    "model": {"data", "sft", "reward", "judge", "dpo", "ppo"},
    "data": {"data"},
    "sft": {"sft"},
    "reward": {"reward", "judge"},
    "dpo": {"dpo"},
    "ppo": {"ppo", "sample", "evaluate", "benchmark"},
    "sample": {"sample"},
    "evaluate": {"evaluate"},
    "benchmark": {"benchmark"},
    "register": {"register"},
}
"""Stages whose keys contain each section."""

SERVICE = {"type": "remote", "urls": ["http://one/x"]}


def _changed(tree: dict[str, Any]) -> set[str]:
    before = _keys({"ppo": {"rewards": [SERVICE]}} if "rewards" in tree.get("ppo", {}) else {})
    after = _keys(tree)
    return {stage for stage in STAGES if before[stage] != after[stage]}


@pytest.mark.parametrize(
    ("tree", "stages"),
    [
        ({"sft": {"epochs": 7}}, SECTIONS["sft"]),
        ({"reward": {"center": 0.1}}, SECTIONS["reward"]),
        ({"ppo": {"lam": 0.9}}, SECTIONS["ppo"]),
        ({"ppo": {"checkpoint_every": 3, "engine": {"min_count": 1}, "max_kl": 50.0}}, set()),
        (
            {
                "sft": {"micro_batch_tokens": 9},
                "ppo": {"micro_batch_tokens": 9, "engine": {"max_num_seqs": 9}},
            },
            set(),
        ),
        ({"ppo": {"policy_deepspeed": {"gradient_checkpointing": True, "ranks": 2, "hpz": 2}}}, set()),
        (
            {"ppo": {"rewards": [{**SERVICE, "concurrency": 9, "items_per_request": 1}]}},
            set(),
        ),
        ({"ppo": {"rewards": [{**SERVICE, "urls": ["http://other/x"]}]}}, SECTIONS["ppo"]),
        ({"run": {"retries": 7}}, set()),
        (
            {"sft": {"deepspeed": {"ranks": 2}}, "ppo": {"reference_ranks": 3}},
            set(),
        ),
        ({"reward": {"early_stop": {"every": 9}}}, SECTIONS["reward"]),
        # With a judge, the default of `ppo.publish` is `best`.
        ({"reward": {"judge": {}}}, {"reward", "judge", "dpo"} | SECTIONS["ppo"]),
        ({"reward": {"judge": {"epochs": 1, "lora": {}}}}, {"reward", "judge", "dpo"} | SECTIONS["ppo"]),
        ({"reward": {"ensemble": {}}}, SECTIONS["reward"]),
        ({"sft": {"early_stop": {"every": 9}}}, SECTIONS["sft"]),
        ({"dpo": {"early_stop": {"every": 9}}}, SECTIONS["dpo"]),
        ({"dpo": {"enabled": True}, "register": {"policy": "dpo"}}, SECTIONS["dpo"] | SECTIONS["register"]),
        ({"sample": {}}, SECTIONS["sample"]),
        ({"run": {"seed": 5}}, set(STAGES)),
    ],
)
def test_setting_changes_only_keys_of_its_stages(tree: dict[str, Any], stages: set[str]) -> None:
    assert _changed(tree) == stages


@pytest.mark.parametrize(
    "part",
    [
        {"deepspeed": {"ranks": 2}},
        {"deepspeed": {"gradient_checkpointing": True}},
        {"optimizer": {"learning_rate": 3e-5}},
        {"lora": {}},
        {"epochs": 2, "batch_size": 32},
    ],
    ids=str,
)
def test_a_setting_of_the_judge_that_the_reward_model_has_too_is_in_no_key(part: dict[str, Any]) -> None:
    reward = {"epochs": 2, "batch_size": 32, "optimizer": {"learning_rate": 3e-5}, "lora": {"r": 4}}
    plain, same, other = (
        config_from_tree({"reward": {**reward, "judge": judge}}, "test")
        for judge in ({"fraction": 0.3}, {"fraction": 0.3, **part}, {"fraction": 0.3, **part, "epochs": 3})
    )
    assert stage_key(same, "judge", {}, {}) == stage_key(plain, "judge", {}, {})
    assert pipeline_key(same, {}) == pipeline_key(plain, {})
    assert stage_key(other, "judge", {}, {}) != stage_key(plain, "judge", {}, {})


JUDGE: dict[str, Any] = {"optimizer": {}, "deepspeed": {}, "lora": {}}
EVERYTHING = {
    "run": {"device": "cpu", "resources": {"default": {}}, "budget": {"device_hours": 1.0}},
    "model": {"path": "model"},
    "sft": {"lora": {}, "early_stop": {}},
    "drift": {},
    "reward": {"lora": {}, "early_stop": {}, "judge": JUDGE, "ensemble": {"combine": "uncertainty"}},
    "dpo": {"enabled": True, "lora": {}, "early_stop": {}},
    "sample": {},
    "evaluate": {"language_model": {"url": "http://one/v1", "model": "m"}},
    "benchmark": {"tasks": ["one"]},
    "ppo": {
        "algorithm": "grpo",
        "samples_per_prompt": 2,
        "lora": {},
        "overlong": {"buffer": 1},
        "dynamic_filtering": {},
        "difficulty": {},
        "ptx": {"coef": 1.0},
        "teacher": {"path": "teacher"},
        "advantages": {"type": "python", "function": "a:b"},
        "rewards": [
            {"type": "model"},
            {"type": "gold"},
            {"type": "length", "target": 9, "tolerance": 3},
            {"type": "keywords", "words": ["sun"]},
            {"type": "format", "pattern": "x"},
            {"type": "repetition"},
            {"type": "relevance"},
            {"type": "well_formed"},
            {"type": "token_share", "below": 50},
            {"type": "answer"},
            {"type": "python", "function": "a:b"},
            SERVICE,
            {"type": "language_model", "url": "http://one/v1", "model": "m"},
        ],
    },
}
"""A configuration with every section and every type of reward."""

DEEPSPEEDS = (
    "sft.deepspeed",
    "reward.deepspeed",
    "reward.judge.deepspeed",
    "dpo.deepspeed",
    "ppo.policy_deepspeed",
    "ppo.critic_deepspeed",
)
IN_NO_KEY = {
    "model.path", "model.revision", "data.chat_template", "register.votes",
    "data.sft.path", "data.sft.revision", "data.preference.path", "data.preference.revision",
    "data.prompts.path", "data.prompts.revision",
    *(f"{section}.{name}" for section in DEEPSPEEDS for name in ("gradient_checkpointing", "hpz",
        "ranks")),
    "sft.checkpoint_every", "sft.eval_every", "sft.micro_batch_tokens", "sft.threads",
    "reward.checkpoint_every", "reward.micro_batch_tokens", "reward.min_accuracy", "reward.threads",
    "reward.judge.path", "reward.judge.revision", "reward.judge.micro_batch_tokens",
    "dpo.checkpoint_every", "dpo.eval_every", "dpo.micro_batch_tokens", "dpo.threads",
    "evaluate.engines", "evaluate.ranks",
    "benchmark.batch_size", "benchmark.folder",
    *(f"evaluate.language_model.{name}" for name in ("path", "rubric", "api_key_env",
        "min_agreement", "concurrency", "timeout", "retries")),
    "ppo.advantages.file",
    "ppo.teacher.path", "ppo.teacher.revision",
    "ppo.check_rewards",
    "ppo.checkpoint_every", "ppo.enabled", "ppo.max_kl", "ppo.micro_batch_tokens",
    "ppo.published_loss_limit", "ppo.reference_ranks", "ppo.reward_ranks", "ppo.samples_every",
    "ppo.guards", "ppo.guard_limits", "ppo.guard_patience", "ppo.engine.gpu_memory_utilization",
    "ppo.engine.kv_cache_gib", "ppo.engine.max_num_seqs",
    "ppo.engine.prefix_caching",
    "ppo.engine.min_count",
    "ppo.engine.sleep_level",
    "ppo.weight_sync.bucket_mib", "ppo.weight_sync.canary", "ppo.weight_sync.canary_tolerance",
   
    "ppo.rewards.python.file", "ppo.rewards.python.retries", "ppo.rewards.python.timeout",
    *(f"ppo.rewards.{kind}.{name}" for kind in ("python", "remote", "language_model")
        for name in ("pure", "smoke")),
    "ppo.rewards.remote.breaker_failures",
    "ppo.rewards.remote.breaker_seconds", "ppo.rewards.remote.concurrency",
    "ppo.rewards.remote.items_per_request",
    "ppo.rewards.remote.retries", "ppo.rewards.remote.timeout",
    *(f"ppo.rewards.language_model.{name}" for name in ("rubric", "api_key_env", "max_questions",
        "min_agreement", "concurrency", "timeout", "retries")),
}  # fmt: skip
"""Whatever they are, the result is the same but for rounding, or its content counts in their place.
Without PPO, the inputs differ.
"""

OUTSIDE: dict[str, set[str]] = {
    "run.seed": set(STAGES),
    "run.name": {"register"},
    "run.home": {"register"},
    "tracking.uri": {"register"},
    "reward.judge.fraction": {"reward", "judge", "dpo"},
}
"""Fields that are not in the keys of their section's stages only. The seed is for all, a registration's name
and registry are its own, and DPO has the pairs that the judge does not have.
"""


def _with_each_field_changed(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path of a field, `value` with something else in it), unchecked, for each field; a list's items by
    their type.
    """
    if isinstance(value, ResourcesConfig):
        for part, resources in value.root.items():
            for where, new in _with_each_field_changed(resources, f"{path}.{part}"):
                yield where, value.model_copy(update={"root": {**value.root, part: new}})
    elif isinstance(value, Section):
        for name, info in type(value).model_fields.items():
            for where, new in _with_each_field_changed(getattr(value, name), f"{path}.{info.alias or name}"):
                yield where, value.model_copy(update={name: new})
    elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
        for index, item in enumerate(value):
            for where, new in _with_each_field_changed(
                item, f"{path}.{item.type}" if hasattr(item, "type") else path
            ):
                yield where, (*value[:index], new, *value[index + 1 :])
    else:
        yield path.removeprefix("."), "something else"


def _stages_of(path: str) -> set[str]:
    if path.startswith("reward.judge.") and path not in {*IN_NO_KEY, *OUTSIDE}:
        return {"judge"}
    return set() if path in IN_NO_KEY else OUTSIDE.get(path, SECTIONS.get(path.split(".")[0], set()))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_field_not_listed_is_in_its_stage_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = config_with_demo_data(EVERYTHING, "test")
    before = {stage: stage_key(config, stage, {}, {}) for stage in STAGES}
    found = {
        path: {stage for stage in STAGES if stage_key(changed, stage, {}, {}) != before[stage]}
        for path, changed in _with_each_field_changed(config)
        if path != "run.device"
    }
    assert found == {path: _stages_of(path) for path in found}
    single = {".".join(path) for path in all_fields() if not is_section(locate(path).schema or {})}
    assert single - set(found) == {"run.device", "data.sft", "data.preference", "data.prompts", "ppo.rewards"}
    assert set(found) >= IN_NO_KEY | set(OUTSIDE)
    reward = locate(("ppo", "rewards", 0)).schema
    assert reward is not None
    assert {source.type for source in config.ppo.rewards} == set(variants(reward))


def test_key_depends_on_content_and_not_on_path() -> None:
    here, there = (
        with_demo_data({"model": {"path": path}, "data": {"sft": [{"path": f"{path}/x.jsonl"}]}})
        for path in ("/a", "/b")
    )
    assert _keys(here, {"model": "1"}) == _keys(there, {"model": "1"})
    assert _keys(here, {"model": "1"})["sft"] != _keys(here, {"model": "2"})["sft"]
    config = config_from_tree(here, "test"), config_from_tree(there, "test")
    assert pipeline_key(config[0], {"model": "1"}) == pipeline_key(config[1], {"model": "1"})


def test_renamed_fields_count_whatever_their_names() -> None:
    renamed = [
        _keys(with_demo_data({"data": {"sft": [{"path": "x.jsonl", "rename": names}]}}))
        for names in ({"path": "prompt"}, {})
    ]
    assert renamed[0]["data"] != renamed[1]["data"]


def test_roundings_are_the_rounding_settings_of_the_stage() -> None:
    config = config_from_tree({}, "test")
    names = {name: set(rounding_settings(config, name)) for name in STAGES}
    assert names["data"] == names["register"] == set()
    assert "sft.micro_batch_tokens" in names["sft"] and not any(
        name.startswith("ppo") for name in names["sft"]
    )
    assert {"ppo.micro_batch_tokens", "ppo.engine.max_num_seqs", "ppo.reward_ranks"} <= names["ppo"]


def test_a_checkpoint_notes_the_ranks_of_every_model_that_its_stage_trains() -> None:
    config = config_from_tree({"ppo": {"policy_deepspeed": {"ranks": 2}}}, "test")
    noted = rounding_settings(config, "ppo")
    assert (noted["ppo.policy_deepspeed.ranks"], noted["ppo.critic_deepspeed.ranks"]) == ("2", "1")
    sections: dict[StageName, str] = {"sft": "sft", "dpo": "dpo", "reward": "reward", "judge": "reward"}
    for stage, section in sections.items():
        assert rounding_settings(config, stage)[f"{section}.deepspeed.ranks"] == "1"


def test_stages_that_do_not_read_the_judges_settings_record_none_of_them() -> None:
    judge = {"deepspeed": {"gradient_checkpointing": True}, "micro_batch_tokens": 9}
    config = config_from_tree({"reward": {"judge": judge}, "dpo": {"enabled": True}}, "test")
    plain = config_from_tree({"reward": {"judge": {}}, "dpo": {"enabled": True}}, "test")
    for name in ("reward", "dpo"):
        assert rounding_settings(config, name) == rounding_settings(plain, name)
    own = {"reward.judge.deepspeed.gradient_checkpointing", "reward.judge.micro_batch_tokens"}
    assert own <= set(rounding_settings(config, "judge"))


def test_another_registry_changes_the_register_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    here, there = (
        _keys({"run": {"home": home}, "store": {"url": "s3://one/store"}}) for home in ("/here", "/there")
    )
    assert {stage for stage in STAGES if here[stage] != there[stage]} == {"register"}


def test_device_auto_has_the_key_of_the_resolved_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with on_machine(ScriptedMachine()):
        fixed = _keys({"run": {"device": "cpu"}})
        assert _keys({"run": {"device": "auto"}}) == fixed
    with on_machine(ScriptedMachine(gpus=["NVIDIA L40S"])):
        assert _keys({"run": {"device": "cpu"}}) == fixed
        assert not set(_keys({"run": {"device": "auto"}}).values()) & set(fixed.values())


@pytest.mark.parametrize(
    ("stage", "tree"), [("judge", {"reward": {"judge": {}}}), ("sample", {"sample": {}})]
)
def test_a_pipeline_key_has_a_later_stage_only_if_it_is_enabled(
    stage: StageName, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, enabled = PipelineConfig(), PipelineConfig.model_validate(tree)
    before = pipeline_key(plain, {}), pipeline_key(enabled, {})
    set_version(monkeypatch, stage, 99)
    assert pipeline_key(plain, {}) == before[0]
    assert pipeline_key(enabled, {}) != before[1]


def test_every_section_that_a_stage_names_is_in_the_pipeline_key() -> None:
    named = {section.split(".")[0] for stage in STAGES.values() for section in stage.sections}
    assert set(keys._PIPELINE_SECTIONS) == named


def test_a_source_that_a_key_leaves_out_is_in_the_key_of_an_input() -> None:
    for stage in STAGES.values():
        of_inputs = {
            source
            for name in stage.inputs
            for source in STAGES[name].sources
            if source not in STAGES[name].sources_of_inputs
        }
        assert set(stage.sources_of_inputs) <= of_inputs & set(stage.sources), stage.name


def test_later_field_is_in_the_key_only_with_another_value() -> None:
    class Old(Section):
        rate: float = result(0.5)

    class New(Old):
        patience: int = result(3, later=True)

    assert keys.result_settings(New()) == keys.result_settings(Old()) == {"rate": 0.5}
    assert keys.result_settings(New(patience=4)) == {"rate": 0.5, "patience": 4}


def test_a_removed_field_stays_in_the_key_with_its_only_value() -> None:
    class Old(Section):
        rate: float = result(0.5)
        momentum: float = result(0.9)

    class New(Section):
        constants: ClassVar = {"momentum": 0.9}

        rate: float = result(0.5)

    assert keys.result_settings(New()) == keys.result_settings(Old())


OPTIONAL_SECTIONS = {
    "sft": {"lora": {}, "early_stop": {}},
    "reward": {"lora": {}, "early_stop": {}, "judge": {}, "ensemble": {}},
    "dpo": {"enabled": True, "lora": {}},
    "sample": {},
    "evaluate": {"language_model": {"url": "http://one/v1", "model": "m"}},
    "ppo": {
        "lora": {},
        "overlong": {"buffer": 1},
        "algorithm": "grpo",
        "dynamic_filtering": {},
        "samples_per_prompt": 2,
        "ptx": {"coef": 1.0},
        "rewards": [{"type": "model"}, {"type": "repetition"}, SERVICE],
    },
    "model": {"path": "model"},
}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            {},
            {
                "data": "9060d56d161f4e50",
                "sft": "7972a7dfd4137c58",
                "reward": "f5b467d7ef8b5eb2",
                "judge": "410f7776b4aea656",
                "dpo": "1a6104fe823b4233",
                "ppo": "a8e910285a041ff5",
                "sample": "5b4a670235c9f6a3",
                "evaluate": "5691392d144da484",
                "register": "0e7dead6ed255d12",
                "pipeline": "08122d91d92973ca",
            },
        ),
        (
            OPTIONAL_SECTIONS,
            {
                "data": "9060d56d161f4e50",
                "sft": "0024bd3b3990a89e",
                "reward": "74a070ce6db2b377",
                "judge": "c7ddd9ddd49ab5a1",
                "dpo": "e0e073e395a24b4a",
                "ppo": "28a468a6ae1192f5",
                "sample": "2c11ceded133f884",
                "evaluate": "de4cc732ab207de8",
                "register": "0e7dead6ed255d12",
                "pipeline": "906dfcc1aba4eda3",
            },
        ),
    ],
    ids=["defaults", "optional sections"],
)
def test_keys_of_existing_configurations_stay(
    tree: dict[str, Any], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a key changes, users train everything again. A new field that causes it is declared with `later`."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:9")
    for name in STAGES:
        set_version(monkeypatch, name, 1)
    config = config_with_demo_data({**tree, "run": {"device": "cpu"}}, "test")
    found: dict[str, str] = {stage: stage_key(config, stage, {}, {}) for stage in STAGES}
    found["pipeline"] = pipeline_key(config, {})
    assert {name: found[name] for name in expected} == expected


def test_changed_settings_are_those_that_differ_from_the_defaults() -> None:
    config = PipelineConfig.model_validate({"run": {"name": "mine"}, "ppo": {"steps": 7}})
    assert changed(config) == {"run.name": "mine", "ppo.steps": 7}
    assert changed(config, ("ppo",)) == {"ppo.steps": 7}
    assert changed(PipelineConfig()) == {}
    unset = PipelineConfig.model_validate({"ppo": {"score_clip": None}})
    assert changed(unset) == {"ppo.score_clip": None}


def test_the_server_of_a_home_has_the_keys_of_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}, "register": {"model": "m"}})
    key = stage_key(config, "register", {}, {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5001")
    assert stage_key(config, "register", {}, {}) != key
    ports = Home(tmp_path).servers_ports
    ports.parent.mkdir()
    ports.write_text('{"mlflow": 5001}')
    assert stage_key(config, "register", {}, {}) == key
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert stage_key(config, "register", {}, {}) != key
