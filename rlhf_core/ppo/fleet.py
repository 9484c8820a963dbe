"""Ray: starts the processes of a placement plan, and ends them.

Workers that train keep to their group: where one dies or is stuck, the attempt fails and the next continues
from the checkpoint. What holds nothing that is not held elsewhere is replaced: a group of frozen models
(reward, reference), which is then asked again, and engines, which serve again after a completed sync.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, PlacementPlan, Role
from rlhf_core.engines.distributed import log_layout
from rlhf_core.errors import InfrastructureError
from rlhf_core.ppo.dispatch import reassign
from rlhf_core.ppo.engine_pool import Engines
from rlhf_core.ppo.placement_groups import reserve
from rlhf_core.ppo.records import ParticipantSpec, Usage
from rlhf_core.ppo.rpc import Calls, gone
from rlhf_core.seeds import derive_seed
from rlhf_core.system.heartbeat import Monitor, heartbeat, register, unregister
from rlhf_core.weight_sync.sender import SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")

FROZEN_RESTARTS = 3
"""How often a group of frozen models is started again for one call."""


@dataclass(frozen=True)
class WorkerGroup:
    """The actors of one group, by rank."""

    group: Group
    actors: tuple[Any, ...]

    @property
    def ranks(self) -> int:
        return len(self.actors)

    def submit(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; returns Ray's references."""
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def submit_each(self, method: str, args_by_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each rank its own arguments."""
        return [
            getattr(actor, method).remote(*args)
            for actor, args in zip(self.actors, args_by_rank, strict=True)
        ]


class Fleet:
    """All worker groups and engines of one PPO stage. Use as a context manager: leaving it ends them all."""

    def __init__(
        self,
        config: PipelineConfig,
        plan: PlacementPlan,
        device: str,
        folders: dict[Role, Path],
        pad_id: int,
        monitor: Monitor | None = None,
    ) -> None:
        """`folders`: the model each role starts from; the policy's is also the engines'. `monitor`: the
        stage's, entered; None: one's own.
        """
        self._config = config
        self._plan = plan
        self._device = device
        self._folders = {role: str(folder.resolve()) for role, folder in folders.items()}
        self._pad_id = pad_id
        self._timeouts = config.run.timeouts
        self._local = not os.environ.get("RAY_ADDRESS")
        self._given_monitor = monitor
        self._connected: list[Any] = []
        self._started: Counter[str] = Counter()
        """How often each group was started."""
        self.groups: dict[Role, WorkerGroup] = {}
        self.engines: Engines
        self.packs = True
        """Whether rows are packed: every loaded model supports it and the configuration allows it."""

    def __enter__(self) -> Fleet:
        self._monitor = self._given_monitor or Monitor().__enter__()
        # This process moves as long as Ray answers it; what it does between calls has bounds of its own.
        register(self._monitor.folder, "controller", math.inf)
        self._calls = Calls(self._monitor, self._timeouts)
        try:
            heartbeat("start Ray", self._timeouts.start)
            self._start_ray()
            self._start_actors()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_rest: object) -> None:
        import ray

        heartbeat("end", self._timeouts.start)
        if error is not None:
            # Some may be suspended, and Ray's daemons wait for nobody whom they cannot ask.
            self._monitor.kill()
        ray.shutdown()
        self._monitor.kill()
        unregister()
        if self._given_monitor is None:
            self._monitor.__exit__()

    # -- start --

    def _start_ray(self) -> None:
        import ray
        from ray.job_config import JobConfig

        # Ray would replace a worker's environment by its own guess of thread counts.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray's monitor serves metrics to the whole network. With an invalid port it only logs that it cannot.
        os.environ.setdefault("AUTOSCALER_METRIC_PORT", "-1")
        # Otherwise Ray puts the working folder first on its workers' search path, and would import a
        # `queue.py` from there.
        job = JobConfig(_client_job=True)
        if not self._local:
            ray.init(log_to_driver=True, logging_level=logging.WARNING, job_config=job)
            return
        # Ray's own choice is a token in a file that everybody on this host can read.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray.init(
            num_cpus=max(os.cpu_count() or 1, self._plan.processes + 1),
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
            object_store_memory=None if self._device == "cuda" else 256 << 20,
            _node_ip_address="127.0.0.1",
            job_config=job,
        )

    def _start_actors(self) -> None:
        self._slots = reserve(self._plan, gpus=self._device == "cuda", wait=self.wait)
        log.info("ppo runs as %s", self._plan.describe())
        self.engines = Engines(self._start_engine, self._config.ppo.engine, self._calls)
        for group in self._plan.groups:
            self._start_group(group)
        if self._slots.together:
            self.usage()  # from here on trainers are idle, and no time to start runs for them
            # While an engine measures the device, it takes what others allocate for its own.
            self._load(engines=self.engines.handles)
            self._load(self.distinct_groups)
        else:
            self._load(self.distinct_groups, self.engines.handles)

    def _start_group(self, group: Group) -> WorkerGroup:
        import ray

        from rlhf_core.ppo.worker import ModelWorker

        before = self._started[group.name]
        self._started[group.name] += 1
        config_json = self._config.model_dump_json(by_alias=True)
        folders = {role: self._folders[role] for role in group.roles}
        actors = [
            ray.remote(ModelWorker)
            # The name of a dead one is free a moment later.
            .options(
                name=f"{group.name}-{rank}.{before}",
                max_concurrency=1,
                runtime_env={"env_vars": self._environment()["worker"]},
                **self._slots.rank(group, rank),
            )
            .remote(
                self._participant(_rank_name(group, rank)), config_json, group.roles, folders, self._pad_id
            )
            for rank in range(group.ranks)
        ]
        started = WorkerGroup(group, tuple(actors))
        self.groups.update(dict.fromkeys(group.roles, started))
        return started

    def _start_engine(self, index: int, before: int) -> Any:
        import ray

        from rlhf_core.ppo.engine_actor import EngineActor

        lora = self._config.ppo.lora if self._config.ppo.syncs_adapter else None
        return (
            ray.remote(EngineActor)
            .options(
                name=f"engine-{index}.{before}",
                max_concurrency=1,
                runtime_env={"env_vars": self._environment()["engine"]},
                **self._slots.engine(index),
            )
            .remote(
                self._participant(f"engine {index}"),
                index,
                self._folders["policy"],
                self._config.ppo.engine.model_dump_json(),
                self._device,
                self._config.max_sequence_tokens,
                derive_seed(self._config.run.seed, "ppo", "engine"),
                self.sync_backend,
                None if lora is None else lora.r,
                self._config.model.head_dtype,
            )
        )

    def _participant(self, name: str) -> ParticipantSpec:
        return ParticipantSpec(name, self._monitor.folder.resolve(), self._timeouts)

    def _load(self, groups: Sequence[WorkerGroup] = (), engines: Sequence[Any] = ()) -> None:
        loading: list[Any] = []
        for worker_group in groups:
            address, port = self.wait(
                [worker_group.actors[0].listen.remote(self._local)], f"{worker_group.group.name} to start"
            )[0]
            loading += worker_group.submit_each(
                "load",
                [
                    (rank, worker_group.ranks, address, port, self._device)
                    for rank in range(worker_group.ranks)
                ],
            )
        ranks = len(loading)
        loading += [engine.load.remote() for engine in engines]
        self.packs &= all(self.wait(loading, "all models to load")[:ranks])
        if groups and self._config.ppo.pack is not False:
            log_layout(self.packs, "the policy, the reward model or the critic", "ppo.pack")
        layouts = [call for group in groups for call in group.submit("choose_layout", self.packs)]
        self.wait(layouts, "all ranks to choose the layout of rows")

    def _environment(self) -> dict[str, dict[str, str]]:
        """Thread counts: trainers share the cores among themselves, engines too; the two take turns."""
        if self._device == "cuda":
            return {"worker": {}, "engine": {}}
        threads = self._config.run.threads or len(os.sched_getaffinity(0))
        ranks = max(1, self._plan.processes - self._plan.engines)
        return {
            "worker": _threads(max(1, threads // ranks)) | {"DS_ACCELERATOR": "cpu"},
            "engine": _threads(max(1, threads // self._plan.engines)),
        }

    # -- calls --

    @property
    def distinct_groups(self) -> list[WorkerGroup]:
        """Each group once, though it serves several roles."""
        return list({group.group.name: group for group in self.groups.values()}.values())

    def usage(self) -> list[Usage]:
        """Of every worker and engine."""
        calls = [actor.usage.remote() for group in self.distinct_groups for actor in group.actors]
        calls += [engine.usage.remote() for engine in self.engines.handles]
        return self.wait(calls, "usage")

    @property
    def sync_backend(self) -> str:
        """ "gloo", "nccl" or "ipc"."""
        wanted = self._config.ppo.weight_sync.backend
        if wanted != "auto":
            return wanted
        if self._device == "cpu":
            return "gloo"
        return "ipc" if self._config.ppo.colocate == "all" else "nccl"

    def wait(self, references: list[Any], what: str) -> list[Any]:
        """Results in order; see `Calls.wait`."""
        return self._calls.wait(references, what)

    # -- frozen models --

    def insist(self, ask: Callable[[], T], what: str) -> T:
        """What `ask` returns, asked again after a group of frozen models was lost and started anew;
        `FROZEN_RESTARTS` times at most. Raises what `ask` raises where that is not the reason, or is not all
        that was lost.
        """
        for left in reversed(range(FROZEN_RESTARTS + 1)):
            try:
                return ask()
            except InfrastructureError as error:
                lost = self._lost_groups()
                if not left or not lost or any(_trains(group) for group in lost):
                    raise
                for group in lost:
                    log.warning(
                        "%s is lost and started again; %s is asked for anew: %s", group.name, what, error
                    )
                    self._end(self.groups[group.roles[0]])
                self._load([self._start_group(group) for group in lost])
        raise AssertionError("the last round raises or returns")

    def _lost_groups(self) -> list[Group]:
        """Those with a rank that is gone, suspended or late; after a call has failed."""
        lost = {participant.name for participant in self._monitor.unhealthy()}
        dead = [] if lost else gone([actor for workers in self.distinct_groups for actor in workers.actors])
        return [
            workers.group
            for workers in self.distinct_groups
            if any(
                _rank_name(workers.group, rank) in lost or a in dead for rank, a in enumerate(workers.actors)
            )
        ]

    def _end(self, workers: WorkerGroup) -> None:
        import ray

        for actor in workers.actors:
            ray.kill(actor)
        self._monitor.kill([_rank_name(workers.group, rank) for rank in range(workers.ranks)])

    # -- engines --

    def sync(self, version: int) -> SyncReport:
        """Weights of policy `version` into all engines, acknowledged. Those that died before or on the way
        are replaced.
        """
        what = f"the weight sync of version {version}"
        self.engines.bury(f"before {what}", failed=False)
        while True:
            self.engines.restart()
            try:
                self._connect()
                report: SyncReport = self.wait(self.groups["policy"].submit("send_weights", version), what)[0]
            except InfrastructureError as error:
                if not self.engines.bury(error.message, failed=True):
                    raise
                # The others hold parts of two versions, in the middle of an update that nobody can take back.
                self.engines.bury_all(f"{what} broke")
                continue
            self.engines.synced()
            return report

    def rollouts(
        self,
        shares: list[list[int]],
        arguments: Callable[[list[int]], tuple[Any, ...]],
        version: int,
        what: str,
    ) -> dict[int, list[Any]]:
        """`EngineActor.generate` on each share of prompts; the rollouts of each prompt, by its index.

        What a lost engine was asked is asked again in one piece, of the engine that replaces it, so that it
        comes out the same; where none does, of the others. `arguments` of a share carry its own seeds.
        """
        found: dict[int, list[Any]] = {}
        asked = {index: share for index, share in zip(self.engines.serving, shares, strict=True) if share}
        while asked:
            answers = self.engines.ask(
                "generate", {index: arguments(share) for index, share in asked.items()}, what
            )
            for index, rollouts in answers.items():
                share = asked.pop(index)
                samples = len(rollouts) // len(share)
                found |= {
                    i: rollouts[place * samples : (place + 1) * samples] for place, i in enumerate(share)
                }
            if asked:
                self.sync(version)
                asked = reassign(asked, self.engines.serving)
        return found

    def _connect(self) -> None:
        """The policy's ranks and the engines there are, for weight sync; nothing if these are connected
        already.
        """
        engines, policy = self.engines.handles, self.groups["policy"]
        if engines == self._connected:
            return
        address = self.wait([policy.actors[0].address.remote(self._local)], "the policy's address")[0]
        receivers = len(engines) * self._config.ppo.engine.tensor_parallel
        self.wait(
            policy.submit("connect_engines", self.sync_backend, address, engines, receivers),
            "policy and engines to connect for weight sync",
        )
        self._connected = engines


def _rank_name(group: Group, rank: int) -> str:
    return f"{group.name} rank {rank}"


def _trains(group: Group) -> bool:
    return bool({"policy", "critic"} & set(group.roles))


def _threads(count: int) -> dict[str, str]:
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
