"""The Ray cluster that this process has joined, and where on it actors run: the nodes and their resources,
the placement group of the ranks of one stage, and the order of bundles by node.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.rpc import Pending, RemoteActor, ready
from rlhf_core.errors import ConfigError, WorkerStuck

log = logging.getLogger(__name__)

_SHOWN_NODES = 8
"""Nodes that a message lists."""


def node_name(node: Mapping[str, Any]) -> str:
    """Return hostname and address of a node, for messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


class RayCluster:
    """What the driver of a stage asks Ray about its cluster.

    `tests.support.scripted_cluster.ScriptedCluster` answers without Ray.
    """

    def own_id(self) -> str:
        """Return the id of this process's node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def all_nodes(self) -> list[dict[str, Any]]:
        """Return what Ray knows of each node, also of those that are lost.

        Fields, as in `ray.nodes`: NodeID, NodeManagerHostname, NodeManagerAddress, Resources, Alive.
        """
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()
        return nodes

    def nodes(self) -> list[dict[str, Any]]:
        """Return what Ray knows of each node that it takes for alive."""
        return [node for node in self.all_nodes() if node["Alive"]]

    def node_names(self) -> dict[str, str]:
        """Return the name of each node by its id, also of those that are lost."""
        return {node["NodeID"]: node_name(node) for node in self.all_nodes()}

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

        # Few nodes if there is room, because ranks of one node exchange gradients faster.
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
            # It must start also where all CPUs are reserved.
            "num_cpus": 0,
            "max_concurrency": max_concurrency,
            # On any other node an agent would serve the files of the wrong host. With `soft=False` it fails
            # if its node is lost.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        return RemoteActor(ray.remote(actor).options(**options).remote(*arguments))


RAY_CLUSTER = RayCluster()


@dataclass(frozen=True)
class RankPlacement:
    """Where each rank runs."""

    placement_group: Any
    bundles: list[int]
    """Index of the bundle of each rank, which several ranks may share."""
    nodes: list[str]
    """Id of the node of each rank."""
    gpus_per_rank: int

    def ranks_by_node(self) -> dict[str, dict[str, set[int]]]:
        """Return the ranks on each node, as `ClusterNodes.join` expects them."""
        nodes: dict[str, dict[str, set[int]]] = {}
        for rank, node_id in enumerate(self.nodes):
            # By folder of the checkpoint, as PPO has one for each role. These ranks write to its top.
            nodes.setdefault(node_id, {"": set()})[""].add(rank)
        return nodes

    def options(self, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a rank."""
        return bundle_options(self.placement_group, self.bundles[rank], self.gpus_per_rank)


def bundle_options(placement_group: Any, bundle: int, gpus: float) -> dict[str, Any]:
    """Return Ray's options for an actor in a bundle, of which it takes a CPU and this share of GPUs."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def reserve_ranks(
    ranks: int,
    label: str,
    *,
    gpus_per_rank: int,
    neighbours: int,
    wait: Callable[[list[Pending[Any]], str], Any],
    cluster: RayCluster = RAY_CLUSTER,
) -> RankPlacement:
    """Reserve a CPU and GPUs for each rank. Nearby ranks are on one node where that is possible.

    Args:
        ranks: Number of ranks.
        label: What a rank is called in messages.
        gpus_per_rank: GPUs of one rank; 0 without GPUs.
        neighbours: Each group of this number of consecutive ranks must be on one node.
        wait: Waits for Ray.
        cluster: Has the nodes.

    Raises the errors of `reserve`.
    """
    groups = f" in groups of {neighbours} on one node (hpz)" if neighbours > 1 else ""
    fix = "lower their number"
    if neighbours > 1:
        fix = "use a smaller hpz"
    elif gpus_per_rank > 1:
        fix = "lower ppo.engine.tensor_parallel"
    # One bundle for all of a group, because Ray never splits a bundle over nodes.
    bundle: dict[str, float] = {"CPU": neighbours, "GPU": neighbours * gpus_per_rank}
    group = reserve([bundle] * (ranks // neighbours), f"{ranks} {label}s{groups}", fix, wait, cluster)
    node_of = node_ids(group)
    # Ray numbers the bundles of one node in the order of its GPUs, but mixes nodes.
    by_node = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
    chosen = [by_node[rank // neighbours] for rank in range(ranks)]
    return RankPlacement(group, chosen, [node_of[bundle] for bundle in chosen], gpus_per_rank)


def reserve(
    bundles: Sequence[Mapping[str, float]],
    what: str,
    fix: str,
    wait: Callable[[list[Pending[Any]], str], Any],
    cluster: RayCluster = RAY_CLUSTER,
    patience: float = 5.0,
) -> Any:
    """Return a placement group of these bundles. A bundle is never split over nodes.

    Args:
        bundles: Amounts of "CPU" and "GPU".
        what: Names the processes in messages.
        fix: What the user can change if they do not fit.
        wait: Waits for Ray.
        cluster: Has the nodes.
        patience: A wait of more seconds is logged.

    Raises:
        ConfigError: The nodes cannot hold the bundles, also if nothing else uses them. Ray would wait for
            that without a limit.
        WorkerStuck: Others use what the nodes have.
    """
    # Ray refuses a bundle with 0 of a resource.
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    nodes = [(node["NodeManagerHostname"], node["Resources"]) for node in cluster.nodes()]
    check_room(bundles, nodes, what, fix)
    needed = _amounts(sum_of(bundles))
    group, reserved = cluster.reserve(bundles)
    if not all(ready([reserved], patience)):
        # Without it, a run that waits for another one would look as if it hung.
        log.warning("%s need %s, and wait for them: %s", what, needed, _free(cluster))
    try:
        wait([reserved], f"Ray to reserve devices for {what}")
    except WorkerStuck as error:
        raise WorkerStuck(
            f"{what} need {needed}, and Ray could not reserve them in time: {_free(cluster)}; if another run"
            " uses the cluster, wait until it has ended"
        ) from error
    return group


def check_room(
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[tuple[str, Mapping[str, float]]],
    what: str,
    fix: str,
) -> None:
    """Raise ConfigError if the nodes cannot hold all bundles.

    Args:
        bundles: See `reserve`.
        nodes: Name and resources of each node.
        what: See `reserve`.
        fix: See `reserve`.
    """
    needed, total = sum_of(bundles), sum_of(resources for _, resources in nodes)
    if any(amount > total[name] for name, amount in needed.items()):
        raise ConfigError(f"{what} need {_amounts(needed)}, but the Ray cluster has {_amounts(total)}; {fix}")
    # Each kind by itself. Whether the kinds fit beside each other is left to Ray, and the wait for it has a
    # limit.
    for kind, count in Counter(tuple(sorted(bundle.items())) for bundle in bundles).items():
        room = 0
        for _, node in nodes:
            # Ray's amounts have four decimal places.
            room += min(int(node.get(name, 0) / each + 1e-6) for name, each in kind)
        if room < count:
            shown = [f"{name}: {_amounts(resources)}" for name, resources in nodes[:_SHOWN_NODES]]
            more = [] if len(nodes) <= _SHOWN_NODES else ["..."]
            raise ConfigError(
                f"{what} need {count} times {_amounts(dict(kind))}, each on one node, but the Ray cluster has"
                f" room for {room} ({'; '.join([*shown, *more])}); {fix}"
            )


def sum_of(resources: Iterable[Mapping[str, float]]) -> Counter[str]:
    """Return the sum of each resource; 0 for one that occurs nowhere."""
    total: Counter[str] = Counter()
    for each in resources:
        total.update(each)
    return total


def _amounts(resources: Mapping[str, float]) -> str:
    """Return such as `4 CPUs and 2 GPUs`."""
    amounts = [f"{resources[name]:g} {name}s" for name in ("CPU", "GPU") if resources.get(name)]
    return " and ".join(amounts) or "nothing"


def _free(cluster: RayCluster) -> str:
    """Return such as `3 of 4 CPUs and 0 of 2 GPUs are free`."""
    free, total = cluster.free(), cluster.total()
    names = [name for name in ("CPU", "GPU") if name in total]
    amounts = [f"{free.get(name, 0):g} of {total[name]:g} {name}s" for name in names]
    return f"{' and '.join(amounts)} are free"


def node_ids(placement_group: Any) -> dict[int, str]:
    """Return the id of the node of each bundle."""
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(placement_group)["bundles_to_node_id"]
    return nodes
