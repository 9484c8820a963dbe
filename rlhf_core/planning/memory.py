"""Memory per device of each model: trained, frozen, or in an engine.

Weights, gradients, optimizer state and buffers are what DeepSpeed 0.19 allocates for `engines.deepspeed`,
with P parameters, T of them trained, e bytes each (float32 4, bfloat16 2), N ranks:

    ZeRO       weights   gradients   optimizer (master weights, two moments)     buffers
    0          eP        eT          8T; bfloat16 12T
    1          eP        eT          12T/N                                       a bucket of gradients
    2          eP        eT/N        12T/N                                       a bucket of gradients
    3          eP/N      eT/N        12T/N                                       the bucket, gathered weights

Activations and logits follow from the layers of transformers' Llama, `models.policy` and `algo.logprobs`.
Each sequence of a micro-batch has the maximum length, and each token is a target.
`tests/integration/test_planned_memory.py` compares the result with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rlhf_core.config.base import HEAD_CHUNK, LOSS_CHUNK, REDUCE_BUCKET, SHORT_ATTENTION
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.hardware import GIB, Device

LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 holds gathered at a time, at most (stage3_max_live_parameters)."""
SUB_GROUP = 1_000_000_000
"""Parameters that ZeRO-3 updates at a time (sub_group_size)."""
ENGINE_CONTEXT = 0.5 * GIB
"""CUDA's context and NCCL of an engine. They are outside of its share, because vLLM measures the free memory
after they were created.
"""
ENGINE_LIBRARIES = 0.3 * GIB
"""Workspaces of CUDA's libraries of an engine, inside its share."""
GRAPHS = 1.0 * GIB
"""CUDA graphs of an engine."""
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a parameter of a quantized linear layer: 4 bits, a byte of scale for 64 of them, a float for 256
scales.
"""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of a number in `dtype`: "float32", "bfloat16" or "float16"."""
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True)
class Bytes:
    """Memory in use on one device, by kind."""

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
        # Written out, because a search adds some hundred thousand of them.
        return Bytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
            self.logits + other.logits,
            self.buffers + other.buffers,
            self.cache + other.cache,
        )

    @cached_property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return float(state + self.activations + self.logits + self.buffers + self.cache)


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
    """Whether a float32 moving average of the weights is kept."""
    device: str = "cuda"
    head: str = "model"
    """Precision of the logits. With `float32`, they are not rounded to that of the model."""

    @property
    def size(self) -> int:
        """Bytes of a parameter."""
        return dtype_bytes(self.deepspeed.dtype)

    @property
    def trainable(self) -> int:
        if not self.trained:
            return 0
        if self.lora is None:
            return self._model_parameters
        head = self.shape.hidden if self.scores else 0
        return self.shape.adapter_parameters(self.lora.r, self.lora.targets) + head

    @property
    def parameters(self) -> int:
        if self.lora is None:
            return self._model_parameters
        return self._model_parameters + self.trainable

    @property
    def _model_parameters(self) -> int:
        return self.shape.score_parameters if self.scores else self.shape.parameters

    @property
    def _weights(self) -> float:
        if self.lora is None or self.lora.quantize is None:
            return self.size * self.parameters
        packed = self.shape.linear_parameters
        return self.size * (self.parameters - packed) + NF4 * packed

    @property
    def stage(self) -> int:
        """The ZeRO stage. For a frozen model, only ZeRO-3 has an effect."""
        if not self.trained and self.deepspeed.zero_stage < 3:
            return 0
        return self.deepspeed.zero_stage

    @property
    def _shards(self) -> int:
        """Ranks over which the weights are divided."""
        return self.deepspeed.ranks if self.stage == 3 else 1

    @property
    def offloaded(self) -> bool:
        return self.deepspeed.offload != "none" and self.stage > 0

    @property
    def weights_offloaded(self) -> bool:
        """Whether the weights are in host memory too."""
        return self.deepspeed.offload == "all" and self.stage == 3

    # -- between steps --

    @property
    def state(self) -> Bytes:
        """Weights and optimizer state, between steps."""
        weights, optimizer = self._weights / self._shards, self._optimizer
        if self.stage == 3 and self.deepspeed.hpz > 1:
            weights += self._weights / self.deepspeed.hpz
        if self.weights_offloaded:
            weights = 0.0
        if self.offloaded:
            optimizer = 0.0
        if self.stage < 3:
            return Bytes(weights=weights, optimizer=optimizer, buffers=self._average)
        # ZeRO-3 allocates gradients and bucket once, at its start. For other stages, `backward` counts them.
        buffers = self._average + self._bucket
        return Bytes(weights=weights, gradients=self.gradients, optimizer=optimizer, buffers=buffers)

    @property
    def while_sampling(self) -> Bytes:
        """State that stays on the device while engines sample there (`engines.deepspeed.offload_states`)."""
        state = self.state
        if not self.trained or self.offloaded or not self.stage:
            return state
        # ZeRO-3 keeps the float32 weights, 4 of 12 bytes.
        optimizer = state.optimizer / 3 if self.stage == 3 else 0.0
        return Bytes(weights=state.weights, optimizer=optimizer, buffers=self._average)

    @property
    def _average(self) -> float:
        """Bytes of the float32 moving average of the trained weights; 0 if none is kept."""
        if not self.average:
            return 0.0
        return 4 * self.trainable / self._shards

    @property
    def _optimizer(self) -> float:
        n = self.deepspeed.ranks
        # ZeRO clones the weights as master weights, also those that are in float32 already.
        if self.stage:
            return 12 * self.trainable / n
        # Without ZeRO, float32 weights have no separate master copy.
        return (8 if self.size == 4 else 12) * self.trainable

    @property
    def gradients(self) -> float:
        """Bytes of the gradients that are accumulated over micro-batches."""
        if self.stage < 2:
            return self.size * self.trainable
        if self.offloaded:
            return 0.0
        size = self.size if self.deepspeed.grad_accum_dtype is None else 4
        return size * self.trainable / self.deepspeed.ranks

    @property
    def _bucket(self) -> float:
        """Bytes of gradients that are being reduced. On GPUs, ZeRO-2 fills a second bucket meanwhile."""
        if not self.stage:
            return 0.0
        bucket = self.size * min(self.trainable, REDUCE_BUCKET)
        # Where `engines.deepspeed` sets `overlap_comm`.
        if self.stage == 2 and self.device == "cuda" and self.deepspeed.ranks > 1:
            return 2 * bucket
        return bucket

    @property
    def host(self) -> float:
        """Bytes of a rank in host memory.

        With an offloaded optimizer: its state, a float32 gradient and a copy of the weights. With offloaded
        weights also those that are not trained.
        """
        n = self.deepspeed.ranks
        host = 0.0
        if self.offloaded:
            host += self._optimizer + (4 + self.size) * self.trainable / n
        if self.weights_offloaded:
            host += self.size * (self.parameters - self.trainable) / n
        return host

    @property
    def loading(self) -> Bytes:
        """Memory while the model is loaded.

        With ZeRO-3, `models.sharded` cuts each tensor when it was read: there are the shards of this rank and
        two whole tensors. Otherwise the model is loaded whole; ZeRO-1 and 2 make a flat copy of the trained
        parameters.
        """
        if self.stage == 3 and (self.lora is None or self.lora.quantize is None):
            # The embedding, a matrix of an MLP, or all experts.
            largest = self.shape.hidden * max(self.shape.vocabulary, self.shape.mlp_rows)
            buffers = 2.0 * self.size * largest
            return Bytes(weights=self._weights / self.deepspeed.ranks, buffers=buffers)
        weights = self._weights
        if self.stage in (1, 2):
            weights += self.size * self.trainable
        return Bytes(weights=weights)

    # -- while computing, in addition to `state` --

    def backward(self, batch: ForwardPass) -> Bytes:
        """Return the peak of a forward and backward pass, with the gradients of the micro-batches before."""
        per_layer = self._layer(batch)
        if self.deepspeed.gradient_checkpointing:
            per_layer = self.size * self.shape.hidden  # only the input of each layer is kept
        layers = batch.tokens * self.shape.layers * per_layer
        norm = batch.tokens * (self._norm(self.shape.hidden) + self.size * self.shape.hidden)
        if self.scores:
            peaks = [self._score_peak(batch, layers + norm)]
        else:
            peaks = [self._loss_peak(batch, layers + norm), self._head_peak(batch, layers + norm)]
        # The backward pass reaches these places one after the other, so that the largest one counts and not
        # the sum.
        peaks.append(self._layer_peak(batch, layers))
        common = Bytes(buffers=self._gathered)
        if self.stage < 3:
            common = Bytes(gradients=self.gradients, buffers=self._gathered)
        return common + max(peaks, key=lambda peak: peak.total)

    def _score_peak(self, batch: ForwardPass, kept: float) -> Bytes:
        """Return the memory in the backward pass of the last norm: its gradients are in float32."""
        return Bytes(activations=kept + batch.tokens * 8 * self.shape.hidden) + self._reducing

    def _loss_peak(self, batch: ForwardPass, kept: float) -> Bytes:
        """Return the memory in the backward pass of the loss: the logits, their gradient, and the first of
        `_head_sums`.
        """
        logits = self._logits(batch)
        chunks = self._chunks(logits, 3 if self.size == 2 else 2)
        peak = Bytes(activations=kept, logits=2 * logits, buffers=chunks + self._head_sums(batch) / 2)
        if self.stage == 1:
            peak += self._reducing
        return peak

    def _head_peak(self, batch: ForwardPass, kept: float) -> Bytes:
        """Return the memory in the backward pass of the head."""
        logits = self._logits(batch)
        if self._logit != self.size:
            logits += logits / 2  # gradients of the logits in 16 bits
        weights = self._new_gradients * self.shape.vocabulary + self._head_sums(batch)
        buffers = weights + self._head_copies
        return Bytes(activations=kept, logits=logits, buffers=buffers) + self._reducing

    def _layer_peak(self, batch: ForwardPass, layers: float) -> Bytes:
        """Return the memory in the backward pass of a layer: its activations, recomputed, and gradients
        inside its MLP.
        """
        per_token: float = self.size * (self.shape.intermediate + 2 * self.shape.hidden)
        if self.deepspeed.gradient_checkpointing:
            per_token += self._layer(batch)
        activations = layers + batch.tokens * per_token
        buffers = self._new_gradients * self.shape.mlp_rows
        return Bytes(activations=activations, buffers=buffers) + self._reducing

    @property
    def step(self) -> Bytes:
        """Memory of the optimizer step: gradients, and float32 copies that DeepSpeed makes of what it
        updates.
        """
        if self.offloaded:
            return Bytes(gradients=self.gradients)
        n, copies = self.deepspeed.ranks, 4 if self.size == 4 else 6
        if self.stage == 3:
            return Bytes(buffers=copies * min(self.trainable, SUB_GROUP) / n)
        if self.stage:
            buffers = copies * self.trainable / n
        elif self.size == 2:
            buffers = 4.0 * self.trainable
        else:
            buffers = 4.0 * min(self.trainable, REDUCE_BUCKET)
        return Bytes(gradients=self.gradients, buffers=buffers)

    def scoring(self, batch: ForwardPass) -> Bytes:
        """Return the memory of a forward pass without gradients: one layer, logits and chunks of the loss."""
        shape, logits = self.shape, self._logits(batch)
        layer = batch.tokens * (self.size * (3 * shape.intermediate + 4 * shape.hidden) + 8 * shape.hidden)
        return Bytes(
            activations=layer,
            logits=logits,
            buffers=self._gathered + max(self._chunks(logits, 3), self._head_copies),
        )

    # -- parts --

    @property
    def _reducing(self) -> Bytes:
        return Bytes(buffers=self._bucket if self.stage in (1, 2) else 0.0)

    @property
    def _new_gradients(self) -> int:
        """Bytes of a row of new gradients, which are kept next to the old ones until they are added."""
        return self.size * self.shape.hidden if self.lora is None else 0

    def _head_sums(self, batch: ForwardPass) -> int:
        """Return the bytes of two sums of the head's gradients, if it is computed in parts: the sum so far,
        and the one with the next part.
        """
        if batch.tokens * self.shape.vocabulary <= HEAD_CHUNK:
            return 0
        return 2 * self._new_gradients * self.shape.vocabulary

    @property
    def _gathered(self) -> float:
        """Bytes of gathered weights that ZeRO-3 keeps because it needs them now or soon."""
        if self.stage < 3 or self.deepspeed.ranks == 1:
            return 0.0
        return self.size * min(self.parameters, LIVE_PARAMETERS)

    def _logits(self, batch: ForwardPass) -> float:
        if self.scores:
            return 0.0
        return self._logit * min(batch.tokens * self.shape.vocabulary, HEAD_CHUNK)

    @property
    def _logit(self) -> int:
        """Bytes of one logit."""
        return 4 if self.head == "float32" else self.size

    @property
    def _head_copies(self) -> float:
        """Bytes of the copies of a 16-bit head with float32 logits: on the CPU, a float32 copy of
        its weight.
        """
        if self.scores or self._logit == self.size or self.device != "cpu":
            return 0.0
        return 4.0 * self.shape.hidden * self.shape.vocabulary

    def _chunks(self, logits: float, copies: int) -> float:
        return copies * min(4 * LOSS_CHUNK[self.device], 4 * logits / self._logit)

    def _layer(self, batch: ForwardPass) -> float:
        """Return the bytes per token of a decoder layer's activations that the backward pass needs."""
        shape, size = self.shape, self.size
        # Queries and outputs, keys and values, and the log-sum-exp of each head, in float32.
        attention = size * (2 * shape.query + 2 * shape.kv) + 4 * shape.heads
        if batch.packed and batch.attention == "sdpa":
            attention += size * shape.query  # the outputs of the sequences of a row, concatenated
        if batch.attention == "eager":
            attention += shape.heads * batch.longest * (4 + 2 * size)
        elif batch.attention == "sdpa" and self.device == "cpu" and size == 2:
            # `short_attention`: probabilities, and keys and values that are repeated for groups of heads.
            # With AMX the probabilities are computed again, and this is more than is needed.
            attention += size * (shape.heads * min(batch.longest, SHORT_ATTENTION) + 2 * shape.query)
        adapters = 0
        if self.lora is not None:
            adapters = size * self.lora.r * len(self.lora.targets or shape.linear_layers)
        norms = 2 * self._norm(shape.hidden)
        if shape.qk_norm:
            norms += self._norm(shape.query + shape.kv)
        # Of the MLP: gate, activation of the gate, up, and the product of the last two.
        return norms + attention + 4 * size * shape.intermediate + adapters

    def _norm(self, width: int) -> float:
        """Return the bytes of a norm: input in float32, normalised input (for its weight's gradient), and
        output.
        """
        return width * (4 + self.size * (2 if self.lora is None else 1))


def asleep(engine: EngineConfig) -> Bytes:
    """Return the memory that a sleeping engine keeps (`ppo.engine.sleep_level`)."""
    return Bytes(activations=ENGINE_LIBRARIES + (0.0 if engine.enforce_eager else GRAPHS))


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of a vLLM engine."""

    bytes: Bytes
    tokens: int
    """Tokens that the engine's KV cache holds, over all its GPUs."""


def engine_memory(
    shape: ModelShape, engine: EngineConfig, device: Device, head: str = "model"
) -> EngineMemory:
    """Return the memory of an engine.

    vLLM uses its share of the device for the weights, the largest forward pass and the KV cache. `head` has
    the same meaning as in `Model`.
    """
    size = dtype_bytes(engine.dtype)
    parallel = engine.tensor_parallel
    weights = shape.parameters * size / parallel
    # vLLM's own default for offline use (`max_num_batched_tokens`), which its profile run fills.
    batched = 16384 if device.memory >= 70 * GIB and not device.name.startswith("A100") else 8192
    layer = size * (3 * shape.intermediate / parallel + 6 * shape.hidden)
    work = batched * layer + engine.max_num_seqs * shape.vocabulary * ((4 if head == "float32" else size) + 8)
    work += asleep(engine).total
    if device.is_cpu:
        # vLLM on CPUs takes a cache of this size, and no share of the memory.
        work, cache = 0.0, engine.kv_cache_gib * GIB
    else:
        # A share that is too small is a cache of 0 tokens, which `search.compare_memory` reports.
        cache = max(0.0, engine.gpu_memory_utilization * device.memory - weights - work)
    per_token = 2 * shape.cached_layers * shape.kv * size / parallel
    return EngineMemory(Bytes(weights=weights, activations=work, cache=cache), math.floor(cache / per_token))
