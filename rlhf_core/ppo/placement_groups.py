"""Where in Ray's cluster each process of a placement plan goes:
one bundle of a placement group per process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.config.placement import Group, PlacementPlan
from rlhf_core.errors import ConfigError


@dataclass(frozen=True)
class Slots:
    """Where in the placement group each process goes."""

    reserved: Any
    index: dict[tuple[str, int], int]
    plan: PlacementPlan
    together: bool
    gpus: bool

    def rank(self, group: Group, rank: int) -> dict[str, Any]:
        return self._options(self.index[(group.name, rank)], self.gpus * self.plan.gpus_per_rank)

    def engine(self, engine: int) -> dict[str, Any]:
        return self._options(
            engine if self.together else len(self.index) + engine, self.gpus * self.plan.gpus_per_engine
        )

    def _options(self, bundle: int, gpus: float) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self.reserved, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def reserve(plan: PlacementPlan, *, gpus: bool, wait: Callable[[list[Any], str], Any]) -> Slots:
    """One bundle per process; too few devices is an error here, not a wait for ever."""
    import ray
    from ray.util.placement_group import placement_group

    together = plan.together and gpus
    per_rank = [(group.name, rank) for group in plan.groups for rank in range(group.ranks)]
    bundles: list[dict[str, float]]
    if together:
        bundles = [{"CPU": 2, "GPU": 1} for _ in per_rank]
    else:
        bundles = [{"CPU": 1, "GPU": gpus * plan.gpus_per_rank} for _ in per_rank]
        bundles += [{"CPU": 1, "GPU": gpus * plan.gpus_per_engine} for _ in range(plan.engines)]
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    have = ray.cluster_resources()
    for resource in ("CPU", "GPU"):
        need = sum(bundle.get(resource, 0) for bundle in bundles)
        if need > have.get(resource, 0):
            raise ConfigError(
                f"ppo needs {need:g} {resource}s ({plan.describe()}), but the Ray cluster has "
                f"{have.get(resource, 0):g}; lower the ranks or ppo.engine.count, or colocate models"
            )
    reserved = placement_group(bundles, strategy="PACK")
    wait([reserved.ready()], "Ray to reserve its devices")
    index = {key: i for i, key in enumerate(per_rank)}
    return Slots(reserved, index, plan, together, gpus)
