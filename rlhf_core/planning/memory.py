"""Bytes per device of each model in training, frozen or serving.

Weights, gradients, optimizer state and buffers are what DeepSpeed 0.19 allocates for `training.engine`, with
P parameters, T of them trained, e bytes each (float32 4, bfloat16 2), N ranks:

    ZeRO       weights   gradients   optimizer (master weights, two moments)     buffers
    0          eP        eT          8T; bfloat16 12T
    1          eP        eT          12T/N                                       a bucket of gradients
    2          eP        eT/N        12T/N                                       a bucket of gradients
    3          eP/N      eT/N        12T/N                                       the bucket, gathered weights

Activations and logits follow from the layers of transformers' Llama, `models.policy` and `algo.logprobs`,
each sequence of a micro-batch being as long as allowed and each token a target.
`tests/integration/test_planned_memory.py` holds all of it against measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import GIB, Device

REDUCE_BUCKET = 500_000_000
"""Gradients that ZeRO 1-3 reduce at a time, at most (`training.engine`); the buffer is allocated whole."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 holds gathered at a time, at most (stage3_max_live_parameters)."""
SUB_GROUP = 1_000_000_000
"""Parameters that ZeRO-3 updates at a time (sub_group_size)."""
ENGINE_CONTEXT = 0.5 * GIB
"""CUDA's context and NCCL of an engine, beside its share: vLLM measures what it takes from after they were
made.
"""
ENGINE_LIBRARIES = 0.3 * GIB
"""Workspaces of CUDA's libraries of an engine, inside its share."""
GRAPHS = 1.0 * GIB
"""CUDA graphs of an engine."""
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a parameter of a quantized linear layer: 4 bits, a byte of scale for 64 of them, a float for 256
scales.
"""
HEAD_CHUNK = 1 << 27
"""Logits that are alive at a time, of those of a micro-batch (`models.policy`)."""
LOSS_CHUNK = {"cuda": 1 << 26, "cpu": 1 << 19}
"""Logits that `algo.logprobs` works on at a time, in float32."""


@dataclass(frozen=True)
class Bytes:
    """What lies on one device."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    """DeepSpeed's buckets and gathered weights, copies made while stepping, chunks of the loss."""
    cache: float = 0.0
    """KV cache."""

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, name) + getattr(other, name) for name in _KINDS))

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in _KINDS))


_KINDS = tuple(kind.name for kind in fields(Bytes))
NOTHING = Bytes()


@dataclass(frozen=True)
class ForwardPass:
    """The largest micro-batch of one rank."""

    tokens: int
    longest: int
    """Tokens of its longest sequence."""
    packed: bool = True
    """Sequences of different lengths in one row."""
    attention: str = "sdpa"


@dataclass(frozen=True)
class Model:
    """One model in the process of one rank."""

    shape: ModelShape
    deepspeed: DeepSpeedConfig
    trained: bool = True
    scores: bool = False
    """A score head in place of the language-model head."""
    lora: LoraConfig | None = None
    average: bool = False
    """A float32 moving average of the weights is kept beside them."""
    device: str = "cuda"
    head: str = "model"
    """With `float32`, logits are not rounded to the precision of the model."""

    @property
    def size(self) -> int:
        """Bytes of a parameter."""
        return 4 if self.deepspeed.dtype == "float32" else 2

    @property
    def trainable(self) -> int:
        if not self.trained:
            return 0
        if self.lora is None:
            return self._whole
        head = self.shape.hidden if self.scores else 0
        return self.shape.adapter_parameters(self.lora.r, self.lora.targets) + head

    @property
    def parameters(self) -> int:
        return self._whole + (self.trainable if self.lora is not None else 0)

    @property
    def _whole(self) -> int:
        return self.shape.score_parameters if self.scores else self.shape.parameters

    @property
    def _weights(self) -> float:
        if self.lora is None or self.lora.quantize is None:
            return self.size * self.parameters
        packed = self.shape.linear_parameters
        return self.size * (self.parameters - packed) + NF4 * packed

    @property
    def stage(self) -> int:
        """Only ZeRO-3 means anything for a frozen model."""
        stage = self.deepspeed.zero_stage
        return stage if self.trained or stage == 3 else 0

    @property
    def offloaded(self) -> bool:
        return self.deepspeed.offload != "none" and self.stage > 0

    @property
    def away(self) -> bool:
        """Whether the weights lie in host memory, too."""
        return self.deepspeed.offload == "all" and self.stage == 3

    # -- at rest --

    @property
    def state(self) -> Bytes:
        """Weights and optimizer state, between steps."""
        n = self.deepspeed.ranks
        weights = self._weights / (n if self.stage == 3 else 1)
        if self.stage == 3 and self.deepspeed.hpz > 1:
            weights += self._weights / self.deepspeed.hpz
        weights *= not self.away
        average = 4 * self._whole / (n if self.stage == 3 else 1) * self.average
        return Bytes(
            weights=weights,
            gradients=self.gradients if self.stage == 3 else 0.0,
            optimizer=0.0 if self.offloaded else self._optimizer,
            buffers=average + (self._bucket if self.stage == 3 else 0.0),
        )

    @property
    def _optimizer(self) -> float:
        n = self.deepspeed.ranks
        return 12 * self.trainable / n if self.stage else (8 if self.size == 4 else 12) * self.trainable

    @property
    def gradients(self) -> float:
        """As they accumulate over micro-batches."""
        if self.stage < 2:
            return self.size * self.trainable
        size = self.size if self.deepspeed.grad_accum_dtype is None else 4
        return 0.0 if self.offloaded else size * self.trainable / self.deepspeed.ranks

    @property
    def _bucket(self) -> float:
        return self.size * min(self.trainable, REDUCE_BUCKET) if self.stage else 0.0

    @property
    def host(self) -> float:
        """Bytes of a rank in host memory: offloaded optimizer state, a float32 gradient and a copy of the
        weights; and those that are not trained, where the weights are offloaded.
        """
        n = self.deepspeed.ranks
        optimizer = (self._optimizer + (4 + self.size) * self.trainable / n) * self.offloaded
        return optimizer + self.away * self.size * (self.parameters - self.trainable) / n

    @property
    def loading(self) -> Bytes:
        """While the model is loaded: all of it, before ZeRO cuts it; ZeRO-1 and 2 make a flat copy of what is
        trained.
        """
        return Bytes(weights=self._weights + self.size * self.trainable * (self.stage in (1, 2)))

    # -- at work: on top of `state` --

    def backward(self, batch: ForwardPass) -> Bytes:
        """The largest moment of a forward and backward pass, with the gradients of the micro-batches
        before.
        """
        shape, size = self.shape, self.size
        layers = (
            batch.tokens * shape.layers * (size * shape.hidden if self._checkpoints else self._layer(batch))
        )
        kept = layers + batch.tokens * (self._norm(shape.hidden) + size * shape.hidden)
        logits = self._logits(batch)
        # While a layer's own pass is undone: its activations, made again, and gradients inside its MLP.
        undone = batch.tokens * (
            size * (shape.intermediate + 2 * shape.hidden) + self._checkpoints * self._layer(batch)
        )
        # A new gradient lies beside the old one until it is added.
        new = size * shape.hidden * (self.lora is None)
        held = self.gradients if self.stage < 3 else 0.0
        common = Bytes(gradients=held, buffers=self._gathered)
        reducing = Bytes(buffers=self._bucket if self.stage in (1, 2) else 0.0)
        # In parts, the head's gradients are added up: the sum so far, the next one, and both together.
        sums = new * shape.vocabulary * (2 if batch.tokens * shape.vocabulary > HEAD_CHUNK else 0)
        chunks = self._chunks(logits, 3 if self.size == 2 else 2)
        loss = Bytes(activations=kept, logits=2 * logits, buffers=chunks + sums / 2)
        if self.stage == 1:
            loss = loss + reducing
        rounded = logits / 2 if self._logit != self.size else 0.0  # gradients of the logits in 16 bits
        weights = new * shape.vocabulary + sums
        head = (
            Bytes(activations=kept, logits=logits + rounded, buffers=weights + self._head_copies) + reducing
        )
        last = Bytes(activations=layers + undone, buffers=new * shape.intermediate) + reducing
        if self.scores:  # the last norm's gradients, in float32
            loss = head = Bytes(activations=kept + batch.tokens * 8 * shape.hidden) + reducing
        return common + max(loss, head, last, key=lambda moment: moment.total)

    @property
    def step(self) -> Bytes:
        """The optimizer step: gradients, and the float32 copies DeepSpeed makes of what it updates."""
        if self.offloaded:
            return Bytes(gradients=self.gradients if self.stage < 2 else 0.0)
        n, copies = self.deepspeed.ranks, self.size + (4 if self.size == 2 else 0)
        if self.stage == 3:
            return Bytes(buffers=copies * min(self.trainable, SUB_GROUP) / n)
        if self.stage:
            return Bytes(gradients=self.gradients, buffers=copies * self.trainable / n)
        flat = self.size * min(self.trainable, REDUCE_BUCKET)
        return Bytes(gradients=self.gradients, buffers=4 * self.trainable if self.size == 2 else flat)

    def scoring(self, batch: ForwardPass) -> Bytes:
        """A forward pass without gradients: one layer, the logits and the loss's chunks."""
        shape, logits = self.shape, self._logits(batch)
        layer = batch.tokens * (self.size * (3 * shape.intermediate + 4 * shape.hidden) + 8 * shape.hidden)
        return Bytes(
            activations=layer,
            logits=logits,
            buffers=self._gathered + max(self._chunks(logits, 3), self._head_copies),
        )

    # -- parts --

    @property
    def _gathered(self) -> float:
        """Whole weights that ZeRO-3 holds for what it computes now and soon again."""
        if self.stage < 3 or self.deepspeed.ranks == 1:
            return 0.0
        return self.size * min(self.parameters, LIVE_PARAMETERS)

    @property
    def _checkpoints(self) -> bool:
        return self.deepspeed.gradient_checkpointing

    def _logits(self, batch: ForwardPass) -> float:
        return 0.0 if self.scores else self._logit * min(batch.tokens * self.shape.vocabulary, HEAD_CHUNK)

    @property
    def _logit(self) -> int:
        """Bytes of one logit."""
        return 4 if self.head == "float32" else self.size

    @property
    def _head_copies(self) -> float:
        """Bytes of the copies of a 16-bit head with float32 logits: on the CPU,
        a float32 copy of its weight.
        """
        if self.scores or self._logit == self.size or self.device != "cpu":
            return 0.0
        return 4.0 * self.shape.hidden * self.shape.vocabulary

    def _chunks(self, logits: float, copies: int) -> float:
        return copies * min(4 * LOSS_CHUNK[self.device], 4 * logits / self._logit)

    def _layer(self, batch: ForwardPass) -> float:
        """A decoder layer's kept activations, per token."""
        shape, size = self.shape, self.size
        joined = (
            batch.packed and batch.attention == "sdpa"
        )  # outputs of the row's sequences, put together once more
        attention = size * ((3 if joined else 2) * shape.query + 2 * shape.kv) + 4 * shape.heads
        if batch.attention == "eager":
            attention += shape.heads * batch.longest * (4 + 2 * size)
        adapters = (
            0 if self.lora is None else size * self.lora.r * len(self.lora.targets or shape.linear_layers)
        )
        norms = 2 * self._norm(shape.hidden) + shape.qk_norm * self._norm(shape.query + shape.kv)
        return norms + attention + 4 * size * shape.intermediate + adapters

    def _norm(self, width: int) -> float:
        """Input in float32, normalised (for the gradient of the norm's weight), and output."""
        return width * (4 + self.size * (self.lora is None) + self.size)


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of a vLLM engine."""

    bytes: Bytes
    tokens: int
    """That the engine's KV cache holds, over all its GPUs."""


def engine_memory(
    shape: ModelShape, engine: EngineConfig, device: Device, head: str = "model"
) -> EngineMemory:
    """Return the memory of an engine. vLLM uses its share of the device for weights, the largest forward pass
    and KV cache.

    `head` is as in `Model`.
    """
    size = 4 if engine.dtype == "float32" else 2
    parallel = engine.tensor_parallel
    weights = shape.parameters * size / parallel
    # vLLM's own default for offline use (`max_num_batched_tokens`), which its profile run fills.
    batched = 16384 if device.memory >= 70 * GIB and not device.name.startswith("A100") else 8192
    layer = size * (3 * shape.intermediate / parallel + 6 * shape.hidden)
    work = batched * layer + engine.max_num_seqs * shape.vocabulary * ((4 if head == "float32" else size) + 8)
    work += ENGINE_LIBRARIES + (0 if engine.enforce_eager else GRAPHS)
    if device.is_cpu:
        work, cache = 0.0, engine.kv_cache_gib * GIB
    else:
        cache = max(0.0, engine.gpu_memory_utilization * device.memory - weights - work)
    per_token = 2 * shape.layers * shape.kv * size / parallel
    return EngineMemory(Bytes(weights=weights, activations=work, cache=cache), math.floor(cache / per_token))
