"""A small real PPO run whose reward is a rule: for the slow learning tests and `tests.benchmarks.learning_curves`.

A random Llama samples 16 tokens; its reward is the share of token ids below half the vocabulary, 0.5 at the start.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rlhf_core.cluster.controller import PPOController
from rlhf_core.cluster.fleet import Fleet
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import plan
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample, Services

ALGORITHMS = ("ppo", "reinforce_pp", "reinforce_baseline", "rloo", "grpo", "dr_grpo")
VOCABULARY = 100


class _Nowhere:
    """Checkpoints, metrics and progress: none."""

    def latest(self) -> None:
        return None

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


def make_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # No EOS: a policy cannot raise its reward by falling silent.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"eos_token_id": []}))


def reward_curve(algorithm: str, seed: int, work: Path, *, steps: int = 20, kl_coef: float = 0.0) -> list[float]:
    """Mean reward of each step's samples, before that step's update."""
    config = config_from_tree(
        {
            "run": {"device": "cpu", "threads": 2, "seed": seed},
            "model": {"path": str(work / "model")},
            "data": {"max_prompt_tokens": 8},
            "ppo": {
                "algorithm": algorithm,
                "steps": steps,
                "prompts_per_step": 16,
                "samples_per_prompt": 4,
                "max_new_tokens": 16,
                "minibatches": 2,
                "policy": {"learning_rate": 3e-3, "schedule": "constant"},
                "critic": {"learning_rate": 3e-3, "schedule": "constant"},
                "kl": {"coef": kl_coef, "place": "loss" if algorithm in ("grpo", "dr_grpo") else "reward"},
                "rewards": [{"type": "token_share", "below": VOCABULARY // 2}],
            },
        },
        "learning",
    )
    make_model(work / "model", seed)
    rng = random.Random(seed)
    prompts = [PromptExample(f"p{i}", "", (1, *(rng.randrange(3, VOCABULARY) for _ in range(4)))) for i in range(64)]
    nowhere: Any = _Nowhere()
    services = Services({}, work, work, nowhere, nowhere, nowhere.progress)
    placement = plan(config.ppo)
    folders: Any = dict.fromkeys(("policy", "reference", "critic", "reward"), work / "model")
    with RewardComposer(config.ppo.rewards) as composer, Fleet(config, placement, "cpu", folders, 0) as fleet:
        controller = PPOController(config, fleet, prompts, str, composer, services)
        controller.sync()
        return [controller.iterate()["objective/scores"] for _ in range(steps)]
