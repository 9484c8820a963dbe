"""Estimated seconds of a PPO step, and of an optimizer step of the stages that train one model.

Arithmetic, memory and links reach an assumed share of the figures in the data sheets. Every sequence has the
maximum length. Nothing overlaps within a rank: computing, collectives and copies to host memory follow each
other, although DeepSpeed reduces gradients during the backward pass.

    collectives    bytes x (n - 1) / n over the slowest link, twice that for an all-reduce: the bus bandwidth
                   of NCCL's rings (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A group with more ranks
                   than a host has devices is as slow as the network of a host
    hpZ            the backward pass gathers inside a host (ZeRO++, arXiv 2306.10209, section 3.2)
    engines        two all-reduces for each layer (Megatron-LM, arXiv 1909.08053, section 3)

One step has been measured, on one GPU, and took `MEASURED` times as long. What else a step does is not in the
estimate: kernels that are small for the device, Python, transfers, rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled, stages_made
from rlhf_core.config.placement import Group, plan
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, POLICIES, StageName
from rlhf_core.planning.hardware import Hardware
from rlhf_core.planning.loads import (
    PPO,
    largest_pass,
    largest_pass_of_ppo,
    ppo_models,
    sequences_of_step,
    trained_model,
)
from rlhf_core.planning.memory import Model, dtype_bytes, engine_memory

MEASURED = 4
"""Seconds of the one PPO step that was measured, on one GPU, divided by those of the estimate."""
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
PROCESS_START = (1, 5)
ENGINES_START = (10, 50)
"""Seconds until the process of a stage begins its work, and until the ranks and engines of PPO begin theirs:
assumed, and in runs of the demo on two cores that other programs used as well.
"""
_READERS = 3
"""Models that read a response of an evaluation: the policy, the SFT model and the reward model."""
HOST_ADAM = 4e9
"""Parameters a second that Adam updates on the CPUs of a host: 10 billion in 2.6 s (ZeRO-Offload, arXiv
2101.06840, table 4).
"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of a PPO step."""

    rollout: float
    scoring: float
    training: float
    sync: float
    staleness: int = 0
    """`ppo.staleness`. If it is not 0, the engines sample during scoring and training."""
    sync_every: int = 1
    """Steps from one weight sync to the next."""

    @property
    def total(self) -> float:
        """Mean seconds of a step. All batches are taken to be equal."""
        ranks = self.scoring + self.training
        if self.staleness:
            return max(self.rollout, ranks) + self.sync / self.sync_every
        return self.rollout + ranks + self.sync

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {
            "rollout": self.rollout,
            "scoring": self.scoring,
            "training": self.training,
            "sync": self.sync,
        }


def seconds_of_step(config: PipelineConfig, shape: ModelShape, hardware: Hardware, stage: StageName) -> float:
    """Return the seconds of a PPO step, or of an optimizer step of a stage that trains one model."""
    if stage == PPO:
        return step_time(config, shape, hardware).total
    [(name, section)] = [each for each in config.training_sections.items() if each[0] == stage]
    model, batch = trained_model(config, shape, name, section.deepspeed), largest_pass(config, name)
    return optimizer_step_time(model, sequences_of_step(section), batch.longest, batch.tokens, hardware)


def step_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> StepTime:
    """Return the time of one PPO step.

    The groups compute at the same time, and the roles of one group one after the other.
    """
    groups, engines = plan(config.ppo).groups, config.ppo.engine.count
    times = [group_time(config, shape, group, hardware) for group in groups]
    return StepTime(
        sampling_time(config, shape, hardware, math.ceil(config.ppo.rollout_batch_size / engines)),
        # Groups compute at the same time: the slowest one counts.
        max(scoring for scoring, _ in times),
        max(training for _, training in times),
        sync_time(config, shape, hardware) + _turn_time(config, shape, groups[0]),
        staleness=config.ppo.staleness,
        sync_every=config.ppo.sync_every,
    )


def group_time(
    config: PipelineConfig, shape: ModelShape, group: Group, hardware: Hardware
) -> tuple[float, float]:
    """Return the times of scoring and of training in one group of ranks."""
    ppo, length = config.ppo, config.max_sequence_tokens
    count, optimizer_steps = ppo.rollout_batch_size, ppo.epochs * ppo.minibatches
    budget = largest_pass_of_ppo(config, ranks=group.ranks).tokens
    models = ppo_models(config, shape, group)
    # With adapters, a role without a model of its own also makes a forward pass.
    model = models.get("policy") or next(iter(models.values()))
    scoring = _computing(_forward(shape, count, length), group.ranks, hardware, SCORING_MFU)
    scoring += _gathering(model, count * length, budget, hardware)
    if model.weights_offloaded:
        micro_batches = math.ceil(count * length / group.ranks / budget)
        scoring += micro_batches * model.size * model.parameters / group.ranks / OFFLOAD_BYTES
    passes = len(group.roles)
    if "reward" in group.roles:
        # Each model of an ensemble reads all responses.
        passes += config.reward.members - 1
    training = 0.0
    for model in models.values():
        if model.trained:
            step = optimizer_step_time(model, ppo.minibatch_size, length, budget, hardware)
            training += step * optimizer_steps
    return scoring * passes, training


def optimizer_step_time(model: Model, sequences: int, length: int, budget: int, hardware: Hardware) -> float:
    """Return the time of forward and backward passes over `sequences`, of communication, and of the step.

    Args:
        model: The trained model.
        sequences: Number of sequences over all ranks.
        length: Tokens of each sequence.
        budget: Tokens of a micro-batch.
        hardware: Devices of the ranks, and their links.
    """
    n, deepspeed = model.deepspeed.ranks, model.deepspeed
    # The backward pass costs two forward passes, one of them for the gradients of weights, which adapters do
    # not need.
    passes = (3.0 if model.lora is None else 2.0) + deepspeed.gradient_checkpointing
    seconds = _computing(_forward(model.shape, sequences, length), n, hardware, TRAINING_MFU) * passes
    micro_batches = math.ceil(sequences * length / n / budget)
    if n > 1:
        # Reduced after every micro-batch; ZeRO-1 and 2 then gather the weights that each rank has updated.
        # From ZeRO-2 on a rank keeps its part of the gradients only: a reduce-scatter, and no all-reduce.
        reduced = (2.0 if deepspeed.zero_stage < 2 else 1.0) * micro_batches
        if deepspeed.zero_stage in (1, 2):
            reduced += 1.0
        seconds += _collective(reduced * model.size * model.trainable, n, hardware)
        tokens = sequences * length
        seconds += _gathering(model, tokens, budget, hardware)
        seconds += _gathering(model, tokens, budget, hardware, backward=True)
    # Offloaded weights are copied to the device for each forward and each backward pass. With an offloaded
    # optimizer, gradients are copied to the host and new weights to the device once.
    if model.weights_offloaded:
        seconds += micro_batches * 2 * model.size * model.parameters / n / OFFLOAD_BYTES
    if model.offloaded:
        seconds += 2 * 4.0 * model.trainable / n / OFFLOAD_BYTES
        # The CPUs of a host update the shards of all ranks there.
        seconds += model.trainable / n * min(n, hardware.per_host) / HOST_ADAM
    return seconds


def sampling_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware, per_engine: int) -> float:
    """Return the time in which each engine generates `per_engine` responses.

    Prefill is limited by arithmetic. Decoding reads the weights and the KV cache once per token, for as many
    sequences at a time as the cache holds.
    """
    engine, device = config.ppo.engine, hardware.device
    size = dtype_bytes(engine.dtype)
    capacity = (
        engine_memory(shape, engine, device, config.model.head_dtype).tokens // config.max_sequence_tokens
    )
    # At least one sequence: a cache that holds none is a problem of memory, which the plan names elsewhere.
    waves = math.ceil(per_engine / max(1, min(engine.max_num_seqs, capacity)))
    concurrent = math.ceil(per_engine / waves)
    limits = config.limits
    prefill = _forward(shape, per_engine, limits.prompt)
    seconds = _computing(prefill, engine.tensor_parallel, hardware, SCORING_MFU)
    seconds += _all_reduces(shape, engine, per_engine * limits.prompt, hardware)
    # The cache grows by a token in each step, from the prompt to the full length.
    mean_context = limits.prompt + limits.new / 2
    # The factor 2 is for keys and values. Weights are read once for all sequences of a wave.
    read = shape.parameters * size + concurrent * mean_context * 2 * shape.cached_layers * shape.kv * size
    reading = read / (device.bandwidth * engine.tensor_parallel * DECODE_BANDWIDTH)
    arithmetic = _computing(
        2.0 * shape.active_parameters * concurrent, engine.tensor_parallel, hardware, SCORING_MFU
    )
    # The slower of both limits the other.
    token = max(arithmetic, reading) + _all_reduces(shape, engine, concurrent, hardware)
    if engine.enforce_eager:
        token += LAUNCH * shape.layers
    return seconds + token * waves * limits.new


def evaluation_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> float:
    """Return the time of the evaluation: each model samples its responses to each prompt, and the models of
    the KL and the reward model read all of them.
    """
    # The SFT model answers in every evaluation, because all win rates are over it.
    models = 1 + sum(is_enabled(config, policy) for policy in POLICIES)
    responses = models * config.evaluate.prompts * config.evaluate.answers_per_prompt
    return _evaluating(config, shape, hardware, responses, config.evaluate.engines, config.evaluate.ranks)


def evaluations_during_ppo(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> float:
    """Return the time of all evaluations that PPO makes of its policy."""
    ppo = config.ppo
    if not ppo.enabled or ppo.evaluation_interval is None:
        return 0.0
    one = _evaluating(
        config, shape, hardware, ppo.evaluate_prompts, ppo.engine.count, ppo.policy_deepspeed.ranks
    )
    # One more for the policy before its first step.
    return one * (1 + math.ceil(ppo.steps / ppo.evaluation_interval))


def _evaluating(
    config: PipelineConfig, shape: ModelShape, hardware: Hardware, responses: int, engines: int, ranks: int
) -> float:
    reading = _forward(shape, responses, config.max_sequence_tokens) * _READERS
    sampling = sampling_time(config, shape, hardware, math.ceil(responses / engines))
    return sampling + _computing(reading, ranks, hardware, SCORING_MFU)


def starting_time(config: PipelineConfig) -> tuple[float, float]:
    """Return the shortest and the longest time in which the processes of all stages start."""
    stages = stages_made(config, FIRST_STAGE, LAST_STAGE)
    least, most = (len(stages) * seconds for seconds in PROCESS_START)
    if PPO in stages:
        least, most = least + ENGINES_START[0], most + ENGINES_START[1]
    return least, most


def sync_time(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> float:
    """Return the time in which the policy's ranks gather weights that ZeRO-3 has sharded, and one of them
    sends the weights, or the adapter alone, to the engines.
    """
    ppo, deepspeed = config.ppo, config.ppo.policy_deepspeed
    parameters = shape.parameters
    if ppo.lora is not None and ppo.syncs_adapter:
        parameters = shape.adapter_parameters(ppo.lora.r, ppo.lora.targets)
    size = parameters * dtype_bytes(ppo.engine.dtype)
    rate = hardware.device.link * LINK
    if hardware.network is not None and ppo.colocate != "all":
        rate = min(rate, hardware.network.rate * NETWORK)  # a sender uses the adapter of its device
    if ppo.weight_sync.backend == "gloo":
        rate = min(rate, OFFLOAD_BYTES)
    gathering = _collective(size, deepspeed.ranks, hardware) if deepspeed.zero_stage == 3 else 0.0
    return gathering + size / rate


def _turn_time(config: PipelineConfig, shape: ModelShape, group: Group) -> float:
    """Return the time in which trainers and engines move their memory to the host and back
    (`ppo.engine.sleep_level`).
    """
    engine = config.ppo.engine
    if engine.sleep_level == 0:
        return 0.0
    models = ppo_models(config, shape, group).values()
    moved = sum(model.state.total - model.while_sampling.total for model in models)
    # Level 1 keeps the weights of the engine in host memory. Level 2 drops them: the next sync sends all.
    if engine.sleep_level == 1:
        moved += shape.parameters * dtype_bytes(engine.dtype)
    return 2 * moved / OFFLOAD_BYTES


# -- parts --


def _forward(shape: ModelShape, sequences: int, length: int) -> float:
    """Return the operations of a forward pass: two for each weight and token, and causal attention."""
    # Scores and weighted values take 2 L^2 operations each for a part of a head. Causality leaves half.
    attention = 2.0 * sequences * length**2 * shape.query * shape.cached_layers
    return 2.0 * shape.active_parameters * sequences * length + attention


def _computing(flops: float, ranks: int, hardware: Hardware, utilisation: float) -> float:
    return flops / (ranks * hardware.device.flops * utilisation)


def _collective(size: float, ranks: int, hardware: Hardware) -> float:
    """Return the time in which `ranks` gather or reduce-scatter `size` bytes."""
    rate = hardware.device.link * LINK
    if ranks > hardware.per_host and hardware.network is not None:
        rate = min(rate, hardware.network.total * NETWORK)
    return size * (ranks - 1) / ranks / rate


def _gathering(
    model: Model, tokens: int, budget: int, hardware: Hardware, *, backward: bool = False
) -> float:
    """Return the time in which ZeRO-3 gathers all weights, once for every micro-batch."""
    n, hpz = model.deepspeed.ranks, model.deepspeed.hpz
    if model.stage < 3 or n == 1:
        return 0.0
    size = math.ceil(tokens / n / budget) * model.size * model.parameters
    return _collective(size, hpz if backward and hpz > 1 else n, hardware)


def _all_reduces(shape: ModelShape, engine: EngineConfig, tokens: float, hardware: Hardware) -> float:
    """Return the time in which an engine's GPUs add up the hidden states of `tokens`, twice in each layer."""
    ways = engine.tensor_parallel
    if ways == 1:
        return 0.0
    # An all-reduce is a reduce-scatter and a gather, each of which sends these bytes once.
    size = 2.0 * tokens * shape.hidden * dtype_bytes(engine.dtype)
    return (_collective(size, ways, hardware) + ALL_REDUCE) * (2 * shape.layers)
