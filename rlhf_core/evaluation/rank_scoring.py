"""Log-probabilities and scores by the ranks of `evaluate.ranks`: what runs on each of them.

The sequences are distributed over the ranks. A model that was trained with ZeRO-3 is sharded over them,
because it may be too large for one device. Otherwise each rank has a copy.

Axes: `T` response tokens of one sequence, `N` those of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.ranks import needs_actors, ray_session, run_ranks
from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.models.architectures import engine_changes_classes
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.types import PromptAndResponse, StageContext

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_core.engines.distributed import Rank
    from rlhf_core.models.scoring import Batches


@contextmanager
def evaluation_session(config: PipelineConfig, device: str, context: StageContext) -> Iterator[None]:
    """Connect to Ray once for all ranks and engines of the body, if they are actors. Otherwise this does
    nothing.
    """
    # Ranks and engines work one after the other, so the larger number is enough.
    largest = max(config.evaluate.ranks, config.evaluate.engines)
    sft = context.inputs.get("sft")
    has_engine_actor = sft is not None and engine_changes_classes(sft / "model")
    if not needs_actors(largest) and not has_engine_actor:
        yield
        return
    session = Monitor() if context.monitor is None else nullcontext(context.monitor)
    with session as monitor, ray_session(largest, device, config.run, monitor, context.nodes):
        yield


def on_ranks(
    target: Callable[..., Any],
    config: PipelineConfig,
    device: str,
    context: StageContext | None,
    *args: Any,
) -> Any:
    """Return what `target(rank, config, *args, context)` returns on rank 0 of `evaluate.ranks`.

    Args:
        target: A function of this module.
        config: Configuration of the run.
        device: "cpu" or "cuda".
        context: Context of the stage; None outside a stage.
        args: Further arguments of `target`.
    """
    return run_ranks(
        target,
        config.evaluate.ranks,
        device,
        config,
        *args,
        context=context,
        run=config.run,
    )


def scores_of_rank(
    rank: Rank,
    config: PipelineConfig,
    folder: Path,
    pairs: Sequence[PromptAndResponse],
    pad_id: int,
    _context: StageContext | None,
) -> list[float]:
    """Return the normalised score of each sequence, on every rank. A collective operation.

    Args:
        rank: This rank.
        config: The configuration; `reward.deepspeed` has the sharding and the precision of the model.
        folder: The reward model.
        pairs: Token ids of prompts and responses.
        pad_id: The token that fills rows.
        _context: Not used; every target of a rank gets it.
    """
    # Here, as in `evaluation.scoring`: the preflight imports this module, and needs no torch.
    import torch
    import torch.distributed as dist

    from rlhf_core.engines.sharding import shards_of
    from rlhf_core.models.score import load_score_model
    from rlhf_core.models.scoring import sequence_scores

    settings = _distribution(rank, config.reward.deepspeed, config.reward.deepspeed.dtype)
    scorer = load_score_model(
        folder,
        dtype=settings.dtype,
        attention=config.model.attention,
        device=rank.torch_device,
        pack=config.reward.pack,
        shards=shards_of(settings),
    )
    model = _placed(scorer, settings, rank)
    batches = _batches(scorer, config, rank, pairs, pad_id)
    scores = torch.tensor(sequence_scores(model, scorer.statistics, batches), dtype=torch.float64)
    # Zero for the sequences of other ranks.
    scores = scores.to(rank.torch_device)
    # Exact: each element is a score plus zeros, so the bits do not depend on the number of ranks.
    dist.all_reduce(scores)
    values: list[float] = scores.tolist()
    return values


def logprobs_of_rank(
    rank: Rank,
    config: PipelineConfig,
    files: PolicyFiles,
    pairs: Sequence[PromptAndResponse],
    temperature: float,
    pad_id: int,
    dtype: str,
    _context: StageContext | None,
) -> list[Tensor]:
    """Return the log-probabilities of each response's tokens, (T,) each, on every rank. A collective
    operation.

    Args:
        rank: This rank.
        config: The configuration; `ppo.policy_deepspeed` has the sharding of the model.
        files: The model and, if there is one, its adapter.
        pairs: Token ids of prompts and responses.
        temperature: Logits are divided by it.
        pad_id: The token that fills rows.
        dtype: Data type of the model.
        _context: Not used; every target of a rank gets it.
    """
    import torch
    import torch.distributed as dist

    from rlhf_core.engines.sharding import shards_of
    from rlhf_core.models.adapters import load_adapter
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.scoring import sequence_logprobs

    settings = _distribution(rank, config.ppo.policy_deepspeed, dtype)
    policy = load_policy(
        files.model,
        dtype=settings.dtype,
        attention=config.model.attention,
        device=rank.torch_device,
        pack=config.ppo.pack,
        head_dtype=config.model.head_dtype,
        shards=shards_of(settings),
    )
    if files.adapter is not None:
        load_adapter(policy, files.adapter)
    model = _placed(policy, settings, rank)
    batches = _batches(policy, config, rank, pairs, pad_id)
    own, _ = sequence_logprobs(model, batches, temperature)
    lengths = [len(response) for _, response in pairs]
    # Zero for the sequences of other ranks.
    rows = [row if len(row) else torch.zeros(length) for row, length in zip(own, lengths, strict=True)]
    logprobs_N = torch.cat(rows).to(rank.torch_device)
    dist.all_reduce(logprobs_N)
    return list(torch.split(logprobs_N.cpu(), lengths))


def _distribution(rank: Rank, trained: DeepSpeedConfig, dtype: str) -> DeepSpeedConfig:
    # Other stages shard what only training has: gradients and the optimizer.
    # On one rank there is nothing to shard, and ZeRO-3 would only gather.
    stage = 3 if trained.zero_stage == 3 and rank.world_size > 1 else 0
    return DeepSpeedConfig.model_validate({"ranks": rank.world_size, "zero_stage": stage, "dtype": dtype})


def _placed(model: Any, settings: DeepSpeedConfig, rank: Rank) -> Any:
    """Return the model, sharded over the ranks with ZeRO-3."""
    from rlhf_core.engines.deepspeed import TrainingEngine

    model = model.requires_grad_(False).eval()
    # DeepSpeed gathers the weights of a sharded model in the forward pass.
    return TrainingEngine(model, settings, None, rank) if settings.zero_stage == 3 else model


def _batches(
    model: Any, config: PipelineConfig, rank: Rank, pairs: Sequence[PromptAndResponse], pad_id: int
) -> Batches:
    """Return the micro-batches of this rank, as many as on every other rank."""
    from rlhf_core.engines.distributed import all_ranks_pack
    from rlhf_core.models.batching import plan_ranks
    from rlhf_core.models.scoring import Batches

    pack = all_ranks_pack(model, False, rank, "evaluate")
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    plans = plan_ranks(lengths, rank.world_size, config.ppo.micro_batch_tokens, pack=pack)
    return Batches(pairs, plans[rank.rank], pad_id=pad_id, device=rank.torch_device, pack=pack)
