"""The iteration of `ppo_iteration.py` by TRL's PPO trainer, to compare side by side. In an environment of its
own:

    python3.11 -m venv trl-env && trl-env/bin/pip install trl==1.12.0 requests && trl-env/bin/python
    tests/benchmarks/ppo_iteration_trl.py

The same shapes, minibatches, rule reward and number of threads; Hugging Face's `generate` samples. Prints the
median seconds and CPU seconds of an iteration.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

VOCABULARY, PROMPT, RESPONSE, PROMPTS = 2048, 64, 64, 64


class TokenShare(torch.nn.Module):
    """The rule reward, in the shape of a reward model: the share of response tokens below half the
    vocabulary.
    """

    base_model_prefix = "backbone"

    def backbone(self, input_ids: torch.Tensor, **_ignored: Any) -> Any:
        low = (input_ids < VOCABULARY // 2).float()
        low[:, :PROMPT] = 0
        return type("Output", (), {"hidden_states": [low.cumsum(1).unsqueeze(-1) / RESPONSE]})

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Clock(TrainerCallback):  # type: ignore[misc]
    """Wall and CPU time at the end of each iteration."""

    def __init__(self) -> None:
        self.ticks = [(time.monotonic(), time.process_time())]

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.ticks.append((time.monotonic(), time.process_time()))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"t{i}": i for i in range(VOCABULARY)}
    words["<pad>"], words["<eos>"] = VOCABULARY, VOCABULARY + 1
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))
    fast.pad_token, fast.eos_token = "<pad>", "<eos>"
    return fast


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=7, help="counted iterations (default 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="iterations before them (default 2)")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    shape = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        num_labels=1,
        dtype="float32",
    )
    rows = torch.randint(2, VOCABULARY, (PROMPTS * (args.iterations + args.warm_up + 1), PROMPT)).tolist()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            save_strategy="no",
            learning_rate=1e-5,
            per_device_train_batch_size=PROMPTS // 4,
            gradient_accumulation_steps=4,
            num_mini_batches=4,
            num_ppo_epochs=1,
            total_episodes=PROMPTS * (args.iterations + args.warm_up),
            local_rollout_forward_batch_size=PROMPTS,
            response_length=RESPONSE,
            num_sample_generations=0,
            temperature=1.0,
        )
        trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer(),
            model=LlamaForCausalLM(shape),
            ref_model=LlamaForCausalLM(shape),
            reward_model=TokenShare(),
            value_model=LlamaForSequenceClassification(shape),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            callbacks=[clock],
        )
        clock.ticks = [(time.monotonic(), time.process_time())]
        trainer.train()
    ticks = clock.ticks[args.warm_up :]
    wall = [b[0] - a[0] for a, b in itertools.pairwise(ticks)]
    cpu = [b[1] - a[1] for a, b in itertools.pairwise(ticks)]
    print(f"iterations: {len(wall)}")
    print(f"seconds: {statistics.median(wall):.3f}  CPU seconds: {statistics.median(cpu):.3f}")


if __name__ == "__main__":
    main()
