"""Rows between the ranks of a group, with the real gloo between threads of this process.

- every rank gets exactly the rows that it trains on, in the order of its samples, bit by bit, for any number
  of ranks, also if it trains on none
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhf_core.engines.distributed import Rank
from rlhf_core.ppo.training.batch import route
from rlhf_core.ppo.training.rank_rows import Exchange, exchanged
from rlhf_core.ppo.update import plan_exchange
from tests.unit.ppo.fleet.test_fleet import chunked


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.local]:
    """Each thread has the process group that is set here."""
    local = threading.local()

    def all_to_all_single(
        incoming: torch.Tensor, outgoing: torch.Tensor, sizes: list[int], sent: list[int]
    ) -> None:
        local.group.alltoall_base(incoming, outgoing, sizes, sent).wait()

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    yield local


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_the_rows_that_it_trains_on(groups: threading.local, ranks: int) -> None:
    noise = np.random.default_rng(0)
    batch = chunked(noise.integers(1, 9, 30).tolist(), 4)
    shares = batch.routes[ranks] = route(batch, ranks, 32, pack=True)
    drawn = random.Random(0).sample(range(30), 20)
    used = [np.array(drawn[rank * 7 : rank * 7 + 7], np.int64) for rank in range(ranks)]
    used[-1] = np.zeros(0, np.int64) if ranks == 3 else used[-1]
    exchanges = plan_exchange(batch, used, ranks)
    numbers = [noise.normal(size=int(length)).astype(np.float32) for length in batch.lengths_B]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rows_of(rank: int) -> list[Any]:
        exchange: Exchange = exchanges[rank]
        gloo: Any = vars(dist)["ProcessGroupGloo"]
        if ranks > 1:
            groups.group = gloo(store, rank, ranks, timedelta(seconds=30))
        own = [
            (np.full(1, i, np.int32), np.full(len(numbers[i]), i, np.int32), [numbers[i], -numbers[i]])
            for i in shares[rank].indices.tolist()
        ]
        return exchanged(own, exchange, Rank(rank, ranks), 2)

    with ThreadPoolExecutor(ranks) as pool:
        arrived = list(pool.map(rows_of, range(ranks), timeout=60))
    for rank in range(ranks):
        assert [int(response[0]) for _, response, _ in arrived[rank]] == used[rank].tolist()
        for (prompt, response, columns), index in zip(arrived[rank], used[rank].tolist(), strict=True):
            assert prompt.tolist() == [index]
            assert response.tolist() == [index] * len(numbers[index])
            assert [column.tobytes() for column in columns] == [
                numbers[index].tobytes(),
                (-numbers[index]).tobytes(),
            ]
