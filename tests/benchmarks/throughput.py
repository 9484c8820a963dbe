"""Training throughput next to a plain PyTorch loop in the same process: `make bench-training`.

The model is the standard Llama of `ppo_iteration`, float32, on one DeepSpeed rank. The plain loop is what one
would write by hand with transformers' own classes, AdamW (fused) and gradient clipping; it sees the same
tokens in the same micro-batches with the same threads, and none of this project's modules. All sequences have
one length, so that packing saves nothing; ours and the plain loop take turns, round by round.

    sft      16 rows of 512 tokens an optimizer step
    reward   32 pairs of 64 + 64 tokens an optimizer step
    ppo      64 responses of 64 + 64 tokens, 4 minibatches: the policy's clipped loss, then the critic's

Tokens per second are medians over the rounds, the ratio is the median of the rounds' own. Ends with `json:
PATH`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig, RewardConfig, SFTConfig
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.models.batching import TokenSequence, plan_ranks
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from rlhf_core.ppo.training.loss_step import (
    OptimizerStep,
    TrainSample,
    UpdateSettings,
    update_critic,
    update_policy,
)
from rlhf_core.stages.reward import train_step as reward_step
from rlhf_core.stages.sft import train_step as sft_step
from rlhf_core.types import PairExample
from tests.benchmarks.ppo_iteration import VOCABULARY, make_model
from tests.support.arguments import positive

MICRO_BATCH = 4096
"""Tokens of one forward pass."""
ROWS, ROW = 16, 512
PAIRS, RESPONSES, MINIBATCHES, PROMPT, RESPONSE = 32, 64, 4, 64, 64
LEARNING_RATE, CLIP = 1e-5, 0.2
Work = Callable[[], object]


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterator[torch.Tensor]) -> None:
    """Backward over the micro-batches, clipping, one optimizer step."""
    optimizer.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def plain_model(kind: str, folder: Path) -> Any:
    """Stock transformers: "policy" with a language-model head, "score" with one number a token."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if kind == "policy":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    auto = AutoModelForSequenceClassification if kind == "score" else AutoModelForTokenClassification
    return auto.from_pretrained(folder, dtype=torch.float32, num_labels=1).train()


def engine_of(kind: str, folder: Path, rank: Rank) -> TrainingEngine:
    load = load_policy if kind == "policy" else load_score_model
    model = load(folder, dtype="float32", attention="sdpa", device="cpu")
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_ratio=0.0)
    return TrainingEngine(model, DeepSpeedConfig(), optimizer, rank)


def sft(folder: Path, rank: Rank) -> tuple[int, Work, Work]:
    """(tokens of a round, ours, plain)."""
    rows = torch.randint(2, VOCABULARY, (ROWS, ROW))
    batch = [TokenSequence(tuple(row), (0, *[1] * (ROW - 1))) for row in rows.tolist()]
    engine = engine_of("policy", folder, rank)
    config = SFTConfig(batch_size=ROWS, micro_batch_tokens=MICRO_BATCH)
    model = plain_model("policy", folder)
    optimizer = plain_optimizer(model)
    count = ROWS * ROW // MICRO_BATCH

    def plain() -> None:
        losses = (model(input_ids=ids, labels=ids, use_cache=False).loss / count for ids in rows.chunk(count))
        plain_step(model, optimizer, losses)

    return rows.numel(), lambda: sft_step(engine, batch, config, 10**6, 0), plain


def reward(folder: Path, rank: Rank) -> tuple[int, Work, Work]:
    """(tokens of a round, ours, plain)."""
    ids = torch.randint(2, VOCABULARY, (PAIRS, 2, PROMPT + RESPONSE))
    ids[:, 1, :PROMPT] = ids[:, 0, :PROMPT]
    pairs = [
        PairExample("", "", tuple(chosen[:PROMPT]), tuple(chosen[PROMPT:]), tuple(rejected[PROMPT:]))
        for chosen, rejected in ids.tolist()
    ]
    engine = engine_of("score", folder, rank)
    config = RewardConfig(batch_size=PAIRS, micro_batch_tokens=MICRO_BATCH)
    model = plain_model("score", folder)
    optimizer = plain_optimizer(model)
    count = ids.numel() // MICRO_BATCH

    def loss(part: torch.Tensor) -> torch.Tensor:
        chosen, rejected = model(input_ids=part.flatten(0, 1), use_cache=False).logits.view(-1, 2).unbind(1)
        return -functional.logsigmoid(chosen - rejected).mean() / count

    def plain() -> None:
        plain_step(model, optimizer, (loss(part) for part in ids.chunk(count)))

    return ids.numel(), lambda: reward_step(engine, pairs, config, 10**6, 0), plain


def ppo(folder: Path, rank: Rank) -> tuple[int, Work, Work]:
    """(tokens of a round, ours, plain); policy and critic see each token once."""
    ids = torch.randint(2, VOCABULARY, (RESPONSES, PROMPT + RESPONSE))
    old_logprobs, advantages, old_values, returns = torch.randn(4, RESPONSES, RESPONSE)
    old_logprobs = old_logprobs * 0.1 - 7.6
    size = RESPONSES // MINIBATCHES
    config = PPOConfig.model_validate(
        {
            "steps": 10**6,
            "prompts_per_step": RESPONSES,
            "minibatches": MINIBATCHES,
            "micro_batch_tokens": MICRO_BATCH,
            "clip_low": CLIP,
            "clip_high": CLIP,
            "value_clip": CLIP,
        }
    )
    samples = [
        TrainSample(
            tuple(row[:PROMPT]),
            tuple(row[PROMPT:]),
            old_logprobs=old_logprobs[i].numpy(),
            advantages=advantages[i].numpy(),
            ref_logprobs=old_logprobs[i].numpy(),
            returns=returns[i].numpy(),
            old_values=old_values[i].numpy(),
            weights=np.ones(RESPONSE, np.float32),
        )
        for i, row in enumerate(ids.tolist())
    ]
    micros = plan_ranks([PROMPT + RESPONSE] * size, 1, MICRO_BATCH, pack=True)[0]
    steps = [
        OptimizerStep([[start + i for i in micro] for micro in micros], float(size * RESPONSE))
        for start in range(0, RESPONSES, size)
    ]
    policy, critic = engine_of("policy", folder, rank), engine_of("score", folder, rank)
    plain_policy, plain_critic = plain_model("policy", folder), plain_model("value", folder)
    optimizers = plain_optimizer(plain_policy), plain_optimizer(plain_critic)

    def policy_loss(part: slice) -> torch.Tensor:
        output = plain_policy(input_ids=ids[part], logits_to_keep=RESPONSE + 1, use_cache=False)
        logits: torch.Tensor = output.logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[part, PROMPT:, None]).squeeze(-1)
        ratio = (logprobs - old_logprobs[part]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[part]
        loss: torch.Tensor = -torch.min(ratio * advantages[part], clipped).mean()
        return loss

    def value_loss(part: slice) -> torch.Tensor:
        output = plain_critic(input_ids=ids[part], use_cache=False)
        values: torch.Tensor = output.logits[:, PROMPT - 1 : -1, 0]
        clipped = old_values[part] + (values - old_values[part]).clamp(-CLIP, CLIP)
        loss: torch.Tensor = (
            0.5 * torch.max((values - returns[part]) ** 2, (clipped - returns[part]) ** 2).mean()
        )
        return loss

    settings = UpdateSettings.of(config)

    def ours() -> None:
        update_policy(policy, samples, steps, settings, 0)
        update_critic(critic, samples, steps, settings, 0)

    def plain() -> None:
        parts = [slice(start, start + size) for start in range(0, RESPONSES, size)]
        for model, optimizer, loss in zip(
            (plain_policy, plain_critic), optimizers, (policy_loss, value_loss), strict=True
        ):
            for part in parts:
                plain_step(model, optimizer, iter([loss(part)]))

    return ids.numel(), ours, plain


def measure(rounds: int, tokens: int, ours: Work, plain: Work) -> dict[str, float]:
    """Medians over `rounds`, after one that does not count; who goes first changes with every round."""
    seconds: dict[Work, list[float]] = {ours: [], plain: []}
    for turn in range(rounds + 1):
        for work in (ours, plain) if turn % 2 else (plain, ours):
            started = time.perf_counter()
            work()
            seconds[work].append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(seconds[ours][1:], seconds[plain][1:], strict=True)]
    return {
        "tokens_per_s": round(tokens / statistics.median(seconds[ours][1:]), 1),
        "plain_tokens_per_s": round(tokens / statistics.median(seconds[plain][1:]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "rounds": rounds,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=7, help="counted rounds (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for both (default 1)")
    parser.add_argument("--only", choices=["sft", "reward", "ppo"], help="one of the three")
    parser.add_argument("--out", type=Path, default=Path(".rlhf/bench/throughput.json"), help="the JSON file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # new heads are meant to be new
    transformers.logging.disable_progress_bar()
    rank = Rank()
    join(rank)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), positions=ROW)
        for make in (sft, reward, ppo):
            if args.only in (None, make.__name__):
                torch.manual_seed(1)
                result[make.__name__] = measure(args.rounds, *make(Path(folder), rank))
    leave()
    table = Table(title=f"Training, tokens/s, {args.threads} thread(s), median of {args.rounds}")
    for column in ("stage", "ours", "plain loop", "ratio"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, row in result.items():
        table.add_row(
            name, f"{row['tokens_per_s']:.0f}", f"{row['plain_tokens_per_s']:.0f}", f"{row['ratio']:.2f}"
        )
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"training_throughput": {"threads": args.threads, **result}}, indent=2) + "\n"
    )
    print(f"json: {args.out}")


if __name__ == "__main__":
    main()
