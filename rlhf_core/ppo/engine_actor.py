"""A vLLM engine as a Ray actor, and the client through which policy rank 0 drives the engines' weight
updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config.engine import EngineConfig
from rlhf_core.errors import WorkerStuck
from rlhf_core.ppo.records import ParticipantSpec, Usage
from rlhf_core.ppo.rpc import Actor, called, fetch
from rlhf_core.ppo.worker import process_usage
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptExample, Rollout
from rlhf_core.weight_sync.wire import Acknowledgement


class EngineActor(Actor):
    """`index`: 0 .. engines - 1. `load` is separate, so that its errors arrive as they are."""

    def __init__(
        self,
        participant: ParticipantSpec,
        index: int,
        model: str,
        engine_json: str,
        device: str,
        max_model_len: int,
        seed: int,
        backend: str,
        adapter_rank: int | None,
        head_dtype: str,
    ) -> None:
        super().__init__(participant)
        self._index = index
        self._config = EngineConfig.model_validate_json(engine_json)
        self._model = Path(model)
        self._options: dict[str, Any] = {
            "device": device,
            "max_model_len": max_model_len,
            "seed": seed,
            "weight_transfer": backend,
            "adapter_rank": adapter_rank,
            "head_dtype": head_dtype,
        }
        self._version = -1
        self._adapter_config: dict[str, Any] | None = None

    @called("start")
    def load(self) -> None:
        """Start the engine; two tokens, so that the first rollout does not pay for lazy initialisation."""
        from rlhf_core.engines.vllm import Engine

        self._engine = Engine(self._model, self._config, **self._options)
        prompt = PromptExample("warm-up", "", (0,))
        self._engine.generate([prompt], n=1, max_new_tokens=2, temperature=1.0, seeds=[0], policy_version=-1)

    @called()
    def generate(
        self,
        prompts: Sequence[PromptExample],
        n: int,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[int],
    ) -> list[Rollout]:
        """See `Engine.generate`; stamped with the version that was acknowledged last."""
        failpoint("engine.generate")
        return self._engine.generate(
            prompts,
            n=n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seeds=seeds,
            policy_version=self._version,
            adapter=None if self._adapter_config is None else self._version + 1,
        )

    @called("start")
    def init_weight_transfer_engine(self, init_info: dict[str, Any], place: int) -> None:
        """`place`: among the engines that receive, which some may have left."""
        # Engines' ranks follow the sender's, each with as many as it has workers.
        offset = init_info.get("rank_offset")
        if offset is not None:
            init_info = {**init_info, "rank_offset": offset + place * self._config.tensor_parallel}
        self._engine.llm.init_weight_transfer_engine({"init_info": init_info})

    @called("sync")
    def expect_adapter(self, config: dict[str, Any]) -> None:
        """What is sent is an adapter; `config` as PEFT describes it."""
        self._adapter_config = config

    @called("sync")
    def start_weight_update(self) -> None:
        self._engine.llm.start_weight_update()

    @called("sync")
    def update_weights(self, update_info: Any) -> None:
        failpoint("engine.receive")
        self._engine.llm.update_weights({"update_info": update_info})

    @called("sync")
    def finish_weight_update(self, weight_version: str | None) -> None:
        llm = self._engine.llm
        if self._adapter_config is None:
            llm.finish_weight_update(weight_version)
            return
        # Finishing throws all adapters out of the engine; the version counts once the new one is in. Numbers
        # start at 1.
        llm.finish_weight_update()
        llm.collective_rpc("load_adapter", args=(int(str(weight_version)) + 1, self._adapter_config))
        llm.update_weight_version(weight_version)

    @called("sync")
    def acknowledge(self) -> Acknowledgement:
        """The version and what arrived; an engine of several workers must have the same on all."""
        version = int(self._engine.llm.get_weight_version())
        received: list[dict[str, str]] = self._engine.llm.collective_rpc("received_checksums")
        merged = dict(received[0])
        for other in received[1:]:
            merged.update({name: "workers differ" for name in merged if other.get(name) != merged[name]})
        self._version = version
        return Acknowledgement(self._index, version, merged)

    @called()
    def usage(self) -> Usage:
        return process_usage()


class RayEngineClient:
    """`weight_sync.sender.EngineClient` over actor handles; every call waits for all engines, at most
    `timeout` seconds.
    """

    def __init__(self, engines: list[Any], timeout: float) -> None:
        self._engines = engines
        self._timeout = timeout

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._each(method, [args for _ in self._engines])

    def _each(self, method: str, args_by_place: list[tuple[Any, ...]]) -> list[Any]:
        calls = [
            getattr(engine, method).remote(*args)
            for engine, args in zip(self._engines, args_by_place, strict=True)
        ]
        try:
            return fetch(calls, self._timeout)
        except TimeoutError as error:
            raise WorkerStuck(f"the engines did not answer {method} within {self._timeout:g} s") from error

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        # vLLM's trainer engines wrap the dict in a request object.
        info = getattr(init_info, "init_info", init_info)
        self._each("init_weight_transfer_engine", [(info, place) for place in range(len(self._engines))])

    def expect_adapter(self, config: dict[str, Any]) -> None:
        self._all("expect_adapter", config)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", getattr(update_info, "update_info", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", weight_version)

    def acknowledge(self) -> list[Acknowledgement]:
        return self._all("acknowledge")
