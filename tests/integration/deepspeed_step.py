"""Trains one tiny policy for two optimizer steps under many settings and saves the parameters of each: a script for
`test_deepspeed_laws`, started with torchrun on one rank and on two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from rlhf_core.algo.losses import sft_loss
from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, collate, plan_ranks
from rlhf_core.models.policy import Policy
from rlhf_core.training.distributed import Rank, join, leave
from rlhf_core.training.engine import TrainingEngine

SETTINGS = [(stage, budget, pack) for stage in (0, 2, 3) for budget, pack in ((1000, False), (60, False), (30, True))]
"""(ZeRO stage, tokens per micro-batch, packed): one, two or three, and more micro-batches."""


def policy() -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
        attn_implementation=implementation("sdpa"),
    )
    return Policy(LlamaForCausalLM(config))


def sequences() -> list[TokenSequence]:
    g = torch.Generator().manual_seed(1)
    return [
        TokenSequence.of(
            torch.randint(1, 64, (3 + i % 5,), generator=g).tolist(),
            torch.randint(1, 64, (2 + (7 * i) % 9,), generator=g).tolist(),
        )
        for i in range(9)
    ]


def train(rank: Rank, stage: int, budget: int, pack: bool) -> dict[str, torch.Tensor]:
    data = sequences()
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant", eps=1e-4)
    engine = TrainingEngine(policy(), DeepSpeedConfig.model_validate({"zero_stage": stage}), optimizer, rank)
    plan = plan_ranks([len(s) for s in data], rank.world_size, budget, pack=pack)[rank.rank]
    targets = sum(sum(s.target_mask) for s in data)

    def losses() -> Iterator[torch.Tensor]:
        for group in plan:
            logprobs_N = engine(collate([data[i] for i in group], pad_id=0, pack=pack)).logprobs_N
            yield sft_loss(logprobs_N, torch.ones_like(logprobs_N), denominator=targets)

    for _ in range(2):
        engine.train_step(losses(), 2)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def main() -> None:
    rank = Rank.from_environment("cpu")
    join(rank)
    for stage, budget, pack in SETTINGS:
        weights = train(rank, stage, budget, pack)
        if rank.rank == 0:
            name = f"ranks{rank.world_size}-zero{stage}-{budget}-{'packed' if pack else 'padded'}.pt"
            torch.save(weights, Path(sys.argv[1]) / name)
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    main()
