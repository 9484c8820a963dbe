"""Ranks that wait for rank 0, with a real store between threads of this process.

- the others wait for longer than the limit of the store's operations, until rank 0 arrives
- rank 0 waits for nobody
- each name is a wait of its own
- the end of rank 0 ends the wait with an error
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rlhf_core.engines import distributed
from rlhf_core.engines.distributed import rendezvous, wait_for_rank_zero

LIMIT = 0.2


class Ranks:
    """Two ranks of one store. Each thread is the rank that it was started as."""

    def __init__(self) -> None:
        self.here = threading.local()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        limit = timedelta(seconds=30)
        self.stores: list[Any] = [rendezvous("127.0.0.1", port, 2, timeout=limit, listener=listener)]
        self.stores.append(rendezvous("127.0.0.1", port, 2, timeout=limit))
        for store in self.stores:
            store.set_timeout(timedelta(seconds=LIMIT))

    def wait(self, rank: int, name: str) -> float:
        self.here.rank = rank
        wait_for_rank_zero(name)
        return time.monotonic()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks()
    monkeypatch.setattr(distributed, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(dist, "get_rank", lambda: ranks.here.rank)
    store = "torch.distributed.distributed_c10d._get_default_store"
    monkeypatch.setattr(store, lambda: ranks.stores[ranks.here.rank])
    yield ranks
    ranks.stores.clear()


def test_others_wait_without_a_limit_until_rank_zero_arrives(ranks: Ranks) -> None:
    assert ranks.wait(0, "first") <= time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ranks.wait, 1, "first").result(10)
        other = pool.submit(ranks.wait, 1, "second")
        time.sleep(3 * LIMIT)
        assert not other.done()
        arrived = ranks.wait(0, "second")
        assert other.result(10) >= arrived - 0.1


def test_end_of_rank_zero_ends_the_wait(ranks: Ranks) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks.wait, 1, "first")
        time.sleep(LIMIT)
        ranks.stores[0] = None
        with pytest.raises(RuntimeError):
            other.result(10)
