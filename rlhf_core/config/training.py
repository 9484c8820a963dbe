"""Sections `sft`, `reward` and `dpo`, and the optimizer and DeepSpeed settings that PPO shares with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, field_validator

from rlhf_core.config.base import (
    BATCH,
    COEFFICIENT,
    PASSES,
    RANKS,
    TOKENS,
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
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
from rlhf_core.config.redact import shown


def _packing(value: Any) -> Any:
    """Validate the field with one message. Pydantic has one message for each of the two types."""
    if isinstance(value, bool) or value == "auto":
        return value
    meant = "true" if str(value).lower() in ("yes", "on", "y", "1") else "false"
    raise ValueError(f"must be true or false, or auto; got {shown(value)}; write {meant}")


Packing = Annotated[bool | Literal["auto"], BeforeValidator(_packing)]
"""`auto` is resolved to true or false when the model is loaded (`models.selftest`)."""


class PackedSection(Section):
    """A section with a field `pack`."""

    pack: Packing = result("auto")
    """Put several sequences into one row, without attention between them. `false`: right-padded rows.
    `auto`: rows are packed if the model supports it, which is tested when it is loaded. `true`: a model that
    does not support it is refused
    """

    @property
    def packs(self) -> bool:
        """Whether rows are packed. `auto` counts as false, which is always correct, until a test."""
        return self.pack is True


class OptimizerConfig(Section):
    """AdamW with warm-up and decay."""

    constants: ClassVar = {"eps": 1e-8}

    learning_rate: PositiveFloat = result(
        1e-5, within=Range(1e-20, 100, "no training of a language model converges above it")
    )
    """Peak learning rate. With `lora` the default is ten times that of all parameters (Schulman et al. 2025,
    LoRA Without Regret)
    """
    weight_decay: NonNegativeFloat = result(0.0, within=Range(0, 10, "0.1 is usual"))
    """Decoupled weight decay"""
    betas: tuple[Decay, Decay] = result((0.9, 0.95))
    """Adam's moment decays"""
    warmup_ratio: Fraction = result(0.05)
    """Share of the optimizer steps in which the learning rate rises linearly"""
    schedule: Literal["cosine", "linear", "constant"] = result("cosine")
    """Decay after the warm-up"""
    min_lr_ratio: Fraction = result(0.1)
    """Learning rate at the end of the decay, as a share of the peak"""
    max_grad_norm: PositiveFloat = result(
        1.0, within=Range(1e-6, 1e12, "lower values stop the training, and higher ones have no effect")
    )
    """Global gradient norm is clipped to this"""


class DeepSpeedConfig(Section):
    """How one model is distributed over ranks."""

    ranks: PositiveInt = rounding(1, within=RANKS)
    """Data-parallel training ranks (processes; one GPU each where there are GPUs). A checkpoint of another
    number is converted
    """
    zero_stage: Literal[0, 1, 2, 3] = result(0)
    """ZeRO: 1 shards optimizer state, 2 also gradients, 3 also parameters"""
    hpz: PositiveInt = rounding(1)
    """ZeRO++ (hpZ), with ZeRO-3 on several hosts: backward passes gather parameters from a second copy that
    is sharded over this number of neighbouring ranks, those of one host; 1: no such copy
    """
    offload: Literal["none", "optimizer", "all"] = result("none")
    """Keep in host memory (GPU): `optimizer` its state (ZeRO 1-3), `all` the parameters as well (ZeRO 3)"""
    dtype: Literal["float32", "bfloat16", "float16"] = result("float32")
    """Compute precision; the default on GPUs is bfloat16. bfloat16 and float16 keep float32 master weights,
    float16 (GPU, ZeRO 1-3) scales the loss, first by 65536 and by half of the last scale after each gradient
    that overflows. On CPUs bfloat16 is faster than float32 only with amx_bf16 or AMD's avx512_bf16
    """
    grad_accum_dtype: Literal["float32"] | None = result(None)
    """`float32`: with bfloat16, add up the gradients of micro-batches in float32 (ZeRO 2 and 3 without
    offload); null: in bfloat16, where sums of several hundred micro-batches lose small values
    """
    gradient_checkpointing: bool = rounding(False)
    """Recompute activations in the backward pass"""

    def problems(self) -> Iterator[str]:
        if self.ranks % self.hpz:
            yield f"hpz must divide ranks ({self.ranks}); got {self.hpz}; use the ranks of one host"


_ADAPTER_WIDTH = Range(1, 8192, "wider than the layers of any model")


class LoraConfig(Section):
    """Low-rank adapters on a frozen model (Hu et al. 2021): each adapted layer adds `alpha / r * B A x`."""

    # No dropout: a continued run must have the same bits, and the ratio of PPO's first step must be 1
    # (decision 7).
    r: PositiveInt = result(16, within=_ADAPTER_WIDTH)
    """Rank of the adapters"""
    alpha: PositiveInt = result(32, within=_ADAPTER_WIDTH)
    """Their output is scaled by alpha / r"""
    targets: tuple[str, ...] | None = result(None, min_length=1)
    """Names of the linear layers that get one, such as q_proj; null: all linear layers of the decoder"""
    quantize: Literal["nf4"] | None = result(None)
    """`nf4`: the frozen weights in 4 bits (QLoRA; needs a GPU and bitsandbytes); null: not quantized"""

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in targets or ():
            # PEFT also takes the end of a path, but the plan counts layers by their names.
            if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                raise ValueError(
                    f"targets must be names of layers, not patterns or paths; got {name!r}; use q_proj"
                )
        return targets


def adapter_rate(rate: float) -> float:
    """Return the learning rate of adapters for that of all parameters: ten times as much (Schulman et al.
    2025, LoRA Without Regret).
    """
    return float(f"{10 * rate:.12g}")  # 1e-5 and not 9.999999999999999e-06


class EarlyStopConfig(Section):
    """End the training when the held-out loss no longer falls, and keep the weights with the lowest one."""

    every: PositiveInt = result(50)
    """Optimizer steps between evaluations on the held-out rows"""
    patience: PositiveInt | None = result(3)
    """Number of consecutive evaluations without a lower loss after which the training ends; null: all epochs,
    and then the weights with the lowest loss
    """


class TrainingSection(PackedSection):
    """Settings of every stage that trains one model."""

    optimizer: OptimizerConfig = result(OptimizerConfig())
    """AdamW and its schedule"""
    deepspeed: DeepSpeedConfig = result(DeepSpeedConfig())
    """Ranks, ZeRO, precision"""
    lora: LoraConfig | None = result(None)
    """Train adapters only; null: all parameters"""
    epochs: PositiveInt = result(1, within=PASSES)
    """Passes over the demonstrations or pairs"""
    batch_size: PositiveInt = result(64, within=BATCH)
    """Demonstrations or pairs per optimizer step, over all ranks"""
    micro_batch_tokens: PositiveInt = rounding(4096, within=TOKENS)
    """Tokens per forward pass of one rank; a longer demonstration or pair has a pass of its own"""
    threads: PositiveInt | None = rounding(None, within=Range(1, 4096, "more threads than cores are slower"))
    """CPU threads of a rank; null: `run.threads`. Changing it can change bits on the CPU"""
    early_stop: EarlyStopConfig | None = result(None, later=True)
    """Publish the weights with the lowest held-out loss, and stop when it no longer falls; null: all epochs
    and the last weights
    """
    checkpoint_every: PositiveInt = execution(50)
    """Optimizer steps between checkpoints"""


class SFTConfig(TrainingSection):
    """Supervised fine-tuning."""

    enabled: bool = result(True, later=True)
    """Train the base model on `data.sft`. If false, the base model is the SFT model: one that follows
    instructions already, saved in the precision `sft.deepspeed.dtype`. It needs `model.path`
    """
    optimizer: OptimizerConfig = result(OptimizerConfig(learning_rate=2e-5))
    """AdamW and its schedule"""
    eval_every: PositiveInt = execution(50)
    """Optimizer steps between evaluations on held-out rows; with `early_stop`, its `every` is used"""
    samples: NonNegativeInt = result(8)
    """Held-out prompts whose responses are logged at the end; 0: none"""


Combine = Literal["mean", "worst_case", "uncertainty"]
"""How the scores of several reward models become one (`models.scoring`)."""
PENALTY = 0.5
"""The only value of `penalty` without `uncertainty`, which alone uses it: equal results have equal keys."""
MEMBERS = Range(2, 8, "each is a whole model in training and in PPO")


class EnsembleConfig(Section):
    """Several reward models whose combined score is the reward (Coste et al. 2023)."""

    members: PositiveInt = result(3, within=MEMBERS)
    """Reward models. All are trained from the same pairs, each with a new score head and an order of the
    pairs of its own. The first is the model of a run without ensemble
    """
    # The default, because it has no coefficient that would have to be chosen (decision 40).
    combine: Combine = result("worst_case")
    """Score of a response: `mean` of the members' scores; `worst_case`: the lowest; `uncertainty`: mean -
    `penalty` * variance
    """
    penalty: NonNegativeFloat = result(PENALTY, within=Range(0, 1000, "the scores have standard deviation 1"))
    """Weight of the variance over the members. Only with `combine: uncertainty`"""


class JudgeConfig(Section):
    """A second reward model from other pairs, with another seed, which the policy is not trained with.

    `optimizer`, `deepspeed` and `lora` have the fields of those in the section `reward`, and what they leave
    out is that of the reward model, like each other setting of the training that is null.
    """

    fraction: PositiveFloat = result(0.5, within=Range(0.05, 0.95, "both models need pairs"))
    """Share of the prompts whose pairs train the judge; the reward model is trained with the others"""
    # With the same tokens, because pairs and responses are stored as ids (decision 40).
    path: UserPath | None = content(None, min_length=1)
    """Another base model, with the same tokens, that the judge starts from: local folder, Hugging Face id or
    [reference](rounds.md#references); null: the SFT model
    """
    revision: str | None = content(None)
    """Commit of a hub model in `path`"""
    optimizer: OptimizerConfig | None = result(None, later=True)
    """AdamW and its schedule"""
    deepspeed: DeepSpeedConfig | None = result(None, later=True)
    """Ranks, ZeRO, precision"""
    lora: LoraConfig | None = result(None, later=True)
    """Train adapters and the score head only"""
    epochs: PositiveInt | None = result(None, within=PASSES, later=True)
    """Passes over its pairs"""
    batch_size: PositiveInt | None = result(None, within=BATCH, later=True)
    """Pairs per optimizer step, over all ranks"""
    micro_batch_tokens: PositiveInt | None = rounding(None, within=TOKENS)
    """Tokens per forward pass of one rank"""

    @property
    def own_settings(self) -> dict[str, Any]:
        """The settings of its training that are not those of the section `reward`, by fields of it."""
        # These say which pairs and weights the judge has, and are no fields of the section `reward`.
        names = set(type(self).model_fields) - {"fraction", "path", "revision"}
        # Sorted, because a set of texts has another order in each process.
        values = {name: getattr(self, name) for name in sorted(names)}
        return {name: value for name, value in values.items() if value is not None}


class RewardConfig(TrainingSection):
    """Bradley-Terry reward model, from the SFT model."""

    enabled: bool = result(True)
    """False: no reward model is trained; PPO then needs rule rewards"""
    lora: LoraConfig | None = result(None)
    """Train adapters and the score head only; null: all parameters"""
    micro_batch_tokens: PositiveInt = rounding(8192, within=TOKENS)
    """Tokens per forward pass of one rank"""
    center: NonNegativeFloat = result(0.0, within=COEFFICIENT)
    """Weight of (chosen + rejected)^2, which keeps scores near 0"""
    margin: Literal["none", "constant", "field"] = result("none")
    """Margin between the chosen and the rejected score in the loss (Touvron et al. 2023): `constant`:
    `margin_value` for all pairs; `field`: the number in each row's field `margin`
    """
    margin_value: PositiveFloat = result(1.0, within=COEFFICIENT)
    """The margin of all pairs with `margin: constant`"""
    # Not declared with `later`: it is part of existing keys.
    early_stop: EarlyStopConfig | None = result(None)
    """Stop when the held-out loss no longer falls; null: all epochs and the last weights"""
    judge: JudgeConfig | None = result(None, later=True, inherits=True)
    """Train a second reward model as a judge, with the settings of this section, or its own. It judges the
    evaluations during PPO, the stage `evaluate` and the match; null: no second model
    """
    ensemble: EnsembleConfig | None = result(None, later=True)
    """Train several reward models with different seeds and combine their scores
    ([rewards](rewards.md#an-ensemble-of-reward-models)); null: one model
    """
    # In no key: a reward model that is reused must meet it as well (`stages.gates`).
    min_accuracy: Fraction = execution(0.55)
    """If the held-out accuracy is below this, or not significantly above chance (the lower bound of its 95 %
    interval is at most 0.5), the stage fails, because PPO with such a reward model would optimise noise; 0:
    no check. A 7B model reaches about 0.7 on HH-RLHF, and the GPU profiles require 0.6
    """

    @property
    def of_judge(self) -> RewardConfig:
        """The settings with which the judge is trained. It is one model also with an ensemble."""
        own = self.judge.own_settings if self.judge is not None else {}
        return self.model_copy(update={"ensemble": None, **own})

    @property
    def members(self) -> int:
        """Number of reward models, without the judge."""
        return 1 if self.ensemble is None else self.ensemble.members

    def problems(self) -> Iterator[str]:
        if self.ensemble is not None and not self.enabled:
            yield (
                "reward.ensemble trains reward models, but reward.enabled is false; set it to true, or leave"
                " reward.ensemble out"
            )
        ensemble = self.ensemble
        if ensemble is not None and ensemble.combine != "uncertainty" and ensemble.penalty != PENALTY:
            yield (
                "reward.ensemble.penalty has no effect with reward.ensemble.combine="
                f"{ensemble.combine}; got {ensemble.penalty:g}; leave it out, or set combine to uncertainty"
            )


class DPOConfig(TrainingSection):
    """Direct preference optimisation (Rafailov et al. 2023) from the SFT model: a policy that is trained on
    the pairs without a reward model and without sampling.
    """

    enabled: bool = result(False)
    """Train this policy. The stage `evaluate` compares it with those of SFT and PPO"""
    beta: PositiveFloat = result(0.1, within=Range(1e-4, 100, "0.01 to 1 is usual"))
    """Weight of the KL to the SFT model in DPO's objective: the higher, the nearer the policy stays"""
    # None without a reference, such as SimPO: that policy has no implicit reward against the SFT model
    # (decision 41).
    loss: Literal["sigmoid", "ipo", "robust"] = result("sigmoid", later=True)
    """`sigmoid`: that of the paper, with `label_smoothing` conservative DPO (Mitchell 2023); `ipo`: the
    squared distance of the gap from 1 / (2 `beta`) (Azar et al. 2023); `robust`: unbiased if
    `label_smoothing` is the share of wrong pairs (Chowdhury et al. 2024)
    """
    # No part of `loss`: TRL averages for IPO, Tülu 3 for `sigmoid`, and the papers for neither (decision 41).
    length_normalised: bool = result(False, later=True)
    """Divide the log-probability of each response by its tokens, under policy and reference (Tülu 3). Such
    gaps are much smaller, so `beta` must be larger: 5 for `sigmoid` there
    """
    label_smoothing: NonNegativeFloat = result(0.0, within=Range(0, 0.49, "at 0.5 the pairs say nothing"))
    """Assumed probability that the responses of a pair are in the wrong order; not for `ipo`"""
    optimizer: OptimizerConfig = result(OptimizerConfig(learning_rate=1e-6))
    """AdamW and its schedule"""
    eval_every: PositiveInt = execution(50)
    """Optimizer steps between evaluations on held-out rows; with `early_stop`, its `every` is used"""

    @property
    def description(self) -> str:
        """The settings that people compare: `sigmoid, beta 0.1, learning rate 1e-06, at most 1 epoch`."""
        normalised = ", length-normalised" if self.length_normalised else ""
        unit = "epoch" if self.epochs == 1 else "epochs"
        return (
            f"{self.loss}{normalised}, beta {self.beta:g}, learning rate {self.optimizer.learning_rate:g}, at"
            f" most {self.epochs} {unit}"
        )

    def problems(self) -> Iterator[str]:
        if self.loss == "robust" and not self.label_smoothing:
            yield (
                "dpo.loss: robust needs dpo.label_smoothing, the share of wrong pairs; got 0; set it, such as"
                " to 0.1, or use sigmoid"
            )
        if self.loss == "ipo" and self.label_smoothing:
            yield (
                f"dpo.label_smoothing has no effect with dpo.loss=ipo; got {self.label_smoothing:g}; leave"
                " one of them out"
            )
