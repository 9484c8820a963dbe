"""Stage keys.

- a setting changes the keys of its stage and, through digests, of what follows; never of what comes before
- what only says when or where things happen changes no key
- what is read from outside counts by content: a folder may move, and its changes are seen
- names that users choose count, whatever they are; a registration belongs to one registry
- what decides by rounding alone is named for a checkpoint
- `device: auto` counts as the device it leads to
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import keys
from rlhf_core.config.keys import pipeline_key, roundings, stage_key
from rlhf_core.config.load import config_from_tree
from rlhf_core.types import STAGES


def _keys(tree: dict[str, Any], sources: dict[str, str] | None = None) -> dict[str, str]:
    config = config_from_tree(tree, "test")
    return {stage: stage_key(config, stage, {}, sources or {}) for stage in STAGES}


SERVICE = {"type": "remote", "urls": ["http://one/x"], "allowed_hosts": ["one", "other"]}


def _changed(tree: dict[str, Any]) -> set[str]:
    before = _keys({"ppo": {"rewards": [SERVICE]}} if "rewards" in tree.get("ppo", {}) else {})
    after = _keys(tree)
    return {stage for stage in STAGES if before[stage] != after[stage]}


@pytest.mark.parametrize(
    ("tree", "stages"),
    [
        ({"sft": {"epochs": 7}}, {"sft"}),
        ({"reward": {"center": 0.1}}, {"reward"}),
        ({"ppo": {"lam": 0.9}}, {"ppo", "evaluate"}),
        ({"ppo": {"checkpoint_every": 3, "engine": {"max_restarts": 0}, "max_kl": 50.0}}, set()),
        ({"sft": {"micro_batch_tokens": 9}, "ppo": {"micro_batch_tokens": 9, "engine": {"max_num_seqs": 9}}}, set()),
        ({"ppo": {"policy_deepspeed": {"gradient_checkpointing": True, "ranks": 2, "hpz": 2}}}, set()),
        ({"ppo": {"rewards": [{**SERVICE, "concurrency": 9, "items_per_request": 1, "backoff": 9.0}]}}, set()),
        ({"ppo": {"rewards": [{**SERVICE, "urls": ["http://other/x"]}]}}, {"ppo", "evaluate"}),
        ({"run": {"retries": 7}}, set()),
        ({"sft": {"deepspeed": {"ranks": 2, "allow_other_ranks": True}}, "ppo": {"reference_ranks": 3}}, set()),
        ({"reward": {"early_stop": {"every": 9}}}, {"reward"}),
        ({"run": {"seed": 5}}, set(STAGES)),
    ],
)
def test_a_setting_changes_the_keys_of_its_stages_alone(tree: dict[str, Any], stages: set[str]) -> None:
    assert _changed(tree) == stages


def test_a_folder_may_move_but_its_content_counts() -> None:
    here, there = ({"model": {"path": path}, "data": {"sft": [{"path": f"{path}/x.jsonl"}]}} for path in ("/a", "/b"))
    assert _keys(here, {"model": "1"}) == _keys(there, {"model": "1"})
    assert _keys(here, {"model": "1"})["sft"] != _keys(here, {"model": "2"})["sft"]
    config = config_from_tree(here, "test"), config_from_tree(there, "test")
    assert pipeline_key(config[0], {"model": "1"}) == pipeline_key(config[1], {"model": "1"})


def test_a_field_may_be_renamed_to_a_word_that_means_something_elsewhere() -> None:
    renamed = [_keys({"data": {"sft": [{"path": "x.jsonl", "rename": names}]}}) for names in ({"path": "prompt"}, {})]
    assert renamed[0]["data"] != renamed[1]["data"]


def test_what_rounds_otherwise_is_named_for_the_stage_that_it_is_of() -> None:
    config = config_from_tree({}, "test")
    names = {name: set(roundings(config, name)) for name in STAGES}
    assert names["data"] == names["register"] == set()
    assert "sft.micro_batch_tokens" in names["sft"] and not any(name.startswith("ppo") for name in names["sft"])
    assert {"ppo.micro_batch_tokens", "ppo.engine.max_num_seqs", "ppo.reward_ranks"} <= names["ppo"]


def test_another_registry_needs_a_registration_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    here, there = (_keys({"run": {"home": home}, "store": {"url": "s3://one/store"}}) for home in ("/here", "/there"))
    assert {stage for stage in STAGES if here[stage] != there[stage]} == {"register"}


def test_auto_counts_as_the_device_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = _keys({"run": {"device": "cpu"}})
    assert _keys({"run": {"device": "auto"}}) == fixed
    monkeypatch.setattr(keys, "runs_on_gpu", lambda config: config.run.device != "cpu")
    assert _keys({"run": {"device": "cpu"}}) == fixed
    assert not set(_keys({"run": {"device": "auto"}}).values()) & set(fixed.values())
