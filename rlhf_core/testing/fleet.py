"""A fleet of PPO whose ranks and engines are scripted, without Ray.

engine = ScriptedEngine(lambda request: Reply((7, 8, 2)))
fleet = ScriptedFleet(config, ranks={"reward": [MyRank()]}, engines=[ScriptedEngineActor(engine)])
fleet.sync(version=0)
batch = Collector(config.ppo, fleet, prompts, decode, composer, seed=0).collect(step=1, version=0)
scores = fleet.scores(batch).gather().values
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.cluster.rpc import ParticipantSpec, Pending, RemoteActor, Usage
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.config.placement import Group, Role, plan
from rlhf_core.engines.distributed import Rank
from rlhf_core.ppo.columns import RolloutColumns, RolloutHeader
from rlhf_core.ppo.engine_actor import EngineActor
from rlhf_core.ppo.engine_pool import EnginePool
from rlhf_core.ppo.fleet import Fleet, WorkerGroup
from rlhf_core.ppo.prompt_queue import PromptQueue
from rlhf_core.ppo.worker import ModelWorker
from rlhf_core.system.overriding import override
from rlhf_core.testing.engines import ScriptedEngine
from rlhf_core.types import PromptExample
from rlhf_core.weight_sync.sender import SyncReport

R = TypeVar("R")


# -- calls --


class _Parts:
    def __init__(self, method: Callable[..., Any], count: int) -> None:
        self._method, self._count = method, count

    def remote(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        parts: Sequence[Any] = self._method(*args, **kwargs)
        if len(parts) != self._count:
            raise ValueError(f"{len(parts)} results instead of {self._count}, for which Ray raises an error")
        return parts


class _Method:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, *, num_returns: int) -> _Parts:
        return _Parts(self.remote, num_returns)


class _Handle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._actor, name))


def scripted_actor(actor: Any) -> RemoteActor[Any]:
    """Return a remote actor whose calls run the methods of `actor` at once, in this process.

    The references of the results are the results themselves.
    """
    return RemoteActor(_Handle(actor))


def results(pending: Sequence[Pending[R]], what: str = "") -> list[R]:
    """Return the results of scripted calls, as `Fleet.wait` does. `what` is not used."""
    return [call.reference for call in pending]


# -- actors --


def _participant(name: str) -> ParticipantSpec:
    return ParticipantSpec(name, Path(), TimeoutsConfig())


class ScriptedRank(ModelWorker):
    """A training rank that loads no models. It keeps the responses that it got last, as a real one does.

    Methods that a test does not override are the real ones, which call `models`.

    Args:
        models: For example a `ScriptedTrainer` for each role.
        config: Default: all defaults.
    """

    def __init__(
        self, models: Mapping[Role, Any] | None = None, config: PipelineConfig | None = None
    ) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = _participant("scripted rank")
        self.counters = Counter()
        self._config = config or PipelineConfig()
        self._rank = Rank()
        self._models = dict(models or {})
        self._members = []
        self._batch = None
        self._pad_id = 0


class ScriptedEngineActor(EngineActor):
    """The process of an engine, without a process.

    Args:
        engine: Samples the responses.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = _participant("scripted engine")
        self.counters = Counter()
        self._engine = engine
        self._version = -1
        self._adapter_config = None

    def receive(self, version: int) -> None:
        """Hold the weights of policy `version`."""
        self._version = version

    @override
    def load(self) -> None:
        """Do nothing: the engine is loaded."""

    @override
    def sample_from(
        self,
        queue: RemoteActor[PromptQueue],
        batch: int,
        parts: int,
        prompts: Sequence[PromptExample],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[int],
    ) -> tuple[tuple[list[list[int]], RolloutHeader], *tuple[RolloutColumns, ...]]:
        """Sample all prompts that are left in the queue. The arguments are those of the real method."""
        taken: list[int] = []
        while numbers := queue.call(PromptQueue.take, batch, len(prompts)).reference:
            taken += numbers
        chunks = [taken[part::parts] for part in range(parts)]
        header, *columns = self.sample(
            [[prompts[i] for i in chunk] for chunk in chunks],
            n=n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=[seeds[i] for chunk in chunks for i in chunk],
        )
        return (chunks, header), *columns


class _ScriptedQueue(PromptQueue):
    def __init__(self) -> None:
        # Not the constructor of the base class, which registers the process.
        self.participant = _participant("scripted queue")
        self.counters = Counter()
        self._left = {}
        self._share = {}


# -- fleet --


class ScriptedEnginePool(EnginePool):
    """Engines 0, 1, ... They serve after the first `ScriptedFleet.sync`."""

    def __init__(self, actors: Sequence[EngineActor], config: PipelineConfig) -> None:
        no_client: Any = None
        settings = config.ppo.engine.model_copy(update={"count": len(actors)})
        super().__init__(lambda index, _starts: scripted_actor(actors[index]), settings, no_client)
        self.lost: set[int] = set()
        """Indices of the engines that do not answer the next call. The next sync restarts them."""

    @override
    def collect(self, pending: Mapping[int, Pending[R]], what: str) -> dict[int, R]:
        lost, self.lost = self.lost, set()
        for index in lost:
            self._engines[index].state = "dead"
        return {index: call.reference for index, call in pending.items() if index not in lost}

    @override
    def mark_dead(self, reason: str, *, after_error: bool) -> list[int]:
        return []

    @override
    def restart(self) -> None:
        for engine in self._engines:
            if engine.state == "dead":
                engine.state = "stale"
                engine.starts += 1


class ScriptedFleet(Fleet):
    """A fleet that starts no processes. Calls run at once, in this process.

    Args:
        config: Default: all defaults.
        ranks: Ranks of each role, each in a group of its own: `ScriptedRank`, or a subclass.
        engines: For example `ScriptedEngineActor`.
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
        super().__init__(config, plan(config.ppo), device, folders={}, pad_id=0)
        for role, workers in (ranks or {}).items():
            group = Group((role,), len(workers))
            self.groups[role] = WorkerGroup(group, tuple(scripted_actor(worker) for worker in workers))
        self.engine_actors = engines
        self.engines = ScriptedEnginePool(engines, config)
        self.synced: list[int] = []
        """Version of each sync."""
        self.usages: dict[str, list[Usage]] | None = None
        """What `usage_by_group` returns."""

    @override
    def __enter__(self) -> ScriptedFleet:
        return self

    @override
    def __exit__(self, error: type[BaseException] | None = None, *_rest: object) -> None:
        """Do nothing: nothing was started."""

    @override
    def wait(self, pending: Sequence[Pending[R]], what: str) -> list[R]:
        return results(pending)

    @override
    def put(self, columns: RolloutColumns) -> Pending[RolloutColumns]:
        return Pending(columns)

    @override
    def start_queue(self) -> RemoteActor[PromptQueue]:
        return scripted_actor(_ScriptedQueue())

    @override
    def usage_by_group(self) -> dict[str, list[Usage]] | None:
        return self.usages

    @override
    def sync(self, version: int) -> SyncReport:
        """Let all engines serve with policy `version`. The report says 1 GB in 1 s."""
        self.engines.restart()
        for actor in self.engine_actors:
            if isinstance(actor, ScriptedEngineActor):
                actor.receive(version)
        self.engines.confirm_weights()
        self.synced.append(version)
        return SyncReport(version, tensors=1, bytes=10**9, seconds=1.0)

    @override
    def _unhealthy_groups(self) -> list[Group]:
        return []  # the error of a call is raised at once
