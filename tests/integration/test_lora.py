"""PPO that trains adapters only: Ray, vLLM and DeepSpeed for real, for both ways of weight sync.

- at the first step the policy without its adapter, the reference, gives the same numbers as with it: KL
  exactly 0
- after each sync, merged weights or adapter alone, engines and trainer give the same tokens the same
  log-probabilities, to 1e-4 in float32; so does the saved adapter, loaded by PEFT on the base model
- the saved model is the base with the adapter merged; the same adapter, served by a fresh engine, gives the
  same
- only the adapter's bytes travel where it is sent alone; an altered tensor stops the run
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.types import PromptExample, Rollout
from tests.support.small_ppo import (
    ADAPTER_TENSORS,
    sampled_rollouts,
    save_small_model,
    small_config,
    small_ppo,
    small_prompts,
)
from tests.support.small_ppo import TENSORS as WHOLE

RANK = 4
TENSORS = {"merged": WHOLE, "adapter": ADAPTER_TENSORS}
"""The whole model, or the A and B of seven adapted matrices in each of two decoder layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def _config(model: Path, sync: str) -> PipelineConfig:
    # A critic would be one more process; that of `merged` has an adapter, too.
    several_ranks = {
        "algorithm": "rloo",
        "prompts_per_step": 6,
        "samples_per_prompt": 2,
        "policy_deepspeed": {"ranks": 2, "zero_stage": 3},
    }
    return small_config(
        model,
        {
            "prompts_per_step": 12,
            "max_new_tokens": 12,
            "minibatches": 3,
            "policy": {"learning_rate": 2e-2, "schedule": "constant"},
            "lora": {"r": RANK, "alpha": 8},
            "weight_sync": {"lora": sync},
            **(several_ranks if sync == "adapter" else {}),
        },
    )


def _logprobs(lm: Any, rollouts: list[Rollout]) -> list[torch.Tensor]:
    """Return the log-probabilities of each response's tokens by a Hugging Face model."""
    found = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            logprobs = lm(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0])
    return found


def _gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_engines_trainer_and_the_saved_adapter_agree(
    model: Path, tmp_path: Path, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third sync is the one after step 2; its fifth tensor is altered after its checksum was taken, or
    # gets lost.
    fault = {"merged": ("load", "drop"), "adapter": ("send", "alter")}[sync]
    monkeypatch.setenv("RLHF_FAIL", f"weight_sync.{fault[0]}:{2 * TENSORS[sync] + 5}:{fault[1]}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    prompts = small_prompts()
    with small_ppo(_config(model, sync), model, tmp_path, prompts) as controller:
        first = controller.iterate()
        assert first["objective/kl"] == 0.0
        assert first["rollout/logprob_gap_max"] < 1e-4
        batch = controller.collect()
        rollouts = sampled_rollouts(controller, batch)
        experience = controller.score(batch)
        assert experience.metrics["rollout/logprob_gap_max"] < 1e-4
        assert abs(experience.metrics["objective/kl"]) > 1e-2
        controller.save_policy(tmp_path / "policy")
        controller.save_adapter(tmp_path / "adapter", str(model))
        with pytest.raises(WeightSyncError, match=rf"1 of {TENSORS[sync]} tensors differ"):
            controller.iterate()
    if sync == "adapter":
        # vLLM reads all modules of its process, and Flask, which other tests import, does not allow that.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            rollouts += process.submit(_served, model, tmp_path / "adapter", prompts).result()
    _check_saved(model, tmp_path, rollouts)


def _check_saved(model: Path, folder: Path, rollouts: list[Rollout]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    start = _logprobs(base, rollouts)
    adapted = _logprobs(PeftModel.from_pretrained(base, folder / "adapter"), rollouts)
    plain = _logprobs(AutoModelForCausalLM.from_pretrained(folder / "policy"), rollouts)
    assert _gap(adapted, start) > 1e-2
    assert _gap(adapted, [torch.tensor(rollout.rollout_logprobs) for rollout in rollouts]) < 1e-4
    assert _gap(plain, adapted) < 1e-4


def _served(model: Path, adapter: Path, prompts: list[PromptExample]) -> list[Rollout]:
    """Responses of a fresh engine that serves `adapter` from its folder."""
    from vllm.lora.request import LoRARequest

    from rlhf_core.engines.vllm import Engine

    engine = Engine(
        model, EngineConfig(kv_cache_gib=1.0), device="cpu", max_model_len=32, seed=0, adapter_rank=RANK
    )
    engine.llm.llm_engine.add_lora(LoRARequest("policy-1", 1, str(adapter)))
    seeds = list(range(len(prompts)))
    rollouts = engine.generate(
        prompts, n=1, max_new_tokens=12, temperature=1.0, seeds=seeds, policy_version=0, adapter=1
    )
    engine.shutdown()
    return rollouts
