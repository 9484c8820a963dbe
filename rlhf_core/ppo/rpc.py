"""Calls of actors: what an actor does before and after each, and how the driver waits for them.

    driver                                    actor
    ------                                    -----
    handle.method.remote(...)        ->       says what it is doing (`rlhf_core.system.heartbeat`), works, is idle again
    wait: looks once a second        <-       a result, or an error of ours: bug, data or infrastructure is decided where
          who is stuck, who is gone           it was raised, since only there its class is known for certain

Nothing waits for ever: a part that does not move within its limit is blamed, whoever waits and for whatever.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.errors import InfrastructureError, OutOfMemory, WorkerDied, classified
from rlhf_core.ppo.records import ParticipantSpec
from rlhf_core.system.heartbeat import Monitor, heartbeat, idle, register

LOOK_SECONDS = 1.0

P = ParamSpec("P")
R = TypeVar("R")


class Actor:
    """Base of our actors: a part of the stage, whose methods are marked with `called`."""

    def __init__(self, participant: ParticipantSpec) -> None:
        self.participant = participant
        register(participant.folder, participant.name, participant.timeouts.stall)
        heartbeat("start", participant.timeouts.start)


def called(limit: Literal["start", "stall", "sync"] = "stall") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For an actor's methods. `limit`: the field of `run.timeouts` that bounds its first movement."""

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            actor: Any = args[0]
            participant: ParticipantSpec = actor.participant
            heartbeat(method.__name__, getattr(participant.timeouts, limit))
            try:
                return method(*args, **kwargs)
            except Exception as error:
                raise classified(error, f"{participant.name}, {method.__name__}") from error
            finally:
                idle()

        return run

    return wrap


def fetch(references: Sequence[Any], seconds: float) -> list[Any]:
    """Results in order. Errors of actors as they were raised; a dead actor is a WorkerDied. Raises
    TimeoutError.
    """
    import ray
    from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

    try:
        results: list[Any] = ray.get(list(references), timeout=seconds)
        return results
    except RayTaskError as error:
        raise classified(error.cause if isinstance(error.cause, Exception) else error) from error
    except GetTimeoutError as error:
        raise TimeoutError(str(error)) from error
    except RayActorError as error:
        raise WorkerDied(f"a process died: {_first_line(error)}") from error
    except OutOfMemoryError as error:
        raise OutOfMemory(f"Ray killed a process for want of memory: {_first_line(error)}") from error
    except RayError as error:
        raise InfrastructureError(f"Ray: {_first_line(error)}") from error


def gone(actors: Sequence[Any], seconds: float = 2.0) -> list[Any]:
    """Those of `actors` that Ray knows to be gone, which no monitor can see on another host. Busy ones are not
    among them.
    """
    import ray

    calls = [actor.usage.remote() for actor in actors]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=seconds)
    found = []
    for actor, call in zip(actors, calls, strict=True):
        try:
            if call in ready:
                fetch([call], seconds)
        except (WorkerDied, OutOfMemory):
            found.append(actor)
    return found


class Calls:
    """Waits of the driver."""

    def __init__(self, monitor: Monitor, timeouts: TimeoutsConfig) -> None:
        self.monitor = monitor
        self.timeouts = timeouts

    def wait(self, references: Sequence[Any], what: str) -> list[Any]:
        """Results in order. Raises what an actor raised, unless others are the reason: who is gone or stuck
        is named.
        """
        began = time.monotonic()
        try:
            while True:
                heartbeat(f"wait for {what}", self.timeouts.stall)
                try:
                    return fetch(references, LOOK_SECONDS)
                except TimeoutError:
                    if self.monitor.busy():
                        began = time.monotonic()
                    # An actor that does not even begin is starting, or its call was lost.
                    patience = max(self.timeouts.start, self.timeouts.stall)
                    if self.monitor.stalled() or time.monotonic() - began > patience:
                        raise self.monitor.diagnose(what, self._limits()) from None
                except OutOfMemory:
                    raise  # it says more than who is gone
                except InfrastructureError as error:
                    # A broken connection is what others see of a process that died or is suspended.
                    if not self.monitor.unhealthy():
                        raise
                    raise self.monitor.diagnose(what, self._limits()) from error
        finally:
            idle()

    def _limits(self) -> str:
        limits = self.timeouts
        return f"run.timeouts: start={limits.start:g}, stall={limits.stall:g}, sync={limits.sync:g}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
