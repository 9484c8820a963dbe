"""PPO with mixtures of experts: Ray, vLLM and DeepSpeed for real.

- after a training step and a sync, engine and trainer give the same tokens the same log-probabilities. The
  modules of these models hold all experts of a layer in one tensor. In their files each expert has its own
  (Qwen3 MoE, slow set), and in those of Mixtral under other names
- experts that vLLM's loader cannot update are an error of the first sync (slow set)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.errors import RLHFError
from tests.support.small_ppo import VOCABULARY, small_config, small_ppo, small_prompts

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 64},
}
"""vLLM pads experts of 48 rows on the CPU."""
POLICY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {
        "policy_deepspeed": {"ranks": 2, "zero_stage": 3},
        "weight_sync": {"backend": "gloo"},
    },
}

TIMEOUTS = {"start": 900}
"""The first start of an engine with experts can take long on a busy machine."""


def saved(folder: Path, model_type: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "mixtral"])
def test_engines_have_the_trained_experts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    model = saved(tmp_path / "model", model_type)
    options = {
        "algorithm": "rloo",
        "kl": {"coef": 0.0},
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "minibatches": 1,
        "max_new_tokens": 12,
        "policy": {"learning_rate": 5e-2, "schedule": "constant"},
        **POLICY[model_type],
    }
    config = small_config(model, options, timeouts=TIMEOUTS)
    with small_ppo(config, model, tmp_path, small_prompts()) as controller:
        first = controller.iterate()
        assert first["rollout/logprob_gap_max"] < 1e-4
        experience = controller.score(controller.collect())
        assert experience.metrics["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_experts_that_the_engine_cannot_update_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    model = saved(tmp_path / "model", "gpt_oss")
    config = small_config(model, {"algorithm": "reinforce_pp", "kl": {"coef": 0.0}}, timeouts=TIMEOUTS)
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention": "eager"})})
    with (
        pytest.raises(RLHFError, match="vLLM does not load the experts of GptOssForCausalLM"),
        small_ppo(config, model, tmp_path, small_prompts()),
    ):
        raise AssertionError("the first sync did not fail")
