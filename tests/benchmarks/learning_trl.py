"""The runs of `learning_with_trl.py` by TRL's GRPO and PPO trainers, in an environment of its own
(`ppo_iteration_trl.py` says how to make it).

It imports nothing of the project. Ends with one line of JSON: the mean score of the responses of each step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer

Settings = dict[str, Any]


def count_words(settings: Settings, responses: Sequence[str]) -> list[float]:
    """Return the number of occurrences of the words in each response, whole and in any case, up to `cap`."""
    words = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE) for word in settings["words"]]
    counts = [sum(len(word.findall(response)) for word in words) for response in responses]
    return [float(min(settings["cap"], count)) for count in counts]


class Rule(torch.nn.Module):
    """The rule in the shape of a reward model, which has the score of a response at each of its tokens."""

    base_model_prefix = "backbone"

    def __init__(self, settings: Settings, tokenizer: Any, means: list[float]) -> None:
        super().__init__()
        self._settings, self._tokenizer, self._means = settings, tokenizer, means

    def backbone(self, input_ids: torch.Tensor, **_ignored: Any) -> Any:
        start = self._settings["prompt_tokens"]
        responses = self._tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
        scores = count_words(self._settings, responses)
        self._means.append(statistics.mean(scores))
        columns = torch.tensor(scores).reshape(-1, 1, 1).expand(-1, input_ids.shape[1], 1)
        return type("Output", (), {"hidden_states": [columns]})

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def common_arguments(settings: Settings, folder: str) -> dict[str, Any]:
    """Return the arguments that both trainers have."""
    return {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": settings["seed"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "max_grad_norm": settings["max_grad_norm"],
        "temperature": settings["temperature"],
    }


def load(kind: Any, settings: Settings, **options: Any) -> Any:
    return kind.from_pretrained(settings["model"], dtype=torch.float32, **options)


def grpo_means(settings: Settings, folder: str) -> list[float]:
    """Train with GRPO and return the mean score of each step."""
    means: list[float] = []

    def reward(completions: Sequence[str], **_ignored: Any) -> list[float]:
        scores = count_words(settings, completions)
        means.append(statistics.mean(scores))
        return scores

    config = GRPOConfig(
        **common_arguments(settings, folder),
        per_device_train_batch_size=settings["responses"] // settings["minibatches"],
        gradient_accumulation_steps=1,
        steps_per_generation=settings["minibatches"],
        num_generations=settings["samples"],
        max_steps=settings["steps"] * settings["minibatches"],
        max_completion_length=settings["new_tokens"],
        top_k=0,
        beta=0.0,
        loss_type="grpo",
    )
    trainer = GRPOTrainer(
        model=load(AutoModelForCausalLM, settings),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": settings["texts"]}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    )
    trainer.train()
    return means


def ppo_means(settings: Settings, folder: str) -> list[float]:
    """Train with PPO and return the mean score of each step."""
    means: list[float] = []
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    responses = settings["responses"]
    config = PPOConfig(
        **common_arguments(settings, folder),
        # The whole batch: a minibatch is then one forward pass. With fewer sequences and accumulation, the
        # trainer makes one optimizer step for all minibatches.
        per_device_train_batch_size=responses,
        gradient_accumulation_steps=1,
        num_mini_batches=settings["minibatches"],
        num_ppo_epochs=1,
        total_episodes=settings["steps"] * responses,
        local_rollout_forward_batch_size=responses,
        response_length=settings["new_tokens"],
        num_sample_generations=0,
        kl_coef=settings["kl_coef"],
        lam=settings["lam"],
        gamma=1.0,
        cliprange_value=settings["value_clip"],
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load(AutoModelForCausalLM, settings),
        ref_model=load(AutoModelForCausalLM, settings),
        reward_model=Rule(settings, tokenizer, means),
        value_model=load(AutoModelForSequenceClassification, settings, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": settings["ids"]}),
    )
    trainer.train()
    return means


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", type=Path, help="the JSON file that `learning_with_trl.py` writes")
    args = parser.parse_args(arguments)
    settings: Settings = json.loads(args.settings.read_text())
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(1)
    train = {"grpo": grpo_means, "ppo": ppo_means}[settings["algorithm"]]
    with tempfile.TemporaryDirectory() as folder:
        means = train(settings, folder)
    print(json.dumps(means))


if __name__ == "__main__":
    main()
