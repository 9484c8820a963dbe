"""Ranks that wait for rank 0, with a real store between threads of this process.

- the others wait for longer than the limit of the store's operations, until rank 0 arrives
- rank 0 waits for nobody
- each name is a wait of its own
- the end of rank 0 ends the wait with an error
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from rlhf_core.engines.distributed import rendezvous, wait_for_rank_zero
from tests.support.rank_threads import RankThreads

LIMIT = 0.2


def stores() -> list[Any]:
    """Return the store of two ranks, as each of them has it, with a short limit of its operations."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=30)
    first = rendezvous("127.0.0.1", port, 2, timeout=limit, listener=listener)
    both = [first, rendezvous("127.0.0.1", port, 2, timeout=limit)]
    for store in both:
        store.set_timeout(timedelta(seconds=LIMIT))
    return both


@pytest.fixture
def ranks() -> Iterator[RankThreads]:
    with RankThreads(2, stores()) as ranks:
        yield ranks


def arrive(name: str) -> float:
    wait_for_rank_zero(name)
    return time.monotonic()


def test_others_wait_without_a_limit_until_rank_zero_arrives(ranks: RankThreads) -> None:
    assert ranks.start(0, arrive, "first").result(60) <= time.monotonic()
    assert ranks.start(1, arrive, "first").result(60)
    other = ranks.start(1, arrive, "second")
    time.sleep(3 * LIMIT)
    assert not other.done()
    before = time.monotonic()
    ranks.start(0, arrive, "second").result(60)
    assert other.result(60) >= before


def test_end_of_rank_zero_ends_the_wait(ranks: RankThreads) -> None:
    other = ranks.start(1, arrive, "first")
    time.sleep(LIMIT)
    ranks.leave(0)
    with pytest.raises(RuntimeError):
        other.result(60)
