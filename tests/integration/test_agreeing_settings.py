"""Whole PPO iterations under settings that must not matter: Ray, vLLM and DeepSpeed for real, float32.

- padded or packed, in one pass or many, on one policy rank or two under ZeRO-3, with one engine or two, with
  models in processes of their own or shared: the same rollouts, and the same loss, KL, scores and gradient
  norm of every step
- policy and reference, critic and reward model, or all four in the same processes: the same
- a merged adapter in the engines, or the adapter alone: the same
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.placement import Role
from rlhf_core.models.score import load_score_model
from tests.support.small_ppo import save_small_model, small_config, small_ppo, small_prompts

pytestmark = pytest.mark.slow  # a start of a fleet for each

STEPS = 2
COMPARED = (
    "loss/policy", "loss/value", "objective/kl", "objective/scores", "objective/rlhf_reward",
    "policy/grad_norm", "value/grad_norm", "policy/entropy", "rollout/length",
)  # fmt: skip
PLAIN: dict[str, Any] = {
    "prompts_per_step": 12,
    "max_new_tokens": 10,
    "minibatches": 2,
    "micro_batch_tokens": 4096,
}
OTHERS: dict[str, dict[str, Any]] = {
    "padded, many passes": {"pack": False, "micro_batch_tokens": 64},
    "packed, many passes, two engines": {"micro_batch_tokens": 64, "engine": {"count": 2}},
    "two ranks of ZeRO-3": {"policy_deepspeed": {"ranks": 2, "zero_stage": 3}, "micro_batch_tokens": 64},
    "processes of their own, ZeRO-2": {"colocate": "none", "critic_deepspeed": {"zero_stage": 2}},
}
REWARD_MODEL: dict[str, Any] = {"rewards": [{"type": "model"}]}
PLACES = ("policy_reference", "critic_reward", "all")
"""Of `ppo.colocate`; compared with `pairs`, with a reward model so that all four roles have work."""
LORA: dict[str, Any] = {**PLAIN, "lora": {"r": 4, "alpha": 8}}


def steps(
    model: Path,
    folder: Path,
    ppo: Mapping[str, Any],
    patch: pytest.MonkeyPatch,
    roles: Mapping[Role, Path] | None = None,
) -> list[dict[str, float]]:
    """What is logged of each."""
    patch.setenv("DS_ACCELERATOR", "cpu")
    config = small_config(model, {**PLAIN, **ppo})
    with small_ppo(config, model, folder, small_prompts(), roles=roles) as controller:
        return [controller.iterate() for _ in range(STEPS)]


def assert_same(made: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, (mine, wanted) in enumerate(zip(made, expected, strict=True), start=1):
        for name in COMPARED:
            assert mine[name] == pytest.approx(wanted[name], rel=1e-4, abs=2e-6), f"step {step}: {name}"
        assert abs(wanted["policy/grad_norm"]) > 1e-3, "something is learned"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        return steps(model, tmp_path_factory.mktemp("plain"), {}, patch)


@pytest.mark.parametrize("name", OTHERS)
def test_how_it_is_run_does_not_matter(
    name: str, plain: list[dict[str, float]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(steps(model, tmp_path, OTHERS[name], monkeypatch), plain)


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    score = load_score_model(model, dtype="float32", attention="sdpa", device="cpu")
    folder = tmp_path_factory.mktemp("reward")
    score.save(folder)
    return folder


@pytest.fixture(scope="module")
def in_pairs(
    model: Path, reward_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        return steps(model, tmp_path_factory.mktemp("pairs"), REWARD_MODEL, patch, scored_by(reward_model))


@pytest.mark.parametrize("colocate", PLACES)
def test_models_that_share_processes_give_the_same_steps(
    colocate: str,
    in_pairs: list[dict[str, float]],
    model: Path,
    reward_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = steps(
        model, tmp_path, {**REWARD_MODEL, "colocate": colocate}, monkeypatch, scored_by(reward_model)
    )
    assert_same(made, in_pairs)


def scored_by(reward_model: Path) -> dict[Role, Path]:
    """Reward model and critic from it, as the stage `ppo` has them."""
    return {"reward": reward_model, "critic": reward_model}


def test_merged_and_separate_adapters_give_the_same_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for sync in ("merged", "adapter"):
        folder = tmp_path / sync
        folder.mkdir()
        made.append(steps(model, folder, {**LORA, "weight_sync": {"lora": sync}}, monkeypatch))
    merged, alone = made
    assert_same(alone, merged)
