"""Sections `ppo.engine` and `ppo.weight_sync`: the vLLM engines and how they receive weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rlhf_core.config.base import (
    TRIES,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    execution,
    result,
    rounding,
)

_ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
MAX_ENGINE_RANK = _ENGINE_RANKS[-1]
"""The largest rank of an adapter that vLLM serves."""


def engine_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM for an adapter of this rank."""
    return next(size for size in _ENGINE_RANKS if size >= rank)


class EngineConfig(Section):
    """The vLLM engines that sample rollouts."""

    count: PositiveInt = result(1, within=Range(1, 1024, "each is a process with a copy of the policy"))
    """Number of engines"""
    tensor_parallel: PositiveInt = result(1, within=Range(1, 256, "GPUs of one engine"))
    """GPUs of one engine, or processes on the CPU; it must divide the attention heads"""
    dtype: Literal["float32", "bfloat16", "float16"] = result("float32")
    """Precision of the engines; by default that of the policy"""
    gpu_memory_utilization: Fraction = execution(0.85)
    """Share of GPU memory for weights and KV cache; lower it when colocated"""
    kv_cache_gib: PositiveFloat = execution(
        1.0, within=Range(0.01, 4096, "larger than the memory of any host")
    )
    """KV cache of a CPU engine in GiB"""
    max_num_seqs: PositiveInt = rounding(256, within=Range(1, 65536, "each sequence needs memory"))
    """Sequences decoded at once by one engine"""
    prefix_caching: bool = rounding(False)
    """Compute the keys and values of a prompt once for all its samples, and of equal beginnings of prompts
    once in a step. Whole blocks of tokens are kept (16 on GPUs, 128 on CPUs), until the next sync or
    evaluation
    """
    enforce_eager: bool = result(True)
    """No CUDA graphs: slower decoding, faster start"""
    max_restarts: NonNegativeInt = execution(3, within=TRIES)
    """How often in a row an engine that dies or hangs before its first answer is restarted"""
    min_count: PositiveInt | None = execution(None)
    """The run continues with at least this number of engines after others have used up their restarts. null:
    all are needed, because fewer would sample in other batches
    """

    sleep_level: Literal[0, 1, 2] = execution(0)
    """With ppo.colocate=all on GPUs: engines and trainers use the same memory in turns. While the trainers
    compute, the engines have no KV cache and no weights on the device: 1 keeps the weights in host memory, 2
    drops them, because the next sync sends them all. While the engines sample, the trainers' optimizer states
    are in host memory. 0: both stay on the device
    """

    @property
    def needed(self) -> int:
        """Number of engines without which the run ends."""
        return self.min_count or self.count

    def problems(self) -> Iterator[str]:
        if self.needed > self.count:
            yield (
                f"ppo.engine.min_count must be at most ppo.engine.count ({self.count}); got {self.min_count}"
            )


class WeightSyncConfig(Section):
    """Transfer of weights from the training ranks to the engines."""

    backend: Literal["auto", "gloo", "nccl", "ipc"] = result("auto")
    """`auto`: gloo on CPU, ipc when policy and engines share GPUs, otherwise nccl, or gloo where torch was
    built without NCCL
    """
    lora: Literal["merged", "adapter"] | None = result(None)
    """With ppo.lora: send the weights with the adapter merged into them (`merged`), or only the adapter,
    which the engines then apply (`adapter`). Evaluation loads the policy in the same way. null: `merged` if
    policy and engines compute in float32 or the adapter is quantized or above rank 512, else `adapter`,
    because a merge that is rounded to bfloat16 loses a large part of a small update. `adapter` needs a model
    class that supports LoRA in vLLM. For other classes the engine does not start, and `merged` must be set
    """
    bucket_mib: PositiveInt | None = execution(
        None, within=Range(1, 16384, "a bucket is held twice in memory")
    )
    """Weights are sent in packed buckets of this size; null: 64 on CPUs, and 512 on GPUs, where each bucket
    costs a call of the engines and a synchronization of the ranks
    """
    canary: bool = execution(True)
    """In every step, compare engine and trainer log-probabilities of the same tokens and stop if they differ
    """
    canary_tolerance: PositiveFloat = execution(
        1e-3, within=Range(1e-9, 10, "with a larger difference the engines have other weights")
    )
    """Largest mean absolute difference of log-probabilities allowed; outside float32 at least 0.05. Above
    half of it, a warning is logged and rollout/logprob_gap_alarm is set
    """

    def bucket_bytes(self, device: str) -> int:
        """Return the size of a bucket on "cpu" or "cuda"."""
        if self.bucket_mib is not None:
            return self.bucket_mib << 20
        return (512 if device == "cuda" else 64) << 20
