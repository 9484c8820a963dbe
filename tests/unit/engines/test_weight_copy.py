"""Copies of weights, which ZeRO-3 may keep in host memory.

- an average keeps `decay` of what it was, and takes the rest from the weights
- ranks gather on the device where they talk, whatever the parameters and the copies lie on: NCCL takes
  nothing else
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.engines.weight_copy import WeightAverage, WeightCopy


def offloaded_model() -> nn.Module:
    """A vector of 6 over two ranks, as `offload: all` leaves it: this rank's 3 in host memory."""
    model = nn.Linear(6, 1, bias=False)
    parameter: Any = model.weight
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = torch.arange(3.0), 6, (1, 6)
    return model


@pytest.mark.parametrize("kind", ["average", "best"])
def test_ranks_gather_on_the_device_of_their_backend(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_average_keeps_the_share_decay_of_its_old_value() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = WeightAverage(model, 0.9, rank_device="cpu")
    found = []
    for weight in (2.0, 3.0):
        nn.init.constant_(model.weight, weight)
        average.update()
        found.append(average.full("weight").item())
    # 0.9 * 1 + 0.1 * 2, then 0.9 * 1.1 + 0.1 * 3
    assert found == pytest.approx([1.1, 1.29])
