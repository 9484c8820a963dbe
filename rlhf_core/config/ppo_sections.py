"""Sections and maps of `ppo`: the vLLM engines and how they receive weights, KL, overlong penalty, dynamic
filtering, losses, pretraining loss, guards (docs/diagnose.md). The default steps between evaluations and
between checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from rlhf_core.config.base import (
    BATCH,
    COEFFICIENT,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    execution,
    result,
    rounding,
)
from rlhf_core.config.rewards import UserFunction

ConfiguredAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
]
"""`-norm` is `seq-mean-token-sum` with a constant divisor (`PPOConfig.loss_divisor`)."""


# vLLM allocates the matrices of an adapter for one of these ranks, and refuses others.
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
    # Off, because a prompt that is partly cached is rounded in another way (decision 45).
    prefix_caching: bool = rounding(False)
    """Compute the keys and values of a prompt once for all its samples, and of equal beginnings of prompts
    once in a step. Whole blocks of tokens are kept (16 on GPUs, 128 on CPUs), until the next sync or
    evaluation
    """
    enforce_eager: bool = result(True)
    """No CUDA graphs: slower decoding, faster start"""
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


class KLConfig(Section):
    """The penalty for divergence from the reference model."""

    coef: NonNegativeFloat = result(0.02, within=COEFFICIENT)
    """Coefficient of the per-token KL, or its initial value if it is adaptive. InstructGPT uses 0.02 (Ouyang
    et al. 2022), LLaMA-2 and OpenRLHF use 0.01
    """
    place: Literal["reward", "loss"] = result("reward")
    """Where the KL is applied: subtracted from each token's reward, or added to the policy loss. The loss is
    the default of algorithms that compare the samples of a prompt, if no `estimator` is set: their advantages
    have no baseline for the KL of a token
    """
    estimator: Literal["k1", "abs", "k2", "k3"] | None = result(None)
    """Per-token estimator (Schulman, Approximating KL divergence). null: k1 in the reward and k2 in the loss,
    which have the gradient of the KL. k1 in the loss has no gradient in expectation and is refused; other
    estimators cause a warning (arXiv 2512.21852)
    """
    target: PositiveFloat | None = result(None)
    """If set, the coefficient adapts to reach this KL, in nats per response (mean over sequences of the token
    sum). null: the coefficient is constant
    """
    horizon: PositiveInt | None = result(None)
    """With a target: number of responses over which the coefficient may change by 20 % (Ziegler et al. 2019,
    who used 10000). null: 20 times the responses of a step, so that it changes by at most 1 % per step
    """

    @property
    def used_estimator(self) -> Literal["k1", "abs", "k2", "k3"]:
        """`estimator`, or the default for `place`."""
        return self.estimator or ("k1" if self.place == "reward" else "k2")

    def problems(self) -> Iterator[str]:
        if self.target is not None and self.coef == 0:
            yield (
                f"ppo.kl.target={self.target:g} with ppo.kl.coef=0 has no effect, because the coefficient is"
                " multiplied in each step and stays 0; use a coef above 0, or leave the target out"
            )
        if self.place == "loss" and self.estimator == "k1":
            yield (
                "ppo.kl.estimator=k1 with ppo.kl.place=loss has no effect on the policy: its gradient is 0 in"
                " expectation; use k2 or leave estimator out, or set ppo.kl.place=reward"
            )


class TeacherConfig(Section):
    """A model that replaces the SFT model as reference (on-policy distillation, docs/distillation.md)."""

    path: UserPath = content(..., min_length=1)
    """Folder, Hugging Face id or [reference](rounds.md#references) of a language model with the same tokens
    """
    revision: str | None = content(None)
    """Commit of a hub model in `path`"""


class DifficultyConfig(Section):
    """The prompts that are trained on, by a pass rate in their rows ([difficulty](grpo.md#6-difficulty))."""

    field: str = result("pass_rate", min_length=1)
    """Field of the prompt's row with its pass rate. Prompts without a number there are left out"""
    min: Fraction = result(0.0)
    """Prompts with a lower pass rate are left out"""
    max: Fraction = result(1.0)
    """Prompts with a higher pass rate are left out"""
    order: Literal["shuffled", "easy_first"] = result("shuffled")
    """`easy_first`: each pass over the prompts begins with the highest pass rates"""

    def problems(self) -> Iterator[str]:
        if self.min > self.max:
            yield f"min must be at most max ({self.max:g}); got {self.min:g}; exchange them"


class OverlongConfig(Section):
    """DAPO's soft penalty for responses close to the length limit (Yu et al. 2025)."""

    buffer: PositiveInt = result(...)
    """The penalty starts this many tokens before ppo.max_new_tokens"""
    factor: PositiveFloat = result(1.0)
    """Subtracted from the score at the limit; linear in between"""


class DynamicFilteringConfig(Section):
    """DAPO's dynamic sampling: replace prompts whose samples all have the same score, and so no gradient."""

    max_rounds: PositiveInt = result(3, within=Range(1, 100, "each round samples a whole batch"))
    """Rounds of replacement prompts in one step; prompts that are still not replaced are kept and counted"""


class SequenceLoss(Section):
    """The clipped surrogate with one ratio for each response (GSPO, Zheng et al. 2025, arXiv 2507.18071). Its
    `aggregation` is seq-mean-token-mean, if none is set.
    """

    type: Literal["gspo"] = "gspo"
    # Both bounds are those of the paper's experiments: the ratio of a whole response varies little.
    clip_low: Fraction = result(3e-4)
    """The ratio of a response is clipped below 1 - this"""
    clip_high: PositiveFloat = result(4e-4)
    """The ratio of a response is clipped above 1 + this"""


class ClippedWeightLoss(Section):
    """The log-probability times the advantage and the clipped ratio, which has no gradient (CISPO, MiniMax
    2025, arXiv 2506.13585): clipped tokens are trained as well.
    """

    type: Literal["cispo"] = "cispo"
    clip_low: Fraction = result(1.0)
    """The ratio is clipped below 1 - this. 1: no lower bound"""
    clip_high: PositiveFloat = result(4.0)
    """The ratio is clipped above 1 + this"""


class PythonLoss(UserFunction):
    """A user-defined function: `LossInputs -> (loss, metrics)`. docs/own-loss.md has an example."""

    type: Literal["python"] = "python"


AnyLoss = Annotated[SequenceLoss | ClippedWeightLoss | PythonLoss, Field(discriminator="type")]


class PythonAdvantages(UserFunction):
    """A user-defined function: `AdvantageInputs -> (advantages_B, metrics)`. docs/own-loss.md has an
    example.
    """

    type: Literal["python"] = result("python")
    """Other types do not exist"""


class PTXConfig(Section):
    """Pretraining loss mixed into the policy's update (Ouyang et al. 2022, eq. 2)."""

    coef: PositiveFloat = result(..., within=COEFFICIENT)
    """Weight of the token loss on the demonstrations of stage `data`"""
    batch_size: PositiveInt = result(16, within=BATCH)
    """Demonstrations per optimizer step, over all ranks"""


def default_evaluation_interval(steps: int, sync_every: int) -> int:
    """Return the steps between evaluations: a tenth of the `steps` of the run, rounded up to a multiple of
    `sync_every` (`ppo.sync_every`). A number above 10 is rounded down to a multiple of 5 as well.
    """
    every = math.ceil(max(1, steps // 10) / sync_every) * sync_every
    unit = math.ceil(5 / sync_every) * sync_every
    return every - every % unit if every > 10 and every >= unit else every


GuardName = Literal[
    "eos_loss",
    "entropy_collapse",
    "entropy_explosion",
    "negative_kl",
    "length_drift",
    "loops",
    "score_length",
    "blind_critic",
    "score_clip",
    "overoptimization",
    "diversity_loss",
]
GuardAction = Literal["warn", "stop", "off"]
"""`warn`: log, metric and tag. `stop`: the stage also ends. `off`: the condition is not checked."""


class GuardLimit(NamedTuple):
    """The limit of a guard: its default, and the values that it must be above and below."""

    default: float
    above: float = 0.0
    below: float = math.inf
    reason: str = ""
    """Why a value outside makes no sense."""


_UNCHANGED = ", because an unchanged policy would raise the guard otherwise"
# Most are relative to the first step, which the SFT model samples: no absolute limit of entropy, length or
# EOS is right for every model (decision 19).
LIMITS: dict[GuardName, GuardLimit] = {
    # A multiple of the initial value: the share of responses with EOS, the entropy, the mean length.
    "eos_loss": GuardLimit(0.5, below=1, reason=_UNCHANGED),
    "entropy_collapse": GuardLimit(0.1, below=1, reason=_UNCHANGED),
    "entropy_explosion": GuardLimit(3.0, above=1, reason=_UNCHANGED),
    "length_drift": GuardLimit(2.0, above=1, reason=_UNCHANGED),
    # Nats per response below 0, as in TRL's warning.
    "negative_kl": GuardLimit(1.0),
    # A share of the responses, and of the scores.
    "loops": GuardLimit(0.2, below=1),
    "score_clip": GuardLimit(0.01, below=1),
    # A Pearson correlation of either sign.
    "score_length": GuardLimit(0.9, below=1),
    # Consecutive steps, in place of `ppo.guard_patience`.
    "blind_critic": GuardLimit(20),
    # A multiple of the correlation over the SFT model's responses.
    "overoptimization": GuardLimit(0.65, below=1),
    # A multiple of the share of distinct word pairs in the SFT model's responses.
    "diversity_loss": GuardLimit(0.5, below=1, reason=_UNCHANGED),
}


def _check_limits(limits: dict[GuardName, float]) -> dict[GuardName, float]:
    for name, value in limits.items():
        default, above, below, reason = LIMITS[name]
        if not above < value < below:
            rule = f"above {above:g}" if value <= above else f"below {below:g}"
            raise ValueError(
                f"ppo.guard_limits.{name} must be {rule}{reason}; got {value:g}; leave it out ({default:g})"
            )
    return limits


GuardLimits = Annotated[dict[GuardName, NonNegativeFloat], AfterValidator(_check_limits)]


def guard_limit(limits: Mapping[GuardName, float], name: GuardName) -> float:
    """Return the limit of a guard in `ppo.guard_limits`, or its default."""
    return limits.get(name, LIMITS[name].default)
