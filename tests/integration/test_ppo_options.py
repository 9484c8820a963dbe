"""Options of PPO and rows that the other tests leave out, on the real Ray, vLLM and DeepSpeed.

- dynamic filtering replaces the prompts whose samples score alike, so that no such prompt is left
- the score of every response is its reward minus the overlong penalty, worked out by hand
- dual clip bounds the loss of tokens that became much more likely although their advantage is negative: the
  loss of the policy is the mean worked out by hand
- rows of 2,048 tokens: engine and trainer agree on every token of them, and the step changes the policy
- the score of a response by an ensemble of reward models is its worst one, as in the evaluation, and a step
  has the deviation over the members as a metric
- an engine of two tensor-parallel processes receives the weights over gloo and samples from the policy of
  each step
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.config.training import EnsembleConfig
from rlhf_core.evaluation.scoring import ResponseScorer
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import member_folder, member_folders, save_ensemble
from rlhf_core.types import PromptExample, RewardInput
from tests.support.small_ppo import (
    VOCABULARY,
    sampled_rollouts,
    save_small_model,
    small_config,
    small_ppo,
    token_columns,
)
from tests.support.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow  # a start of a fleet for each

LENGTH, BUFFER, FACTOR = 10, 4, 0.5
SHIFT, CLIP, DUAL_CLIP = 2.0, 0.2, 1.5
EVEN_FIRST = r"[\[(]\d*[02468]\D.*"
"""Matches the ids of a response, as `str` writes them, whose first is even."""


def prompts(count: int, length: int) -> list[PromptExample]:
    chance = random.Random(0)
    return [
        PromptExample(f"p{i}", "", (1, *(chance.randrange(3, VOCABULARY) for _ in range(length - 1))))
        for i in range(count)
    ]


def test_filtering_overlong_penalty_and_dual_clip_match_hand_computed_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary_lines: list[str]
) -> None:
    model = save_small_model(tmp_path / "model")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {
        "algorithm": "rloo",
        "kl": {"coef": 0.0},
        "prompts_per_step": 12,
        "samples_per_prompt": 2,
        "minibatches": 1,
        "max_new_tokens": LENGTH,
        "rewards": [{"type": "format", "pattern": EVEN_FIRST}],
        "dynamic_filtering": {"max_rounds": 8},
        "overlong": {"buffer": BUFFER, "factor": FACTOR},
        "clip_low": CLIP,
        "clip_high": CLIP,
        "dual_clip": DUAL_CLIP,
    }
    with small_ppo(small_config(model, options), model, tmp_path, prompts(100, 8)) as controller:
        batch = controller.collect()
        experience = controller.score(batch)
        rollouts = sampled_rollouts(controller, batch)
        # As if every token had become exp(2) times as likely since it was sampled.
        advantages_N = token_columns(controller, shift_old=-SHIFT)["advantages"]
        update = controller._train(batch, experience, 1)
    assert len(rollouts) == len(batch.prompts) == 24
    assert all(r.prompt_ids == p.input_ids for r, p in zip(rollouts, batch.prompts, strict=True))
    scores = []
    for rollout in rollouts:
        over = max(0, len(rollout.response_ids) - (LENGTH - BUFFER)) / BUFFER
        scores.append(float(rollout.response_ids[0] % 2 == 0) - FACTOR * over)
    assert experience.scores_B.tolist() == pytest.approx(scores, abs=1e-6)
    assert min(scores) <= -FACTOR < 0 < max(scores)
    assert batch.replaced > 0
    assert experience.metrics["rollout/replaced_prompts"] == batch.replaced
    assert experience.metrics["rollout/zero_variance_groups"] == 0
    assert all(scores[i] != scores[i + 1] for i in range(0, 24, 2))

    if experience.whitening is not None:
        advantages_N = torch.from_numpy(experience.whitening.apply(advantages_N.numpy()))
    assert (advantages_N < 0).any() and (advantages_N > 0).any()
    ratio = math.exp(SHIFT)
    unbounded_N = torch.where(advantages_N < 0, -ratio * advantages_N, -(1 + CLIP) * advantages_N)
    bounded_N = torch.where(advantages_N < 0, -DUAL_CLIP * advantages_N, -(1 + CLIP) * advantages_N)
    assert update["loss/policy"] == pytest.approx(bounded_N.mean().item(), abs=1e-5)
    assert update["policy/grad_norm"] == 0, "of a token held by a clip there is no gradient"
    summary_lines.append(
        f"options of PPO: {batch.replaced} prompts replaced, scores {min(scores):.2f} to {max(scores):.2f},"
        f" loss {update['loss/policy']:.5f} with dual clip (by hand {bounded_N.mean():.5f}, without"
        f" {unbounded_N.mean():.5f})"
    )


def test_a_step_trains_all_positions_of_rows_of_2048_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary_lines: list[str]
) -> None:
    model = save_tiny_llama(
        tmp_path / "model",
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        dtype="float32",
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {
        "prompts_per_step": 4,
        "max_new_tokens": 1024,
        "minibatches": 1,
        "micro_batch_tokens": 4096,
        "steps": 1,
    }
    config = small_config(model, options)
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 1024})})
    with small_ppo(config, model, tmp_path, prompts(4, 1024)) as controller:
        batch = controller.collect()
        experience = controller.score(batch)
        before_BT = token_columns(controller)["old_logprobs"].reshape(4, -1)
        update = controller._train(batch, experience, 1)
        controller.score(batch)
        after_BT = token_columns(controller)["old_logprobs"].reshape(4, -1)
    assert (batch.prompt_lengths_B + batch.lengths_B).tolist() == [2048] * 4
    assert experience.metrics["rollout/logprob_gap_max"] < 1e-4
    assert update["policy/grad_norm"] > 0 and update["value/grad_norm"] > 0
    changed_BT = (after_BT - before_BT).abs()
    # The last positions too are trained on, not the first ones alone.
    assert changed_BT[:, -128:].mean() > 1e-4
    summary_lines.append(
        "rows of 2,048 tokens: largest gap to the engine"
        f" {experience.metrics['rollout/logprob_gap_max']:.1e}, mean change of log-probabilities by one step"
        f" {changed_BT.mean():.1e}"
    )


def test_an_ensemble_scores_as_in_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary_lines: list[str]
) -> None:
    model = save_small_model(tmp_path / "model")
    folder = tmp_path / "reward"
    for number in range(3):
        torch.manual_seed(number)
        member = load_score_model(model, dtype="float32", attention="sdpa", device="cpu")
        member.statistics = ScoreStatistics(0.0, 0.1 + number)
        member.save(member_folder(folder, number))
    save_ensemble(folder, EnsembleConfig(members=3, combine="worst_case"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {
        "prompts_per_step": 8,
        "max_new_tokens": 12,
        "minibatches": 1,
        "score_clip": None,
        "rewards": [{"type": "model"}],
    }
    config = small_config(model, options)
    with small_ppo(config, model, tmp_path, prompts(20, 8), roles={"reward": folder}) as controller:
        batch = controller.collect()
        experience = controller.score(batch)
        rollouts = sampled_rollouts(controller, batch)
    samples = [RewardInput("", "", "", r.prompt_ids, r.response_ids, r.finished) for r in rollouts]

    def scored(part: Path) -> list[float]:
        return ResponseScorer(config, 0, "cpu").reward_model("reward", part, samples)

    # Of a folder without `ensemble.json`, the first member alone.
    alone = [scored(part) for part in member_folders(folder)[1:]]
    (folder / "ensemble.json").rename(tmp_path / "ensemble.json")
    alone.append(scored(folder))
    (tmp_path / "ensemble.json").rename(folder / "ensemble.json")
    assert batch.rewards is not None
    assert batch.rewards.total == pytest.approx(np.array(alone).min(0), abs=1e-4)
    assert batch.rewards.total == pytest.approx(scored(folder), abs=1e-4)
    deviation = experience.metrics["rewards/ensemble_std"]
    assert deviation == pytest.approx(np.array(alone).std(0).mean(), abs=1e-4) and deviation > 0
    summary_lines.append(
        f"an ensemble of three reward models: mean deviation {deviation:.3f} over the members"
    )


def test_a_tensor_parallel_engine_gets_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary_lines: list[str]
) -> None:
    model = save_small_model(tmp_path / "model")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {
        "algorithm": "rloo",
        "samples_per_prompt": 2,
        "prompts_per_step": 8,
        "max_new_tokens": 12,
        "minibatches": 1,
        "engine": {"tensor_parallel": 2},
    }
    with small_ppo(small_config(model, options), model, tmp_path, prompts(20, 8)) as controller:
        steps = [controller.iterate() for _ in range(3)]
    assert [step["sync/version"] for step in steps] == [1, 2, 3]
    assert steps[-1]["objective/kl"] > 0.01, "the policy has left its reference"
    gaps = [step["rollout/logprob_gap_max"] for step in steps]
    assert max(gaps) < 1e-4
    summary_lines.append(
        f"an engine of two processes: largest gap in log-probability {max(gaps):.1e} in three steps"
    )
