"""The engines of a fleet: asked, and replaced when they die or are stuck.

    ask ---> answers of those that gave one; the others are dead now: killed, if they were only stuck
    bury --> dead are those that are gone or stuck
    restart  the dead are started again; what they hold is stale until the next completed sync

What each may go through is in `cluster.health`. Waits for an engine as long as it moves.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.config.engine import EngineConfig
from rlhf_core.errors import InfrastructureError, OutOfMemory, WorkerDied
from rlhf_core.ppo.health import Health
from rlhf_core.ppo.rpc import LOOK_SECONDS, Calls, fetch, gone

log = logging.getLogger(__name__)


class Engines:
    """By index, 0 .. count - 1."""

    def __init__(self, start: Callable[[int, int], Any], config: EngineConfig, calls: Calls) -> None:
        """`start(index, before)`: a handle to a new actor, after so many others of this index."""
        self._start = start
        self._calls = calls
        self._names = [f"engine {index}" for index in range(config.count)]
        self.health = Health(self._names, max_restarts=config.max_restarts, floor=config.needed)
        self._started = Counter(range(config.count))
        self._handles = {index: start(index, 0) for index in range(config.count)}

    @property
    def handles(self) -> list[Any]:
        """Of those that are not given up, in order."""
        return list(self._handles.values())

    @property
    def serving(self) -> list[int]:
        """Indices of those that hold confirmed weights."""
        return [index for index, name in enumerate(self._names) if self.health[name] == "healthy"]

    def synced(self) -> None:
        """A sync into all of them has completed."""
        for index in self._handles:
            self.health.note(self._names[index], "synced")

    def ask(self, method: str, arguments: Mapping[int, Sequence[Any]], what: str) -> dict[int, Any]:
        """`method` on those engines, all at once. Who is missing in the answers is dead. Raises what they
        raise, and WorkerDied where too few are left.
        """
        import ray

        calls = {
            index: getattr(self._handles[index], method).remote(*args) for index, args in arguments.items()
        }
        answers: dict[int, Any] = {}
        moved = time.monotonic()
        limits = self._calls.timeouts
        while calls:
            ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=LOOK_SECONDS)
            for index in [index for index, reference in calls.items() if reference in ready]:
                try:
                    (answers[index],) = fetch([calls.pop(index)], LOOK_SECONDS)
                    self.health.note(self._names[index], "answered")
                except (WorkerDied, OutOfMemory) as error:
                    self._bury(index, f"while {what} was waited for: {error.message}")
            if ready or self._calls.monitor.busy():
                moved = time.monotonic()
            # One that does not even begin has no part that could be late: its call was lost.
            lost = time.monotonic() - moved > max(limits.start, limits.stall)
            for index in list(calls):
                if lost:
                    self._bury(index, f"{what} did not begin within {time.monotonic() - moved:.0f} s")
                if lost or self._stuck(index, what):
                    del calls[index]
        return answers

    def bury(self, reason: str, *, failed: bool) -> list[int]:
        """Those that are gone or stuck. `failed`: something did, so that those also count that are suspended, or
        that only Ray knows to be gone.
        """
        lost = [
            index for index in self._handles if self._alive(index) and self._is_lost(index, failed=failed)
        ]
        for index in lost:
            self._bury(index, reason)
        return lost

    def bury_all(self, reason: str) -> None:
        """All that are not dead yet."""
        for index in [index for index in self._handles if self._alive(index)]:
            self._bury(index, reason)

    def restart(self) -> bool:
        """Start the dead ones again, as far as they have restarts left; the others are given up. False: none
        was dead.
        """
        dead = [
            index
            for index, name in enumerate(self._names)
            if self.health[name] == "dead" and index in self._handles
        ]
        pending = list(dead)
        while pending:
            for index in list(pending):
                if not self.health.may_restart(self._names[index]):
                    log.error(
                        "engine %d is given up; the run goes on with %s", index, self.health.remaining()
                    )
                    del self._handles[index]
                    pending.remove(index)
                    continue
                self.health.note(self._names[index], "restart")
                self._handles[index] = self._start(index, self._started[index])
                self._started[index] += 1
            pending = [index for index in pending if not self._loaded(index)]
        return bool(dead)

    # -- one engine --

    def _loaded(self, index: int) -> bool:
        handle = self._handles[index]
        try:
            self._calls.wait([handle.load.remote()], f"engine {index} to be started again")
        except InfrastructureError as error:
            if not self._is_lost(index, failed=True):
                raise
            self._bury(index, error.message)
            return False
        self.health.note(self._names[index], "loaded")
        log.info("engine %d is started again, time %d", index, self._started[index] - 1)
        return True

    def _alive(self, index: int) -> bool:
        return self.health[self._names[index]] != "dead"

    def _stuck(self, index: int, what: str) -> bool:
        """Whether an engine that was asked has to be buried; a suspended one is suspect until its limit has
        passed.
        """
        participant = self._calls.monitor.participant(self._names[index])
        if participant is not None and participant.stalled:
            self._bury(
                index,
                f"{participant.describe()}, while {what} was waited for; stacks: {self._calls.monitor.folder}",
            )
            return True
        if (
            participant is not None
            and participant.state == "suspended"
            and self.health[self._names[index]] == "healthy"
        ):
            self.health.note(self._names[index], "silent")
            log.warning("%s; it is waited for until %g s", participant.describe(), participant.stall_after)
        return False

    def _is_lost(self, index: int, *, failed: bool) -> bool:
        participant = self._calls.monitor.participant(self._names[index])
        if participant is not None and (
            participant.state == "dead"
            or participant.stalled
            or (failed and participant.state == "suspended")
        ):
            return True
        return failed and bool(gone([self._handles[index]]))

    def _bury(self, index: int, reason: str) -> None:
        import ray

        name = self._names[index]
        log.warning("%s is lost: %s", name, reason)
        ray.kill(self._handles[index])
        self._calls.monitor.kill([name])
        try:
            self.health.note(name, "died")
        except WorkerDied as error:
            raise WorkerDied(f"{error.message}; at last: {reason}") from error
