"""Evaluation on held-out prompts and the policy that is published, with the real Ray, vLLM and DeepSpeed.

- evaluations do not change the training: the weights of the last step have the same bits
- with `publish: best` the published weights are those of the best version, and not those of the last one
- an attempt that is killed after the best version continues from its checkpoint to the same evaluations and
  the same published bits
- with `publish: average` and ZeRO-3 the published weights are neither those of the SFT model nor the last
  ones, and an attempt that is killed continues to the same bits
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PPOSettings
from rlhf_core.evaluation.during_ppo import HeldOutEvaluation
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.watching.selection import OBJECTIVE, HeldOutResult
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from tests.support.checkpoints import keep
from tests.support.small_ppo import ROLES, local_context, save_small_model, small_config, small_prompts

STEPS, BEST = 3, 1
SETTINGS = {
    "steps": STEPS,
    "prompts_per_step": 8,
    "minibatches": 1,
    "max_new_tokens": 8,
    "checkpoint_every": 2,
}


class Killed(Exception):
    pass


class FallingScore(HeldOutEvaluation):
    """Measures what the real one does, but each version is worse than the one before."""

    killed_at: int | None = None

    def evaluate(self, version: int) -> HeldOutResult:
        if version == self.killed_at:
            raise Killed
        found, objective = super().evaluate(version), float(-version)
        return HeldOutResult({**found.metrics, OBJECTIVE: objective}, [objective] * len(found.objectives))


@contextmanager
def trained(config: PipelineConfig, model: Path, work: Path, killed_at: int | None = None) -> Iterator[Any]:
    """Yield the controller after its last step. Checkpoints are in the folder next to `work`."""
    work.mkdir()
    store = CheckpointStore(Store(work.parent / "store"), config.ppo.publish, work, keep(1))
    context = replace(local_context(work), checkpoints=store)
    prompts = small_prompts()
    with (
        RewardComposer(config.ppo.rewards) as composer,
        Fleet(PPOSettings.of(config), "cpu", dict.fromkeys(ROLES, model), 0) as fleet,
    ):
        evaluation = None
        if config.ppo.evaluation_interval is not None:
            evaluation = FallingScore(config, fleet, prompts[:6], str, composer)
            evaluation.killed_at = killed_at
        controller = PPOController(fleet, prompts[6:], str, composer, context, evaluation=evaluation)
        controller.run()
        yield controller


def saved(controller: PPOController, folder: Path) -> str:
    """Save the policy and return the digest of its weights."""
    controller.save_policy(folder)
    return digest(folder)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_best_version_is_published_also_after_a_kill(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    plain = small_config(model, SETTINGS)
    evaluated = small_config(model, {**SETTINGS, "publish": "best", "evaluate_every": 1})
    with trained(plain, model, tmp_path / "plain") as controller:
        last = saved(controller, tmp_path / "last")
    with trained(evaluated, model, tmp_path / "whole") as controller:
        assert saved(controller, tmp_path / "of_last_step") == last
        evaluations = controller.selection.evaluations
        assert list(evaluations) == [0, 1, 2, 3]
        assert evaluations[0]["eval/kl"] == 0.0 and evaluations[0]["eval/win_rate"] == 0.5
        assert evaluations[STEPS]["eval/kl"] != 0.0
        assert controller.restore_best() == BEST
        best = saved(controller, tmp_path / "best")
    assert best != last
    (tmp_path / "store").rename(tmp_path / "store_of_whole")
    with pytest.raises(Killed), trained(evaluated, model, tmp_path / "killed", killed_at=STEPS):
        pass
    with trained(evaluated, model, tmp_path / "continued") as controller:
        assert controller.selection.evaluations == evaluations
        assert controller.restore_best() == BEST
        assert saved(controller, tmp_path / "best_continued") == best


@pytest.mark.slow
def test_the_average_is_published_also_after_a_kill(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    sharded = {"policy_deepspeed": {"zero_stage": 3}, "evaluate_every": 1}
    config = small_config(model, {**SETTINGS, **sharded, "publish": "average", "ema_decay": 0.5})
    with trained(config, model, tmp_path / "whole") as controller:
        last = saved(controller, tmp_path / "last")
        controller.restore_average()
        average = saved(controller, tmp_path / "average")
    assert len({digest(model), last, average}) == 3
    (tmp_path / "store").rename(tmp_path / "store_of_whole")
    with pytest.raises(Killed), trained(config, model, tmp_path / "killed", killed_at=STEPS):
        pass
    with trained(config, model, tmp_path / "continued") as controller:
        assert list(controller.selection.evaluations) == [0, 1, 2, 3]
        assert saved(controller, tmp_path / "last_continued") == last
        controller.restore_average()
        assert saved(controller, tmp_path / "average_continued") == average


def test_published_weights_are_the_last_ones_without_an_acceptable_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller: Any = SimpleNamespace(
        selection=SimpleNamespace(best=None), completed_steps=4, _ppo=SimpleNamespace(publish_kl_limit=2.0)
    )
    assert PPOController.restore_best(controller) == 4
    assert "ppo.publish_max_kl" in caplog.text
