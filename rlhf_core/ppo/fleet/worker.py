"""One training rank as a Ray actor, with the models of all roles of its group.

Consumes: chunks of rollouts, with the rows of this rank, already cut into micro-batches, as many on every
rank.
Produces: columns with numbers of each token, which other ranks get without the controller; sums of each
response; and sums of metrics, which the controller adds up over ranks.
Waits for: the other ranks of its group, in collectives with the timeout `run.timeouts.stall`. It does not
call other groups. Policy ranks call the engines during a weight sync.

Axes: `T` response tokens of one sequence.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_core.cluster.rpc import ListeningActor, ParticipantSpec, RemoteActor, rpc
from rlhf_core.config.placement import TRAINED, Group, PPOSettings, Role
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import InfrastructureError
from rlhf_core.ppo.fleet.engine_actor import EngineActor, RayEngineClient
from rlhf_core.ppo.training import loss_step
from rlhf_core.ppo.training.batch import ModelScores, RolloutColumns, RowColumns, SentShare, row_columns
from rlhf_core.ppo.training.experience import ResponseSums, Whitening
from rlhf_core.ppo.training.loss_step import Loss, OptimizerStep, UpdateSettings
from rlhf_core.ppo.training.rank_rows import (
    CriticInputs,
    Exchange,
    ExperienceInputs,
    RankBatch,
    RankExperience,
    critic_samples,
    experience_of_rank,
    policy_samples,
)
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint


class ModelWorker(ListeningActor):
    """One rank of a group of models. The controller calls each method on all ranks at the same time.

    Args:
        participant: How this process registers with the heartbeat monitor.
        settings: Settings of the stage.
        roles: The models of this group.
        folders: The folder from which each model is loaded.
        pad_id: Padding token.
        loss_code: Source of the file of a user's loss; None without one.
    """

    _loss: Loss | None = None
    """The policy's loss, once the policy is loaded."""

    def __init__(
        self,
        participant: ParticipantSpec,
        settings: PPOSettings,
        roles: tuple[Role, ...],
        folders: dict[Role, str],
        pad_id: int,
        loss_code: bytes | None = None,
    ) -> None:
        super().__init__(participant)
        self._settings = settings
        self._roles = roles
        self._folders = folders
        self._pad_id = pad_id
        self._loss_code = loss_code
        self._models: dict[Role, Any] = {}
        self._members: list[Any] = []
        """The reward models of an ensemble after the first."""
        self._batch: RankBatch | None = None
        """The responses that this rank got last."""
        self._experience: RankExperience
        """The experience of a policy rank in the present step."""

    @rpc("start")
    def load(self, rank: int, world_size: int, address: str, port: int, device: str) -> bool:
        """Join the process group and load the models. Return whether all of them support packed rows.

        Args:
            rank: Rank of this process in its group.
            world_size: Number of ranks of the group.
            address: Address at which rank 0 listens (see `listen`).
            port: Port at which rank 0 listens.
            device: "cpu" or "cuda".
        """
        import torch

        # The local rank is 0 on all: Ray shows each actor its own GPU only.
        limits = self.participant.timeouts
        self._rank = Rank(rank, world_size, 0, address, port, device, limits.start, limits.stall)
        # torch takes the socket over, so `_rank` does not keep it.
        join(replace(self._rank, listener=self._listener))
        # The judge has no ranks of its own: those of the reward model hold it as well.
        roles: tuple[Role, ...] = (*self._roles, *(("judge",) if "judge" in self._folders else ()))
        for role in roles:
            # For weights that no file has, of a new head or an adapter: every rank makes the same.
            torch.manual_seed(derive_seed(self._settings.run.seed, "ppo", "init", role))
            self._models[role] = self._load(role)
        if "reward" in roles:
            self._load_members()
        if "policy" in roles:
            self._loss = loss_step.loss_of(self._settings.ppo, self._loss_code)
        # An engine of DeepSpeed wraps the model in `module`; a frozen model may be bare.
        models = [*self._models.values(), *self._members]
        return all(getattr(model, "module", model).packs for model in models)

    @rpc()
    def choose_layout(self, pack: bool) -> None:
        """Select packed or padded rows.

        All groups use the same layout, which is known after all have loaded.
        """
        self._settings = replace(self._settings, ppo=self._settings.ppo.model_copy(update={"pack": pack}))

    def _load(self, role: Role) -> Any:
        from rlhf_core.models.adapters import WithoutAdapter

        group = Group(self._roles, self._rank.world_size)
        adapted = group.adapted_from(role, self._settings.ppo)
        if adapted is not None:
            # It is loaded: `config.placement.plan` names a trained role before the frozen one.
            return WithoutAdapter(self._models[adapted])
        return self._load_model(role, self._folders[role])

    def _load_members(self) -> None:
        """Load the members of an ensemble after the first. Each is a whole model, also with adapters."""
        from rlhf_core.models.scoring import load_ensemble, member_folders

        folder = Path(self._folders["reward"])
        self._ensemble = load_ensemble(folder)
        self._members = [self._load_model("reward", str(other)) for other in member_folders(folder)[1:]]

    def _load_model(self, role: Role, folder: str) -> Any:
        """Load the model of `role`, in an engine if it is trained or sharded."""
        from rlhf_core.engines.deepspeed import TrainingEngine
        from rlhf_core.engines.sharding import shards_of
        from rlhf_core.models.adapters import add_adapter
        from rlhf_core.models.policy import load_policy
        from rlhf_core.models.score import load_score_model

        ppo = self._settings.ppo
        group = Group(self._roles, self._rank.world_size)
        trained = role in TRAINED
        deepspeed = group.deepspeed(role, ppo)
        load: Any = load_score_model
        revision = None
        if role == "reference" and ppo.teacher is not None:
            revision = ppo.teacher.revision
        if role in ("policy", "reference"):
            # The same head for both: a KL between log-probabilities with different rounding has no meaning.
            load = partial(load_policy, head_dtype=self._settings.model.head_dtype)
        model: Any = load(
            folder,
            dtype=deepspeed.dtype,
            attention=self._settings.model.attention,
            device=self._rank.torch_device,
            revision=revision,
            quantize=ppo.lora.quantize if ppo.lora is not None and trained else None,
            pack=ppo.pack,
            shards=shards_of(deepspeed),
        )
        if role == "critic":
            # Before the adapter and the optimizer make their copies of the head.
            model.become_critic(ppo.reward_model_weight or 1.0)
        optimizer = {"policy": ppo.policy, "critic": ppo.critic}.get(role)
        # Only ZeRO-3 does something for a frozen model: it shards it.
        if not trained and deepspeed.zero_stage < 3:
            return model.requires_grad_(False).eval()
        if trained:
            add_adapter(model, ppo.lora)
        ema_decay = ppo.ema_decay if role == "policy" else None
        keep_best = role == "policy" and ppo.publish == "best"
        return TrainingEngine(
            model, deepspeed, optimizer, self._rank, ema_decay=ema_decay, keep_best=keep_best
        )

    # -- experience --

    @rpc()
    def logprobs(
        self, role: Role, with_entropy: bool, share: SentShare | int, *chunks: RolloutColumns
    ) -> tuple[None, RowColumns]:
        """Return `logprobs` of each response token at the sampling temperature.

        Args:
            role: "policy" or "reference".
            with_entropy: Also return `entropy` at each token, in nats.
            share: Responses of this rank in `chunks`; the number of the batch if this rank has both.
            chunks: Tokens.
        """
        from rlhf_core.models.scoring import sequence_logprobs

        fault = failpoint(f"{role}.logprobs", "nan")
        logprobs, entropy = sequence_logprobs(
            self._models[role],
            self._batches(share, chunks),
            self._settings.ppo.temperature,
            with_entropy,
        )
        columns = {"logprobs": [row.numpy() for row in logprobs]}
        if entropy is not None:
            columns["entropy"] = [row.numpy() for row in entropy]
        if fault == "nan":
            columns["logprobs"][0][-1] = np.nan
        # Two results: the controller waits for the first one, and the columns stay in the object store for
        # other ranks.
        return None, row_columns([len(row) for row in logprobs], **columns)

    @rpc()
    def values(self, share: SentShare | int, *chunks: RolloutColumns) -> tuple[None, RowColumns]:
        """Return `values` of the critic before each response token."""
        from rlhf_core.models.scoring import sequence_values

        fault = failpoint("critic.values", "nan")
        values = sequence_values(self._models["critic"], self._batches(share, chunks))
        if fault == "nan":
            values[0][-1] = np.nan
        return None, row_columns([len(row) for row in values], values=[row.numpy() for row in values])

    @rpc()
    def scores(
        self, role: Literal["reward", "judge"], share: SentShare | int, *chunks: RolloutColumns
    ) -> ModelScores:
        """Return the score of each response by the reward model or the judge, normalized by its stored
        statistics. The members of an ensemble score one after the other, and are combined here.
        """
        from rlhf_core.models.scoring import combined, deviations, sequence_scores

        fault = failpoint(f"{role}.scores", "nan")
        batches = self._batches(share, chunks)
        members = self._members if role == "reward" else []
        by_member = []
        for model in (self._models[role], *members):
            statistics = getattr(model, "module", model).statistics
            by_member.append(sequence_scores(model, statistics, batches))
        if fault == "nan":
            by_member[0] = [np.nan] * len(by_member[0])
        if not members:
            return ModelScores(by_member[0])
        return ModelScores(combined(self._ensemble, by_member), deviations(by_member))

    def _batches(self, sent: SentShare | int, chunks: Sequence[RolloutColumns]) -> Any:
        from rlhf_core.models.scoring import Batches

        batch = self.received(sent, chunks)
        sequences = [
            (prompt.tolist(), response.tolist()) for prompt, response in zip(*batch.tokens(), strict=True)
        ]
        device, pack = self._rank.torch_device, self._settings.ppo.packs
        return Batches(sequences, batch.share.micro_batches, pad_id=self._pad_id, device=device, pack=pack)

    def received(self, sent: SentShare | int, chunks: Sequence[RolloutColumns]) -> RankBatch:
        """Return the responses that a call is about: those that it brings, or those of an earlier call."""
        if isinstance(sent, SentShare):
            self._batch = RankBatch(sent, chunks)
        return self._batch_of(sent if isinstance(sent, int) else sent.batch)

    def _batch_of(self, number: int) -> RankBatch:
        """Return the responses of a batch that this rank has. Raises InfrastructureError if it has none."""
        if self._batch is None or self._batch.share.batch != number:
            raise InfrastructureError(
                f"{self.participant.name} does not have the responses of batch {number}"
            )
        return self._batch

    @rpc()
    def make_experience(
        self, inputs: ExperienceInputs, *objects: RowColumns
    ) -> tuple[ResponseSums, RowColumns]:
        """Make the experience of this policy rank's responses (see `ppo.training.experience`) and keep it.

        Returns the sums of each response for the controller, `returns` for the critic, and `advantages`
        before whitening if they are kept.
        """
        batch = self._batch_of(inputs.batch)
        self._experience, sums = experience_of_rank(batch, inputs, objects, self._settings.ppo)
        columns = self._experience.columns
        names = ("returns", "advantages") if inputs.keep_advantages else ("returns",)
        return sums, RowColumns(columns.offsets, {name: columns.values[name] for name in names})

    # -- update --

    @rpc()
    def update_policy(
        self,
        exchange: Exchange,
        steps: list[OptimizerStep],
        whitening: Whitening | None,
        *,
        kl_coef: float,
        demonstrations: list[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> dict[str, float]:
        """Make all optimizer steps of one PPO step, and return sums over this rank
        (see `ppo.training.loss_step`).

        Args:
            exchange: The responses that this rank trains on, and where their experience is.
            steps: Optimizer steps, with indices into these responses and `demonstrations`.
            whitening: Whitening of the advantages.
            kl_coef: Coefficient of the KL to the reference, used with `kl.place: loss`.
            demonstrations: (input ids, target mask) each, for the pretraining loss.
        """
        from rlhf_core.models.batching import TokenSequence

        failpoint("policy.update")
        return loss_step.update_policy(
            self._models["policy"],
            policy_samples(self._experience, whitening, exchange, self._rank),
            steps,
            UpdateSettings.of(self._settings.ppo, self._loss),
            self._pad_id,
            kl_coef=kl_coef,
            demonstrations=[TokenSequence(*row) for row in demonstrations],
        )

    @rpc()
    def update_critic(
        self,
        inputs: CriticInputs,
        exchange: Exchange,
        steps: list[OptimizerStep],
        clip_values: bool,
        *objects: RowColumns,
    ) -> dict[str, float]:
        """Update the critic in the same way.

        Args:
            inputs: Values and returns of this rank's responses.
            exchange: The responses that this rank trains on, and where they are.
            steps: Optimizer steps, with indices into these responses.
            clip_values: False during the warm-up of the critic.
            objects: What `inputs` has places of.
        """
        failpoint("critic.update")
        samples = critic_samples(self._batch_of(inputs.batch), inputs, objects, exchange, self._rank)
        return loss_step.update_critic(
            self._models["critic"],
            samples,
            steps,
            UpdateSettings.of(self._settings.ppo),
            self._pad_id,
            clip_values=clip_values,
        )

    # -- memory --

    @rpc("start")
    def release_cache(self) -> None:
        """Return the freed memory that torch keeps for later tensors to the device."""
        import torch

        # `empty_cache` returns only blocks without tensors, and cycles keep some alive until they are
        # collected.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @rpc("start")
    def offload_states(self) -> None:
        """Move the optimizer states of trained models to host memory."""
        from rlhf_core.engines.deepspeed import offload_states

        # A frozen model has no states, and its weights stay on the device.
        for role, model in self._models.items():
            if role in TRAINED:
                offload_states(model.engine)

    @rpc("start")
    def reload_states(self) -> None:
        """Move the optimizer states of trained models back to the device."""
        from rlhf_core.engines.deepspeed import reload_states

        for role, model in self._models.items():
            if role in TRAINED:
                reload_states(model.engine)

    # -- weights --

    @rpc("start")
    def connect_engines(
        self,
        backend: str,
        sender: tuple[str, int],
        engines: list[RemoteActor[EngineActor]],
        hosts: tuple[str, ...],
    ) -> None:
        """Prepare weight sync to `engines`. This is a collective operation of the policy ranks.

        Args:
            backend: "gloo", "nccl" or "ipc".
            sender: What `listen` returned on rank 0, which sends.
            engines: All engines of the run.
            hosts: Address of each engine.
        """
        from rlhf_core.engines.sync.sender import WeightSender
        from rlhf_core.engines.sync.wire import TensorSpec, TransportConfig
        from rlhf_core.models.adapters import adapter_config
        from rlhf_core.models.policy import DTYPES

        policy = self._models["policy"]
        ppo = self._settings.ppo
        adapter = ppo.syncs_adapter
        timeout = self.participant.timeouts.sync
        # One sender: with ZeRO-3 the other ranks only help to gather the weights (decision 1).
        client = RayEngineClient(engines, hosts, timeout) if self._rank.rank == 0 else None
        if adapter and client is not None:
            client.expect_adapter(adapter_config(policy.module.lm, policy.lora))
        dtype = DTYPES[ppo.engine.dtype]
        specs = [TensorSpec(name, dtype, shape) for name, shape in policy.shapes(adapter=adapter)]
        weights = policy.adapter if adapter else policy.weights
        self._sender = WeightSender(
            weights,
            specs,
            client,
            self._rank.rank,
            TransportConfig(
                backend,
                sender,
                hosts,
                ppo.engine.tensor_parallel,
                ppo.weight_sync.bucket_bytes(self._rank.device),
                timeout,
            ),
            listener=self._listener if client is not None else None,
        )

    @rpc("sync")
    def send_weights(self, version: int) -> SyncReport | None:
        """Send the policy's weights to all engines as `version`. This is a collective operation.

        Returns a report on rank 0 and None on the others. Raises WeightSyncError unless all engines
        acknowledge.
        """
        return self._sender.send(version)

    @rpc()
    def snapshot_best(self) -> None:
        """Copy the policy's weights to host memory, for `restore_best`. Checkpoints contain the copy."""
        self._models["policy"].snapshot_best()

    @rpc()
    def restore_best(self) -> None:
        """Restore the policy's weights of the last `snapshot_best`. This is a collective operation."""
        self._models["policy"].restore_best()

    @rpc()
    def restore_average(self) -> None:
        """Replace the policy's weights by their moving average. This is a collective operation."""
        self._models["policy"].restore_average()

    @rpc()
    def save_model(self, role: Role, folder: str) -> None:
        """Save the model in Hugging Face layout. This is a collective operation.

        A model with an adapter is saved in float32, because a merge that is rounded to bfloat16 would be a
        different policy.
        """
        import torch

        engine = self._models[role]
        dtype = None if engine.lora is None else torch.float32
        engine.save_model(Path(folder), engine.module.save, dtype=dtype)

    @rpc()
    def save_adapter(self, role: Role, folder: str, base: str) -> None:
        """Save the adapter in PEFT's layout. `base` names its model. This is a collective operation."""
        self._models[role].save_adapter(Path(folder), base)

    # -- checkpoints --

    @rpc()
    def checkpoint_bytes(self, role: Role) -> tuple[int, int]:
        """Return approximately how many bytes `save_checkpoint` writes on all ranks together, and how many of
        them rank 0 alone.
        """
        sizes: tuple[int, int] = self._models[role].checkpoint_bytes
        return sizes

    @rpc()
    def save_checkpoint(self, role: Role, folder: str) -> None:
        """Save the DeepSpeed state of this rank to the folder `folder` of its host."""
        self._models[role].save_checkpoint(Path(folder))

    @rpc()
    def load_checkpoint(self, role: Role, folder: str, scratch: str) -> None:
        """Load what `save_checkpoint` saved. `scratch` is an unused path."""
        self._models[role].load_checkpoint(Path(folder), Path(scratch))
