"""Engines and trainers that use the memory of the same devices in turns (`ppo.engine.sleep_level`).

                 load        sync           sampling                  scoring, training
    engines      asleep      weights   ->   weights + KV cache   ->   asleep
    trainers     awake       awake          states in host memory     awake

Weights are sent before the KV cache is allocated, and checkpoints are written between the two, while the
trainers hold all of their states. Memory is always given back by one side before the other side allocates it.
With level 0 nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.worker import ModelWorker


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
