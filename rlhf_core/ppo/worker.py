"""One training rank as a Ray actor: it hosts the models of its group's roles and computes what it is told.

Consumes: lists of sequences or samples, already cut into micro-batches with equal counts on all ranks.
Produces: per-sequence numbers and sums of metrics; the controller adds them up over ranks.
Waits for: the other ranks of its group, inside collectives bounded by `run.timeouts.stall`. It never calls
another group; policy ranks call the engines during a weight sync.
"""

from __future__ import annotations

import resource
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, Role
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.ppo.records import LogprobResult, ParticipantSpec, Usage
from rlhf_core.ppo.rpc import Actor, called
from rlhf_core.ppo.samples import FloatArray, OptimizerStep, TrainSample
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptAndResponse


class ModelWorker(Actor):
    """Methods are called by the controller on every rank of the group at once."""

    def __init__(
        self,
        participant: ParticipantSpec,
        config_json: str,
        roles: tuple[Role, ...],
        folders: dict[Role, str],
        pad_id: int,
    ) -> None:
        super().__init__(participant)
        self._config = PipelineConfig.model_validate_json(config_json)
        self._roles = roles
        self._folders = folders
        self._pad_id = pad_id
        self._models: dict[Role, Any] = {}
        self._listener: socket.socket | None = None
        """Address of rank 0."""

    @called()
    def address(self, local: bool) -> str:
        """Address of this host, or loopback if all of Ray runs on it."""
        return _own_address(local)

    @called()
    def listen(self, local: bool) -> tuple[str, int]:
        """Start listening as rank 0 of the group, and return (address, port)."""
        self._listener = socket.create_server((_own_address(local), 0))
        address, port = self._listener.getsockname()
        return address, port

    @called("start")
    def load(self, rank: int, world_size: int, address: str, port: int, device: str) -> bool:
        """Join the group and load the models. Return whether all of them support packed rows."""
        import torch

        # Ray shows each actor its own GPU only, as number 0.
        limits = self.participant.timeouts
        self._rank = Rank(rank, world_size, 0, address, port, device, limits.start, limits.stall)
        join(replace(self._rank, listener=self._listener))
        for role in self._roles:
            torch.manual_seed(derive_seed(self._config.run.seed, "ppo", "init", role))
            self._models[role] = self._load(role)
        return all(getattr(model, "module", model).packs for model in self._models.values())

    @called()
    def choose_layout(self, pack: bool) -> None:
        """Set packed or padded rows before the first pass. All groups use the same layout."""
        ppo = self._config.ppo.model_copy(update={"pack": pack})
        self._config = self._config.model_copy(update={"ppo": ppo})

    def _load(self, role: Role) -> Any:
        from rlhf_core.engines.deepspeed import TrainingEngine
        from rlhf_core.models.adapters import WithoutAdapter, add_adapter
        from rlhf_core.models.policy import load_policy
        from rlhf_core.models.score import load_score_model

        ppo = self._config.ppo
        group = Group(self._roles, self._rank.world_size)
        if (adapted := group.adapted_from(role, ppo)) is not None:
            return WithoutAdapter(self._models[adapted])
        trained = role in ("policy", "critic")
        deepspeed = group.deepspeed(role, ppo)
        load: Any = load_score_model
        if role in ("policy", "reference"):
            load = partial(load_policy, head_dtype=self._config.model.head_dtype)
        model: Any = load(
            self._folders[role],
            dtype=deepspeed.dtype,
            attention=self._config.model.attention,
            device=self._rank.torch_device,
            quantize=ppo.lora.quantize if ppo.lora is not None and trained else None,
            pack=ppo.pack,
        )
        if role == "critic":
            model.fold_statistics()
        optimizer = {"policy": ppo.policy, "critic": ppo.critic}.get(role)
        if not trained and deepspeed.zero_stage < 3:
            return model.requires_grad_(False).eval()
        if trained:
            add_adapter(model, ppo.lora)
        ema_decay = ppo.ema_decay if role == "policy" else None
        return TrainingEngine(model, deepspeed, optimizer, self._rank, ema_decay=ema_decay)

    # -- experience --

    @called()
    def logprobs(
        self,
        role: Role,
        sequences: list[PromptAndResponse],
        micro_batches: list[list[int]],
        with_entropy: bool,
    ) -> LogprobResult:
        """Of each response token, in float32, at the sampling temperature."""
        from rlhf_core.models.scoring import sequence_logprobs

        bad = failpoint(f"{role}.logprobs", "nan")
        logprobs, entropy = sequence_logprobs(
            self._models[role],
            self._batches(sequences, micro_batches),
            self._config.ppo.temperature,
            with_entropy,
        )
        arrays = [values.numpy() for values in logprobs]
        if bad == "nan":
            arrays[0][-1] = np.nan
        return LogprobResult(arrays, None if entropy is None else [values.numpy() for values in entropy])

    @called()
    def values(self, sequences: list[PromptAndResponse], micro_batches: list[list[int]]) -> list[FloatArray]:
        """The critic's value before each response token, (T,) each."""
        from rlhf_core.models.scoring import sequence_values

        bad = failpoint("critic.values", "nan")
        values = sequence_values(self._models["critic"], self._batches(sequences, micro_batches))
        if bad == "nan":
            values[0][-1] = np.nan
        return [tensor.numpy() for tensor in values]

    @called()
    def scores(self, sequences: list[PromptAndResponse], micro_batches: list[list[int]]) -> list[float]:
        """The reward model's score of each response, normalised by its stored statistics."""
        from rlhf_core.models.scoring import sequence_scores

        bad = failpoint("reward.scores", "nan")
        model = self._models["reward"]
        statistics = getattr(model, "module", model).statistics
        scores = sequence_scores(model, statistics, self._batches(sequences, micro_batches))
        return [np.nan] * len(scores) if bad == "nan" else scores

    def _batches(self, sequences: list[PromptAndResponse], micro_batches: list[list[int]]) -> Any:
        from rlhf_core.models.scoring import Batches

        device, pack = self._rank.torch_device, self._config.ppo.packs
        return Batches(sequences, micro_batches, pad_id=self._pad_id, device=device, pack=pack)

    # -- update --

    @called()
    def update_policy(
        self,
        samples: list[TrainSample],
        steps: list[OptimizerStep],
        kl_coef: float,
        demonstrations: list[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> dict[str, float]:
        """All optimizer steps of one PPO iteration; sums over this rank (see `training.ppo`).
        `demonstrations`: (input ids, target mask) each, for the pretraining loss.
        """
        from rlhf_core.models.batching import TokenSequence
        from rlhf_core.ppo.loss_step import update_policy

        failpoint("policy.update")
        return update_policy(
            self._models["policy"],
            samples,
            steps,
            self._config.ppo,
            self._pad_id,
            kl_coef=kl_coef,
            demonstrations=[TokenSequence(*row) for row in demonstrations],
        )

    @called()
    def update_critic(
        self, samples: list[TrainSample], steps: list[OptimizerStep], clip_values: bool
    ) -> dict[str, float]:
        """Update the critic in the same way. `clip_values` is False during its warm-up."""
        from rlhf_core.ppo.loss_step import update_critic

        failpoint("critic.update")
        return update_critic(
            self._models["critic"], samples, steps, self._config.ppo, self._pad_id, clip_values=clip_values
        )

    # -- weights --

    @called("start")
    def connect_engines(self, backend: str, address: str, engines: list[Any], receivers: int) -> None:
        """Prepare weight sync into `engines` (actor handles); a collective of the policy ranks."""
        from rlhf_core.models.adapters import adapter_config
        from rlhf_core.models.policy import DTYPES
        from rlhf_core.ppo.engine_actor import RayEngineClient
        from rlhf_core.weight_sync.sender import WeightSender
        from rlhf_core.weight_sync.wire import TensorSpec

        policy = self._models["policy"]
        dtype = DTYPES[self._config.ppo.engine.dtype]
        adapter = self._config.ppo.syncs_adapter
        seconds = self.participant.timeouts.sync
        client = RayEngineClient(engines, seconds) if self._rank.rank == 0 else None
        if adapter and client is not None:
            client.expect_adapter(adapter_config(policy.module.lm, policy.lora))
        self._sender = WeightSender(
            policy.adapter if adapter else policy.weights,
            [TensorSpec(name, dtype, shape) for name, shape in policy.shapes(adapter=adapter)],
            client,
            rank=self._rank.rank,
            backend=backend,
            address=address,
            receivers=receivers,
            bucket_bytes=self._config.ppo.weight_sync.bucket_mib << 20,
            timeout=seconds,
        )

    @called("sync")
    def send_weights(self, version: int) -> Any:
        """`SyncReport` on rank 0, None elsewhere; raises WeightSyncError unless all engines acknowledge."""
        return self._sender.send(version)

    @called()
    def save_model(self, role: Role, folder: str, average: bool) -> None:
        """Save the model in Hugging Face layout. This is a collective operation.

        `average` saves the moving average of the weights. A model with an adapter is saved in float32,
        because a merge that is rounded to bfloat16 would be a different policy.
        """
        import torch

        engine = self._models[role]
        dtype = None if engine.lora is None else torch.float32
        engine.save_model(Path(folder), engine.module.save, average=average, dtype=dtype)

    @called()
    def save_adapter(self, role: Role, folder: str, base: str) -> None:
        """As PEFT saves it; `base` names the model it belongs to. A collective."""
        self._models[role].save_adapter(Path(folder), base)

    @called()
    def save_checkpoint(self, role: Role, folder: str) -> None:
        """DeepSpeed state of every rank into one folder, which all ranks' hosts must share."""
        self._models[role].save_checkpoint(Path(folder))

    @called()
    def checkpoint_bytes(self, role: Role) -> int:
        """About what `save_checkpoint` writes, over all ranks."""
        size: int = self._models[role].checkpoint_bytes
        return size

    @called()
    def load_checkpoint(self, role: Role, folder: str, scratch: str) -> None:
        """`scratch`: a folder of its own for this role, which all ranks' hosts must share."""
        self._models[role].load_checkpoint(Path(folder), Path(scratch))

    @called()
    def usage(self) -> Usage:
        return process_usage()


def process_usage() -> Usage:
    """CPU seconds and peak memory of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(own.ru_utime + own.ru_stime, own.ru_maxrss * 1024)


def _own_address(local: bool) -> str:
    import ray

    return "127.0.0.1" if local else str(ray.util.get_node_ip_address())
