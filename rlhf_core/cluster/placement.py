"""Where actors run: the Ray placement group of the ranks of one stage, and the order of bundles by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.rpc import Pending
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class RankPlacement:
    """The bundle of each rank."""

    placement_group: Any
    bundles: list[int]
    """Indices into the placement group, sorted by node."""
    neighbours: int
    """Ranks of one bundle."""
    gpus_per_rank: int
    ranks: int

    def ranks_by_node(self) -> dict[str, dict[str, set[int]]]:
        """Return the ranks on each node, as `ClusterNodes.join` expects them."""
        nodes: dict[str, dict[str, set[int]]] = {}
        node_of_bundle = node_ids(self.placement_group)
        for rank in range(self.ranks):
            node_id = node_of_bundle[self.bundles[rank // self.neighbours]]
            nodes.setdefault(node_id, {}).setdefault("", set()).add(rank)
        return nodes

    def node_names(self) -> list[str]:
        """Return the name of each rank's node, by rank."""
        node_of_bundle = node_ids(self.placement_group)
        names = node_names()
        bundles = [self.bundles[rank // self.neighbours] for rank in range(self.ranks)]
        return [names[node_of_bundle[bundle]] for bundle in bundles]

    def options(self, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self.placement_group, placement_group_bundle_index=self.bundles[rank // self.neighbours]
        )
        return {"num_cpus": 1, "num_gpus": self.gpus_per_rank, "scheduling_strategy": strategy}


def reserve_ranks(
    ranks: int,
    label: str,
    *,
    gpus_per_rank: int,
    neighbours: int,
    wait: Callable[[list[Pending[Any]], str], Any],
) -> RankPlacement:
    """Reserve a CPU and GPUs for each rank. Nearby ranks are on one node where that is possible.

    Args:
        ranks: Number of ranks.
        label: What a rank is called in messages.
        gpus_per_rank: GPUs of one rank; 0 without GPUs.
        neighbours: Each group of this number of consecutive ranks must be on one node.
        wait: Waits for Ray.

    Raises:
        ConfigError: The cluster has too few CPUs or GPUs. Ray would wait for them without a limit.
    """
    import ray
    from ray.util.placement_group import placement_group

    available = ray.cluster_resources()
    for resource, needed in (("CPU", ranks), ("GPU", ranks * gpus_per_rank)):
        if needed > available.get(resource, 0):
            raise ConfigError(
                f"{ranks} {label}s need {needed} {resource}s, but the Ray cluster has"
                f" {available.get(resource, 0):g}; lower their number"
            )
    bundle = {"CPU": neighbours, "GPU": neighbours * gpus_per_rank}
    # A bundle is never split over nodes. Ray refuses one with 0 of a resource.
    bundle = {name: amount for name, amount in bundle.items() if amount}
    group = placement_group([bundle] * (ranks // neighbours), strategy="PACK")
    wait([Pending(group.ready())], f"Ray to reserve devices for the {label}s")
    return RankPlacement(group, bundles_by_node(group), neighbours, gpus_per_rank, ranks)


def bundles_by_node(placement_group: Any) -> list[int]:
    """Return the indices of the bundles, sorted by node and then by index.

    Ray numbers the bundles of one node in the order of its GPUs, but mixes nodes.
    """
    nodes = node_ids(placement_group)
    return sorted(nodes, key=lambda bundle: (nodes[bundle], bundle))


def node_ids(placement_group: Any) -> dict[int, str]:
    """Return the id of the node of each bundle."""
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(placement_group)["bundles_to_node_id"]
    return nodes


def node_names() -> dict[str, str]:
    """Return hostname and address of each node of the cluster, by id."""
    import ray

    names = {}
    for node in ray.nodes():
        names[node["NodeID"]] = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    return names


def node_address(local: bool) -> str:
    """Return the address of this host, or loopback if the whole Ray cluster runs on it (`local`)."""
    import ray

    return "127.0.0.1" if local else str(ray.util.get_node_ip_address())
