"""A vLLM engine as a Ray actor, and the client by which policy rank 0 updates the weights of all engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, Pending, RemoteActor, fetch, ready, rpc
from rlhf_core.config.placement import PPOSettings
from rlhf_core.engines.sync.wire import Acknowledgement
from rlhf_core.engines.vllm import SamplingOptions
from rlhf_core.errors import WorkerStuck
from rlhf_core.ppo.training.batch import RolloutColumns, RolloutHeader, columns_of, header_of
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptExample, Rollout

P = ParamSpec("P")
R = TypeVar("R")


class EngineActor(Actor):
    """Engine number `index`. The constructor does not start it, so that errors keep their class."""

    # vLLM imports SciPy for audio, which takes 7 % of its CPU time. Ranks compute intervals with it.
    unused = (*Actor.unused, "scipy")

    def __init__(
        self,
        participant: ParticipantSpec,
        index: int,
        settings: PPOSettings,
        model: str,
        device: str,
        backend: str,
    ) -> None:
        """Remember the settings.

        Args:
            participant: Registration with the heartbeat monitor.
            index: 0 .. engines - 1.
            settings: Settings of the stage.
            model: Folder of the model in Hugging Face layout.
            device: "cpu" or "cuda".
            backend: Backend of the weight sync: "gloo", "nccl" or "ipc".
        """
        super().__init__(participant)
        self._index = index
        self._settings = settings
        self._model = Path(model)
        self._device = device
        self._backend = backend
        self._version = -1
        """Policy version that was acknowledged last; -1 before the first sync."""
        self._adapter_config: dict[str, Any] | None = None

    @rpc("start")
    def start_engine(self) -> None:
        """Load the model."""
        # Here, because the driver imports this module: vLLM takes seconds to import, and reads its
        # environment then.
        from rlhf_core.engines.vllm import Engine

        settings, ppo = self._settings, self._settings.ppo
        lora = ppo.lora if ppo.syncs_adapter else None
        self._engine = Engine(
            self._model,
            ppo.engine,
            device=self._device,
            max_model_len=settings.max_sequence_tokens,
            seed=derive_seed(settings.run.seed, "ppo", "engine"),
            weight_transfer=self._backend,
            adapter_rank=None if lora is None else lora.r,
            head_dtype=settings.model.head_dtype,
            sleep_level=ppo.engine.sleep_level,
        )
        # Two tokens now, so that lazy initialization does not slow down the first rollout.
        prompt = PromptExample("warm-up", "", (0,))
        self._engine.generate([prompt], n=1, max_new_tokens=2, temperature=1.0, seeds=[0], policy_version=-1)

    @rpc()
    def sample(
        self,
        chunks: Sequence[Sequence[PromptExample]],
        *,
        seeds: Sequence[int],
        **options: Unpack[SamplingOptions],
    ) -> tuple[RolloutHeader, *tuple[RolloutColumns, ...]]:
        """Sample responses to each prompt with the weights of the last sync.

        Args:
            chunks: Prompts. All are sampled at the same time.
            seeds: One for each prompt of all chunks.
            options: See `SamplingOptions`.

        Returns:
            A `RolloutHeader` of all responses, and `RolloutColumns` for each chunk.
        """
        failpoint("engine.generate")
        rollouts = self._engine.generate(
            [prompt for chunk in chunks for prompt in chunk],
            seeds=seeds,
            policy_version=self._version,
            adapter=self._adapter,
            **options,
        )
        self.counters["decode_steps"] = self._engine.steps
        return header_of(rollouts), *_columns(rollouts, [len(chunk) for chunk in chunks], options["n"])

    @property
    def _adapter(self) -> int | None:
        """Number of the adapter that the requests use; None without one."""
        return None if self._adapter_config is None else _adapter_number(self._version)

    # -- sleep --

    @rpc("start")
    def sleep(self) -> None:
        """Give the memory of weights and KV cache to the trainers."""
        self._engine.sleep()

    @rpc("start")
    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take the memory of a part back."""
        self._engine.wake(part)

    # -- weight sync --

    @rpc("start")
    def init_weight_transfer_engine(self, init_info: dict[str, Any], position: int) -> None:
        """Connect to the sender. `position` is the place of this engine among those that receive."""
        # The ranks of the workers follow from the position of their engine and not from its index, because
        # engines that were given up have no ranks.
        offset = init_info.get("rank_offset")  # with IPC there are no ranks
        if offset is not None:
            workers_before = position * self._settings.ppo.engine.tensor_parallel
            init_info = {**init_info, "rank_offset": offset + workers_before}
        self._engine.llm.init_weight_transfer_engine({"init_info": init_info})

    @rpc("sync")
    def expect_adapter(self, config: dict[str, Any]) -> None:
        """Announce that the updates contain an adapter and not the whole model. `config` is PEFT's."""
        # Kept for all later syncs: the sender announces it once, when it connects.
        self._adapter_config = config

    @rpc("sync")
    def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        self._engine.llm.start_weight_update()

    @rpc("sync")
    def update_weights(self, update_info: Any) -> None:
        """Receive the weights."""
        failpoint("engine.receive")
        self._engine.llm.update_weights({"update_info": update_info})

    @rpc("sync")
    def finish_weight_update(self, weight_version: str | None) -> None:
        """Use the received weights."""
        llm = self._engine.llm
        # Before the new weights are used: the cached keys and values are of the old ones.
        self._engine.forget_prefixes()
        if self._adapter_config is None:
            llm.finish_weight_update(weight_version)
            return
        # This removes all adapters from the engine, so the version must be set after the new one is loaded.
        llm.finish_weight_update()
        number = _adapter_number(int(str(weight_version)))
        llm.collective_rpc("load_adapter", args=(number, self._adapter_config))
        llm.update_weight_version(weight_version)

    @rpc()
    def forget_prefixes(self) -> None:
        """Forget the KV cache of prompts. No request may be alive."""
        self._engine.forget_prefixes()

    @rpc("sync")
    def acknowledge(self) -> Acknowledgement:
        """Return the version and the checksums of what arrived."""
        self._version = int(self._engine.llm.get_weight_version())
        return Acknowledgement(self._index, self._version, self._engine.received_checksums())


def _adapter_number(version: int) -> int:
    """Return vLLM's number of the adapter of a policy version. Numbers begin at 1, and versions at 0."""
    return version + 1


def _columns(rollouts: Sequence[Rollout], prompts: Sequence[int], n: int) -> list[RolloutColumns]:
    """Cut the rollouts into chunks of these numbers of prompts."""
    columns = []
    start = 0
    for count in prompts:
        end = start + count * n
        columns.append(columns_of(rollouts[start:end], n))
        start = end
    return columns


class RayEngineClient:
    """A `engines.sync.wire.EngineClient`. Each call waits at most `timeout` seconds for all engines."""

    def __init__(
        self, engines: Sequence[RemoteActor[EngineActor]], hosts: Sequence[str], timeout: float
    ) -> None:
        self._engines = engines
        self._hosts = hosts
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # All are started before the first is waited for: engines and sender form process groups together.
        calls = [
            engine.call(EngineActor.init_weight_transfer_engine, init_info, position)
            for position, engine in enumerate(self._engines)
        ]
        self._wait(calls, "init_weight_transfer_engine")

    def expect_adapter(self, config: dict[str, Any]) -> None:
        self._call_all(EngineActor.expect_adapter, config)

    def start_weight_update(self) -> None:
        self._call_all(EngineActor.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call_all(EngineActor.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all(EngineActor.finish_weight_update, weight_version)

    def acknowledge(self) -> list[Acknowledgement]:
        return self._call_all(EngineActor.acknowledge)

    def _call_all(
        self, method: Callable[Concatenate[EngineActor, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        calls = [engine.call(method, *args, **kwargs) for engine in self._engines]
        return self._wait(calls, method.__name__)

    def _wait(self, calls: list[Pending[R]], name: str) -> list[R]:
        try:
            return fetch(calls, self._timeout)
        except TimeoutError as error:
            silent = [host for host, ended in zip(self._hosts, ready(calls, 0), strict=True) if not ended]
            raise WorkerStuck(
                f"{len(silent)} of {len(calls)} engines (on {', '.join(sorted(set(silent)))}) did not answer"
                f" {name} within {self._timeout:g} s (run.timeouts.sync)"
            ) from error
