"""The Ray placement group of a placement plan, with one bundle of resources per process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.placement import node_ids
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.placement import Group, PlacementPlan
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The bundle of each process in the placement group."""

    placement_group: Any
    bundle_of_rank: dict[tuple[str, int], int]
    """(name of the group, rank) -> index of the bundle."""
    plan: PlacementPlan
    colocated: bool
    """Whether an engine uses the same bundle as a training rank."""
    gpus: bool

    def rank_options(self, group: Group, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a training rank."""
        return self._options(self.bundle_of_rank[group.name, rank], self.gpus * self.plan.gpus_per_rank)

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Return Ray's options for the actor of an engine."""
        bundle = engine if self.colocated else len(self.bundle_of_rank) + engine
        return self._options(bundle, self.gpus * self.plan.gpus_per_engine)

    def ranks_by_node(self) -> dict[str, dict[str, set[int]]]:
        """Return the training ranks of each role on each node, by id of the node. Nodes that have engines
        alone are included.
        """
        node_of_bundle = node_ids(self.placement_group)
        nodes: dict[str, dict[str, set[int]]] = {node_id: {} for node_id in node_of_bundle.values()}
        for group in self.plan.groups:
            for rank in range(group.ranks):
                roles = nodes[node_of_bundle[self.bundle_of_rank[group.name, rank]]]
                for role in group.roles:
                    roles.setdefault(role, set()).add(rank)
        return nodes

    def _options(self, bundle: int, gpus: float) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def reserve_bundles(
    plan: PlacementPlan, *, gpus: bool, wait: Callable[[list[Pending[Any]], str], Any]
) -> Placement:
    """Reserve one bundle per process.

    Raises:
        ConfigError: The cluster has too few CPUs or GPUs. Ray would wait for them without a limit.
    """
    import ray
    from ray.util.placement_group import placement_group

    colocated = plan.colocated and gpus
    ranks = [(group.name, rank) for group in plan.groups for rank in range(group.ranks)]
    if colocated:
        bundles: list[dict[str, float]] = [{"CPU": 2, "GPU": 1} for _ in ranks]
    else:
        bundles = [{"CPU": 1, "GPU": gpus * plan.gpus_per_rank} for _ in ranks]
        bundles += [{"CPU": 1, "GPU": gpus * plan.gpus_per_engine} for _ in range(plan.engines)]
    available = ray.cluster_resources()
    for resource in ("CPU", "GPU"):
        needed = sum(bundle.get(resource, 0) for bundle in bundles)
        if needed > available.get(resource, 0):
            raise ConfigError(
                f"ppo needs {needed:g} {resource}s ({plan.describe()}), but the Ray cluster has "
                f"{available.get(resource, 0):g}; lower the ranks or ppo.engine.count, or colocate models"
            )
    # Ray refuses a bundle with 0 of a resource.
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    group = placement_group(bundles, strategy="PACK")
    wait([Pending(group.ready())], "Ray to reserve its devices")
    bundle_of_rank = {key: index for index, key in enumerate(ranks)}
    return Placement(group, bundle_of_rank, plan, colocated, gpus)
