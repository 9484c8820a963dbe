"""Selection of a replica.

- the least busy replica is selected, then the one with the fewest requests, within the concurrency
- a replica is not used for a time after failures in a row, but it is if a success is in between
- a refusal counts as a success of the replica; during a search, so does a failure that a sample may have
  caused
- the wait for replicas that are not used is bounded
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from rlhf_core.config.rewards import RemoteReward
from rlhf_core.rewards.failures import Failure, Refused
from rlhf_core.rewards.remote import ReplicaPool


def pool(count: int, *, failures: int = 2, seconds: float = 60.0) -> ReplicaPool:
    source = RemoteReward(
        type="remote",
        urls=tuple(f"http://{index}.example/" for index in range(count)),
        concurrency=2,
        timeout=0.05,
        breaker_failures=failures,
        breaker_seconds=seconds,
    )
    return ReplicaPool(source)


def used(replicas: ReplicaPool) -> str:
    """Return the number of the replica that answers a request."""
    with replicas.least_busy() as url:
        return url[7]


def fail(replicas: ReplicaPool, failure: Failure | None = None, *, searching: bool = False) -> str:
    """Return the number of the replica whose request fails."""
    with pytest.raises(Failure), replicas.least_busy(searching=searching) as url:
        raise failure or Failure("500")
    return url[7]


def test_the_least_busy_replica_is_selected() -> None:
    replicas, answered = pool(2), threading.Event()

    def wait() -> str:
        with replicas.least_busy() as url:
            answered.wait(10)
            return url[7]

    with ExitStack() as requests:
        urls = [requests.enter_context(replicas.least_busy()) for _ in range(3)]
        assert [url[7] for url in urls] == ["0", "1", "0"]
        with ThreadPoolExecutor(2) as threads:
            fourth, fifth = threads.submit(wait), threads.submit(wait)
            with pytest.raises(TimeoutError):
                fifth.result(0.3)  # both are at their limit, and busy is not broken
            answered.set()
            assert {fourth.result(10), fifth.result(10)} == {"1"}


def test_one_that_fails_in_a_row_is_passed_over() -> None:
    replicas = pool(2)
    assert [fail(replicas), used(replicas), fail(replicas)] == ["0", "1", "0"]
    assert [used(replicas) for _ in range(3)] == ["1", "1", "1"]


def test_a_success_between_failures_resets_their_count() -> None:
    replicas = pool(1)
    fail(replicas)
    used(replicas)
    fail(replicas)
    assert used(replicas) == "0"


def test_it_is_used_again_after_its_time() -> None:
    replicas = pool(1, failures=1, seconds=0.2)
    fail(replicas)
    assert used(replicas) == "0"


def test_the_wait_for_replicas_that_fail_is_bounded() -> None:
    replicas = pool(2, failures=1, seconds=0.3)
    fail(replicas)
    fail(replicas)
    replicas._replicas[0].unused_until = replicas._replicas[1].unused_until = float("inf")
    with pytest.raises(Failure, match="none of its 2 replicas answers"):
        used(replicas)


@pytest.mark.parametrize(
    ("failure", "searching", "counts"),
    [
        (Refused("no"), False, False),
        (Failure("500"), False, True),
        (Failure("500"), True, False),
        (Failure("late", searchable=False), True, True),
    ],
)
def test_failures_that_count_against_a_replica(failure: Failure, searching: bool, counts: bool) -> None:
    replicas = pool(2, failures=1)
    assert fail(replicas, failure, searching=searching) == "0"
    used(replicas)
    assert used(replicas) == ("1" if counts else "0")
