"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_core.engines.distributed import Rank

OnTwoRanks = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow. Its migrations take seconds, so that all tests of the registry share it."""
    return tmp_path_factory.mktemp("mlflow") / "mlflow.db"


@pytest.fixture
def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> OnTwoRanks:
    """Call a function for both ranks of a group of two, one after the other, and return the result of rank 0.

    The tensors that rank 1 passes to `all_reduce` are added to those of rank 0.
    """

    def run(call: Callable[[Any], Any]) -> Any:
        ranks = [Rank(rank=i, world_size=2) for i in range(2)]
        reduced: list[torch.Tensor] = []
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: reduced.append(tensor.clone()))
        call(ranks[1])
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(reduced.pop(0)))
        return call(ranks[0])

    return run
