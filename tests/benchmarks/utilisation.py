"""Tokens per second and model FLOPs utilisation of training on one GPU: `python -m
tests.benchmarks.utilisation`.

A random model of the shape of Qwen2.5-0.5B in bfloat16 with float32 master weights and activation
checkpointing, through the real engine on one rank:

    sft     an optimizer step on 4 rows of 8192 tokens
    ppo     the policy's update on 4 responses, 16384 tokens with their prompts

Utilisation counts the arithmetic of the model, not of checkpointing's second forward pass: 6 floating point
operations for each weight of a matrix product and token, and 6 x layers x width x length for causal
attention, divided by the peak of the data sheet. It also prints prime-rl's published 26.0 (SFT, 8k) and 11.9
(RL, 16k) thousand tokens/s for Qwen3-0.6B on one H100. `--device cpu --small` tries the script where there is
no GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig, SFTConfig
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.models.batching import TokenSequence
from rlhf_core.models.policy import load_policy
from rlhf_core.planning.hardware import visible_hardware
from rlhf_core.ppo.training.loss_step import OptimizerStep, TrainSample, UpdateSettings, update_policy
from rlhf_core.stages.sft import train_step
from tests.support.arguments import positive
from tests.support.tiny_llama import save_tiny_llama

SHAPE = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
PUBLISHED = {"sft": 26.0e3, "ppo": 11.9e3}
"""prime-rl, Qwen3-0.6B on one H100."""
ROWS = 4


def flops_per_token(shape: dict[str, int], parameters: int, length: int) -> float:
    """Forward and backward pass of one token of a sequence of `length`. The embedding is tied: it counts
    once, as head.
    """
    return 6.0 * parameters + 6.0 * shape["num_hidden_layers"] * shape["hidden_size"] * length


def engine_of(folder: Path, rank: Rank, attention: str) -> TrainingEngine:
    on_gpu = rank.device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    model = load_policy(folder, dtype=dtype, attention=attention, device=rank.torch_device)
    deepspeed = DeepSpeedConfig.model_validate({"dtype": dtype, "gradient_checkpointing": on_gpu})
    return TrainingEngine(model, deepspeed, OptimizerConfig(learning_rate=1e-6, schedule="constant"), rank)


def sft(engine: TrainingEngine, vocabulary: int, length: int) -> Callable[[], object]:
    rows = torch.randint(2, vocabulary, (ROWS, length)).tolist()
    batch = [TokenSequence(tuple(row), (0, *[1] * (length - 1))) for row in rows]
    config = SFTConfig(batch_size=ROWS, micro_batch_tokens=length)
    return lambda: train_step(engine, batch, config, 10**6, 0)


def ppo(engine: TrainingEngine, vocabulary: int, length: int) -> Callable[[], object]:
    prompt = length // 8
    numbers = np.random.default_rng(0).normal(0, 0.1, (ROWS, length - prompt)).astype(np.float32)
    samples = [
        TrainSample(
            tuple(row[:prompt]),
            tuple(row[prompt:]),
            old_logprobs=numbers[i] - 11.9,
            advantages=numbers[i],
            ref_logprobs=numbers[i] - 11.9,
            returns=numbers[i],
            old_values=numbers[i],
            weights=np.ones(length - prompt, np.float32),
        )
        for i, row in enumerate(torch.randint(2, vocabulary, (ROWS, length)).tolist())
    ]
    config = PPOConfig.model_validate(
        {"steps": 10**6, "prompts_per_step": ROWS, "micro_batch_tokens": length}
    )
    settings = UpdateSettings.of(config)
    steps = [OptimizerStep([[i] for i in range(ROWS)], float(numbers.size))]
    return lambda: update_policy(engine, samples, steps, settings, 0)


def measure(work: Callable[[], object], rounds: int, device: str) -> float:
    """Median seconds of a round, after two that do not count."""
    seconds = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


WORK = {"sft": (sft, 8192), "ppo": (ppo, 16384)}


def measure_stage(name: str, rank: Rank, *, small: bool, attention: str, rounds: int) -> dict[str, float]:
    """Return the length of a row, tokens per second and, on a known GPU, the utilisation of its arithmetic.

    Args:
        name: "sft" or "ppo".
        rank: This process, which has joined its group.
        small: A tiny model and short rows.
        attention: `model.attention`.
        rounds: Number of measured rounds.
    """
    hardware = visible_hardware() if rank.device == "cuda" else None
    shape = SMALL if small else SHAPE
    make, length = WORK[name]
    length = 128 if small else length
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_llama(Path(folder), tie_word_embeddings=True, max_position_embeddings=length, **shape)
        engine = engine_of(Path(folder), rank, attention)
    parameters = sum(parameter.numel() for parameter in engine.engine.module.parameters())
    torch.manual_seed(1)
    tokens_per_s = ROWS * length / measure(make(engine, shape["vocab_size"], length), rounds, rank.device)
    result = {"length": length, "tokens_per_s": round(tokens_per_s, 1), "prime_rl": PUBLISHED[name]}
    if hardware is not None:
        flops = tokens_per_s * flops_per_token(shape, parameters, length)
        result["utilisation"] = round(flops / hardware.device.flops, 4)
    engine.close()
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--attention", choices=["sdpa", "flash_attention_2"], default="sdpa")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/utilisation.json"))
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; --device cpu --small tries the program without one")
    hardware = visible_hardware() if args.device == "cuda" else None
    rank = Rank(device=args.device)
    join(rank)
    result = {
        name: measure_stage(name, rank, small=args.small, attention=args.attention, rounds=args.rounds)
        for name in WORK
    }
    leave()
    device = hardware.device.name if hardware is not None else args.device
    print(json.dumps({"device": device, "attention": args.attention, **result}, indent=2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"device": device, "attention": args.attention, **result}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
