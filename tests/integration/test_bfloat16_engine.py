"""Engines that compute in bfloat16, through the real vLLM.

- with `model.head_dtype: float32` an engine in bfloat16 gives the log-probabilities of unrounded logits, as the trainer
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.config.ppo import EngineConfig
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from tests.small_ppo import VOCABULARY, small_prompts
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow  # two starts of an engine

HIDDEN = 256


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


def test_an_engine_in_bfloat16_can_leave_its_logits_unrounded(tmp_path: Path, summary_lines: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    from rlhf_core.rollout.engine import Engine

    # Decoder layers that add nothing: what is left of bfloat16's rounding is that of the head. Its logits have a
    # standard deviation of sqrt(256) x 0.5 = 8, where bfloat16's numbers are 0.03 to 0.06 apart.
    model = saved(tmp_path / "model", 0.5)
    lm = AutoModelForCausalLM.from_pretrained(model)
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    lm.save_pretrained(model)
    heads = ("model", "float32")
    trainers = {
        head: load_policy(model, dtype="bfloat16", attention="sdpa", device="cpu", head_dtype=head) for head in heads
    }
    prompts, gaps = small_prompts(), {}
    for head in heads:
        engine = Engine(model, EngineConfig(dtype="bfloat16"), device="cpu", max_model_len=64, seed=0, head_dtype=head)
        seeds = list(range(len(prompts)))
        rollouts = engine.generate(prompts, n=1, max_new_tokens=40, temperature=1.0, seeds=seeds, policy_version=0)
        engine.shutdown()
        batch = collate([TokenSequence.of(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=0, pack=False)
        sampled_N = torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs])
        for name, trainer in trainers.items():
            with torch.no_grad():
                gaps[head, name] = (trainer(batch).logprobs_N - sampled_N).abs().mean().item()
    shown = ", ".join(f"{engine} and {trainer} {gap:.1e}" for (engine, trainer), gap in gaps.items())
    summary_lines.append(f"mean gap in log-probability by head of engine and trainer, both in bfloat16: {shown}")
    # Float32 sums of 256 products of logits of about 8 are off by 1e-5; rounding to bfloat16 by 1e-2.
    assert gaps["float32", "float32"] < 1e-4
    assert gaps["model", "float32"] > 1e-3
    assert gaps["float32", "model"] > 1e-3
