"""The engines of a fleet. Engines that die or stall are replaced.

                                         +----------- mark_dead -----------+
                                         |                                 v
    start --> stale -- confirm_weights --> serving ---- mark_dead ----> dead
                ^                                                         |
                +------------------------ restart ------------------------+

Only a serving engine gets requests: one that was restarted holds old weights until the next complete sync.
The count of restarts of an engine is reset by each answer. An engine without restarts left is
removed, and the stage fails if fewer engines than `ppo.engine.min_count` remain.

`DeviceTurns`: engines and trainers use the memory of the same devices in turns (`ppo.engine.sleep_level`).

                 load        sync           sampling                  scoring, training
    engines      asleep      weights   ->   weights + KV cache   ->   asleep
    trainers     awake       awake          states in host memory     awake

Weights are sent before the KV cache is allocated, and checkpoints are written between the two, while the
trainers hold all of their states. Memory is always given back by one side before the other side allocates it.
With level 0 nothing happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlhf_core.cluster.rpc import POLL_SECONDS, ActorClient, Pending, RemoteActor, settle
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.errors import OutOfMemory, RLHFError, WorkerDied
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.worker import ModelWorker

log = logging.getLogger(__name__)

R = TypeVar("R")

# In a row without an answer: what fails before each answer has a cause that a new process does not remove.
MAX_RESTARTS = 3


@dataclass
class _PoolMember:
    index: int
    actor: RemoteActor[EngineActor]
    state: Literal["stale", "serving", "dead"] = "stale"
    starts: int = 1
    restarts: int = 0
    """Since its last answer."""
    given_up: bool = False

    @property
    def name(self) -> str:
        return f"engine {self.index}"


class EnginePool:
    """Engines 0 .. `config.count` - 1.

    Args:
        start: `start(index, starts)` returns a new actor for an engine that was started `starts` times
            before.
        config: Section `ppo.engine`.
        client: Waits for the engines, and ends those that are lost.
        restarts: How often in a row an engine that dies or hangs before its first answer is restarted.
    """

    def __init__(
        self,
        start: Callable[[int, int], RemoteActor[EngineActor]],
        config: EngineConfig,
        client: ActorClient,
        restarts: int = MAX_RESTARTS,
    ) -> None:
        self._start = start
        self._restarts = restarts
        self._config = config
        self._client = client
        self._engines = [_PoolMember(index, start(index, 0)) for index in range(config.count)]

    @property
    def actors(self) -> list[RemoteActor[EngineActor]]:
        """The actors of all engines that are not given up, in order."""
        return [engine.actor for engine in self._engines if not engine.given_up]

    @property
    def serving(self) -> list[int]:
        """Indices of the engines that hold confirmed weights."""
        return [engine.index for engine in self._engines if engine.state == "serving"]

    def actor(self, index: int) -> RemoteActor[EngineActor]:
        """Return the present actor of an engine."""
        return self._engines[index].actor

    def confirm_weights(self) -> None:
        """Let all engines serve after a complete sync."""
        for engine in self._engines:
            if not engine.given_up:
                engine.state = "serving"

    def collect(self, pending: Mapping[int, Pending[R]], what: str) -> dict[int, R]:
        """Wait for calls of engines, and return the results of those that answered, by index.

        An engine that dies, stalls or never begins is marked dead and has no result. Raises the error of an
        engine, and WorkerDied if too few engines remain.
        """
        results = self._collect(pending, what)
        for index in results:
            self._engines[index].restarts = 0
        return results

    def _collect(self, pending: Mapping[int, Pending[R]], what: str) -> dict[int, R]:
        client = self._client
        remaining = dict(pending)
        results: dict[int, R] = {}
        suspended: set[int] = set()
        last_progress = client.clock()
        while remaining:
            answers = zip(list(remaining), settle(list(remaining.values()), POLL_SECONDS), strict=True)
            has_answers = False
            for index, answer in answers:
                if isinstance(answer, TimeoutError):
                    continue
                del remaining[index]
                has_answers = True
                if isinstance(answer, WorkerDied | OutOfMemory):
                    self._mark_dead(self._engines[index], f"while waiting for {what}: {answer.message}")
                # Any other error is not about the process, so a new engine would raise it, too.
                elif isinstance(answer, RLHFError):
                    raise answer
                else:
                    results[index] = answer
            if has_answers or client.monitor.busy():
                last_progress = client.clock()
            # The monitor does not see an engine as stalled if the call never reached it.
            waited = client.clock() - last_progress
            never_began = waited > client.start_seconds
            for index in list(remaining):
                engine = self._engines[index]
                if never_began:
                    self._mark_dead(engine, f"{what} did not begin within {waited:.0f} s")
                    del remaining[index]
                elif self._is_stalled(engine, what, suspended):
                    del remaining[index]
        return results

    def mark_dead(self, reason: str, *, after_error: bool) -> list[int]:
        """Mark all engines dead that died or stalled, and return their indices.

        `after_error`: a call has failed. Then suspended engines count too, and those that only Ray reports.
        """
        dead = [
            engine
            for engine in self._engines
            if engine.state != "dead" and self._is_unhealthy(engine, after_error=after_error)
        ]
        for engine in dead:
            self._mark_dead(engine, reason)
        return [engine.index for engine in dead]

    def mark_all_dead(self, reason: str) -> None:
        """Mark every engine dead."""
        for engine in self._engines:
            if engine.state != "dead":
                self._mark_dead(engine, reason)

    def restart(self) -> None:
        """Restart the dead engines. Engines without restarts left are given up."""
        dead = [engine for engine in self._engines if engine.state == "dead" and not engine.given_up]
        while dead:
            # They load together, as at the start of the stage: a large model takes minutes.
            loading: dict[int, Pending[None]] = {}
            for engine in dead:
                if not self._can_restart(engine):
                    engine.given_up = True
                    names = [other.name for other in self._remaining()]
                    log.error("%s has no restarts left; the run continues with %s", engine.name, names)
                    continue
                engine.actor = self._start(engine.index, engine.starts)
                engine.state = "stale"
                engine.starts += 1
                engine.restarts += 1
                loading[engine.index] = engine.actor.call(EngineActor.start_engine)
            for index in self._collect(loading, "engines to be restarted"):
                engine = self._engines[index]
                log.info("%s has been restarted, restart %d", engine.name, engine.starts - 1)
            # Those that did not load are dead again.
            dead = [engine for engine in dead if engine.state == "dead" and not engine.given_up]

    # -- one engine --

    def _can_restart(self, engine: _PoolMember) -> bool:
        return engine.restarts < self._restarts

    def _remaining(self) -> list[_PoolMember]:
        """Return the engines that live or can be restarted."""
        return [engine for engine in self._engines if engine.state != "dead" or self._can_restart(engine)]

    def _is_stalled(self, engine: _PoolMember, what: str, suspended: set[int]) -> bool:
        """Mark the engine dead if it is stalled.

        A suspended engine is only logged until its limit has passed.
        """
        monitor = self._client.monitor
        participant = monitor.participant(engine.name)
        if participant is None:
            return False
        if participant.stalled:
            reason = f"{participant.describe()}, while waiting for {what}; stacks: {monitor.folder}"
            self._mark_dead(engine, reason)
            return True
        if participant.state == "suspended" and engine.index not in suspended:
            suspended.add(engine.index)
            log.warning("%s; the timeout is %g s", participant.describe(), participant.stall_after)
        return False

    def _is_unhealthy(self, engine: _PoolMember, *, after_error: bool) -> bool:
        participant = self._client.monitor.participant(engine.name)
        if participant is not None:
            if participant.state == "dead" or participant.stalled:
                return True
            if after_error and participant.state == "suspended":
                return True
        return after_error and bool(self._client.dead_actors([engine.actor]))

    def _mark_dead(self, engine: _PoolMember, reason: str) -> None:
        """Kill what is left of an engine. Raises WorkerDied if too few engines remain."""
        if engine.state == "dead":
            return  # With `ppo.staleness` of more than 1, an engine has calls of several steps.
        log.warning("%s is lost: %s", engine.name, reason)
        # It may be suspended and not dead. If it went on later, it would use the devices beside its
        # successor.
        self._client.kill({engine.name: engine.actor})
        engine.state = "dead"
        remaining = len(self._remaining())
        if remaining < self._config.needed:
            raise WorkerDied(
                f"{engine.name} is lost after {engine.restarts} restarts: {remaining} of {len(self._engines)}"
                f" remain, {self._config.needed} are needed; at last: {reason}"
            )


class DeviceTurns:
    """Moves the memory of the devices between engines and trainers.

    Args:
        level: `ppo.engine.sleep_level`.
        ranks: Returns all training ranks.
        engines: Returns the present engines.
        wait: Waits for calls; the text describes them.
    """

    def __init__(
        self,
        level: int,
        ranks: Callable[[], Sequence[RemoteActor[ModelWorker]]],
        engines: Callable[[], Sequence[RemoteActor[EngineActor]]],
        wait: Callable[[list[Pending[None]], str], Any],
    ) -> None:
        self._level = level
        self._ranks = ranks
        self._engines = engines
        self._wait = wait

    def trainers_load(self) -> None:
        """Let the engines sleep, after they have loaded and before the trainers do."""
        self._sleep()

    def receive_weights(self) -> None:
        """Give the engines the memory of their weights, before a sync."""
        if self._level:
            # After an update, torch keeps the memory of the whole backward pass.
            calls = [rank.call(ModelWorker.release_cache) for rank in self._ranks()]
            self._wait(calls, "the trainers to release memory")
        self._wake("weights")

    def sample(self) -> None:
        """Give the devices to the engines, after a sync."""
        if self._level:
            calls = [rank.call(ModelWorker.offload_states) for rank in self._ranks()]
            self._wait(calls, "the trainers' states to be moved to host memory")
        self._wake("kv_cache")

    def train(self) -> None:
        """Give the devices to the trainers, after sampling."""
        # First, because reloading the states needs the memory that the engines have.
        self._sleep()
        if self._level:
            calls = [rank.call(ModelWorker.reload_states) for rank in self._ranks()]
            self._wait(calls, "the trainers' states to be moved to the devices")

    def _sleep(self) -> None:
        if self._level:
            self._wait([engine.call(EngineActor.sleep) for engine in self._engines()], "engines to sleep")

    def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if self._level:
            calls = [engine.call(EngineActor.wake, part) for engine in self._engines()]
            self._wait(calls, f"engines to allocate their {part}")
