"""Copies of weights, which ZeRO-3 may keep in host memory.

- an average keeps `decay` of what it was, and takes the rest from the weights
- the whole tensor has the shards of all ranks in their order
- ranks gather on the device where they talk, whatever the parameters and the copies lie on: NCCL takes
  nothing else
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_core.engines.deepspeed import WeightAverage, WeightCopy
from tests.support.rank_threads import RankThreads


class Joined(TorchDispatchMode):
    """Records the devices of tensors that are joined."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.devices: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.cat.default:
            self.devices |= {part.device.type for part in args[0]}
        return function(*args, **(kwargs or {}))


def offloaded_model() -> Any:
    """A vector of 6 over two ranks, as `offload: all` leaves it: this rank's 3 in host memory."""
    model = nn.Linear(6, 1, bias=False)
    parameter: Any = model.weight
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = torch.arange(3.0), 6, (1, 6)
    return model


@pytest.mark.parametrize("kind", ["average", "best"])
def test_ranks_gather_on_the_device_of_their_backend(kind: str) -> None:
    device = "meta"  # for a GPU

    def full(_rank: int) -> tuple[torch.Tensor, set[str]]:
        model = offloaded_model()
        copy = (
            WeightAverage(model, 0.5, rank_device=device)
            if kind == "average"
            else WeightCopy(model, kind, rank_device=device, device="cpu")
        )
        with Joined() as joined:
            return copy.full("weight"), joined.devices

    with RankThreads(2) as ranks:
        for whole, gathered in ranks.run(full):
            assert gathered == {"meta"}
            assert whole.shape == (1, 6) and whole.device.type == "meta"


def test_the_whole_tensor_has_the_shards_of_all_ranks() -> None:
    def full(rank: int) -> torch.Tensor:
        model = offloaded_model()
        model.weight.ds_tensor.add_(3 * rank)
        return WeightCopy(model, "best", rank_device="cpu").full("weight")

    with RankThreads(2) as ranks:
        for whole in ranks.run(full):
            assert whole.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


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
