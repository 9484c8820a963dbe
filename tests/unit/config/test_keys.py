"""Stage keys.

- a setting changes the keys of its stage and, through digests, of what follows; never of what comes before
- what only says when or where things happen changes no key
- what is read from outside counts by content: a folder may move, and its changes are seen
- `device: auto` counts as the device it leads to
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import keys
from rlhf_core.config.keys import pipeline_key, stage_key
from rlhf_core.config.load import config_from_tree
from rlhf_core.types import STAGES


def _keys(tree: dict[str, Any], sources: dict[str, str] | None = None) -> dict[str, str]:
    config = config_from_tree(tree, "test")
    return {stage: stage_key(config, stage, {}, sources or {}) for stage in STAGES}


def _changed(tree: dict[str, Any]) -> set[str]:
    before, after = _keys({}), _keys(tree)
    return {stage for stage in STAGES if before[stage] != after[stage]}


@pytest.mark.parametrize(
    ("tree", "stages"),
    [
        ({"sft": {"epochs": 7}}, {"sft"}),
        ({"reward": {"center": 0.1}}, {"reward"}),
        ({"ppo": {"lam": 0.9}}, {"ppo", "evaluate"}),
        ({"ppo": {"checkpoint_every": 3, "engine": {"max_restarts": 0}, "max_kl": 50.0}}, set()),
        ({"run": {"retries": 7}}, set()),
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


def test_auto_counts_as_the_device_it_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = _keys({"run": {"device": "cpu"}})
    assert _keys({"run": {"device": "auto"}}) == fixed
    monkeypatch.setattr(keys, "runs_on_gpu", lambda config: config.run.device != "cpu")
    assert _keys({"run": {"device": "cpu"}}) == fixed
    assert not set(_keys({"run": {"device": "auto"}}).values()) & set(fixed.values())
