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
from typing import Any

import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import RemoteActor, Usage
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.errors import WorkerDied
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.engine_pool import EnginePool
from rlhf_core.testing.engines import Reply, ScriptedEngine
from tests.support.scripted_actors import NEVER, local_actor
from tests.support.scripted_fleet import ScriptedActorClient, ScriptedEngineActor, ScriptedMonitor

LIMIT = 30.0


class _Engine(ScriptedEngineActor):
    """Engine `index` of a script."""

    def __init__(self, index: int, script: _Script) -> None:
        super().__init__(ScriptedEngine(lambda request: Reply(())))
        self._index, self._script = index, script

    @override
    def start_engine(self) -> Any:
        self._script.loading.append(self._index)
        return self._script.answer(self._index)

    @override
    def sample(self, *given: Any, **options: Any) -> Any:
        return self._script.answer(self._index)

    @override
    def usage(self) -> Usage:
        if self._script.are_dead:
            raise WorkerDied("a process died")
        return Usage(0.0, 0)


class _Monitor(ScriptedMonitor):
    """Other processes work for `busy_seconds`."""

    def __init__(self, script: _Script) -> None:
        super().__init__()
        self._script = script

    @override
    def busy(self) -> bool:
        return self._script.client.clock() <= self._script.busy_seconds


class _Script:
    """What the engines of a pool do. Calls of `sample` and `load` return the answer of the engine."""

    def __init__(self) -> None:
        self.client = ScriptedActorClient(TimeoutsConfig(start=LIMIT, stall=LIMIT / 2), _Monitor(self))
        self.busy_seconds = 0
        """How long any process works."""
        self.silent: set[int] = set()
        """Engines whose calls never end."""
        self.lost: set[int] = set()
        """Engines that die in their next call."""
        self.are_dead = False
        """Whether Ray reports the engines as dead."""
        self.starts: list[tuple[int, int]] = []
        self.loading: list[int] = []
        """Engines whose model began to load."""

    def answer(self, index: int) -> Any:
        if index in self.lost:
            self.lost.remove(index)
            raise WorkerDied("a process died")
        return NEVER if index in self.silent else f"answer of {index}"

    def start(self, index: int, starts: int) -> RemoteActor[EngineActor]:
        self.starts.append((index, starts))
        return local_actor(_Engine(index, self), self.client.objects)

    def pool(self, count: int, *, min_count: int = 1, max_restarts: int = 3) -> EnginePool:
        config = EngineConfig(count=count, min_count=min_count)
        return EnginePool(self.start, config, self.client, max_restarts)


@pytest.fixture
def script() -> _Script:
    return _Script()


def sample(pool: EnginePool) -> dict[int, Any]:
    """Call `sample` on all serving engines."""
    options: Any = {"n": 1, "max_new_tokens": 1, "temperature": 1.0, "seeds": []}
    calls = {index: pool.actor(index).call(EngineActor.sample, [], **options) for index in pool.serving}
    return pool.collect(calls, "the rollout")


def serve_again(pool: EnginePool) -> None:
    """Restart dead engines and complete a sync."""
    pool.restart()
    pool.confirm_weights()


@pytest.mark.parametrize("busy_seconds", [0, 100])
def test_a_call_that_never_begins_marks_its_engine_dead(
    script: _Script, busy_seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    script.silent, script.busy_seconds = {1}, busy_seconds
    pool = script.pool(2)
    pool.confirm_weights()
    assert sample(pool) == {0: "answer of 0"}
    assert pool.serving == [0]
    assert script.client.objects.seconds == pytest.approx(max(1, busy_seconds) + LIMIT + 1, abs=2)
    assert script.client.killed == ["engine 1"]
    assert "engine 1 is lost: the rollout did not begin within 31 s" in caplog.text


def test_only_a_sync_lets_a_restarted_engine_serve(script: _Script) -> None:
    pool = script.pool(2)
    assert pool.serving == []
    pool.confirm_weights()
    script.lost = {1}
    assert sample(pool) == {0: "answer of 0"}
    assert pool.serving == [0]
    pool.restart()
    assert pool.serving == [0] and len(pool.actors) == 2
    assert script.starts == [(0, 0), (1, 0), (1, 1)]
    pool.confirm_weights()
    assert pool.serving == [0, 1]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_the_stage_fails_when_an_engine_has_no_restarts_left(script: _Script, allowed: int) -> None:
    pool = script.pool(1, max_restarts=allowed)
    for _ in range(allowed):
        pool.confirm_weights()
        script.lost = {0}
        assert sample(pool) == {}
        pool.restart()
    pool.confirm_weights()
    script.lost = {0}
    message = (
        rf"engine 0 is lost after {allowed} restarts: 0 of 1 remain, 1 are needed; at last: while waiting"
    )
    with pytest.raises(WorkerDied, match=message):
        sample(pool)
    assert script.starts == [(0, starts) for starts in range(allowed + 1)]


def test_the_run_continues_without_a_lost_engine_down_to_the_minimum(
    script: _Script, caplog: pytest.LogCaptureFixture
) -> None:
    pool = script.pool(3, min_count=2, max_restarts=0)
    pool.confirm_weights()
    script.lost = {1}
    assert sorted(sample(pool)) == [0, 2]
    serve_again(pool)
    assert pool.serving == [0, 2] and len(pool.actors) == 2
    assert "engine 1 has no restarts left; the run continues with ['engine 0', 'engine 2']" in caplog.text
    script.lost = {2}
    with pytest.raises(WorkerDied, match="1 of 3 remain, 2 are needed"):
        sample(pool)


def test_deaths_within_the_restarts_do_not_count_against_the_minimum(script: _Script) -> None:
    pool = script.pool(2, min_count=2, max_restarts=1)
    pool.confirm_weights()
    pool.mark_all_dead("the sync broke")
    assert pool.serving == []
    serve_again(pool)
    assert pool.serving == [0, 1]


def test_an_engine_that_dies_while_it_loads_is_restarted_again(script: _Script) -> None:
    pool = script.pool(1, max_restarts=2)
    pool.mark_all_dead("the sync broke")
    script.are_dead = True
    script.lost = {0}
    pool.restart()
    assert script.starts == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(WorkerDied, match="after 2 restarts"):
        pool.mark_all_dead("the sync broke")


def test_engines_load_together_after_a_restart(script: _Script, caplog: pytest.LogCaptureFixture) -> None:
    pool = script.pool(3, max_restarts=1)
    pool.mark_all_dead("the sync broke")
    script.silent = {0}
    with caplog.at_level("INFO"):
        pool.restart()
    assert script.loading == [0, 1, 2], "no engine waits for another one"
    pool.confirm_weights()
    assert pool.serving == [1, 2]
    assert "engine 2 has been restarted, restart 1" in caplog.text


def test_an_answer_resets_the_restarts_of_an_engine(script: _Script) -> None:
    pool = script.pool(1, max_restarts=1)
    for _ in range(5):
        serve_again(pool)
        assert sample(pool) == {0: "answer of 0"}
        script.lost = {0}
        assert sample(pool) == {}
    serve_again(pool)
    script.lost = {0}
    with pytest.raises(WorkerDied, match="after 1 restarts"):
        sample(pool)


@pytest.mark.parametrize("seed", range(100))
def test_random_histories_keep_all_bounds(script: _Script, seed: int) -> None:
    chance = random.Random(seed)
    count, allowed = chance.randint(1, 4), chance.randint(0, 2)
    needed = chance.randint(1, count)
    pool = script.pool(count, min_count=needed, max_restarts=allowed)
    in_a_row = dict.fromkeys(range(count), 0)
    for _ in range(30):
        serve_again(pool)
        serving = pool.serving
        assert len(serving) == len(pool.actors) >= needed
        lost = {index for index in serving if chance.random() < 0.3}
        script.lost = set(lost)
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
