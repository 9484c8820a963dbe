"""Selection of a replica, and its circuit breaker.

- a breaker opens after failures in a row, but not if a success is in between
- an open breaker allows nothing; after its time it allows one request, whose result closes or reopens it;
  the failure of a request that began before does not allow another one
- the least busy replica is selected, then the one with the fewest requests, within the concurrency
- a refusal counts as a success of the replica; during a search, so does a failure that a sample may have
  caused
- the wait for open breakers is bounded
"""

import asyncio

import pytest

from rlhf_core.rewards.failures import Failure, Refused
from rlhf_core.rewards.remote import Breaker, Replica, ReplicaPool


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def allows(breaker: Breaker) -> bool:
    """Return `breaker.allows`. mypy assumes that calls do not change the property itself."""
    return breaker.allows


def opened(clock: FakeClock, failures: int = 2, seconds: float = 10.0) -> Breaker:
    breaker = Breaker(failures, seconds, clock)
    for _ in range(failures):
        breaker.failed(breaker.began())
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(2, 10.0, FakeClock())
    breaker.failed(breaker.began())
    breaker.began()
    breaker.succeeded()
    breaker.failed(breaker.began())
    assert allows(breaker)
    breaker.failed(breaker.began())
    assert not allows(breaker)


def test_open_breaker_sends_one_probe_after_its_time() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 9.9
    assert not allows(breaker)
    clock.now += 0.1
    assert allows(breaker)
    breaker.began()
    assert not allows(breaker)


def test_probe_closes_or_reopens_the_breaker() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 10
    breaker.failed(breaker.began())
    assert not allows(breaker)
    clock.now += 10
    breaker.began()
    breaker.succeeded()
    assert allows(breaker)
    breaker.failed(breaker.began())
    assert allows(breaker), "closed, it counts from zero again"


def test_failure_of_an_earlier_request_does_not_end_the_probe() -> None:
    clock = FakeClock()
    breaker = Breaker(1, 10.0, clock)
    earlier = breaker.began()
    breaker.failed(breaker.began())
    clock.now += 10
    probe = breaker.began()
    breaker.failed(earlier)
    clock.now += 10
    assert not allows(breaker), "the probe still runs"
    breaker.failed(probe)
    clock.now += 10
    assert allows(breaker)


def replicas(
    *breakers: Breaker, concurrency: int = 2, timeout: float = 0.05
) -> tuple[list[Replica], ReplicaPool]:
    all_ = [Replica(str(index), breaker) for index, breaker in enumerate(breakers)]
    return all_, ReplicaPool(all_, concurrency, timeout)


def test_least_busy_replica_is_acquired() -> None:
    async def main() -> list[str]:
        all_, pool = replicas(Breaker(9, 9.0), Breaker(9, 9.0))
        taken = [(await pool.acquire()).url for _ in range(3)]
        with pool.use(all_[1]):
            pass
        taken += [(await pool.acquire()).url, (await pool.acquire()).url]
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0.1)
        assert not waiting.done(), "both are at their limit, and busy is not broken"
        with pool.use(all_[0]):
            pass
        return [*taken, (await waiting).url]

    assert asyncio.run(main()) == ["0", "1", "0", "1", "1", "0"]


def test_one_that_is_left_alone_is_passed_over() -> None:
    _, pool = replicas(opened(FakeClock()), Breaker(9, 9.0))
    assert [asyncio.run(pool.acquire()).url for _ in range(2)] == ["1", "1"]


def test_wait_for_open_breakers_is_bounded() -> None:
    _, pool = replicas(opened(FakeClock()), opened(FakeClock()))
    with pytest.raises(Failure, match="none of its 2 replicas answers"):
        asyncio.run(pool.acquire())


@pytest.mark.parametrize(
    ("failure", "searching", "alive"),
    [
        (Refused("no"), False, True),
        (Failure("500"), False, False),
        (Failure("500"), True, True),
        (Failure("late", searchable=False), True, False),
    ],
)
def test_failures_that_count_against_a_replica(failure: Failure, searching: bool, alive: bool) -> None:
    (replica,), pool = replicas(Breaker(1, 10.0, FakeClock()))
    asyncio.run(pool.acquire())
    with pytest.raises(Failure), pool.use(replica, searching=searching):
        raise failure
    assert replica.breaker.allows == alive
    assert replica.active == 0
