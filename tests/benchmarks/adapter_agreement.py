"""The policy of a PPO run with `ppo.lora`, three ways: vLLM serves its adapter on the SFT model, PEFT loads
the adapter onto the SFT model, and the merged model stands alone. Prints the largest differences of the
log-probabilities that they give to the same sampled responses, and the difference from the SFT model.

    python -m tests.benchmarks.adapter_agreement SUMMARY

SUMMARY is the path of the summary.json that `rlhf run` prints at its end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.engines.vllm import Engine
from rlhf_core.types import PromptExample, Rollout
from tests.support.arguments import positive


def served(model: Path, adapter: Path, prompts: list[PromptExample], tokens: int) -> list[Rollout]:
    """Responses by a fresh engine."""
    from vllm.lora.request import LoRARequest

    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    length = max(len(prompt.input_ids) for prompt in prompts) + tokens
    engine = Engine(model, EngineConfig(), device="cpu", max_model_len=length, seed=0, adapter_rank=rank)
    engine.llm.llm_engine.add_lora(LoRARequest("policy-1", 1, str(adapter)))
    seeds = list(range(len(prompts)))
    rollouts = engine.generate(
        prompts, n=1, max_new_tokens=tokens, temperature=1.0, seeds=seeds, policy_version=0, adapter=1
    )
    engine.shutdown()
    return rollouts


@torch.no_grad()
def largest_gap(lm: Any, rollouts: list[Rollout]) -> float:
    """Between the engine's log-probabilities and those of a Hugging Face model."""
    gaps: list[float] = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        logprobs = lm(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        gaps.append((own - torch.tensor(rollout.rollout_logprobs)).abs().max().item())
    return max(gaps)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=48)
    args = parser.parse_args(arguments)
    stages = json.loads(args.summary.read_text())["stages"]
    data, sft, ppo = (
        Path(stages[name]["artifact"].removeprefix("file://")) for name in ("data", "sft", "ppo")
    )

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rollouts = served(sft / "model", ppo / "adapter", load_prompts(data, "eval")[: args.prompts], args.tokens)
    base = AutoModelForCausalLM.from_pretrained(sft / "model")
    print(
        f"{sum(len(r.response_ids) for r in rollouts)} tokens sampled by vLLM with the adapter; largest"
        " differences:"
    )
    print(f"  SFT model, no adapter    {largest_gap(base, rollouts):.1e}")
    print(
        "  SFT model + PEFT adapter"
        f" {largest_gap(PeftModel.from_pretrained(base, ppo / 'adapter'), rollouts):.1e}"
    )
    print(
        "  merged model            "
        f" {largest_gap(AutoModelForCausalLM.from_pretrained(ppo / 'policy'), rollouts):.1e}"
    )


if __name__ == "__main__":
    main()
