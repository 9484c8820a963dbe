"""Trains tiny models for two optimizer steps under many settings and saves the parameters of each, on one,
two and four ranks, for `test_deepspeed_laws` and `tests.benchmarks.law_differences`.

Losses go through the real loops: `sft` (token loss), `policy` (clipped surrogate + entropy + KL + pretraining
loss, with a moving average of the weights), `value` (clipped squared error), `reward` (Bradley-Terry). What
else a name may have:

    @token-mean    that aggregation
    lora           only adapters are trained
    parts          the head sees seven tokens at a time
    resumed        another engine takes the second step, from a checkpoint
    hpz            the ranks share a second copy of the parameters
    offload        optimizer and parameters are offloaded

`nan`, which may be offloaded, takes the policy through three steps of which the second has a gradient that is
not finite.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.algo.losses import step_denominator
from rlhf_core.config.base import HEAD_CHUNK
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig, RewardConfig, SFTConfig
from rlhf_core.engines import deepspeed, sharding
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.models.adapters import add_adapter
from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, plan_ranks
from rlhf_core.models.policy import Policy
from rlhf_core.models.score import ScoreModel
from rlhf_core.models.scoring import Batches, sequence_logprobs
from rlhf_core.ppo.training.loss_step import (
    OptimizerStep,
    TrainSample,
    UpdateSettings,
    update_critic,
    update_policy,
)
from rlhf_core.stages.reward import train_step as reward_step
from rlhf_core.stages.sft import train_step as sft_step
from rlhf_core.system.processes import free_port
from rlhf_core.types import PairExample
from tests.support.prepared_ranks import ENVIRONMENT, spawn

TORCHRUN = {
    **ENVIRONMENT,
    # Otherwise torchrun listens on the port on which rank 0 listens itself.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
"""Environment of torchrun."""
CUTS = ((1000, False), (60, False), (60, True), (30, True))
"""(tokens per micro-batch, packed): one, two or three, and more micro-batches."""
SETTINGS = [
    (kind, stage, budget, pack)
    for kind, stage, (budget, pack) in itertools.product(
        ("sft", "policy", "value", "reward"), (0, 2, 3), CUTS
    )
] + [
    (kind, stage, 60, True) for kind, stage in (("policy", 1), ("nan", 0), ("nan", 1), ("nan", 2), ("nan", 3))
]
SETTINGS += [
    (kind, stage, 60, True) for kind, stage in itertools.product(("policy-lora", "value-lora"), range(4))
]
SETTINGS += [
    (kind, stage, 60, True) for kind, stage in (("policy-lora-resumed", 2), ("value-lora-resumed", 3))
]
MODES = ("token-mean", "seq-mean-token-sum", "token-sum")
"""Besides `seq-mean-token-mean`, which the other settings have."""
BY_MODE = [f"{kind}@{mode}" for kind in ("policy", "value") for mode in MODES]
SETTINGS += [(kind, *setting) for kind in BY_MODE for setting in ((0, 1000, False), (3, 30, True))]
SETTINGS += [("policy-parts", stage, 1000, True) for stage in (0, 2, 3)]
SETTINGS += [("policy-offload", stage, 60, True) for stage in (1, 2)]
SETTINGS += [("nan-offload", stage, 60, True) for stage in (1, 2, 3)]
VARIANTS = ("policy-offload", "policy-offload-resumed", "policy-hpz", "policy-hpz-resumed")
"""That end in the bits of `policy`. Those with a second copy come last: DeepSpeed keeps its groups for all
that follows.
"""
SETTINGS += [(kind, 3, 60, True) for kind in VARIANTS]
"""(loss, ZeRO stage, tokens per micro-batch, packed)."""
OF_FOUR_RANKS = [(kind, 3, 60, True) for kind in ("policy", "policy-hpz", "policy-hpz-resumed")]

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def model(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(**_SHAPE, attn_implementation=implementation("sdpa"))
    lora = LoraConfig(r=4, alpha=8) if "lora" in kind else None
    if not kind.startswith(("value", "reward")):
        head_chunk = 7 * _SHAPE["vocab_size"] if "parts" in kind else HEAD_CHUNK
        return add_adapter(Policy(LlamaForCausalLM(config), head_chunk), lora)
    config.num_labels = 1
    return add_adapter(ScoreModel(LlamaForSequenceClassification(config)), lora)


def samples() -> list[TrainSample]:
    """Nine responses of uneven length, with advantages of both signs and ratios on both sides of the clip."""
    g = torch.Generator().manual_seed(1)

    def numbers(count: int, mean: float = 0.0, std: float = 1.0) -> Any:
        return (mean + std * torch.randn(count, generator=g)).numpy()

    made = []
    for i in range(9):
        prompt = tuple(torch.randint(1, 64, (3 + i % 5,), generator=g).tolist())
        count = 2 + (7 * i) % 9
        response = tuple(torch.randint(1, 64, (count,), generator=g).tolist())
        made.append(
            TrainSample(
                prompt,
                response,
                old_logprobs=numbers(count, -4.2, 0.3),
                advantages=numbers(count),
                ref_logprobs=numbers(count, -4.0, 0.3),
                returns=numbers(count),
                old_values=numbers(count, 0.0, 0.1),
                weights=np.ones(count, np.float32),
            )
        )
    return made


def pairs(data: Sequence[TrainSample]) -> list[PairExample]:
    """Each response against the next one's."""
    return [
        PairExample("", "", a.prompt_ids, a.response_ids, b.response_ids)
        for a, b in zip(data, [*data[1:], data[0]], strict=True)
    ]


def shard_small_parameters() -> None:
    """Let ZeRO-3 treat these parameters as those of a large model.

    It would keep all of them whole on every rank, and never prefetch or release any.
    """
    limit_gathered_parameters(2000, prefetched=1000, stage3_param_persistence_threshold=0)


def limit_gathered_parameters(live: int, *, prefetched: int, **settings: int) -> None:
    """Change DeepSpeed's limits for ZeRO-3, which are too high to have an effect on small models.

    Args:
        live: Parameters that are gathered at a time, at most.
        prefetched: Those of them that are prefetched, at most.
        settings: Others of DeepSpeed's settings of ZeRO.
    """
    original = sharding.deepspeed_config

    def changed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        config = original(*args, **kwargs)
        config["zero_optimization"] |= {
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": prefetched,
            **settings,
        }
        return config

    sharding.deepspeed_config = changed
    deepspeed.deepspeed_config = changed  # type: ignore[attr-defined]  # imported there


def raise_eps() -> None:
    """Give AdamW an eps with which the sizes of gradients matter from the first step on, in this process."""
    deepspeed.ADAM_EPS = 1e-4


def new_engine(rank: Rank, kind: str, stage: int) -> TrainingEngine:
    raise_eps()
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant")
    hpz = 2 if "hpz" in kind and rank.world_size > 1 else 1
    offload = "all" if "offload" in kind else "none"
    config = DeepSpeedConfig.model_validate(
        {"zero_stage": stage, "ranks": rank.world_size, "hpz": hpz, "offload": offload}
    )
    ema_decay = 0.5 if kind.startswith("policy") else None
    return TrainingEngine(model(kind), config, optimizer, rank, ema_decay=ema_decay)


def train(
    rank: Rank, kind: str, stage: int, budget: int, pack: bool, folder: Path
) -> dict[str, torch.Tensor]:
    engine = new_engine(rank, kind, stage)
    copies: list[bool] = []
    # They exist from a forward pass to the step after it.
    engine.module.register_forward_hook(
        lambda module, *_: copies.append(
            any(getattr(p, "ds_secondary_tensor", None) is not None for p in module.parameters())
        )
    )
    data = samples()
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in data]
    if kind == "sft":
        config = SFTConfig(batch_size=9, micro_batch_tokens=budget, pack=pack)
        for _ in range(2):
            sft_step(engine, sequences, config, 2, 0)
    elif kind == "reward":
        pair_config = RewardConfig(batch_size=9, micro_batch_tokens=2 * budget, pack=pack, center=0.01)
        for _ in range(2):
            reward_step(engine, pairs(data), pair_config, 2, 0)
    else:
        policy_step(engine, kind, data, sequences, budget, pack)
        if kind.endswith("resumed"):
            checkpoint = folder / label(rank.world_size, kind, stage, budget, pack)
            engine.save_checkpoint(checkpoint)
            torch.distributed.barrier()
            engine = new_engine(rank, kind, stage)
            engine.load_checkpoint(checkpoint, checkpoint / "converted")
        policy_step(engine, kind, data, sequences, budget, pack)
    assert any(copies) == ("hpz" in kind and rank.world_size > 1)
    if kind.startswith(("sft", "policy")):
        # A backward pass, for which ZeRO-3 prefetches parameters, does not follow.
        rows = [(s.prompt_ids, s.response_ids) for s in data]
        batches = Batches(rows, [list(range(len(rows)))], pad_id=0, device="cpu", pack=pack)
        for _ in range(2):
            sequence_logprobs(engine, batches, 1.0)
    found = {name: tensor.clone() for name, tensor in engine.weights()}
    found |= {f"adapter.{name}": tensor.clone() for name, tensor in engine.adapter()}
    if kind.startswith("policy"):
        engine.restore_average()
        found |= {f"average.{name}": tensor.clone() for name, tensor in engine.weights()}
    return found


def policy_step(
    engine: TrainingEngine,
    kind: str,
    data: Sequence[TrainSample],
    sequences: Sequence[TokenSequence],
    budget: int,
    pack: bool,
) -> None:
    rank = engine.rank
    ppo = PPOConfig.model_validate(
        {
            "steps": 1,
            "minibatches": 2,
            "prompts_per_step": 18,
            "pack": pack,
            "entropy_coef": 0.01,
            "kl": {"place": "loss"},
            "ptx": {"coef": 0.3},
            "aggregation": kind.partition("@")[2] or "seq-mean-token-mean",
        }
    )
    lengths = [len(sequence) for sequence in sequences]
    plan = plan_ranks(lengths, rank.world_size, budget, pack=pack)[rank.rank]
    tokens = sum(len(s.response_ids) for s in data)
    denominator = step_denominator(ppo.loss_sum, tokens, len(data))
    critic = kind.startswith("value")
    step = OptimizerStep(plan, denominator, [] if critic else plan, tokens)
    if critic:
        update_critic(engine, data, [step], UpdateSettings.of(ppo), 0)
        return
    if kind.startswith("nan") and engine.steps_done == 1:
        broken = [s if i else _broken(s) for i, s in enumerate(data)]
        before = {name: tensor.clone() for name, tensor in engine.weights()}
        sums = update_policy(
            engine, broken, [step], UpdateSettings.of(ppo), 0, kl_coef=0.1, demonstrations=sequences
        )
        assert sums["skipped"] == 1 and engine.skipped_steps == 1
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())
    update_policy(engine, data, [step], UpdateSettings.of(ppo), 0, kl_coef=0.1, demonstrations=sequences)


def _broken(sample: TrainSample) -> TrainSample:
    return TrainSample(**{**vars(sample), "advantages": np.full_like(sample.advantages, np.inf)})


def torchrun_rank() -> Rank:
    """Return the rank of this process, from the variables that torchrun sets; a world of one without them."""
    if "RANK" not in os.environ:
        return Rank()
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Rank(
        rank, world_size, local_rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "cpu"
    )


def train_all(number: int, ranks: int, port: int, folder: Path) -> None:
    """One rank, which trains under every setting."""
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    shard_small_parameters()
    settings = SETTINGS if ranks < 4 else OF_FOUR_RANKS
    for setting in settings:
        weights = train(rank, *setting, folder)
        if number == 0:
            torch.save(weights, folder / f"{label(ranks, *setting)}.pt")
    torch.distributed.barrier()
    leave_for_good()


def leave_for_good() -> None:
    """Leave the group and end this process here: when Python takes itself apart while torch's threads still
    run, it aborts now and then, after all is done.
    """
    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def label(ranks: int, kind: str, stage: int, budget: int, pack: bool) -> str:
    return f"{kind}-ranks{ranks}-zero{stage}-{budget}-{'packed' if pack else 'padded'}"


def reference_label(kind: str) -> str:
    """One rank, ZeRO 0, in one padded micro-batch; with an adapter, in packed ones."""
    return label(1, kind, 0, *((60, True) if "lora" in kind else (1000, False)))


def run_all(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every setting on one rank and on two, and two pairs of ranks with a copy each; parameters by label."""
    for ranks in (1, 2, 4):
        spawn(train_all, (ranks, free_port(), folder), ranks)
    return {path.stem: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}


def largest_difference(
    weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """(largest absolute difference of a parameter, its name)."""
    return max(((weights[name] - tensor).abs().max().item(), name) for name, tensor in reference.items())
