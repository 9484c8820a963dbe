"""Waits for actors end in time, and say who did not answer. Ray is scripted here.

- results that Ray evicts again and again do not keep the caller beyond its limit
- many results are received in a few waits; an error among them is found within a second
- engines that do not answer a call of the weight sync, and senders that do not finish, are named with their
  hosts and the setting that limits them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from rlhf_core.cluster.rpc import POLL_SECONDS, Pending, RemoteActor, fetch, receive
from rlhf_core.errors import WeightSyncError, WorkerDied, WorkerStuck
from rlhf_core.ppo.engine_actor import RayEngineClient
from rlhf_core.weight_sync.sender_group import SenderGroup


@pytest.fixture
def scripted_ray(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str], set[str]], None]:
    """Returns a function that sets the references that have ended, and those that Ray has evicted."""

    def use(ended: set[str], evicted: set[str]) -> None:
        def wait(
            references: Sequence[str], *, num_returns: int, timeout: float, **_: Any
        ) -> tuple[list[str], list[str]]:
            found = [reference for reference in references if reference in ended]
            if len(found) < num_returns:
                time.sleep(timeout)
            return found[:num_returns], []

        def get(reference: Any, *, timeout: float) -> Any:
            if isinstance(reference, list):
                return [get(each, timeout=timeout) for each in reference]
            if reference in evicted:
                time.sleep(timeout)
                raise GetTimeoutError("not here")
            return reference.upper()

        monkeypatch.setattr("ray.wait", wait)
        monkeypatch.setattr("ray.get", get)

    return use


def calls(*names: str) -> list[Pending[str]]:
    return [Pending(name) for name in names]


def test_evicted_results_do_not_extend_the_limit(scripted_ray: Any) -> None:
    scripted_ray({"a", "b", "c"}, {"a", "b"})
    received: dict[int, str] = {}
    started = time.monotonic()
    receive(calls("a", "b", "c"), received, 0.3)
    assert time.monotonic() - started < 1
    with pytest.raises(TimeoutError, match=r"\d of 3 results after 0.3 s"):
        fetch(calls("a", "c", "c"), 0.3)
    scripted_ray({"a", "b", "c"}, set())
    assert fetch(calls("a", "b", "c"), 0.3) == ["A", "B", "C"], "in a later call"


def test_many_results_are_not_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"r{number}" for number in range(1000)]
    started = time.monotonic()
    waits: list[int] = []

    def wait(references: Sequence[str], *, num_returns: int, timeout: float, **_: Any) -> Any:
        """A result arrives every 0.2 ms."""
        waits.append(len(references))
        until = time.monotonic() + timeout
        while True:
            arrived = names[: int((time.monotonic() - started) / 2e-4)]
            found = [reference for reference in references if reference in arrived]
            if len(found) >= num_returns or time.monotonic() >= until:
                return found[:num_returns], []
            time.sleep(1e-3)

    monkeypatch.setattr("ray.wait", wait)

    def get(reference: Any, *, timeout: float) -> Any:
        return reference.upper() if isinstance(reference, str) else [each.upper() for each in reference]

    monkeypatch.setattr("ray.get", get)
    assert fetch(calls(*names), 30.0) == [name.upper() for name in names]
    assert len(waits) < 20


def test_an_error_among_many_results_is_found_within_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(references: Sequence[str], *, num_returns: int, timeout: float, **_: Any) -> Any:
        time.sleep(timeout)  # all but one never arrive
        return ["r7"], []

    def get(_reference: str, *, timeout: float) -> Any:
        raise RayActorError

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", get)
    started = time.monotonic()
    with pytest.raises(WorkerDied):
        fetch(calls(*(f"r{number}" for number in range(100))), 30.0)
    assert time.monotonic() - started < 3 * POLL_SECONDS


def test_results_that_have_arrived_are_taken_at_the_limit(scripted_ray: Any) -> None:
    names = [f"r{number}" for number in range(50)]
    scripted_ray(set(names[:49]), set())
    received: dict[int, str] = {}
    receive(calls(*names), received, 0.1)
    assert len(received) == 49


def test_engines_that_do_not_answer_are_named(scripted_ray: Any) -> None:
    scripted_ray({"one"}, set())
    engines = [
        RemoteActor[Any](SimpleNamespace(start_weight_update=SimpleNamespace(remote=lambda name=name: name)))
        for name in ("one", "two", "three")
    ]
    client = RayEngineClient(engines, ("10.0.0.1", "10.0.0.2", "10.0.0.2"), 0.2)
    with pytest.raises(WorkerStuck) as caught:
        client.start_weight_update()
    assert caught.value.message == (
        "2 of 3 engines (on 10.0.0.2) did not answer start_weight_update within 0.2 s (run.timeouts.sync)"
    )


def test_senders_that_do_not_finish_are_named() -> None:
    class Store:
        def check(self, keys: list[str]) -> bool:
            return keys == ["senders/1/checksums/1"]

    names = [f"policy rank {rank} on 10.0.0.{rank + 1}" for rank in range(3)]
    group = SenderGroup(Store(), 0, names, 0.1)
    group.start()
    with pytest.raises(WeightSyncError) as caught:
        group.add({})
    assert caught.value.message == (
        "policy rank 2 on 10.0.0.3 did not finish sending weights within 0.1 s (run.timeouts.sync)"
    )
