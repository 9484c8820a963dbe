"""Remote actors in the process of a test.

actor = local_actor(MyActor())
[value] = fetch([actor.call(MyActor.value, 3)], seconds=1.0)

A call that ends when the test says so:

result: Future[int] = Future()
call = Pending[int](result, LocalObjects())
result.set_result(3)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RayObjects, RemoteActor

R = TypeVar("R")


class LocalObjects(RayObjects):
    """Objects of this process. The reference of an object is a `concurrent.futures.Future`."""

    def __init__(self) -> None:
        self.killed: list[Any] = []
        """Handles of the actors whose processes were ended."""

    @override
    def wait(self, references: Sequence[Any], *, count: int, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        while True:
            ended = [reference for reference in references if reference.done()]
            left = deadline - time.monotonic()
            if len(ended) >= count or left <= 0:
                return ended[:count]
            if count == len(references):
                wait(references, left)
            else:
                wait([each for each in references if not each.done()], left, FIRST_COMPLETED)

    @override
    def get(self, reference: Any, *, seconds: float) -> Any:
        """Return the object, or a list of them. Raises the error of the call, or TimeoutError."""
        if isinstance(reference, list):
            return [each.result(seconds) for each in reference]
        return reference.result(seconds)

    @override
    def kill(self, handle: Any) -> None:
        self.killed.append(handle)


NEVER: Any = Future()
"""Result of a method whose call never ends."""


class TimedObjects(LocalObjects):
    """Objects of this process, for which nothing waits: a counter takes the place of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        """Time that waits for calls which never end have taken."""

    @override
    def now(self) -> float:
        return self.seconds

    @override
    def wait(self, references: Sequence[Any], *, count: int, seconds: float) -> list[Any]:
        ended = [reference for reference in references if reference.done()]
        if len(ended) < count:
            # A wait that does not end takes all of its time, so that limits of time are reached at once.
            self.seconds += seconds
        # As `ray.wait`, which returns no more than it was asked for.
        return ended[:count]


def local_actor(actor: Any, objects: LocalObjects | None = None) -> RemoteActor[Any]:
    """Return a remote actor whose calls run the methods of `actor` at once, in this process.

    An error of a method is the result of its call. If a method returns a `Future`, the call ends with it;
    `NEVER` is one that does not end.

    Args:
        actor: Any object with the methods that are called.
        objects: The objects with the results.
    """
    return RemoteActor(_Handle(actor), objects or LocalObjects())


class _Handle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._actor, name))


class _Method:
    def __init__(self, method: Callable[..., Any], parts: int | None = None) -> None:
        self._method = method
        self._parts = parts

    def options(self, *, num_returns: int) -> _Method:
        return _Method(self._method, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Return the reference of the result, or of each part of it."""
        # As in Ray, an argument that is a reference arrives as its object.
        given = [arg.result() if isinstance(arg, Future) else arg for arg in args]
        try:
            result = self._method(*given, **kwargs)
        # Any error is the result of the call, as in Ray.
        except Exception as error:
            result = Future()
            result.set_exception(error)
        if self._parts is None:
            return _reference(result)
        if isinstance(result, Future):
            return [result] * self._parts
        if len(result) != self._parts:
            raise ValueError(f"{len(result)} results instead of {self._parts}, for which Ray raises an error")
        return [_reference(part) for part in result]


def _reference(result: Any) -> Future[Any]:
    if isinstance(result, Future):
        return result
    reference: Future[Any] = Future()
    reference.set_result(result)
    return reference


def ended(result: R, objects: LocalObjects | None = None) -> Pending[R]:
    """Return a call with this result."""
    return Pending(_reference(result), objects or LocalObjects())
