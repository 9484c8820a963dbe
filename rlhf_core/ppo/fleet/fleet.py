"""The processes of PPO: starts them on Ray by a placement plan, calls them, replaces what can be replaced,
ends them.

A rank is not replaced: if one dies or stalls, the attempt fails, and the next one continues from the
checkpoint. Engines are replaced, and serve again after a complete sync.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Generic, Literal, ParamSpec, TypeVar

from rlhf_core.cluster.connect import on_cluster
from rlhf_core.cluster.placement import RAY_CLUSTER
from rlhf_core.cluster.ranks import new_ray_session
from rlhf_core.cluster.rpc import Actor, ActorClient, ParticipantSpec, Pending, RemoteActor, Usage, fetch
from rlhf_core.config.placement import Group, PPOSettings, Role, plan
from rlhf_core.engines.distributed import lacks_nccl, log_layout
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import InfrastructureError
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.engine_pool import MAX_RESTARTS, DeviceTurns, EnginePool
from rlhf_core.ppo.fleet.placement import (
    Placement,
    actor_environment,
    environment_option,
    reserve_bundles,
    use_gpus,
)
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.training.batch import (
    FloatArray,
    ModelScores,
    ObjectArguments,
    Places,
    RankShare,
    RolloutBatch,
    RolloutColumns,
    RowColumns,
    Sent,
    SentBatches,
    in_batch_order,
    places_of,
    route,
)
from rlhf_core.system.heartbeat import Monitor, heartbeat, register, unregister
from rlhf_core.types import Nodes

log = logging.getLogger(__name__)

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)
R = TypeVar("R")
T = TypeVar("T")

ENGINES = "engines"
"""Name of the engines, where the other names are those of groups."""
_USAGE_SECONDS = 1.0
"""Time in which an idle process reports its usage."""


# -- calls of all ranks of a group --


@dataclass(frozen=True)
class WorkerGroup:
    """The actors of one group, by rank."""

    group: Group
    workers: tuple[RemoteActor[ModelWorker], ...]

    @property
    def ranks(self) -> int:
        return len(self.workers)

    def call(
        self, method: Callable[Concatenate[ModelWorker, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Pending[R]]:
        """Start `method` with the same arguments on every rank."""
        return [worker.call(method, *args, **kwargs) for worker in self.workers]


class Scattered(Generic[R]):
    """A call that runs on all ranks of a group, each with its own responses, and whose results stay there.

    Each call returns a message for the controller (None if there is nothing to say), and columns.
    """

    def __init__(
        self,
        fleet: Fleet,
        what: str,
        shares: list[RankShare],
        parts: list[tuple[Pending[R], list[Pending[RowColumns]]]],
    ) -> None:
        self._fleet = fleet
        self._what = what
        self.shares = shares
        self._messages = [message for message, _ in parts]
        self.columns = [columns for _, [columns] in parts]
        """Columns of each rank. The rows are in the order of its share."""
        self._places_B: Places | None = None

    def add_rows(self, objects: ObjectArguments, rank: int, shares: list[RankShare]) -> Places:
        """Add the columns that have the responses of `shares[rank]`, and return the places of the rows."""
        indices = shares[rank].indices
        # Groups of the same size have the same list (`Fleet._route`): rank r of both has the same responses.
        if shares is self.shares:
            return objects.add_all_rows(self.columns[rank], len(indices))
        if self._places_B is None:
            self._places_B = places_of(self.shares)
        return objects.add(self.columns, self._places_B.take(indices))

    def complete(self) -> list[R]:
        """Wait for all ranks, and return their messages."""
        return self._fleet.wait(self._messages, self._what)

    def gather(self, name: str) -> list[FloatArray]:
        """Wait for all ranks, fetch the column `name`, and return (T,) for each response in order."""
        self.complete()
        rows: dict[int, FloatArray] = {}
        for share, columns in zip(self.shares, self._fleet.wait(self.columns, self._what), strict=True):
            for row, index in enumerate(share.indices.tolist()):
                rows[index] = columns.row(name, row)
        return [rows[index] for index in range(len(rows))]


class ScatteredScores:
    """A call of all reward ranks, which return one score for each of their responses."""

    def __init__(self, fleet: Fleet, shares: list[RankShare], pending: list[Pending[ModelScores]]) -> None:
        self._fleet = fleet
        self._shares = shares
        self._pending = pending

    def gather(self) -> ModelScores:
        """Wait for all ranks, and return the scores in the order of the batch."""
        return in_batch_order(self._shares, self._fleet.wait(self._pending, "reward.scores"))


# -- fleet --


class Fleet:
    """All worker groups and engines of one PPO stage. Leaving the context manager ends them.

    Args:
        settings: Settings of the stage, from which the processes follow.
        device: "cpu" or "cuda".
        folders: The model that each role starts from, a folder or a hub id. The engines start from the
            policy's.
        pad_id: Padding token.
        monitor: The heartbeat monitor of the stage, already entered; None for a new one.
        nodes: The other hosts of a cluster; None if all hosts have the same folders.
        loss_code: Source of the file of a user's loss; None without one.
    """

    def __init__(
        self,
        settings: PPOSettings,
        device: str,
        folders: Mapping[Role, Path | str],
        pad_id: int,
        monitor: Monitor | None = None,
        nodes: Nodes | None = None,
        loss_code: bytes | None = None,
    ) -> None:
        self._loss_code = loss_code
        self.settings = settings
        self._plan = plan(settings.ppo)
        self._device = device
        self._folders = {
            # Absolute, because an actor need not have this process's working folder.
            role: folder if isinstance(folder, str) else str(folder.resolve())
            for role, folder in folders.items()
        }
        self._pad_id = pad_id
        self._timeouts = settings.run.timeouts
        self._local = not on_cluster()
        self._given_monitor = monitor
        self._nodes = nodes
        self._resources: ExitStack
        self._connected: list[RemoteActor[EngineActor]] = []
        """Engines to which the policy is connected for weight sync."""
        self._sent = SentBatches()
        self.groups: dict[Role, WorkerGroup] = {}
        self.engines: EnginePool
        self.turns = DeviceTurns(
            settings.ppo.engine.sleep_level, self._all_workers, lambda: self.engines.actors, self.wait
        )
        self.packs = True
        """Whether rows are packed. All loaded models must support it, and the configuration must allow it."""

    def __enter__(self) -> Fleet:
        run, cores = self.settings.run, self._plan.cores(gpus=self._device == "cuda")
        # `with` does not call `__exit__` if `__enter__` raises.
        with ExitStack() as resources:
            self._monitor = self._given_monitor or resources.enter_context(Monitor())
            # Never stalled: each wait for Ray has a timeout of its own, and so has the work between waits.
            register(self._monitor.folder, "controller", math.inf)
            resources.callback(unregister)
            self._client = ActorClient(self._monitor, self._timeouts)
            session = new_ray_session(cores, self._device, run, self._monitor, self._nodes)
            resources.enter_context(session)
            self._start_actors()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        heartbeat("end", self._timeouts.start)
        self._resources.__exit__(kind, error, traceback)

    # -- start --

    def _start_actors(self) -> None:
        self._placement = self._reserve()
        log.info("ppo runs as %s; %s", self._plan.describe(), self._placement.describe_nodes())
        if self._nodes is not None:
            self._nodes.join(self._placement.ranks_by_node())
        engine = self.settings.ppo.engine
        restarts = MAX_RESTARTS
        if engine.sleep_level:
            # An engine measures the device when it loads, and the trainers have it.
            restarts = 0
        for group in self._plan.groups:
            self._start_group(group)
        # After the ranks, which know their GPUs.
        self.engines = EnginePool(self._start_engine, engine, self._client, restarts)
        if self._placement.colocated:
            self.usage()  # returns once all have started: a trainer that waits for the engines is then idle
            # The engines first: while one measures its device, it counts the memory of others as its own.
            self._load(engines=self.engines.actors)
            self.turns.trainers_load()
            self._load(self.distinct_groups)
        else:
            self._load(self.distinct_groups, self.engines.actors)

    def _reserve(self) -> Placement:
        neighbours = {}
        for group in self._plan.groups:
            neighbours[group.name] = max(group.deepspeed(role, self.settings.ppo).hpz for role in group.roles)
        return reserve_bundles(self._plan, neighbours, gpus=self._device == "cuda", wait=self.wait)

    def _start_group(self, group: Group) -> WorkerGroup:
        workers = [self._start_rank(group, rank) for rank in range(group.ranks)]
        started = WorkerGroup(group, tuple(workers))
        # The ranks of the reward model also hold the judge, which is no role of the group.
        self.groups.update(dict.fromkeys(self._folders_of(group), started))
        return started

    def _folders_of(self, group: Group) -> dict[Role, str]:
        folders = {role: self._folders[role] for role in group.roles}
        if "reward" in group.roles and "judge" in self._folders:
            folders["judge"] = self._folders["judge"]
        return folders

    def _start_rank(self, group: Group, rank: int) -> RemoteActor[ModelWorker]:
        import ray

        options = {
            "name": f"{group.name}-{rank}",
            # Most calls are collectives, whose order must be the same on all ranks: two calls at a time would
            # mix it up.
            "max_concurrency": 1,
            **environment_option(self._environment()["worker"]),
            **self._placement.rank_options(group, rank),
        }
        participant = self._participant(f"{group.name} rank {rank}")
        return RemoteActor(
            ray.remote(ModelWorker)
            .options(**options)
            .remote(
                participant,
                self.settings,
                group.roles,
                self._folders_of(group),
                self._pad_id,
                self._loss_code,
            )
        )

    def _start_engine(self, index: int, starts_before: int) -> RemoteActor[EngineActor]:
        import ray

        environment = self._environment()["engine"]
        if ranks := self._placement.ranks_of_engine(index):
            gpus = [self.groups["policy"].workers[rank].call(Actor.visible_gpus) for rank in ranks]
            environment |= use_gpus(self.wait(gpus, f"the ranks of engine {index} to start"))
        options = {
            # Numbered, because the name of a dead actor is only free after a moment.
            "name": f"engine-{index}.{starts_before}",
            "max_concurrency": 1,
            **environment_option(environment),
            **self._placement.engine_options(index),
        }
        participant = self._participant(f"engine {index}")
        model = self._folders["policy"]
        return RemoteActor(
            ray.remote(EngineActor)
            .options(**options)
            .remote(participant, index, self.settings, model, self._device, self.sync_backend)
        )

    def _participant(self, name: str) -> ParticipantSpec:
        return ParticipantSpec(name, self._monitor.folder.resolve(), self._timeouts)

    def _load(
        self, groups: Sequence[WorkerGroup] = (), engines: Sequence[RemoteActor[EngineActor]] = ()
    ) -> None:
        """Load the models of these groups and engines, and agree on the layout of rows."""
        loading: list[Pending[bool]] = []
        for group in groups:
            # Rank 0 binds the port itself and keeps the socket: a port that was only looked up could be taken
            # meanwhile.
            first = group.workers[0].call(ModelWorker.listen, self._local)
            address, port = self.wait([first], f"{group.group.name} to start")[0]
            for rank, worker in enumerate(group.workers):
                loading.append(worker.call(ModelWorker.load, rank, group.ranks, address, port, self._device))
        starting = [engine.call(EngineActor.start_engine) for engine in engines]
        supported = self.wait([*loading, *starting], "all models to load")[: len(loading)]
        # One layout for all groups, because those with the same number of ranks have the same micro-batches
        # (`route`).
        self.packs &= all(supported)
        if groups and self.settings.ppo.pack is not False:
            log_layout(self.packs, "the policy, the reward model or the critic", "ppo.pack")
        layouts: list[Pending[None]] = []
        for group in groups:
            layouts += group.call(ModelWorker.choose_layout, self.packs)
        self.wait(layouts, "all ranks to choose the layout of rows")

    def _environment(self) -> dict[str, dict[str, str]]:
        """Return the environment of workers and engines."""
        shares_weights = self._device == "cuda" and self.sync_backend == "ipc"
        return actor_environment(
            self.settings.run.threads, self._plan, self._device, shares_weights=shares_weights
        )

    # -- calls --

    @property
    def distinct_groups(self) -> list[WorkerGroup]:
        """Each group once, although it serves several roles."""
        return list({group.group.name: group for group in self.groups.values()}.values())

    def _all_workers(self) -> list[RemoteActor[ModelWorker]]:
        return [worker for group in self.distinct_groups for worker in group.workers]

    def wait(self, pending: Sequence[Pending[R]], what: str) -> list[R]:
        """Return results in order; see `ActorClient.wait`."""
        return self._client.wait(pending, what)

    def put(self, columns: RolloutColumns) -> Pending[RolloutColumns]:
        """Return a reference to a chunk that the controller has read."""
        import ray

        return Pending(ray.put(columns))

    def start_helper(self, kind: type[A], name: str, node: str | None = None) -> RemoteActor[A]:
        """Start an actor that needs no core of its own on the node with this id. None is the driver's node.

        Without a node, Ray would start an actor that needs no resources on any node of the cluster.
        """
        node_id = node or RAY_CLUSTER.own_id()
        return RAY_CLUSTER.start_actor(kind, node_id, [self._participant(name)], max_concurrency=1)

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes of all ranks and engines."""
        # In the order of the bundles: a set of texts has another order in each process.
        return list(dict.fromkeys(self._placement.node_of_bundle))

    def usage(self) -> list[Usage]:
        """Return the resources used by each worker and engine."""
        actors: list[RemoteActor[Actor]] = [*self._all_workers(), *self.engines.actors]
        return self.wait([actor.call(Actor.usage) for actor in actors], "usage")

    def usage_by_group(self) -> dict[str, list[Usage]] | None:
        """Return the resources used by each process, by the name of its group or `ENGINES`.

        None if a process does not answer at once, because it is dead or suspended. The next call that needs
        the process finds out.
        """
        calls = {ENGINES: [engine.call(Actor.usage) for engine in self.engines.actors]}
        for group in self.distinct_groups:
            calls[group.group.name] = group.call(Actor.usage)
        try:
            # All were asked at the same time, so the second group has had the time of the first one, too.
            return {name: fetch(group, _USAGE_SECONDS) for name, group in calls.items()}
        except (InfrastructureError, TimeoutError):
            return None

    @property
    def most_ranks(self) -> int:
        """Ranks of the largest group."""
        return max(group.ranks for group in self._plan.groups)

    def logprobs(
        self, role: Literal["policy", "reference"], batch: RolloutBatch, *, with_entropy: bool
    ) -> Scattered[None]:
        """Start `ModelWorker.logprobs` on the ranks of `role`."""
        group, shares, arguments = self._arguments(role, batch)
        parts = []
        for worker, (share, chunks) in zip(group.workers, arguments, strict=True):
            parts.append(worker.call_parts(2, ModelWorker.logprobs, role, with_entropy, share, *chunks))
        return Scattered(self, f"{role}.logprobs", shares, parts)

    def values(self, batch: RolloutBatch) -> Scattered[None]:
        """Start `ModelWorker.values` on the ranks of the critic."""
        group, shares, arguments = self._arguments("critic", batch)
        parts = []
        for worker, (share, chunks) in zip(group.workers, arguments, strict=True):
            parts.append(worker.call_parts(2, ModelWorker.values, share, *chunks))
        return Scattered(self, "critic.values", shares, parts)

    def scores(self, batch: RolloutBatch, role: Literal["reward", "judge"] = "reward") -> ScatteredScores:
        """Start `ModelWorker.scores` on the ranks of the reward model, which also hold the judge."""
        group, shares, arguments = self._arguments(role, batch)
        pending = []
        for worker, (share, chunks) in zip(group.workers, arguments, strict=True):
            pending.append(worker.call(ModelWorker.scores, role, share, *chunks))
        return ScatteredScores(self, shares, pending)

    def _arguments(self, role: Role, batch: RolloutBatch) -> tuple[WorkerGroup, list[RankShare], list[Sent]]:
        """Return the ranks of `role`, the responses of each, and the arguments that say so."""
        group, shares = self._route(role, batch)
        return group, shares, self._sent.arguments(group.group.name, group.workers, batch, shares)

    def _route(self, role: Role, batch: RolloutBatch) -> tuple[WorkerGroup, list[RankShare]]:
        group = self.groups[role]
        if group.ranks not in batch.routes:
            tokens = self.settings.ppo.micro_batch_tokens
            batch.routes[group.ranks] = route(batch, group.ranks, tokens, pack=self.packs)
        return group, batch.routes[group.ranks]

    def forget_prefixes(self, what: str) -> None:
        """Let the serving engines forget the KV cache of the prompts that they were asked. No request may be
        alive. `what` describes the prompts.

        A prompt that begins like one of these would be rounded in another way.
        """
        engines = self.engines
        calls = [engines.actor(index).call(EngineActor.forget_prefixes) for index in engines.serving]
        self.wait(calls, f"the engines to forget {what}")

    # -- weight sync --

    @property
    def sync_backend(self) -> str:
        """ "gloo", "nccl" or "ipc"."""
        wanted = self.settings.ppo.weight_sync.backend
        if wanted != "auto":
            return wanted
        if self._device == "cpu":
            return "gloo"
        # NCCL cannot have two ranks on one GPU.
        if self.settings.ppo.colocate == "all":
            return "ipc"
        return "gloo" if lacks_nccl() else "nccl"

    def sync(self, version: int) -> SyncReport:
        """Send the weights of policy `version` to all engines, which acknowledge them.

        Engines that died before or that die during the sync are replaced. With NCCL, those that die during
        the sync are an error.
        """
        what = f"the weight sync of version {version}"
        self.engines.mark_dead(f"before {what}", after_error=False)
        while True:
            self.engines.restart()
            # Not in the `try`: engines that sleep have no restarts.
            self.turns.receive_weights()
            try:
                self._connect()
                sending = self.groups["policy"].call(ModelWorker.send_weights, version)
                report = self.wait(sending, what)[0]
            except InfrastructureError as error:
                if self.sync_backend == "nccl":
                    # A rank of the policy may wait in a broadcast to a dead engine, which nothing ends: new
                    # engines could not connect to it. The next attempt continues from the checkpoint.
                    raise
                if not self.engines.mark_dead(error.message, after_error=True):
                    # No engine is lost, so the cause is elsewhere, and new engines would not remove it.
                    raise
                # The other engines are in the middle of the update, with weights of two versions.
                self.engines.mark_all_dead(f"{what} broke")
                continue
            self.engines.confirm_weights()
            assert report is not None, "rank 0 returns the report"
            return report

    def _connect(self) -> None:
        """Connect the policy to the present engines, unless it is connected to them."""
        engines, policy = self.engines.actors, self.groups["policy"]
        # An engine that was restarted is another actor.
        if engines == self._connected:
            return
        # Each time: torch takes the socket over when the group is formed.
        listening = [policy.workers[0].call(ModelWorker.listen, self._local)]
        [sender] = self.wait(listening, "policy rank 0 to listen")
        hosts = tuple(self._addresses(engines))
        self.wait(
            policy.call(ModelWorker.connect_engines, self.sync_backend, sender, engines, hosts),
            "policy and engines to connect for weight sync",
        )
        # Last: after an error the next sync connects again.
        self._connected = engines

    def _addresses(self, actors: Sequence[RemoteActor[Actor]]) -> list[str]:
        """Return the address of each actor's host."""
        if self._local:
            # Without a cluster nothing listens on another interface (decision 14).
            return ["127.0.0.1"] * len(actors)
        return self.wait([actor.call(Actor.address) for actor in actors], "the addresses of hosts")
