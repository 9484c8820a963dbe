"""A small real PPO run whose reward is a rule: for the slow learning tests and
`tests.benchmarks.learning_curves`.

A random Llama samples 16 tokens, no EOS among them: a policy cannot raise its reward by falling silent. The
reward is the share of token ids below half the vocabulary, 0.5 at the start.
"""

from __future__ import annotations

import random
from pathlib import Path

from rlhf_core.types import PromptExample
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.small_ppo import small_ppo
from tests.support.tiny_llama import save_tiny_llama

ALGORITHMS = ("ppo", "reinforce_pp", "reinforce_baseline", "rloo", "grpo", "dr_grpo")
VOCABULARY = 100


def reward_curve(
    algorithm: str, seed: int, work: Path, *, steps: int = 20, kl_coef: float = 0.0, staleness: int = 0
) -> list[float]:
    """Mean reward of each step's samples, before that step's update."""
    config = config_from_tree(
        {
            "run": {"device": "cpu", "threads": 2, "seed": seed},
            "model": {"path": str(work / "model")},
            "data": {"max_prompt_tokens": 8},
            "ppo": {
                "algorithm": algorithm,
                "steps": steps,
                "staleness": staleness,
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
    model = save_tiny_llama(
        work / "model", seed, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=None, dtype="float32"
    )
    rng = random.Random(seed)
    prompts = [
        PromptExample(f"p{i}", "", (1, *(rng.randrange(3, VOCABULARY) for _ in range(4)))) for i in range(64)
    ]
    with small_ppo(config, model, work, prompts) as controller:
        return [controller.iterate()["objective/scores"] for _ in range(steps)]
