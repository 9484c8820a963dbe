"""Engines that compute in bfloat16, through the real vLLM.

- with `model.head_dtype: float32` an engine in bfloat16 gives the log-probabilities of unrounded logits, as
  the trainer
- a trainer in float32 corrects for such an engine: the weight of each token is exp(trainer - engine) within
  `ppo.importance_bounds`, and the loss of the policy is the mean of weight x advantage worked out by hand
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from tests.support.small_ppo import (
    VOCABULARY,
    sampled_rollouts,
    small_config,
    small_ppo,
    small_prompts,
    token_columns,
)
from tests.support.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow  # three starts of an engine

HIDDEN = 256
LOW, HIGH = 0.9, 1.001


def saved(folder: Path, initializer_range: float) -> Path:
    return save_tiny_llama(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )


def test_an_engine_in_bfloat16_can_leave_its_logits_unrounded(
    tmp_path: Path, summary_lines: list[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from rlhf_core.engines.vllm import Engine

    # Decoder layers that add nothing: what is left of bfloat16's rounding is that of the head. Its logits
    # have a standard deviation of sqrt(256) x 0.5 = 8, where bfloat16's numbers are 0.03 to 0.06 apart.
    model = saved(tmp_path / "model", 0.5)
    lm = AutoModelForCausalLM.from_pretrained(model)
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    lm.save_pretrained(model)
    heads = ("model", "float32")
    trainers = {
        head: load_policy(model, dtype="bfloat16", attention="sdpa", device="cpu", head_dtype=head)
        for head in heads
    }
    prompts, gaps = small_prompts(), {}
    for head in heads:
        engine = Engine(
            model, EngineConfig(dtype="bfloat16"), device="cpu", max_model_len=64, seed=0, head_dtype=head
        )
        seeds = list(range(len(prompts)))
        rollouts = engine.generate(
            prompts, n=1, max_new_tokens=40, temperature=1.0, seeds=seeds, policy_version=0
        )
        engine.shutdown()
        batch = collate(
            [TokenSequence.of(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=0, pack=False
        )
        sampled_N = torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs])
        for name, trainer in trainers.items():
            with torch.no_grad():
                gaps[head, name] = (trainer(batch).logprobs_N - sampled_N).abs().mean().item()
    shown = ", ".join(f"{engine} and {trainer} {gap:.1e}" for (engine, trainer), gap in gaps.items())
    summary_lines.append(
        f"mean gap in log-probability by head of engine and trainer, both in bfloat16: {shown}"
    )
    # Float32 sums of 256 products of logits of about 8 are off by 1e-5; rounding to bfloat16 by 1e-2.
    assert gaps["float32", "float32"] < 1e-4
    assert gaps["model", "float32"] > 1e-3
    assert gaps["float32", "model"] > 1e-3


def test_importance_weights_correct_the_loss_for_an_engine_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary_lines: list[str]
) -> None:
    model = saved(tmp_path / "model", 0.12)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options: dict[str, Any] = {
        "algorithm": "rloo",
        "kl": {"coef": 0.0},
        "prompts_per_step": 10,
        "samples_per_prompt": 2,
        "minibatches": 1,
        "max_new_tokens": 40,
        "engine": {"dtype": "bfloat16"},
        "importance_bounds": [LOW, HIGH],
    }
    config = small_config(model, options)
    assert config.ppo.used_importance == "truncate", "chosen because the precisions differ"
    with small_ppo(config, model, tmp_path, small_prompts()) as controller:
        batch = controller.collect()
        experience = controller.score(batch)
        rollouts = sampled_rollouts(controller, batch)
        columns = token_columns(controller)
        update = controller._train(batch, experience, 1)
    sampled_N = torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs])
    ratio_N = (columns["old_logprobs"] - sampled_N).exp()
    weights_N = ratio_N.clamp(LOW, HIGH)
    torch.testing.assert_close(columns["weights"], weights_N, rtol=0, atol=1e-6)
    inside = ((ratio_N > LOW) & (ratio_N < HIGH)).float().mean().item()
    assert 0.05 < inside < 0.95, "the bounds cut some weights and leave others"

    advantages_N = columns["advantages"]
    by_hand = -(weights_N * advantages_N).mean().item()
    uncorrected = -advantages_N.mean().item()
    # The update computes the log-probabilities again; its ratio is 1 but for float32's last bits.
    assert update["loss/policy"] == pytest.approx(by_hand, abs=1e-6)
    assert abs(by_hand - uncorrected) > 2e-5
    summary_lines.append(
        f"engine in bfloat16, trainer in float32: {inside:.0%} of the weights within {LOW} and {HIGH}, mean"
        f" gap {experience.metrics['rollout/logprob_gap_mean']:.1e}, loss {update['loss/policy']:.6f} (by"
        f" hand {by_hand:.6f}, without weights {uncorrected:.6f})"
    )
