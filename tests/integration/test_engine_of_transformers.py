"""A model that vLLM runs with the class of transformers: sampled, and then scored in the same process.

vLLM changes the class in the process of its engine. Ray and vLLM are real.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_core.evaluation.generate import sample_responses
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from tests.support.small_ppo import VOCABULARY, small_config, small_prompts


def save_smollm3(folder: Path) -> Path:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    SmolLM3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_model_can_be_loaded_after_it_was_sampled(tmp_path: Path) -> None:
    model = save_smollm3(tmp_path / "model")
    config = small_config(model, {"max_new_tokens": 12})
    rollouts = sample_responses(
        config, PolicyFiles(model), small_prompts(), device="cpu", done=lambda count: None
    )
    policy = load_policy(model, dtype="float32", attention="sdpa", device="cpu")
    batch = collate([TokenSequence.of(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=0, pack=False)
    with torch.no_grad():
        logprobs_N = policy(batch).logprobs_N
    sampled_N = torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs])
    assert (logprobs_N - sampled_N).abs().max() < 1e-4
