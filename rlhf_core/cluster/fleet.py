"""Ray: starts the processes of a placement plan, calls them, and turns what can go wrong into named errors."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.cluster.records import Usage
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, PlacementPlan, Role
from rlhf_core.errors import ConfigError, RLHFError, WorkerDied
from rlhf_core.seeds import derive_seed

log = logging.getLogger(__name__)


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
        return [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, args_by_rank, strict=True)]


class Fleet:
    """All worker groups and engines of one PPO stage. Use as a context manager: leaving it ends them all."""

    def __init__(
        self, config: PipelineConfig, plan: PlacementPlan, device: str, folders: dict[Role, Path], pad_id: int
    ) -> None:
        """`folders`: the model each role starts from; the policy's is also the engines'."""
        self._config = config
        self._plan = plan
        self._device = device
        self._folders = {role: str(folder.resolve()) for role, folder in folders.items()}
        self._pad_id = pad_id
        self._timeout = config.ppo.engine.start_timeout
        self._local = "RAY_ADDRESS" not in os.environ
        self.groups: dict[Role, WorkerGroup] = {}
        self.engines: list[Any] = []

    def __enter__(self) -> Fleet:
        self._start_ray()
        try:
            self._start_actors()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        import ray

        ray.shutdown()

    # -- start --------------------------------------------------------------------------------------------------

    def _start_ray(self) -> None:
        import ray

        # Ray would replace a worker's environment by its own guess of thread counts.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if not self._local:
            ray.init(log_to_driver=True, logging_level=logging.WARNING)
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
        )

    def _start_actors(self) -> None:
        import ray

        from rlhf_core.cluster.engine_actor import EngineActor
        from rlhf_core.cluster.worker import ModelWorker

        slots = self._reserve()
        log.info("ppo runs as %s", self._plan.describe())
        config_json = self._config.model_dump_json(by_alias=True)
        environment = self._environment()
        backend = self.sync_backend
        lora = self._config.ppo.lora if self._config.ppo.syncs_adapter else None
        adapter_rank = None if lora is None else lora.r
        seed = derive_seed(self._config.run.seed, "ppo", "engine")
        for index in range(self._plan.engines):
            options = slots.engine(index) | {"runtime_env": {"env_vars": environment["engine"]}}
            self.engines.append(
                ray.remote(EngineActor)
                .options(name=f"engine-{index}", max_concurrency=1, **options)
                .remote(
                    index,
                    self._folders["policy"],
                    self._config.ppo.engine.model_dump_json(),
                    self._device,
                    self._config.max_sequence_tokens,
                    seed,
                    backend,
                    adapter_rank,
                )
            )
        for group in self._plan.groups:
            folders = {role: self._folders[role] for role in group.roles}
            actors = []
            for rank in range(group.ranks):
                options = slots.rank(group, rank) | {"runtime_env": {"env_vars": environment["worker"]}}
                actors.append(
                    ray.remote(ModelWorker)
                    .options(name=f"{group.name}-{rank}", max_concurrency=1, **options)
                    .remote(config_json, group.roles, folders, self._pad_id)
                )
            worker_group = WorkerGroup(group, tuple(actors))
            self.groups.update(dict.fromkeys(group.roles, worker_group))
        self._load()

    def _load(self) -> None:
        loading = []
        for worker_group in self.distinct_groups:
            address, port = self.wait(
                [worker_group.actors[0].address.remote(self._local)], f"{worker_group.group.name} to start"
            )[0]
            loading += worker_group.submit_each(
                "load", [(rank, worker_group.ranks, address, port, self._device) for rank in range(worker_group.ranks)]
            )
        loading += [engine.warm_up.remote() for engine in self.engines]
        self.wait(loading, "all models to load", self._timeout)
        policy = self.groups["policy"]
        address = self.wait([policy.actors[0].address.remote(self._local)], "the policy's address")[0][0]
        receivers = self._plan.engines * self._config.ppo.engine.tensor_parallel
        self.wait(
            policy.submit("connect_engines", self.sync_backend, address, self.engines, receivers),
            "policy and engines to connect for weight sync",
            self._timeout,
        )

    def _reserve(self) -> _Slots:
        """One bundle per process; too few devices is an error here, not a wait for ever."""
        import ray
        from ray.util.placement_group import placement_group

        plan = self._plan
        gpus = self._device == "cuda"
        together = plan.together and gpus
        per_rank = [(group.name, rank) for group in plan.groups for rank in range(group.ranks)]
        bundles: list[dict[str, float]] = [
            {"CPU": 2 if together else 1, "GPU": gpus * plan.gpus_per_rank} for _ in per_rank
        ]
        if together:
            bundles = [{"CPU": 2, "GPU": 1} for _ in per_rank]
        else:
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
        self.wait([reserved.ready()], "Ray to reserve its devices", self._timeout)
        index = {key: i for i, key in enumerate(per_rank)}
        return _Slots(reserved, index, plan, together, gpus)

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

    # -- calls --------------------------------------------------------------------------------------------------

    @property
    def distinct_groups(self) -> list[WorkerGroup]:
        """Each group once, though it serves several roles."""
        return list({group.group.name: group for group in self.groups.values()}.values())

    def usage(self) -> list[Usage]:
        """Of every worker and engine."""
        calls = [actor.usage.remote() for group in self.distinct_groups for actor in group.actors]
        calls += [engine.usage.remote() for engine in self.engines]
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

    def wait(self, references: list[Any], what: str, timeout: float | None = None) -> list[Any]:
        """Results in order. A dead or late actor is a WorkerDied that says what was waited for; errors of ours come as
        they were raised."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        limit = timeout if timeout is not None else self._config.ppo.call_timeout
        try:
            results: list[Any] = ray.get(references, timeout=limit)
            return results
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RLHFError):
                raise cause from error
            if isinstance(cause, RayActorError | GetTimeoutError):
                raise WorkerDied(f"while waiting for {what}: {cause}") from error
            raise RLHFError(f"while waiting for {what}: {type(cause).__name__}: {cause}") from error
        except GetTimeoutError as error:
            raise WorkerDied(f"waited {limit:g} s for {what}; something hangs, the run stops") from error
        except RayActorError as error:
            first = str(error).strip().splitlines()[0]
            raise WorkerDied(f"a process died while waiting for {what}: {first}") from error


@dataclass(frozen=True)
class _Slots:
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


def _threads(count: int) -> dict[str, str]:
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
