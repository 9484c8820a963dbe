"""Copies of weights, which ZeRO-3 keeps shard by shard.

- an average keeps `decay` of what it was, and is what is saved where it is asked for
- ranks gather on the device where they talk, whatever the parameters and the copies lie on: NCCL takes nothing else
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.training.distributed import Rank
from rlhf_core.training.engine import TrainingEngine
from rlhf_core.training.shards import WeightAverage, WeightCopy


def offloaded_model() -> nn.Module:
    """A vector of 6 over two ranks, as `offload: all` leaves it: this rank's 3 in host memory."""
    model = nn.Linear(6, 1, bias=False)
    parameter: Any = model.weight
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = torch.arange(3.0), 6, (1, 6)
    return model


@pytest.mark.parametrize("kind", ["average", "best"])
def test_ranks_gather_on_the_device_where_they_talk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def all_gather(parts: list[torch.Tensor], shard: torch.Tensor) -> None:
        seen.append({part.device.type for part in (*parts, shard)})

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    model, device = offloaded_model(), "meta"  # for a GPU
    copy = (
        WeightAverage(model, 0.5, rank_device=device)
        if kind == "average"
        else WeightCopy(model, kind, rank_device=device, device="cpu")
    )
    whole = copy.full("weight")
    assert seen == [{"meta"}]
    assert whole.shape == (1, 6) and whole.device.type == "meta"


@pytest.mark.parametrize(("average", "saved"), [(True, 1.1), (False, 2.0)])
def test_an_average_keeps_decay_of_what_it_was_and_is_saved_where_it_is_asked_for(
    average: bool, saved: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = nn.Module()
    module.lm = nn.Linear(1, 1, bias=False)
    weight = module.lm.weight.data.fill_(1.0)
    engine: Any = object.__new__(TrainingEngine)
    monkeypatch.setattr(TrainingEngine, "_gathered", lambda *_: nullcontext())
    engine.engine, engine.rank, engine.lora = SimpleNamespace(module=module), Rank(), None
    engine._average = WeightAverage(module.lm, 0.9, rank_device="cpu")
    weight.fill_(2.0)
    engine._average.update()
    kept: list[float] = []
    engine.save_model(tmp_path, lambda _folder, state: kept.append(state["weight"].item()), average=average)
    # 0.9 x 1 + 0.1 x 2
    assert kept == pytest.approx([saved])
