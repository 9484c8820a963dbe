"""Remote actors in the process of a test, without Ray.

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
from typing import Any

from typing_extensions import override

from rlhf_core.cluster.rpc import RayObjects, RemoteActor


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


def local_actor(actor: Any, objects: LocalObjects | None = None) -> RemoteActor[Any]:
    """Return a remote actor whose calls run the methods of `actor` at once, in this process.

    An error of a method is the result of its call. If a method returns a `Future`, the call ends with it.

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
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        # As in Ray, an argument that is a reference arrives as its object.
        given = [arg.result() if isinstance(arg, Future) else arg for arg in args]
        reference: Future[Any] = Future()
        try:
            result = self._method(*given, **kwargs)
        except Exception as error:
            reference.set_exception(error)
            return reference
        if isinstance(result, Future):
            return result
        reference.set_result(result)
        return reference
