"""Remote actors and the cluster of tests, used as the driver uses those of Ray.

- a call returns the value of the method or its error
- a call without a result is waited for until the limit
- a reservation ends if enough is free
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rlhf_core.cluster.rpc import Pending, fetch, ready, wait_for_first
from tests.support.scripted_actors import LocalObjects, local_actor
from tests.support.scripted_cluster import ScriptedCluster, node


class Adder:
    def __init__(self) -> None:
        self.later: Future[int] = Future()

    def add(self, a: int, b: int) -> int:
        return a + b

    def divide(self, a: int, b: int) -> float:
        return a / b

    def wait(self) -> int:
        # As a method that takes long: its call ends with this future.
        return self.later  # type: ignore[return-value]


def test_calls_return_values_and_errors() -> None:
    actor = local_actor(Adder())
    assert fetch([actor.call(Adder.add, 3, 4), actor.call(Adder.add, 1, b=1)], 1.0) == [7, 2]
    with pytest.raises(ZeroDivisionError):
        fetch([actor.call(Adder.divide, 1, 0)], 1.0)


def test_a_call_ends_when_the_test_says_so() -> None:
    adder = Adder()
    actor = local_actor(adder)
    calls: list[Pending[int]] = [actor.call(Adder.wait), actor.call(Adder.add, 1, 2)]
    wait_for_first(calls, 10.0)
    assert ready(calls, 0.01) == [False, True]
    with pytest.raises(TimeoutError, match="1 of 2 results"):
        fetch(calls, 0.01)
    adder.later.set_result(8)
    assert fetch(calls, 1.0) == [8, 3]


def test_an_actor_that_is_killed_is_recorded() -> None:
    objects = LocalObjects()
    actor = local_actor(Adder(), objects)
    actor.kill()
    assert objects.killed == [actor.handle]


def test_a_reservation_ends_if_enough_is_free() -> None:
    nodes = [node("1", "one", {"CPU": 4.0}), node("2", "two", {"CPU": 4.0, "GPU": 2.0})]
    cluster = ScriptedCluster(nodes, used={"CPU": 3.0})
    assert cluster.total() == {"CPU": 8.0, "GPU": 2.0} and cluster.free()["CPU"] == 5.0
    for cpus, ends in ((5, True), (6, False)):
        group, reserved = cluster.reserve([{"CPU": cpus, "GPU": 1}])
        assert ready([reserved], 0.01) == [ends] and group == [{"CPU": cpus, "GPU": 1}]
    nodes[1]["Alive"] = False
    assert cluster.total() == {"CPU": 4.0} and list(cluster.node_names()) == ["1", "2"]
