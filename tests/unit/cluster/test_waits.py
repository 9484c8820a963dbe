"""Waits for actors end in time, and say who did not answer. The calls are local here.

- results that Ray evicts again and again do not keep the caller beyond its limit
- many results are received in a few waits; an error among them is found within a second
- engines that do not answer a call of the weight sync are named with their hosts and the setting that limits
  them
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster.rpc import FEW, Pending, fetch, receive
from rlhf_core.errors import WorkerDied, WorkerStuck
from rlhf_core.ppo.fleet.engine_actor import RayEngineClient
from tests.support.scripted_actors import LocalObjects, local_actor


class Evicting(LocalObjects):
    """Objects that have arrived, and of which Ray has evicted some from the memory of this host."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[Future[str]] = []
        self.missed = 0
        """How often a result was asked for that Ray has evicted."""
        self.waits = 0

    def wait(self, references: Sequence[Any], *, count: int, seconds: float) -> list[Any]:
        self.waits += 1
        return super().wait(references, count=count, seconds=seconds)

    def get(self, reference: Any, *, seconds: float) -> Any:
        if reference in self.evicted:
            self.missed += 1
            time.sleep(seconds)
            raise TimeoutError("not here")
        return super().get(reference, seconds=seconds)


def calls(objects: LocalObjects, count: int) -> list[Pending[str]]:
    return [Pending(Future(), objects) for _ in range(count)]


def test_evicted_results_do_not_extend_the_limit() -> None:
    objects = Evicting()
    a, b, c = calls(objects, 3)
    for name, call in zip("ABC", (a, b, c), strict=True):
        call.reference.set_result(name)
    objects.evicted = [a.reference, b.reference]
    received: dict[int, str] = {}
    receive([a, b, c], received, 0.3)
    assert objects.missed == 1, "the first one has taken all the time"
    with pytest.raises(TimeoutError, match=r"\d of 3 results after 0.3 s"):
        fetch([a, c, c], 0.3)
    objects.evicted = []
    assert fetch([a, b, c], 0.3) == ["A", "B", "C"], "in a later call"


def test_many_results_are_not_waited_for_one_by_one() -> None:
    objects = Evicting()
    pending = calls(objects, 1000)

    def answer() -> None:
        """A result arrives every 0.2 ms."""
        for number, call in enumerate(pending):
            time.sleep(2e-4)
            call.reference.set_result(f"R{number}")

    answering = threading.Thread(target=answer)
    answering.start()
    assert fetch(pending, 30.0) == [f"R{number}" for number in range(1000)]
    answering.join()
    # Only the last `FEW` are waited for one by one, and each second there is a wait for all.
    assert objects.waits < 2 * FEW + 30


def test_an_error_among_many_results_is_found_before_the_time_limit() -> None:
    pending = calls(LocalObjects(), 100)  # all but one never arrive
    pending[7].reference.set_exception(WorkerDied("a process died"))
    started = time.monotonic()
    with pytest.raises(WorkerDied):
        fetch(pending, 60.0)
    assert time.monotonic() - started < 30.0


def test_results_that_have_arrived_are_taken_at_the_limit() -> None:
    pending = calls(LocalObjects(), 50)
    for call in pending[:49]:
        call.reference.set_result("arrived")
    received: dict[int, str] = {}
    receive(pending, received, 0.1)
    assert len(received) == 49


def test_engines_that_do_not_answer_are_named() -> None:
    objects = LocalObjects()
    silent: Future[None] = Future()
    engines = [
        local_actor(SimpleNamespace(start_weight_update=lambda answer=answer: answer), objects)
        for answer in (None, silent, silent)
    ]
    client = RayEngineClient(engines, ("10.0.0.1", "10.0.0.2", "10.0.0.2"), 0.2)
    with pytest.raises(WorkerStuck) as caught:
        client.start_weight_update()
    assert caught.value.message == (
        "2 of 3 engines (on 10.0.0.2) did not answer start_weight_update within 0.2 s (run.timeouts.sync)"
    )
