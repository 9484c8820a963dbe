"""The Ray cluster that this process has joined: its nodes, their resources, and actors on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.cluster.rpc import Pending, RemoteActor


class RayCluster:
    """What the driver of a stage asks Ray about its cluster.

    `rlhf_core.testing.cluster.ScriptedCluster` answers without Ray.
    """

    def own_id(self) -> str:
        """Return the id of this process's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def nodes(self) -> list[dict[str, Any]]:
        """Return what Ray knows of each node that it takes for alive.

        The fields are those of `ray.nodes`: NodeID, NodeManagerHostname, NodeManagerAddress, Resources.
        """
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def node_names(self) -> dict[str, str]:
        """Return hostname and address of each node by its id, also of those that are lost."""
        import ray

        names = {}
        for node in ray.nodes():
            names[node["NodeID"]] = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        return names

    def total(self) -> Mapping[str, float]:
        """Return the resources of all nodes."""
        import ray

        amounts: Mapping[str, float] = ray.cluster_resources()
        return amounts

    def free(self) -> Mapping[str, float]:
        """Return the resources that nobody has reserved."""
        import ray

        amounts: Mapping[str, float] = ray.available_resources()
        return amounts

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> tuple[Any, Pending[Any]]:
        """Return a placement group, and the call that ends when it has its resources."""
        from ray.util.placement_group import placement_group

        group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        return group, Pending(group.ready())

    def start_actor(
        self, actor: type[Any], node_id: str, arguments: Sequence[Any], max_concurrency: int
    ) -> RemoteActor[Any]:
        """Start an actor without CPUs on a node.

        Args:
            actor: Its class.
            node_id: The node.
            arguments: Arguments of the constructor.
            max_concurrency: Calls that run at the same time.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": 0,
            "max_concurrency": max_concurrency,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        return RemoteActor(ray.remote(actor).options(**options).remote(*arguments))


RAY_CLUSTER = RayCluster()
