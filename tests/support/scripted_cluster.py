"""A Ray cluster that is scripted, for code that asks for nodes and starts actors on them.

cluster = ScriptedCluster([node("1", "gpu-1", {"CPU": 8, "GPU": 2}), node("2", "gpu-2", {"CPU": 8})])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from rlhf_core.cluster.placement import RayCluster, sum_of
from rlhf_core.cluster.rpc import Pending, RemoteActor
from tests.support.scripted_actors import LocalObjects, local_actor


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
    def all_nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    @override
    def total(self) -> Mapping[str, float]:
        return sum_of(each["Resources"] for each in self.nodes())

    @override
    def free(self) -> Mapping[str, float]:
        return {name: amount - self._used[name] for name, amount in self.total().items()}

    @override
    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> tuple[Any, Pending[Any]]:
        """Return the bundles as the placement group. The sums of their resources are compared with `free`."""
        self.reserved.append(list(bundles))
        needed, free = sum_of(bundles), self.free()
        reference: Future[None] = Future()
        if all(amount <= free.get(name, 0) for name, amount in needed.items()):
            reference.set_result(None)
        return self.reserved[-1], Pending(reference, self.objects)

    @override
    def start_actor(
        self, actor: type[Any], node_id: str, arguments: Sequence[Any], max_concurrency: int
    ) -> RemoteActor[Any]:
        return local_actor(self._actors[node_id], self.objects)
