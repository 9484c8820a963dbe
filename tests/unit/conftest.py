"""Two ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

OnTwoRanks = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture
def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> OnTwoRanks:
    """Calls a function with each `Rank`, one after the other, and gives what rank 0 returns: it is told what
    the other brought to each `all_reduce`.
    """

    def run(call: Callable[[Any], Any]) -> Any:
        ranks = [SimpleNamespace(rank=i, world_size=2, torch_device=torch.device("cpu")) for i in range(2)]
        told: list[torch.Tensor] = []
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: told.append(tensor.clone()))
        call(ranks[1])
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(told.pop(0)))
        return call(ranks[0])

    return run
