"""How engines are waited for, marked dead, restarted and given up. Ray is scripted here, and is real in
`tests/integration/test_stuck.py`.

- a call that never begins ends the wait for this engine after the start timeout, unless any process works;
  the results of the other engines are kept
- only a complete sync lets a restarted engine serve
- restarts are counted per engine since its last answer; without restarts left an engine is given up, and the
  stage fails exactly when fewer than `min_count` engines remain
- this holds for random histories
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster.rpc import ActorClient, Pending, RemoteActor
from rlhf_core.config.engine import EngineConfig
from rlhf_core.errors import WorkerDied
from rlhf_core.ppo import engine_pool as module
from rlhf_core.ppo.engine_actor import EngineActor
from rlhf_core.ppo.engine_pool import EnginePool

LIMIT = 30.0


class _Engine:
    """Calls of `sample` and `load` return the index of the engine as their reference."""

    def __init__(self, index: int) -> None:
        self.sample = self.load = SimpleNamespace(remote=lambda: index)


@dataclass
class _Ray:
    clock: float = 0.0
    busy_seconds: int = 0
    """How long any process works."""
    answering: set[int] = field(default_factory=set)
    """Engines whose calls end."""
    lost: set[int] = field(default_factory=set)
    """Engines that die in their next call."""
    killed: list[Any] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    def pool(self, count: int, *, min_count: int = 1, max_restarts: int = 3) -> EnginePool:
        def start(index: int, starts: int) -> RemoteActor[EngineActor]:
            self.starts.append((index, starts))
            return RemoteActor(_Engine(index))

        monitor: Any = SimpleNamespace(
            busy=lambda: self.clock <= self.busy_seconds,
            participant=lambda name: None,
            kill=lambda names: None,
            folder="stacks",
        )
        client = ActorClient(monitor, SimpleNamespace(start=LIMIT, stall=LIMIT / 2))  # type: ignore[arg-type]
        client.wait = lambda pending, what: self.fetch(pending, 1.0)  # type: ignore[method-assign]
        config = EngineConfig(count=count, min_count=min_count, max_restarts=max_restarts)
        return EnginePool(start, config, client)

    def fetch(self, pending: list[Pending[Any]], _seconds: float) -> list[Any]:
        for call in pending:
            if call.reference in self.lost:
                self.lost.remove(call.reference)
                raise WorkerDied("a process died")
        return [f"answer of {call.reference}" for call in pending]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    """Each poll takes a second."""
    import ray

    script = _Ray()

    def wait(references: list[int], **_options: Any) -> tuple[list[int], list[int]]:
        script.clock += 1.0
        ended = [r for r in references if r in script.answering | script.lost]
        return ended, [r for r in references if r not in ended]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", script.killed.append)
    monkeypatch.setattr(module, "fetch", script.fetch)
    monkeypatch.setattr(module, "dead_actors", list)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: script.clock))
    return script


def sample(pool: EnginePool) -> dict[int, Any]:
    """Call `sample` on all serving engines."""
    calls: dict[int, Pending[Any]] = {}
    for index in pool.serving:
        calls[index] = pool.actor(index).call(EngineActor.sample)  # type: ignore[call-arg]
    return pool.collect(calls, "the rollout")


def serve_again(pool: EnginePool) -> None:
    """Restart dead engines and complete a sync."""
    pool.restart()
    pool.confirm_weights()


@pytest.mark.parametrize("busy_seconds", [0, 100])
def test_a_call_that_never_begins_marks_its_engine_dead(
    ray: _Ray, busy_seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    ray.answering, ray.busy_seconds = {0}, busy_seconds
    pool = ray.pool(2)
    pool.confirm_weights()
    assert sample(pool) == {0: "answer of 0"}
    assert pool.serving == [0]
    assert ray.clock == pytest.approx(max(1, busy_seconds) + LIMIT + 1, abs=2)
    assert len(ray.killed) == 1, "the other engine is not killed"
    assert "engine 1 is lost: the rollout did not begin within 31 s" in caplog.text


def test_only_a_sync_lets_a_restarted_engine_serve(ray: _Ray) -> None:
    ray.answering = {0, 1}
    pool = ray.pool(2)
    assert pool.serving == []
    pool.confirm_weights()
    ray.lost = {1}
    assert sample(pool) == {0: "answer of 0"}
    assert pool.serving == [0]
    pool.restart()
    assert pool.serving == [0] and len(pool.actors) == 2
    assert ray.starts == [(0, 0), (1, 0), (1, 1)]
    pool.confirm_weights()
    assert pool.serving == [0, 1]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_the_stage_fails_when_an_engine_has_no_restarts_left(ray: _Ray, allowed: int) -> None:
    pool = ray.pool(1, max_restarts=allowed)
    for _ in range(allowed):
        pool.confirm_weights()
        ray.lost = {0}
        assert sample(pool) == {}
        pool.restart()
    pool.confirm_weights()
    ray.lost = {0}
    message = (
        rf"engine 0 is lost after {allowed} restarts: 0 of 1 remain, 1 are needed; at last: while waiting"
    )
    with pytest.raises(WorkerDied, match=message):
        sample(pool)
    assert ray.starts == [(0, starts) for starts in range(allowed + 1)]


def test_the_run_continues_without_a_lost_engine_down_to_the_minimum(
    ray: _Ray, caplog: pytest.LogCaptureFixture
) -> None:
    ray.answering = {0, 1, 2}
    pool = ray.pool(3, min_count=2, max_restarts=0)
    pool.confirm_weights()
    ray.lost = {1}
    assert sorted(sample(pool)) == [0, 2]
    serve_again(pool)
    assert pool.serving == [0, 2] and len(pool.actors) == 2
    assert "engine 1 has no restarts left; the run continues with ['engine 0', 'engine 2']" in caplog.text
    ray.lost = {2}
    with pytest.raises(WorkerDied, match="1 of 3 remain, 2 are needed"):
        sample(pool)


def test_deaths_within_the_restarts_do_not_count_against_the_minimum(ray: _Ray) -> None:
    pool = ray.pool(2, min_count=2, max_restarts=1)
    pool.confirm_weights()
    pool.mark_all_dead("the sync broke")
    assert pool.serving == []
    serve_again(pool)
    assert pool.serving == [0, 1]


def test_an_engine_that_dies_while_it_loads_is_restarted_again(
    ray: _Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ray.pool(1, max_restarts=2)
    pool.mark_all_dead("the sync broke")
    monkeypatch.setattr(module, "dead_actors", lambda actors: actors)
    ray.lost = {0}
    pool.restart()
    assert ray.starts == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(WorkerDied, match="after 2 restarts"):
        pool.mark_all_dead("the sync broke")


def test_an_answer_resets_the_restarts_of_an_engine(ray: _Ray) -> None:
    ray.answering = {0}
    pool = ray.pool(1, max_restarts=1)
    for _ in range(5):
        serve_again(pool)
        assert sample(pool) == {0: "answer of 0"}
        ray.lost = {0}
        assert sample(pool) == {}
    serve_again(pool)
    ray.lost = {0}
    with pytest.raises(WorkerDied, match="after 1 restarts"):
        sample(pool)


@pytest.mark.parametrize("seed", range(100))
def test_random_histories_keep_all_bounds(ray: _Ray, seed: int) -> None:
    chance = random.Random(seed)
    count, allowed = chance.randint(1, 4), chance.randint(0, 2)
    needed = chance.randint(1, count)
    ray.answering = set(range(count))
    pool = ray.pool(count, min_count=needed, max_restarts=allowed)
    in_a_row = dict.fromkeys(range(count), 0)
    for _ in range(30):
        serve_again(pool)
        serving = pool.serving
        assert len(serving) == len(pool.actors) >= needed
        lost = {index for index in serving if chance.random() < 0.3}
        ray.lost = set(lost)
        try:
            answers = sample(pool)
        except WorkerDied:
            exhausted = [index for index in in_a_row if in_a_row[index] + (index in lost) > allowed]
            assert count - len(exhausted) < needed
            return
        assert set(answers) == set(serving) - lost
        for index in serving:
            in_a_row[index] = in_a_row[index] + 1 if index in lost else 0
            assert in_a_row[index] <= allowed + 1
