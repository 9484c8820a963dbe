"""Where the processes of PPO run: the Ray placement group of a placement plan, with one bundle of resources
per process, and the environment variables of ranks and engines.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.cluster.connect import on_cluster
from rlhf_core.cluster.placement import RAY_CLUSTER, bundle_options, node_ids, reserve
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.placement import Group, PlacementPlan
from rlhf_core.errors import ConfigError
from rlhf_core.system.environment import THREAD_VARIABLES
from rlhf_core.system.machine import machine


@dataclass(frozen=True)
class Placement:
    """The bundle of each process in the placement group."""

    placement_group: Any
    bundle_of_rank: dict[tuple[str, int], int]
    """(name of the group, rank) -> index of the bundle."""
    bundle_of_engine: list[int]
    """A colocated engine of several GPUs: the bundle of its first one."""
    node_of_bundle: Sequence[str]
    """Id of the node of each bundle."""
    node_names: Mapping[str, str]
    """Hostname and address of each node, by id."""
    plan: PlacementPlan
    colocated: bool
    """Whether an engine uses the same bundle as a training rank."""
    gpus: bool

    def rank_options(self, group: Group, rank: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a training rank."""
        gpus = self.gpus * self.plan.gpus_per_rank
        return bundle_options(self.placement_group, self.bundle_of_rank[group.name, rank], gpus)

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Return Ray's options for the actor of an engine."""
        gpus = self.gpus * self.plan.gpus_per_engine
        return bundle_options(self.placement_group, self.bundle_of_engine[engine], gpus)

    def ranks_of_engine(self, engine: int) -> list[int]:
        """Return the policy ranks whose GPUs an engine uses; none if it has one GPU, or GPUs of its own."""
        if not self.colocated or self.plan.tensor_parallel == 1:
            return []
        bundles = self._policy_bundles()
        first = bundles.index(self.bundle_of_engine[engine])
        return list(range(first, first + self.plan.tensor_parallel))

    def ranks_by_node(self) -> dict[str, dict[str, set[int]]]:
        """Return the training ranks of each role on each node, by id of the node. Nodes that have engines
        alone are included.
        """
        nodes: dict[str, dict[str, set[int]]] = {node_id: {} for node_id in self.node_of_bundle}
        for group in self.plan.groups:
            for rank in range(group.ranks):
                roles = nodes[self.node_of_bundle[self.bundle_of_rank[group.name, rank]]]
                for role in group.roles:
                    roles.setdefault(role, set()).add(rank)
        return nodes

    def describe_nodes(self) -> str:
        """Return the nodes of the policy's ranks and of the engines, as `policy on a, b; engines on b`."""
        bundles = {"policy": self._policy_bundles(), "engines": self.bundle_of_engine}
        parts = []
        for what, indices in bundles.items():
            nodes = dict.fromkeys(self.node_names[self.node_of_bundle[index]] for index in indices)
            parts.append(f"{what} on {', '.join(nodes)}")
        return "; ".join(parts)

    def _policy_bundles(self) -> list[int]:
        """Return the bundles of the policy's ranks, by rank."""
        [policy] = [group for group in self.plan.groups if "policy" in group.roles]
        return [self.bundle_of_rank[policy.name, rank] for rank in range(policy.ranks)]


def check_engine_size(plan: PlacementPlan, largest: float | None) -> None:
    """Raise ConfigError if an engine needs more GPUs than `largest`, the number on the largest host.

    Ray would wait for such a bundle without a limit. docs/clusters.md says what engines over several hosts
    lack. None: the engines use no GPUs.
    """
    if largest is None or plan.tensor_parallel <= largest:
        return
    raise ConfigError(
        f"ppo.engine.tensor_parallel: an engine must be on one host; got {plan.tensor_parallel}, but the"
        f" largest host of the Ray cluster has {largest:g} GPUs; use at most {largest:g}, and"
        " ppo.engine.count for more engines"
    )


def use_gpus(gpus: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the variables of a process that uses the GPUs of others instead of those of its bundle.

    A bundle has one GPU, because Ray may put two ranks on the same GPU of a larger one.

    Args:
        gpus: `Actor.visible_gpus` of each other process.
    """
    name = gpus[0][0]
    return {name: ",".join(gpu for _, gpu in gpus), f"RAY_EXPERIMENTAL_NOSET_{name}": "1"}


def reserve_bundles(
    plan: PlacementPlan,
    neighbours: Mapping[str, int],
    *,
    gpus: bool,
    wait: Callable[[list[Pending[Any]], str], Any],
) -> Placement:
    """Reserve one bundle per process.

    Args:
        plan: The processes.
        neighbours: Name of a group -> each group of this number of consecutive ranks is on one node (hpZ).
        gpus: Whether ranks and engines use GPUs.
        wait: Waits for Ray.

    Raises the errors of `cluster.placement.reserve`.
    """
    colocated = plan.colocated and gpus
    ranks = sum(group.ranks for group in plan.groups)
    if colocated:
        # One core for the rank and one for the worker of the engine that shares its GPU.
        bundles: list[dict[str, float]] = [{"CPU": 2, "GPU": 1}] * ranks
    else:
        bundles = [{"CPU": 1, "GPU": gpus * plan.gpus_per_rank}] * ranks
        bundles += [{"CPU": 1, "GPU": gpus * plan.gpus_per_engine}] * plan.engines
    # Before the reservation, which would wait for a bundle that no node can have.
    largest = max((node["Resources"].get("GPU", 0) for node in RAY_CLUSTER.nodes()), default=0)
    check_engine_size(plan, largest if gpus else None)
    fix = "lower the ranks or ppo.engine.count, or colocate models"
    group = reserve(bundles, f"the processes of ppo ({plan.describe()})", fix, wait)
    node_of_bundle = node_ids(group)
    nodes = [node_of_bundle[bundle] for bundle in range(len(bundles))]
    of_rank, of_engine = assign(plan, neighbours, nodes, gpus=gpus)
    return Placement(group, of_rank, of_engine, nodes, RAY_CLUSTER.node_names(), plan, colocated, gpus)


class Bundles:
    """Bundles of one size that are not assigned yet.

    Nodes with many bundles come first. Within a node, Ray numbers the bundles in the order of its GPUs.

    Args:
        node_of: Index of a bundle -> its node.
    """

    def __init__(self, node_of: Mapping[int, str]) -> None:
        free: dict[str, list[int]] = {}
        for bundle in sorted(node_of):
            free.setdefault(node_of[bundle], []).append(bundle)
        # So that a group is on few nodes: ranks of one node exchange gradients faster.
        self._free = dict(sorted(free.items(), key=lambda item: -len(item[1])))

    def take(self, count: int, neighbours: int = 1, near: Collection[str] = ()) -> list[int]:
        """Assign and return `count` bundles, sorted by node, or fewer if there are not enough.

        Args:
            count: Number of bundles.
            neighbours: Each node gives a multiple of this number.
            near: Nodes that come first.
        """
        taken: list[int] = []
        # A stable sort: otherwise nodes with many bundles stay first.
        for node in sorted(self._free, key=lambda node: node not in near):
            here = min(count - len(taken), len(self._free[node]) // neighbours * neighbours)
            taken += self._free[node][:here]
            self._free[node] = self._free[node][here:]
        return taken


def assign(
    plan: PlacementPlan, neighbours: Mapping[str, int], nodes: Sequence[str], *, gpus: bool
) -> tuple[dict[tuple[str, int], int], list[int]]:
    """Return the bundle of each rank, by (name of the group, rank), and of each engine.

    The ranks of a group are sorted by node. The policy is first, then the engines, as far as possible on its
    nodes, so that their weights cross no network, then the other groups.

    Args:
        plan: The processes.
        neighbours: See `reserve_bundles`.
        nodes: Node of each bundle, first those of ranks, then those of engines that have bundles of their
            own.
        gpus: Whether ranks and engines use GPUs.

    Raises:
        ConfigError: The ranks of one hpZ group, or of one colocated engine, would be on several nodes.
    """
    colocated = plan.colocated and gpus
    node_of = dict(enumerate(nodes))
    # Bundles of one size are interchangeable, so ranks and engines take them from the same nodes.
    for_ranks = for_engines = Bundles(node_of)
    if not colocated and gpus and plan.gpus_per_rank != plan.gpus_per_engine:
        for_ranks = Bundles({bundle: node_of[bundle] for bundle in range(plan.ranks)})
        for_engines = Bundles({bundle: node_of[bundle] for bundle in range(plan.ranks, len(nodes))})
    of_rank: dict[tuple[str, int], int] = {}
    of_engine: list[int] = []
    for group in sorted(plan.groups, key=lambda group: "policy" not in group.roles):
        size = neighbours.get(group.name, 1)
        taken = for_ranks.take(group.ranks, size)
        if len(taken) < group.ranks:
            raise ConfigError(
                f"the {group.ranks} ranks of {group.label} must be in groups of {size} on one node (hpz); the"
                f" nodes have {', '.join(map(str, Counter(nodes).values()))} devices for ppo; use an hpz that"
                " divides them, or hpz=1"
            )
        of_rank |= {(group.name, rank): bundle for rank, bundle in enumerate(taken)}
        if "policy" in group.roles:
            near = {node_of[bundle] for bundle in taken}
            # Over CUDA IPC a worker of an engine only receives from a policy rank on its GPU.
            of_engine = (
                _shared(plan, taken, node_of) if colocated else for_engines.take(plan.engines, near=near)
            )
    return of_rank, of_engine


def _shared(plan: PlacementPlan, bundles: Sequence[int], node_of: Mapping[int, str]) -> list[int]:
    """Return the first bundle of each engine. An engine uses consecutive `bundles` of one node, which are
    those of the policy's ranks and sorted by node.
    """
    firsts: list[int] = []
    ranks = Counter(node_of[bundle] for bundle in bundles)
    start = 0
    for count in ranks.values():
        fitting = count // plan.tensor_parallel
        firsts += [bundles[start + engine * plan.tensor_parallel] for engine in range(fitting)]
        start += count
    if len(firsts) < plan.engines:
        raise ConfigError(
            f"ppo.engine: each of the {plan.engines} engines uses the GPUs of {plan.tensor_parallel} ranks on"
            f" one node (ppo.engine.tensor_parallel, ppo.colocate=all); the nodes have"
            f" {', '.join(map(str, ranks.values()))} ranks, enough for {len(firsts)}; lower one of them"
        )
    return firsts[: plan.engines]


def actor_environment(
    threads: int, plan: PlacementPlan, device: str, *, shares_weights: bool = False
) -> dict[str, dict[str, str]]:
    """Return the variables of a "worker" and of an "engine".

    On a CPU the trainers share all cores, and so do the engines, because trainers and engines compute in
    turns. With `ppo.staleness` they compute at the same time.

    Args:
        threads: `run.threads`.
        plan: All processes.
        device: "cpu" or "cuda".
        shares_weights: Whether the engines get the weights over CUDA IPC.
    """
    if device == "cuda":
        return _on_gpus(threads, plan, shares_weights=shares_weights)
    threads = threads or machine().cores()
    ranks = max(1, plan.processes - plan.engines)
    return {
        # `run.device` decides about the accelerator, and not what DeepSpeed 0.19 detects on the host.
        "worker": _threads(max(1, threads // ranks)) | {"DS_ACCELERATOR": "cpu"},
        "engine": _threads(max(1, threads // plan.engines)),
    }


def _on_gpus(threads: int, plan: PlacementPlan, *, shares_weights: bool) -> dict[str, dict[str, str]]:
    # On a cluster, the cores of other hosts are not known; `rank_environment` has `run.threads`.
    own: dict[str, str] = {}
    if not on_cluster():
        own = _threads(max(1, (threads or machine().cores()) // plan.processes))
    # Weights in expandable segments cannot be shared, and vLLM allocates engines that sleep otherwise.
    fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    return {"worker": own | fixed if shares_weights else own, "engine": own | fixed}


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(THREAD_VARIABLES, str(count))


def environment_option(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's option for the variables of an actor; none if every process of Ray has them, because this
    process has them and has started Ray.

    For an actor with the option, Ray starts a new process, which starts Python twice. An actor without it
    gets a process that Ray has already started, if there is one.
    """
    if not on_cluster() and variables.items() <= os.environ.items():
        return {}
    return {"runtime_env": {"env_vars": dict(variables)}}
