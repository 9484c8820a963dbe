"""Bytes per device of each part of a model in training, frozen or serving.

Parameters, gradients and optimizer state are counted as DeepSpeed allocates them (`training.engine`); activations and
logits are estimated for the largest micro-batch.

    float32    weights 4, gradients 4, Adam 8 bytes a parameter; ZeRO 1-3 add a flat copy of the rank's share, 4
    bfloat16   weights 2, gradients 2 (ZeRO 0: 2 and 4 in float32), master weights and Adam 12
    ZeRO       1: optimizer state / ranks; 2: gradients too; 3: weights too
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlhf_core.config.ppo import EngineConfig
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.shape import ModelShape

CONTEXT = 1.2 * GIB
"""CUDA context, cuBLAS and NCCL buffers of one process."""
FRAGMENTATION = 1.05
"""What the allocator holds beyond what tensors need."""
ENGINE_OVERHEAD = 1.5 * GIB
"""vLLM's own activations and graphs, inside its share."""
LIVE_PARAMETERS = 1_000_000_000
"""ZeRO-3 gathers at most this many parameters at a time."""


@dataclass(frozen=True)
class Part:
    """Bytes on one device of one role in one phase, by kind."""

    role: str
    bytes: dict[str, float]
    host: float = 0.0
    """Bytes in host memory for each rank (offload)."""

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class DeviceLoad:
    """All that lies on one device at the same time."""

    phase: str
    what: str
    devices: int
    """How many devices look like this."""
    parts: tuple[Part, ...]
    processes: int = 1
    reserved: float = 0.0
    """An engine's share, which it takes whole."""
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> float:
        return sum(part.total for part in self.parts) * FRAGMENTATION + self.reserved + self.processes * CONTEXT

    @property
    def host(self) -> float:
        return sum(part.host for part in self.parts) * self.devices


def state_bytes(parameters: int, deepspeed: DeepSpeedConfig, *, trained: bool) -> tuple[dict[str, float], float]:
    """({"weights", "gradients", "optimizer"} on the device, bytes in host memory) of one rank."""
    n, stage = deepspeed.ranks, deepspeed.zero_stage
    low = deepspeed.dtype != "float32"
    size = 2 if low else 4
    share = parameters / n
    sharded = stage == 3
    weights = size * (share if sharded else parameters)
    if not trained:
        return {"weights": weights}, 0.0
    gradients = size * (share if stage >= 2 else parameters)
    optimizer = (12.0 if low else 8.0) * (share if stage >= 1 else parameters)
    if low and stage == 0:
        gradients += 4.0 * parameters
        optimizer = 12.0 * share  # DeepSpeed's bfloat16 optimizer shards its state even without ZeRO
    if not low and stage >= 1:
        optimizer += 4.0 * share
    if deepspeed.offload == "optimizer" and stage >= 1:
        host = optimizer + (gradients if stage >= 2 else 0.0)
        return {"weights": weights, "gradients": 0.0 if stage >= 2 else gradients, "optimizer": 0.0}, host
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}, 0.0


def gathered_bytes(shape: ModelShape, parameters: int, deepspeed: DeepSpeedConfig) -> float:
    """Whole weights that ZeRO-3 holds at a time: two layers and the largest matrix, or what its limit allows."""
    if deepspeed.zero_stage < 3 or deepspeed.ranks == 1:
        return 0.0
    size = 4 if deepspeed.dtype == "float32" else 2
    return size * min(parameters, LIVE_PARAMETERS, 2 * shape.layer_parameters + shape.embedding_parameters)


def activation_bytes(shape: ModelShape, tokens: int, deepspeed: DeepSpeedConfig, *, trained: bool) -> float:
    """What one forward pass over `tokens` keeps for its backward pass; without one, what a layer needs."""
    size = 4 if deepspeed.dtype == "float32" else 2
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Per token and layer: two norms (input and normalised, in float32 too), q k v and output, gate, up and product.
    norms = 2 * shape.hidden * (size + 4)
    attention = size * (2 * shape.hidden + 2 * query + 2 * kv) + 4 * shape.heads
    mlp = size * (4 * shape.intermediate + shape.hidden)
    layer = norms + attention + mlp
    if not trained:
        return tokens * layer
    if deepspeed.gradient_checkpointing:
        return tokens * (size * shape.hidden * shape.layers + layer)
    return tokens * layer * shape.layers


def logits_bytes(shape: ModelShape, tokens: int, deepspeed: DeepSpeedConfig, *, trained: bool) -> float:
    """The logits, and in training their gradient; the softmax is made in chunks (`algo.logprobs`)."""
    size = 4 if deepspeed.dtype == "float32" else 2
    return tokens * shape.vocabulary * size * (2 if trained else 1)


def model_part(
    role: str,
    shape: ModelShape,
    deepspeed: DeepSpeedConfig,
    tokens: int,
    *,
    trained: bool,
    scores: bool,
    resident_only: bool = False,
) -> Part:
    """`scores`: a score head in place of the language-model head. `resident_only`: idle while another role works."""
    parameters = shape.score_parameters if scores else shape.parameters
    kinds, host = state_bytes(parameters, deepspeed, trained=trained)
    if not resident_only:
        kinds["gathered"] = gathered_bytes(shape, parameters, deepspeed)
        kinds["activations"] = activation_bytes(shape, tokens, deepspeed, trained=trained)
        kinds["logits"] = 0.0 if scores else logits_bytes(shape, tokens, deepspeed, trained=trained)
    return Part(role, {name: value for name, value in kinds.items() if value}, host)


def engine_weights(shape: ModelShape, engine: EngineConfig) -> float:
    """Bytes of an engine's weights on each of its GPUs."""
    return shape.parameters * (4 if engine.dtype == "float32" else 2) / engine.tensor_parallel


def kv_tokens(shape: ModelShape, engine: EngineConfig, memory: float) -> int:
    """Tokens that one engine's KV cache holds on devices of so many bytes."""
    size = 4 if engine.dtype == "float32" else 2
    free = engine.gpu_memory_utilization * memory - engine_weights(shape, engine) - ENGINE_OVERHEAD
    return max(0, math.floor(free * engine.tensor_parallel / (shape.kv_width * size)))
