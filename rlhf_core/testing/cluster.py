"""A Ray cluster that is scripted, for code that asks for nodes and starts actors on them.

cluster = ScriptedCluster([node("1", "gpu-1", {"CPU": 8, "GPU": 2}), node("2", "gpu-2", {"CPU": 8})])

Remote actors in the process of a test:

actor = local_actor(MyActor())
[value] = fetch([actor.call(MyActor.value, 3)], seconds=1.0)

A call that ends when the test says so:

result: Future[int] = Future()
call = Pending[int](result, LocalObjects())
result.set_result(3)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from typing_extensions import override

from rlhf_core.cluster.placement import RayCluster
from rlhf_core.cluster.rpc import Pending, RayObjects, RemoteActor


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


def node(
    node_id: str, hostname: str, resources: Mapping[str, float] | None = None, address: str = "10.0.0.1"
) -> dict[str, Any]:
    """Return what Ray knows of a node."""
    return {
        "NodeID": node_id,
        "NodeManagerHostname": hostname,
        "NodeManagerAddress": address,
        "Resources": dict(resources or {}),
        "Alive": True,
    }


class ScriptedCluster(RayCluster):
    """A cluster with these nodes. The driver is on the first one.

    Args:
        nodes: See `node`. A test sets "Alive" of a node to False to lose it.
        used: The resources that other runs have reserved. If they leave too little, a reservation does not
            end.
        actors: The actor that is started on each node, by the node's id, with `local_actor`.
        objects: The objects with the results of its actors.
    """

    def __init__(
        self,
        nodes: Sequence[dict[str, Any]],
        *,
        used: Mapping[str, float] | None = None,
        actors: Mapping[str, Any] | None = None,
        objects: LocalObjects | None = None,
    ) -> None:
        self._nodes = list(nodes)
        self._used = Counter(dict(used or {}))
        self._actors = dict(actors or {})
        self.objects = objects or LocalObjects()
        self.reserved: list[list[Mapping[str, float]]] = []
        """The bundles of each reservation."""

    @override
    def own_id(self) -> str:
        return str(self._nodes[0]["NodeID"])

    @override
    def nodes(self) -> list[dict[str, Any]]:
        return [each for each in self._nodes if each["Alive"]]

    @override
    def node_names(self) -> dict[str, str]:
        return {
            each["NodeID"]: f"{each['NodeManagerHostname']} ({each['NodeManagerAddress']})"
            for each in self._nodes
        }

    @override
    def total(self) -> Mapping[str, float]:
        return _sum([each["Resources"] for each in self.nodes()])

    @override
    def free(self) -> Mapping[str, float]:
        return {name: amount - self._used[name] for name, amount in self.total().items()}

    @override
    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> tuple[Any, Pending[Any]]:
        """Return the bundles as the placement group. The sums of their resources are compared with `free`."""
        self.reserved.append(list(bundles))
        needed, free = _sum(bundles), self.free()
        reference: Future[None] = Future()
        if all(amount <= free.get(name, 0) for name, amount in needed.items()):
            reference.set_result(None)
        return self.reserved[-1], Pending(reference, self.objects)

    @override
    def start_actor(
        self, actor: type[Any], node_id: str, arguments: Sequence[Any], max_concurrency: int
    ) -> RemoteActor[Any]:
        return local_actor(self._actors[node_id], self.objects)


def _sum(resources: Sequence[Mapping[str, float]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in resources:
        total.update(each)
    return total
