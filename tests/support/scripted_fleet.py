"""A fleet of PPO whose ranks and engines are scripted, without Ray.

engine = ScriptedEngine(lambda request: Reply((7, 8, 2)))
fleet = ScriptedFleet(config, ranks={"reward": [MyRank()]}, engines=[ScriptedEngineActor(engine)])
fleet.sync(version=0)
batch = Collector(config.ppo, fleet, prompts, decode, composer, seed=0).collect(step=1, version=0)
scores = fleet.scores(batch).gather().values
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from rlhf_core.cluster.rpc import Actor, ActorClient, ParticipantSpec, Pending, RemoteActor, Usage
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.config.placement import Group, PPOSettings, Role
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import WorkerDied
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.engine_pool import EnginePool
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.fleet.placement import Placement, assign
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.sampling.reward_actor import RewardActor
from rlhf_core.ppo.training.batch import RolloutColumns
from rlhf_core.system.heartbeat import Monitor, Participant, State
from rlhf_core.system.processes import ProcessId
from rlhf_core.testing.engines import ScriptedEngine
from tests.support.scripted_actors import TimedObjects, ended, local_actor

A = TypeVar("A", bound=Actor)
R = TypeVar("R")


class ScriptedMonitor(Monitor):
    """Observes no processes. Its participants are those that a test reports."""

    def __init__(self) -> None:
        # Nothing is written to the folder, which only error messages name.
        super().__init__(Path("scripted processes"))

    def report(self, name: str, state: State = "running", activity: str = "") -> None:
        """Add or change the participant `name`."""
        # /proc has no process 0, so that a monitor that ends this participant signals nothing.
        process = ProcessId(0, 0)
        observed = Participant(name, process, "scripted", beats=0, stall_after=math.inf, activity=activity)
        observed.state = state
        with self._lock:
            self._participants[name] = observed

    @override
    def save_stacks(self) -> None:
        """Do nothing: there are no processes."""

    @override
    def _poll(self, passed: float, *, fresh: bool = False) -> None:
        """Do nothing: `report` is called instead."""


class ScriptedActorClient(ActorClient):
    """Waits for calls of local actors with its `objects`, whose clock counts the seconds of waits.

    Args:
        timeouts: Default: all defaults.
        monitor: Default: a new one.
    """

    monitor: ScriptedMonitor

    def __init__(
        self, timeouts: TimeoutsConfig | None = None, monitor: ScriptedMonitor | None = None
    ) -> None:
        self.objects = TimedObjects()
        super().__init__(monitor or ScriptedMonitor(), timeouts or TimeoutsConfig(), self.objects)
        self.killed: list[str] = []
        """Names of the actors that were ended."""

    @override
    def kill(self, actors: Mapping[str, RemoteActor[Actor]]) -> None:
        self.killed += actors
        self.monitor.kill(list(actors))


# -- actors --


def _participant(name: str) -> ParticipantSpec:
    return ParticipantSpec(name, Path(), TimeoutsConfig())


class ScriptedRank(ModelWorker):
    """A training rank that loads no models. It keeps the responses that it got last, as a real one does.

    Methods that a test does not override are the real ones, which call `models`.

    Args:
        models: The models, for example a `ScriptedTrainer` for each role.
        config: Default: all defaults.
    """

    def __init__(
        self, models: Mapping[Role, Any] | None = None, config: PipelineConfig | None = None
    ) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = _participant("scripted rank")
        self.counters = Counter()
        self._settings = PPOSettings.of(config or PipelineConfig())
        self._rank = Rank()
        self._models = dict(models or {})
        self._members = []
        self._batch = None
        self._pad_id = 0

    @override
    def listen(self, local: bool) -> tuple[str, int]:
        """Return an address at which nothing listens."""
        return "127.0.0.1", 1

    @override
    def load(self, rank: int, world_size: int, address: str, port: int, device: str) -> bool:
        """Load nothing. Return whether rows are packed."""
        return True

    @override
    def choose_layout(self, pack: bool) -> None:
        """Do nothing: the models are scripted."""


class ScriptedEngineActor(EngineActor):
    """The process of an engine, without a process.

    Args:
        engine: Samples the responses.
        index: Index of the engine.
    """

    _engine: ScriptedEngine

    def __init__(self, engine: ScriptedEngine, index: int = 0) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = _participant("scripted engine")
        self.counters = Counter()
        self._settings = PPOSettings.of(PipelineConfig())
        self._engine = engine
        self._version = -1
        self._adapter_config = None
        self._index = index

    def receive(self, version: int) -> None:
        """Hold the weights of policy `version`."""
        self._version = version

    @override
    def start_engine(self) -> None:
        """Do nothing: the engine is loaded."""


class ScriptedRewards(RewardActor):
    """An actor that scores with reward sources, without a process."""

    def __init__(self, participant: ParticipantSpec | None = None) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = participant or _participant("scripted rewards")
        self.counters = Counter()


# -- fleet --


class ScriptedEnginePool(EnginePool):
    """Engines 0, 1, ... They serve after the first `ScriptedFleet.sync`."""

    def __init__(
        self,
        start: Callable[[int, int], RemoteActor[EngineActor]],
        config: EngineConfig,
        client: ScriptedActorClient,
    ) -> None:
        super().__init__(start, config, client)
        self._objects = client.objects
        self.lost: set[int] = set()
        """Indices of the engines that die in the next call. The next sync restarts them."""

    @override
    def collect(self, pending: Mapping[int, Pending[R]], what: str) -> dict[int, R]:
        calls = dict(pending)
        for index in self.lost:
            died: Future[R] = Future()
            died.set_exception(WorkerDied("a scripted engine has died"))
            calls[index] = Pending(died, self._objects)
        self.lost = set()
        return super().collect(calls, what)


class ScriptedFleet(Fleet):
    """A fleet that starts no processes. Calls run at once, in this process.

    Args:
        config: Default: all defaults.
        ranks: Ranks of each role, each in a group of its own: `ScriptedRank`, or a subclass.
        engines: Class of the engines, for example `ScriptedEngineActor`.
        device: "cpu" or "cuda".
    """

    engines: ScriptedEnginePool

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        ranks: Mapping[Role, Sequence[ModelWorker]] | None = None,
        engines: Sequence[EngineActor] = (),
        device: str = "cpu",
    ) -> None:
        config = config or PipelineConfig()
        super().__init__(PPOSettings.of(config), device, folders={}, pad_id=0)
        self._client = self.client = ScriptedActorClient(config.run.timeouts)
        self._monitor = self.client.monitor
        self._ranks = dict(ranks or {})
        for role, workers in self._ranks.items():
            self._start_group(Group((role,), len(workers)))
        self.engine_actors = engines
        settings = config.ppo.engine.model_copy(update={"count": len(engines)})
        self.engines = ScriptedEnginePool(self._start_engine, settings, self.client)
        self.node_ids = ["host"]
        """What `nodes` returns."""
        self.rewards: list[ScriptedRewards] = []
        """Actors that score with reward sources, and that were started."""
        self.synced: list[int] = []
        """Version of each sync."""
        self.usages: dict[str, list[Usage]] | None = None
        """What `usage_by_group` returns."""

    @override
    def __enter__(self) -> ScriptedFleet:
        return self

    @override
    def __exit__(self, *_error: object) -> None:
        """Do nothing: nothing was started."""

    # -- start --

    @override
    def _reserve(self) -> Placement:
        """Return bundles on one host."""
        gpus = self._device == "cuda"
        colocated = self._plan.colocated and gpus
        nodes = ["host"] * (self._plan.ranks if colocated else self._plan.processes)
        of_rank, of_engine = assign(self._plan, {}, nodes, gpus=gpus)
        return Placement(None, of_rank, of_engine, nodes, {"host": "host"}, self._plan, colocated, gpus)

    @property
    @override
    def nodes(self) -> list[str]:
        return self.node_ids

    @override
    def _folders_of(self, group: Group) -> dict[Role, str]:
        return dict.fromkeys(group.roles, "")

    @override
    def _start_rank(self, group: Group, rank: int) -> RemoteActor[ModelWorker]:
        return local_actor(self._ranks[group.roles[0]][rank], self.client.objects)

    @override
    def _start_engine(self, index: int, starts_before: int) -> RemoteActor[EngineActor]:
        return local_actor(self.engine_actors[index], self.client.objects)

    @override
    def start_helper(self, kind: type[A], name: str, node: str | None = None) -> RemoteActor[A]:
        helper = ScriptedRewards(_participant(name))
        self.rewards.append(helper)
        return local_actor(helper, self.client.objects)

    # -- calls --

    @override
    def put(self, columns: RolloutColumns) -> Pending[RolloutColumns]:
        return ended(columns, self.client.objects)

    @override
    def usage_by_group(self) -> dict[str, list[Usage]] | None:
        return self.usages

    @override
    def sync(self, version: int) -> SyncReport:
        """Let all engines serve with policy `version`. The report says 1 GB in 1 s, and
        has the version in place of a digest.
        """
        self.engines.restart()
        for actor in self.engine_actors:
            if isinstance(actor, ScriptedEngineActor):
                actor.receive(version)
        self.engines.confirm_weights()
        self.synced.append(version)
        return SyncReport(version, tensors=1, bytes=10**9, seconds=1.0, checksum=f"{version:016x}")
