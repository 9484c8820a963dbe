"""Measures what DeepSpeed allocates for a tiny policy under each ZeRO stage in float32: a script for
`test_planned_memory`, started with torchrun. Prints JSON: stage -> {"weights", "gradients", "optimizer"} in bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.training.distributed import Rank, join, leave
from rlhf_core.training.engine import TrainingEngine
from tests.integration.deepspeed_step import model


def measure(rank: Rank, stage: int) -> dict[str, int]:
    deepspeed = DeepSpeedConfig.model_validate({"ranks": rank.world_size, "zero_stage": stage})
    engine = TrainingEngine(model("policy"), deepspeed, OptimizerConfig(), rank)
    batch = collate([TokenSequence.of((1, 2, 3), (4, 5, 6))], pad_id=0)
    seen: dict[str, int] = {}

    def losses() -> Iterator[torch.Tensor]:
        yield engine(batch).logprobs_N.sum()
        # Backward has run: the gradients lie where the optimizer will find them.
        seen["gradients"] = _bytes(_gradients(engine, stage))

    engine.train_step(losses(), 1)
    parameters = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    seen["weights"] = _bytes(parameters)
    inner = engine.optimizer if stage == 0 else engine.optimizer.optimizer
    state = [x for s in inner.state.values() for x in s.values() if torch.is_tensor(x) and x.numel() > 1]
    flat = [] if stage == 0 else [p for group in inner.param_groups for p in group["params"]]
    if stage == 3:
        flat = list(engine.optimizer.fp32_partitioned_groups_flat)
    seen["optimizer"] = _bytes(state) + _bytes(flat)
    return seen


def _gradients(engine: TrainingEngine, stage: int) -> list[Any]:
    if stage <= 1:
        return [p.grad for p in engine.module.parameters()]
    if stage == 2:
        return [g for group in engine.optimizer.all_grad_tensors.values() for g in group]
    return list(engine.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())


def _bytes(tensors: Iterable[Any]) -> int:
    distinct = {t.data_ptr(): t for t in tensors if t is not None and t.numel()}
    return sum(t.numel() * t.element_size() for t in distinct.values())


def main() -> None:
    rank = Rank.from_environment("cpu")
    join(rank)
    found = {stage: measure(rank, stage) for stage in (0, 1, 2, 3)}
    if rank.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    main()
