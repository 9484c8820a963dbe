"""Estimated seconds of each phase of a PPO step, and of an optimizer step of SFT and reward model.

Arithmetic, memory and links reach an assumed share of the figures in the data sheets. Every sequence has the
maximum length. Nothing overlaps within a rank: computing, collectives and copies to host memory follow each
other, although DeepSpeed reduces gradients during the backward pass.

    collectives    bytes x (n - 1) / n over the slowest link, twice that for an all-reduce: the bus bandwidth
                   of NCCL's rings (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A group on several
                   hosts is as slow as the network of a host: a ring leaves and enters each host once, and
                   NCCL builds a ring for each network adapter
    hpZ            the backward pass gathers inside a host (ZeRO++, arXiv 2306.10209, section 3.2)
    engines        two all-reduces for each layer (Megatron-LM, arXiv 1909.08053, section 3)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.config.constants import MAX_AUTO_SENDERS
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.placement import Group, plan
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import Hardware
from rlhf_core.planning.layout import Layout, layout
from rlhf_core.planning.loads import largest_pass_of_ppo, ppo_models
from rlhf_core.planning.memory import Model, dtype_bytes, engine_memory

TRAINING_MFU = 0.35
SCORING_MFU = 0.45
DECODE_BANDWIDTH = 0.6
LINK = 0.5
NETWORK = 0.8
"""Assumed shares of the data sheet's figures: arithmetic, memory, the link inside a host and the network."""
LAUNCH = 0.3e-3
"""Seconds to launch the kernels of one layer for one token, without CUDA graphs."""
ALL_REDUCE = 15e-6
"""Assumed seconds of the smallest all-reduce of an engine's GPUs."""
OFFLOAD_BYTES = 12e9
"""Bytes a second between device and host memory, for offloaded state and for gloo (assumed, PCIe 4 x16)."""
HOST_ADAM = 4e9
"""Parameters a second that Adam updates on the CPUs of a host: 10 billion in 2.6 s (ZeRO-Offload, arXiv
2101.06840, table 4).
"""


@dataclass(frozen=True)
class Seconds:
    """Time of one rank, by what limits it."""

    arithmetic: float = 0.0
    memory: float = 0.0
    """Reading weights and KV cache in decoding, and launching kernels."""
    link: float = 0.0
    """Collectives inside a host."""
    network: float = 0.0
    """Collectives and transfers between hosts."""
    host: float = 0.0
    """Copies to and from host memory, and the optimizer there."""

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.link + self.network + self.host

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(("arithmetic", "memory", "link", "network", "host"), key=lambda name: getattr(self, name))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.arithmetic + other.arithmetic,
            self.memory + other.memory,
            self.link + other.link,
            self.network + other.network,
            self.host + other.host,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(
            self.arithmetic * factor,
            self.memory * factor,
            self.link * factor,
            self.network * factor,
            self.host * factor,
        )


NO_TIME = Seconds()
Phase = Literal["rollout", "scoring", "training", "sync"]
PHASES: tuple[Phase, ...] = ("rollout", "scoring", "training", "sync")


@dataclass(frozen=True)
class StepTime:
    """Time of each phase of a PPO step."""

    rollout: Seconds
    scoring: Seconds
    training: Seconds
    sync: Seconds
    staleness: int = 0
    """`ppo.staleness`."""
    sync_every: int = 1
    """Steps from one weight sync to the next."""

    @property
    def total(self) -> float:
        ranks = self.scoring.total + self.training.total
        return step_seconds(
            self.rollout.total,
            ranks,
            self.sync.total,
            staleness=self.staleness,
            sync_every=self.sync_every,
        )

    def phase(self, name: Phase) -> Seconds:
        found: Seconds = getattr(self, name)
        return found


def step_seconds(rollout: float, ranks: float, sync: float, *, staleness: int, sync_every: int) -> float:
    """Return the mean seconds of a step. All batches are taken to be equal.

    Args:
        rollout: Seconds of the engines.
        ranks: Seconds of scoring and training.
        sync: Seconds of a sync, which waits for both.
        staleness: `ppo.staleness`. If it is not 0, the engines sample during scoring and training.
        sync_every: `ppo.sync_every`, the steps from one sync to the next.
    """
    return max(rollout, ranks) + sync / sync_every if staleness else rollout + ranks + sync


def step_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> StepTime:
    """Return the time of one PPO step.

    The groups compute at the same time, and the roles of one group one after the other.
    """
    placement = plan(config.ppo)
    # Without room for the engines, the times are those of enough devices.
    where = layout(placement, hardware) or Layout(tuple((0,) for _ in placement.groups), (0,))
    times = [
        group_time(config, shape, group, hardware, spans=len(hosts) > 1)
        for group, hosts in zip(placement.groups, where.groups, strict=True)
    ]
    return StepTime(
        rollout_time(config, shape, hardware),
        max((scoring for scoring, _ in times), key=lambda seconds: seconds.total),
        max((training for _, training in times), key=lambda seconds: seconds.total),
        gather_time(config, shape, hardware, spans=len(where.groups[0]) > 1)
        + send_time(config, shape, hardware, where.groups[0], where.engines)
        + turn_time(config, shape, placement.groups[0]),
        staleness=config.ppo.staleness,
        sync_every=config.ppo.sync_every,
    )


def turn_time(config: PipelineConfig, shape: ModelShape, group: Group) -> Seconds:
    """Return the time in which trainers and engines move their memory to the host and back
    (`ppo.engine.sleep_level`).
    """
    engine = config.ppo.engine
    if engine.sleep_level == 0:
        return NO_TIME
    models = ppo_models(config, shape, group).values()
    moved = sum(model.state.total - model.while_sampling.total for model in models)
    # Level 1 keeps the weights of the engine in host memory. Level 2 drops them: the next sync sends all.
    if engine.sleep_level == 1:
        moved += shape.parameters * dtype_bytes(engine.dtype)
    return Seconds(host=2 * moved / OFFLOAD_BYTES)


def group_time(
    config: PipelineConfig, shape: ModelShape, group: Group, hardware: Hardware, *, spans: bool
) -> tuple[Seconds, Seconds]:
    """Return the times of scoring and of training in one group of ranks.

    Args:
        config: Configuration of the pipeline.
        shape: Shape of all models.
        group: The ranks.
        hardware: Their devices and links.
        spans: Whether they are on several hosts.
    """
    ppo, length = config.ppo, config.max_sequence_tokens
    count, optimizer_steps = ppo.rollout_batch_size, ppo.epochs * ppo.minibatches
    budget = largest_pass_of_ppo(config, ranks=group.ranks).tokens
    models = ppo_models(config, shape, group)
    # With adapters, a role without a model of its own also makes a forward pass.
    model = models.get("policy") or next(iter(models.values()))
    forward = _computing(_forward(shape, count, length), group.ranks, hardware, SCORING_MFU)
    gathering = _gathering(model, count * length, budget, hardware, spans=spans)
    passes = len(group.roles)
    if "reward" in group.roles:
        passes += config.reward.members - 1
    scoring = (forward + gathering) * passes
    if model.weights_offloaded:
        micro_batches = math.ceil(count * length / group.ranks / budget)
        copied = micro_batches * model.size * model.parameters / group.ranks
        scoring += Seconds(host=copied / OFFLOAD_BYTES) * passes
    training = NO_TIME
    for model in models.values():
        if model.trained:
            step = optimizer_step_time(model, ppo.minibatch_size, length, budget, hardware, spans=spans)
            training = training + step * optimizer_steps
    return scoring, training


def optimizer_step_time(
    model: Model, sequences: int, length: int, budget: int, hardware: Hardware, *, spans: bool | None = None
) -> Seconds:
    """Return the time of forward and backward passes over `sequences`, of communication, and of the step.

    Args:
        model: The trained model.
        sequences: Number of sequences over all ranks.
        length: Tokens of each sequence.
        budget: Tokens of a micro-batch.
        hardware: Devices of the ranks, and their links.
        spans: Whether the ranks are on several hosts. None: if one host has too few devices for them.
    """
    n, deepspeed = model.deepspeed.ranks, model.deepspeed
    if spans is None:
        spans = n > hardware.per_host
    # The backward pass costs two forward passes, one of them for the gradients of weights, which adapters do
    # not need.
    passes = (3.0 if model.lora is None else 2.0) + deepspeed.gradient_checkpointing
    seconds = _computing(_forward(model.shape, sequences, length), n, hardware, TRAINING_MFU) * passes
    micro_batches = math.ceil(sequences * length / n / budget)
    if n > 1:
        # Reduced after every micro-batch; ZeRO-1 and 2 then gather the weights that each rank has updated.
        reduced = (2.0 if deepspeed.zero_stage < 2 else 1.0) * micro_batches
        if deepspeed.zero_stage in (1, 2):
            reduced += 1.0
        seconds += _collective(reduced * model.size * model.trainable, n, hardware, spans=spans)
        tokens = sequences * length
        seconds += _gathering(model, tokens, budget, hardware, spans=spans)
        seconds += _gathering(model, tokens, budget, hardware, spans=spans, backward=True)
    # Offloaded weights are copied to the device for each forward and each backward pass. With an offloaded
    # optimizer, gradients are copied to the host and new weights to the device once.
    host = 0.0
    if model.weights_offloaded:
        host += micro_batches * 2 * model.size * model.parameters / n / OFFLOAD_BYTES
    if model.offloaded:
        host += 2 * 4.0 * model.trainable / n / OFFLOAD_BYTES
        # The CPUs of a host update the shards of all ranks there.
        host += model.trainable / n * min(n, hardware.per_host) / HOST_ADAM
    return seconds + Seconds(host=host)


def rollout_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> Seconds:
    """Return the time of generating all responses of a step.

    Prefill is limited by arithmetic. Decoding reads the weights and the KV cache once per token, for as many
    sequences at a time as the cache holds.
    """
    ppo, engine, device = config.ppo, config.ppo.engine, hardware.device
    size = dtype_bytes(engine.dtype)
    per_engine = math.ceil(ppo.rollout_batch_size / engine.count)
    capacity = (
        engine_memory(shape, engine, device, config.model.head_dtype).tokens // config.max_sequence_tokens
    )
    waves = math.ceil(per_engine / max(1, min(engine.max_num_seqs, capacity)))
    concurrent = math.ceil(per_engine / waves)
    limits = config.limits
    prefill = _forward(shape, per_engine, limits.prompt)
    seconds = _computing(prefill, engine.tensor_parallel, hardware, SCORING_MFU)
    seconds += _all_reduces(shape, engine, per_engine * limits.prompt, hardware)
    mean_context = limits.prompt + limits.new / 2
    read = shape.parameters * size + concurrent * mean_context * 2 * shape.layers * shape.kv * size
    reading = read / (device.bandwidth * engine.tensor_parallel * DECODE_BANDWIDTH)
    arithmetic = 2.0 * shape.parameters * concurrent / (device.flops * engine.tensor_parallel * SCORING_MFU)
    # The slower of both limits the other.
    token = Seconds(arithmetic=arithmetic) if arithmetic > reading else Seconds(memory=reading)
    if engine.enforce_eager:
        token += Seconds(memory=LAUNCH * shape.layers)
    token += _all_reduces(shape, engine, concurrent, hardware)
    return seconds + token * (waves * limits.new)


def gather_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware, *, spans: bool) -> Seconds:
    """Return the time in which the policy's ranks gather the weights of a sync, which ZeRO-3 has sharded.

    If all ranks send, each sends its shards, without gathering them.
    """
    deepspeed = config.ppo.policy_deepspeed
    all_send = senders(config, spans=spans) == deepspeed.ranks
    if deepspeed.zero_stage < 3 or (all_send and _sends_shards(config)):
        return NO_TIME
    return _collective(_sent_bytes(config, shape), deepspeed.ranks, hardware, spans=spans)


def send_time(
    config: PipelineConfig,
    shape: ModelShape,
    hardware: Hardware,
    policy: tuple[int, ...],
    engines: tuple[int, ...],
) -> Seconds:
    """Return the time to send the weights, or the adapter alone, to the engines.

    Args:
        config: Configuration of the pipeline.
        shape: Shape of the policy.
        hardware: Devices and links.
        policy: Hosts of the policy's ranks.
        engines: Hosts of the engines.
    """
    size = _sent_bytes(config, shape)
    inside = size / (hardware.device.link * LINK)
    if set(engines) <= set(policy) or hardware.network is None:
        return Seconds(link=inside)
    # A sender uses the adapter of its device. What a host receives goes through all of its adapters.
    network = hardware.network
    adapters = min(senders(config, spans=len(policy) > 1), network.adapters * len(policy))
    rate = NETWORK * min(adapters * network.rate, network.total)
    if config.ppo.weight_sync.backend == "gloo":
        rate = min(rate, OFFLOAD_BYTES)
    return Seconds(network=max(inside, size / rate))


def _sent_bytes(config: PipelineConfig, shape: ModelShape) -> float:
    ppo = config.ppo
    parameters = shape.parameters
    if ppo.lora is not None and ppo.syncs_adapter:
        parameters = shape.adapter_parameters(ppo.lora.r, ppo.lora.targets)
    return parameters * dtype_bytes(ppo.engine.dtype)


def senders(config: PipelineConfig, *, spans: bool) -> int:
    """Return the number of policy ranks that send weights to the engines.

    The backends of GPUs have one sender. With gloo and `auto`, it depends on whether the policy `spans`
    hosts.
    """
    sync, deepspeed = config.ppo.weight_sync, config.ppo.policy_deepspeed
    if sync.backend != "gloo":
        return 1
    if sync.senders == "auto":
        return min(deepspeed.ranks, MAX_AUTO_SENDERS) if spans else 1
    return sync.senders


def _sends_shards(config: PipelineConfig) -> bool:
    """Return whether a policy rank that sends need not gather the weights, if all ranks send."""
    return config.ppo.policy_deepspeed.zero_stage == 3 and config.ppo.lora is None


# -- parts --


def _forward(shape: ModelShape, sequences: int, length: int) -> float:
    """Return the operations of a forward pass: two for each weight and token, and causal attention."""
    attention = 2.0 * sequences * length**2 * shape.query * shape.layers
    return 2.0 * shape.parameters * sequences * length + attention


def _computing(flops: float, ranks: int, hardware: Hardware, utilisation: float) -> Seconds:
    return Seconds(arithmetic=flops / (ranks * hardware.device.flops * utilisation))


def _collective(size: float, ranks: int, hardware: Hardware, *, spans: bool) -> Seconds:
    """Return the time in which `ranks` gather or reduce-scatter `size` bytes."""
    moved = size * (ranks - 1) / ranks
    inside = moved / (hardware.device.link * LINK)
    if not spans or hardware.network is None:
        return Seconds(link=inside)
    outside = moved / (hardware.network.total * NETWORK)
    return Seconds(network=outside) if outside > inside else Seconds(link=inside)


def _gathering(
    model: Model, tokens: int, budget: int, hardware: Hardware, *, spans: bool, backward: bool = False
) -> Seconds:
    """Return the time in which ZeRO-3 gathers all weights, once for every micro-batch."""
    n, hpz = model.deepspeed.ranks, model.deepspeed.hpz
    if model.stage < 3 or n == 1:
        return NO_TIME
    size = math.ceil(tokens / n / budget) * model.size * model.parameters
    if backward and hpz > 1:
        return _collective(size, hpz, hardware, spans=hpz > hardware.per_host)
    return _collective(size, n, hardware, spans=spans)


def _all_reduces(shape: ModelShape, engine: EngineConfig, tokens: float, hardware: Hardware) -> Seconds:
    """Return the time in which an engine's GPUs add up the hidden states of `tokens`, twice in each layer."""
    ways = engine.tensor_parallel
    if ways == 1:
        return NO_TIME
    size = 2.0 * tokens * shape.hidden * dtype_bytes(engine.dtype)
    one = _collective(size, ways, hardware, spans=False)
    return (one + Seconds(link=ALL_REDUCE)) * (2 * shape.layers)
