"""Section `ppo`: sampling, rewards, the update, and where everything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.config.base import (
    BATCH,
    COEFFICIENT,
    PASSES,
    RANKS,
    TEMPERATURE,
    TOKENS,
    Aggregation,
    Decay,
    Fraction,
    GroupKind,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    divisors_near,
    execution,
    result,
    rounding,
)
from rlhf_core.config.ppo_sections import (
    MAX_ENGINE_RANK,
    AnyLoss,
    ConfiguredAggregation,
    DifficultyConfig,
    DynamicFilteringConfig,
    EngineConfig,
    GuardAction,
    GuardLimits,
    GuardName,
    KLConfig,
    OverlongConfig,
    PTXConfig,
    PythonAdvantages,
    SequenceLoss,
    TeacherConfig,
    WeightSyncConfig,
    default_evaluation_interval,
)
from rlhf_core.config.rewards import (
    AnswerReward,
    AnyReward,
    LanguageModelReward,
    ModelReward,
    comparing_sources,
)
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig, PackedSection

WITHOUT_GROUPS = ("ppo", "reinforce_pp")
"""Algorithms that do not compare the samples of one prompt."""
_TITLES = {
    "reinforce_pp": "REINFORCE++",
    "reinforce_baseline": "REINFORCE++-baseline",
    "dr_grpo": "Dr. GRPO",
}
"""Algorithms whose name people do not write in capitals only."""
_AGGREGATIONS: dict[str, ConfiguredAggregation] = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""`aggregation` of algorithms for which it is not `token-mean`."""
MINIBATCH = 64
"""Responses of an optimizer step in InstructGPT (Ouyang et al. 2022) and LLaMA-2 (Touvron et al. 2023)."""


class PPOConfig(PackedSection):
    """Proximal policy optimization, and related algorithms without a critic."""

    enabled: bool = result(True, later=True)
    """Train this policy. If false, `dpo.enabled` is needed"""
    algorithm: Literal["ppo", "reinforce_pp", "reinforce_baseline", "rloo", "grpo", "dr_grpo"] = result("ppo")
    """`ppo`: critic and GAE. Without a critic: `reinforce_pp` (returns, whitened over the batch), and by
    group of samples of a prompt `reinforce_baseline`, `rloo`, `grpo`, `dr_grpo`
    """
    steps: PositiveInt = result(100)
    """PPO iterations. The default on GPUs is 200 (LLaMA-2 has 200 to 400, Touvron et al. 2023)"""
    prompts_per_step: PositiveInt = result(64, within=BATCH)
    """Prompts of one rollout batch. The default on GPUs is 512 / `samples_per_prompt`: 512 responses, as in
    InstructGPT (Ouyang et al. 2022) and LLaMA-2
    """
    staleness: NonNegativeInt = result(
        0, within=Range(0, 16, "the rollouts of so many steps are in memory and in checkpoints"), later=True
    )
    """0: each step is sampled with the weights of the step before. 1: the engines sample the next step while
    the present one is scored and trained, with weights that are one step older. n: weights are at most n
    steps older, and the engines sample n batches between two weight syncs. `importance` corrects for them.
    For engines with devices of their own, or CPUs with idle cores
    """
    samples_per_prompt: PositiveInt = result(1, within=Range(1, 65536, "a batch is held in memory"))
    """Responses sampled for each prompt"""
    max_new_tokens: PositiveInt | None = result(None, within=TOKENS)
    """Length limit of a response. null: `data.max_response_tokens`"""
    temperature: PositiveFloat = result(1.0, within=TEMPERATURE)
    """Sampling temperature; every log-probability uses it"""
    epochs: PositiveInt = result(1, within=PASSES)
    """Passes over each rollout batch"""
    minibatches: PositiveInt = result(4, within=BATCH)
    """Optimizer steps per epoch. The default on GPUs makes minibatches of 64 responses or more, as in
    InstructGPT and LLaMA-2
    """
    micro_batch_tokens: PositiveInt = rounding(16384, within=TOKENS)
    """Tokens per forward pass of one rank"""
    policy: OptimizerConfig = result(OptimizerConfig(learning_rate=1e-6, schedule="constant"))
    """Policy optimizer"""
    critic: OptimizerConfig = result(
        OptimizerConfig(learning_rate=5e-6, warmup_ratio=0.0, schedule="constant")
    )
    """Critic optimizer. Its learning rate has no warm-up, so that the critic learns before the policy is
    trained
    """
    policy_deepspeed: DeepSpeedConfig = result(DeepSpeedConfig())
    """Policy ranks"""
    critic_deepspeed: DeepSpeedConfig = result(DeepSpeedConfig())
    """Critic ranks"""
    lora: LoraConfig | None = result(None)
    """Train adapters of policy and critic (and its head) only; the reference is then the policy without its
    adapter, or `teacher`; null: all parameters
    """
    reference_ranks: PositiveInt = rounding(1, within=RANKS)
    """Reference workers; not used if the reference is colocated with the policy"""
    reward_ranks: PositiveInt = rounding(1, within=RANKS)
    """Reward-model workers; not used if colocated with the critic"""
    colocate: Literal["none", "policy_reference", "critic_reward", "pairs", "all"] = result("pairs")
    """Which models share processes: `pairs` is policy+reference and critic+reward; `all` is all four. With
    `all` on GPUs, each engine uses the devices of `engine.tensor_parallel` consecutive ranks
    """
    engine: EngineConfig = result(EngineConfig())
    """vLLM engines"""
    weight_sync: WeightSyncConfig = result(WeightSyncConfig())
    """Weights into the engines"""
    rewards: tuple[AnyReward, ...] = result((ModelReward(),))
    """Reward sources; their weighted sum is the score. Empty only with a `teacher`"""
    check_rewards: Literal["off", "warn", "refuse"] = execution("off")
    """Before PPO, look for [faults of the rewards](check-reward.md), without those that are asked over the
    network: `warn` logs what is found, `refuse` ends the stage
    """
    # Subtracted, and not put in place of the score: scores of rules have no fixed scale (decision 19).
    missing_eos_penalty: NonNegativeFloat | None = result(None, within=COEFFICIENT)
    """Subtracted from the score of a response that reaches the length limit. null: 1 with a reward model of
    nonzero weight, which was not trained with truncated responses (one standard deviation of its scores;
    Huang et al. 2024 give a fixed -1), and 0 with rules only or with `overlong`
    """
    overlong: OverlongConfig | None = result(None)
    """Soft penalty close to the length limit; null: none"""
    dynamic_filtering: DynamicFilteringConfig | None = result(None)
    """Replace prompts whose samples all have the same score; null: keep them"""
    difficulty: DifficultyConfig | None = result(None, later=True)
    """Train on prompts of some difficulty only, or on easy ones first; null: on all, shuffled"""
    # Not of the whole score: such a clip would hide the penalties (decision 19).
    score_clip: PositiveFloat | None = result(
        5.0, within=Range(0.1, 1e6, "the scores have standard deviation 1")
    )
    """The reward model's normalised scores are clipped to +- this value, before weight, other rewards,
    penalties and KL are applied. Rules are not clipped. null: no clip
    """
    kl: KLConfig = result(KLConfig())
    """KL to the reference"""
    teacher: TeacherConfig | None = result(None, later=True)
    """The reference; null: the SFT model. The rewards may then be empty: the policy learns from the KL alone
    """
    gamma: Fraction = result(1.0, within=Range(0.1, 1, "below it, the score is lost"))
    """Discount per token"""
    lam: Fraction = result(1.0)
    """GAE's lambda; 1 as in OpenRLHF and verl. With 0.95, the final score reaches the first of 500 tokens
    only through the critic
    """
    whiten_advantages: bool | None = result(None)
    """Mean 0, variance 1 over all valid tokens of the rollout batch; null: on for ppo, reinforce_pp and
    reinforce_baseline, off for the others
    """
    clip_low: Fraction = result(0.2)
    """The ratio is clipped below 1 - this"""
    clip_high: PositiveFloat = result(0.2)
    """The ratio is clipped above 1 + this"""
    dual_clip: Annotated[float, Field(gt=1, le=1e9, allow_inf_nan=False)] | None = result(3.0)
    """Bound c of the loss if the advantage is negative (Ye et al. 2020; 3 as in verl); null: none"""
    loss: AnyLoss | None = result(None, later=True)
    """The policy's loss, which replaces the clipped surrogate and does not use `clip_low`, `clip_high` and
    `dual_clip`; null: the clipped surrogate. Entropy bonus, KL and pretraining loss are added to each
    """
    advantages: PythonAdvantages | None = result(None, later=True)
    """The advantages of responses, instead of those of an algorithm that compares the samples of a prompt;
    null: those of the algorithm
    """
    value_clip: PositiveFloat | None = result(
        0.5, within=Range(1e-3, 1e6, "the values are of the size of the scores")
    )
    """Maximum change of the values relative to the old ones (0.5 as in OpenRLHF and verl), not applied during
    the critic's warm-up; null: no limit
    """
    entropy_coef: NonNegativeFloat = result(0.0, within=COEFFICIENT)
    """Weight of the entropy bonus"""
    aggregation: ConfiguredAggregation | None = result(None)
    """How token losses are aggregated. Denominators count the whole optimizer step. `-norm` also divides by
    `max_new_tokens`. null: the default of the algorithm: `grpo` seq-mean-token-mean (Shao et al. 2024, eq.
    3), `dr_grpo` seq-mean-token-sum-norm (Liu et al. 2025: a constant in place of each length), others
    token-mean
    """
    importance: Literal["none", "truncate", "mask", "sequence-mask"] | None = result(None)
    """Importance weights for the difference between engine and trainer; null: `truncate` (Yao et al. 2025) if
    engine or policy is not float32 or with `staleness`, else `none`
    """
    importance_bounds: tuple[NonNegativeFloat, PositiveFloat] = result((0.0, 2.0))
    """Lowest and highest weight that `importance` allows"""
    ptx: PTXConfig | None = result(None)
    """Pretraining loss in the policy's update; null: none"""
    # Of the weights that sampled, and not of the optimizer's float32 copies, which ZeRO-1 and ZeRO-2 flatten
    # and shard (decision 18).
    ema_decay: Decay | None = result(None)
    """Decay per optimizer step of a float32 moving average of the policy's weights. It is saved in the
    policy's dtype, next to the policy or as the policy (`publish: average`); null: none
    """
    critic_warmup_steps: NonNegativeInt | None = result(None)
    """The first steps train the critic only. null: 0, see `critic_warmup_max_steps`"""
    critic_warmup_max_steps: PositiveInt | None = result(None, later=True)
    """After `critic_warmup_steps` the critic's warm-up continues until the explained variance of its values
    is above 0, for at most this many steps in total. null, with `critic_warmup_steps`: that number. null for
    both, and the critic starts from the reward model: a tenth of the steps, because its scores of unfinished
    responses mean little. null for both, and it does not: 0, because its values start at 0
    """
    published_loss_limit: PositiveFloat = execution(
        0.1, within=Range(1e-9, 1, "at 1 the whole change by training may be lost")
    )
    """With ppo.lora: maximum mean difference of log-probabilities between the trained policy and the files
    that evaluation loads, relative to the change by training (both on the last rollouts). Above it, the stage
    fails. A merge in bfloat16 loses 0.1 to 0.7 of a small update (decision 18)
    """
    # It does not follow the checkpoints: results would depend on a setting that only says how the work is
    # done (decision 18).
    evaluate_every: NonNegativeInt | None = result(None, later=True)
    """Steps between evaluations of the policy on held-out prompts, which also take place before the first and
    after the last step; null: about a tenth of the steps; 0: none
    """
    evaluate_prompts: PositiveInt = result(128, later=True)
    """Held-out prompts of these evaluations, or all if there are fewer. They are the last ones, so that they
    are not those of the stage `evaluate` and of the match, if `data.max_eval` is large enough
    """
    publish: Literal["last", "best", "average"] = result("last", later=True)
    """The policy that the stage publishes: that of the last step, the best evaluated one, or the moving
    average at the last step (`ema_decay`). The default is `best` if a judge (`reward.judge`) or rules alone
    score the evaluations and the KL counts. A version replaces the best one if its mean score on the held-out
    prompts minus `kl.coef` times the KL is higher by more than one standard error
    """
    publish_max_kl: PositiveFloat | None = result(None, later=True)
    """A policy with a higher KL per response on the held-out prompts is not the best; null: 5 times
    `kl.target`, or no limit without a target
    """
    # As the limit of the guard: chosen on three seeds of the demo, and tested on two others (decision 40).
    publish_min_agreement: Fraction = result(0.65, later=True)
    """With `reward.judge`: the best policy is from before the first evaluation that raises the guard
    `overoptimization` with this value as its limit
    """
    stop_patience: PositiveInt | None = result(None, later=True)
    """Number of consecutive evaluations without a better policy after which the training ends; null: all
    steps
    """
    max_kl: PositiveFloat | None = execution(None)
    """If the KL per response is above this for three consecutive steps, the run stops; null: 5 times
    `kl.target`, or 100 without a target, or no limit with a `teacher`
    """
    guards: dict[GuardName, GuardAction] = execution({})
    """What a condition does that indicates a failing training run ([guards](diagnose.md)): `warn`, which is
    the default, `stop` (the stage ends) or `off`
    """
    guard_limits: GuardLimits = execution({})
    """Limits of guards, in place of those in the table of [guards](diagnose.md)"""
    guard_patience: PositiveInt = execution(3)
    """Number of consecutive steps for which the condition of a guard must hold"""
    checkpoint_every: PositiveInt | None = execution(None)
    """Steps between checkpoints; null: 10, or with `staleness` the next multiple of its steps"""
    samples_every: PositiveInt = execution(10)
    """Steps between tables of sample responses"""

    @property
    def rollout_batch_size(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def minibatch_size(self) -> int:
        """Responses of one optimizer step, over all ranks."""
        return self.rollout_batch_size // self.minibatches

    @property
    def uses_reward_model(self) -> bool:
        return any(isinstance(source, ModelReward) for source in self.rewards)

    @property
    def answer_fields(self) -> list[str]:
        """Fields of prompt rows with the answers that rewards compare with."""
        return [source.field for source in self.rewards if isinstance(source, AnswerReward)]

    @property
    def reward_model_weight(self) -> float:
        """Weight of the reward model in the score."""
        return sum(source.weight for source in self.rewards if isinstance(source, ModelReward))

    @property
    def trains_on_reward_model(self) -> bool:
        """Whether the reward model counts. With weight 0 its scores are only logged."""
        return self.reward_model_weight != 0

    @property
    def title(self) -> str:
        """Name of the algorithm as people write it: `GRPO`."""
        return _TITLES.get(self.algorithm, self.algorithm.upper())

    @property
    def uses_critic(self) -> bool:
        return self.algorithm == "ppo"

    @property
    def trained_roles(self) -> tuple[Literal["policy", "critic"], ...]:
        if self.uses_critic:
            return ("policy", "critic")
        return ("policy",)

    @property
    def syncs_adapter(self) -> bool:
        """Whether the engines hold the base model and only the adapter is sent to them."""
        if self.lora is None:
            return False
        if self.weight_sync.lora is not None:
            return self.weight_sync.lora == "adapter"
        if self.lora.quantize is not None or self.lora.r > MAX_ENGINE_RANK:
            return False
        # A merge in float32 is not rounded, so it loses nothing of a small update.
        return self.served_dtype != "float32"

    @property
    def served_dtype(self) -> str:
        """Precision to which weights are rounded for the engines: the lower one of engines and training."""
        if self.engine.dtype != "float32":
            return self.engine.dtype
        return self.policy_deepspeed.dtype

    @property
    def group_kind(self) -> GroupKind | None:
        """How advantages compare the samples of one prompt; None if the algorithm does not compare them."""
        if self.algorithm == "ppo" or self.algorithm == "reinforce_pp":
            return None
        return self.algorithm

    @property
    def by_group(self) -> bool:
        """Whether advantages compare the samples of one prompt."""
        return self.group_kind is not None

    @property
    def whitens(self) -> bool:
        """`whiten_advantages`, or the default of the algorithm."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.algorithm in ("ppo", "reinforce_pp", "reinforce_baseline")

    @property
    def _used_aggregation(self) -> ConfiguredAggregation:
        if self.aggregation is not None:
            return self.aggregation
        if isinstance(self.loss, SequenceLoss):
            return "seq-mean-token-mean"
        return _AGGREGATIONS.get(self.algorithm, "token-mean")

    @property
    def loss_sum(self) -> Aggregation:
        """`aggregation` or the default of the algorithm, without the division by `loss_divisor`."""
        used = self._used_aggregation
        return "seq-mean-token-sum" if used == "seq-mean-token-sum-norm" else used

    @property
    def loss_divisor(self) -> float:
        """Additional constant divisor of the losses."""
        return float(self.response_limit) if self._used_aggregation == "seq-mean-token-sum-norm" else 1.0

    @property
    def response_limit(self) -> int:
        """`max_new_tokens`, which the stages have as a number (`PipelineConfig.with_limits`)."""
        assert self.max_new_tokens is not None, "the limits of the data artifact are missing"
        return self.max_new_tokens

    @property
    def used_importance(self) -> Literal["none", "truncate", "mask", "sequence-mask"]:
        """`importance`, or the default for the configured precisions and staleness."""
        if self.importance is not None:
            return self.importance
        # With older or rounded weights, the engines sample from another distribution than the trained one.
        if self.staleness or self.served_dtype != "float32":
            return "truncate"
        return "none"

    @property
    def sync_every(self) -> int:
        """Steps from one weight sync to the next."""
        return max(1, self.staleness)

    @property
    def eos_penalty(self) -> float:
        """`missing_eos_penalty`, or the default for the configured rewards."""
        if self.missing_eos_penalty is not None:
            return self.missing_eos_penalty
        # A reward model was trained with whole responses only; a rule says itself what a cut one is worth.
        return 1.0 if self.trains_on_reward_model and self.overlong is None else 0.0

    @property
    def kl_limit(self) -> float:
        """`max_kl`, or the default derived from the target."""
        if self.max_kl is not None:
            return self.max_kl
        if self.kl.target:
            return 5 * self.kl.target
        # The KL to a teacher is large before the training.
        return 100.0 if self.teacher is None else math.inf

    @property
    def evaluation_interval(self) -> int | None:
        """Steps between evaluations on held-out prompts; None if there are none."""
        if self.evaluate_every is None:
            return default_evaluation_interval(self.steps, self.sync_every)
        return self.evaluate_every or None

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoint_every or math.ceil(10 / self.sync_every) * self.sync_every

    @property
    def publish_kl_limit(self) -> float:
        """`publish_max_kl`, or the default derived from the target."""
        if self.publish_max_kl is not None:
            return self.publish_max_kl
        return 5 * self.kl.target if self.kl.target else math.inf

    @property
    def kl_horizon(self) -> int:
        """`kl.horizon`, or the default derived from the number of responses per step."""
        # `AdaptiveKL.update` changes the coefficient by at most 0.2 n / horizon, here 1 %.
        return self.kl.horizon or 20 * self.rollout_batch_size

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run. They do not depend on the micro-batches."""
        # Without the steps that the explained variance adds to the warm-up: the learning rate of the policy
        # must not depend on it (decision 19).
        return (self.steps - self.warmup_steps) * self.epochs * self.minibatches

    @property
    def critic_optimizer_steps(self) -> int:
        return self.steps * self.epochs * self.minibatches

    @property
    def warmup_steps(self) -> int:
        """First iterations, in which the policy is not trained."""
        return min(self.critic_warmup_steps or 0, self.steps) if self.uses_critic else 0

    @property
    def longest_warmup(self) -> int:
        """`warmup_steps`, or the limit of a warm-up that depends on the explained variance."""
        if self.critic_warmup_max_steps is not None:
            return self.critic_warmup_max_steps
        if self.critic_warmup_steps is None and self.uses_critic and self.trains_on_reward_model:
            # The critic starts from the reward model, whose scores of unfinished responses mean little.
            return self.steps // 10
        return self.warmup_steps

    # Rules of one field. Pydantic checks them before the rules of several fields.

    @field_validator("importance_bounds")
    @classmethod
    def _check_importance_bounds(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        low, high = bounds
        if not low < high or not low <= 1 <= high:
            raise ValueError(
                f"ppo.importance_bounds must be increasing and include 1 (no gap); got {low:g}, {high:g};"
                " leave it out"
            )
        return bounds

    @field_validator("rewards")
    @classmethod
    def _check_reward_names(cls, rewards: tuple[AnyReward, ...]) -> tuple[AnyReward, ...]:
        # Under one name, the metrics of one source would hide those of the other.
        names = [source.used_name for source in rewards]
        if len(set(names)) < len(names):
            raise ValueError(
                f"ppo.rewards need distinct names; got {', '.join(names)}; give `name` to those of one type"
            )
        return rewards

    def problems(self) -> Iterator[str]:
        yield from self._of_rewards()
        yield from self._of_sampling()
        yield from self._of_warmup()
        yield from self._of_overlong()
        yield from self._of_publishing()
        yield from self._of_updates()
        yield from self._of_devices()
        yield from self._of_sleeping()
        yield from self._of_sync()
        total = self.rollout_batch_size
        if self.kl.target is not None and self.kl_horizon * 5 <= total:
            yield (
                f"ppo.kl.horizon must be above a fifth of the {total} responses of a step, because the"
                f" coefficient could become negative otherwise; got {self.kl.horizon}; leave it out, or use"
                f" {20 * total}"
            )

    def _of_rewards(self) -> Iterator[str]:
        if not self.rewards and self.teacher is None:
            yield (
                "ppo.rewards must have a source, because only a teacher trains a policy without; got none;"
                " add one, or ppo.teacher"
            )
        if self.teacher is not None and self.kl.coef == 0:
            yield (
                "ppo.teacher has no effect with ppo.kl.coef=0, because the policy learns from it through the"
                " KL; use a coef above 0, such as 1"
            )
        for source in comparing_sources(self.rewards):
            yield from self._of_comparing(f"ppo.rewards.{self.rewards.index(source)}", source)

    def _of_comparing(self, field: str, source: LanguageModelReward) -> Iterator[str]:
        if self.samples_per_prompt < 2:
            yield (
                f"{field}.compare compares the responses to one prompt: ppo.samples_per_prompt must be at"
                f" least 2; got {self.samples_per_prompt}; use 4, or leave out compare"
            )
        asked = self.most_questions(source)
        if source.max_questions is not None and asked > source.max_questions:
            yield (
                f"{field}.max_questions: a step asks up to {asked} questions; got {source.max_questions};"
                " use a smaller opponents, compare=ranking, or fewer samples_per_prompt"
            )

    def most_questions(self, source: LanguageModelReward) -> int:
        """Return the largest number of questions that a source asks in a step, each once."""
        # The first batch, and one more for each round of replacements.
        rounds = 1 if self.dynamic_filtering is None else 1 + self.dynamic_filtering.max_rounds
        # Of equal responses one is asked about, and an odd number of them can need more opponents.
        of_prompt = max(source.questions(count) for count in range(1, self.samples_per_prompt + 1))
        return rounds * self.prompts_per_step * of_prompt

    def _of_sampling(self) -> Iterator[str]:
        if self.by_group and self.samples_per_prompt < 2:
            yield (
                f"ppo.algorithm={self.algorithm} compares samples of one prompt: ppo.samples_per_prompt must"
                f" be at least 2; got {self.samples_per_prompt}; use 4, or ppo.algorithm=reinforce_pp"
            )
        if self.advantages is not None and not self.by_group:
            yield (
                "ppo.advantages replaces those of an algorithm that compares samples of one prompt; got"
                f" ppo.algorithm={self.algorithm}; use grpo, dr_grpo, rloo or reinforce_baseline"
            )
        if self.staleness and self.colocate == "all":
            yield (
                f"ppo.staleness={self.staleness} lets the engines sample during the training, but with"
                " ppo.colocate=all they are on the devices of the training ranks; use ppo.staleness=0, or"
                " ppo.colocate=pairs"
            )
        if self.staleness > 1 and self.dynamic_filtering is not None:
            yield (
                f"ppo.staleness={self.staleness} lets the engines sample one batch after another, but"
                " ppo.dynamic_filtering scores each batch before it samples other prompts for it; use"
                " ppo.staleness=1, or leave out ppo.dynamic_filtering"
            )
        if self.dynamic_filtering and not self.by_group:
            yield (
                "ppo.dynamic_filtering needs an algorithm that compares samples of one prompt; got"
                f" ppo.algorithm={self.algorithm}; use grpo, dr_grpo, rloo or reinforce_baseline"
            )

    def _of_warmup(self) -> Iterator[str]:
        least, most = self.critic_warmup_steps or 0, self.critic_warmup_max_steps
        if not self.uses_critic and (least or most is not None):
            given = f"ppo.critic_warmup_steps={least}, ppo.critic_warmup_max_steps={most or 'null'}"
            yield f"ppo.algorithm={self.algorithm} has no critic to warm up; got {given}; use 0 and null"
        for name, value in (("critic_warmup_steps", least), ("critic_warmup_max_steps", most or 0)):
            if value >= self.steps:
                yield (
                    f"ppo.{name} must be below ppo.steps ({self.steps}), because the policy would never be"
                    f" trained otherwise; got {value}; lower it"
                )
        if most is not None and most < least:
            yield (
                f"ppo.critic_warmup_max_steps must be at least ppo.critic_warmup_steps ({least}); got {most};"
                " leave it out"
            )

    def _of_overlong(self) -> Iterator[str]:
        if self.overlong and self.missing_eos_penalty:
            yield (
                "ppo.overlong and ppo.missing_eos_penalty both penalize a response that reaches the length"
                " limit; set one of them"
            )
        limit = self.max_new_tokens
        if self.overlong and limit is not None and self.overlong.buffer > limit:
            yield (
                f"ppo.overlong.buffer must be at most ppo.max_new_tokens ({limit}); got"
                f" {self.overlong.buffer}"
            )

    def _of_publishing(self) -> Iterator[str]:
        if self.evaluate_every == 0 and (self.publish == "best" or self.stop_patience is not None):
            yield (
                "ppo.publish=best and ppo.stop_patience need evaluations; got ppo.evaluate_every=0; use"
                " ppo.evaluate_every=null"
            )
        if self.publish == "best" and self.ema_decay is not None:
            yield (
                "ppo.ema_decay keeps the average at the last step, which is not that of the best policy; got"
                " ppo.publish=best; leave one of them out"
            )
        if self.publish == "average" and self.ema_decay is None:
            yield (
                "ppo.publish=average publishes the moving average of the weights; got no ppo.ema_decay; set"
                " it, for example to 0.99"
            )

    def _of_updates(self) -> Iterator[str]:
        if self.weight_sync.lora == "adapter" and (self.lora is None or self.lora.r > MAX_ENGINE_RANK):
            given = "no ppo.lora" if self.lora is None else f"r={self.lora.r}"
            yield (
                f"ppo.weight_sync.lora=adapter needs ppo.lora with r of at most {MAX_ENGINE_RANK}; got"
                f" {given}; set ppo.lora.r or ppo.weight_sync.lora=merged"
            )
        if self.kl.target is not None and self.kl.target >= self.kl_limit:
            yield (
                f"ppo.max_kl must be above ppo.kl.target ({self.kl.target:g}), because a policy at its target"
                f" would be stopped otherwise; got {self.kl_limit:g}; leave it out ({5 * self.kl.target:g})"
            )
        total = self.rollout_batch_size
        if total % self.minibatches:
            divisors = ", ".join(str(divisor) for divisor in divisors_near(total, self.minibatches))
            yield (
                f"ppo.minibatches must divide prompts_per_step x samples_per_prompt ({self.prompts_per_step}"
                f" x {self.samples_per_prompt} = {total}); got {self.minibatches}; use {divisors}"
            )
        ranks = {"policy": self.policy_deepspeed.ranks}
        if self.uses_critic:
            ranks["critic"] = self.critic_deepspeed.ranks
        for role, count in ranks.items():
            if self.minibatch_size < count:
                yield (
                    f"ppo.{role}_deepspeed.ranks must be at most the minibatch of {self.minibatch_size}"
                    f" responses ({self.rollout_batch_size} / {self.minibatches}); got {count}"
                )

    def _of_devices(self) -> Iterator[str]:
        policy, critic = self.policy_deepspeed.ranks, self.critic_deepspeed.ranks
        used = self.uses_critic or self.uses_reward_model  # both have the ranks of the critic
        if self.colocate == "all" and used and policy != critic:
            yield (
                "ppo.colocate=all needs ppo.policy_deepspeed.ranks equal to ppo.critic_deepspeed.ranks; "
                f"got {policy} and {critic}"
            )
        count, ways = self.engine.count, self.engine.tensor_parallel
        if self.colocate == "all" and count * ways > policy:
            yield (
                "ppo.colocate=all puts engines on the devices of ranks: ppo.engine.count x ppo.engine."
                f"tensor_parallel must be at most ppo.policy_deepspeed.ranks ({policy}); got {count} x {ways}"
            )

    def _of_sleeping(self) -> Iterator[str]:
        level = self.engine.sleep_level
        if level == 0:
            return
        name = f"ppo.engine.sleep_level={level}"
        if self.colocate != "all":
            yield (
                f"{name} needs engines on the devices of the training ranks; got"
                f" ppo.colocate={self.colocate}; use ppo.colocate=all, or ppo.engine.sleep_level=0"
            )
        if self.dynamic_filtering is not None and self.uses_reward_model:
            yield (
                f"{name} cannot be combined with ppo.dynamic_filtering and a reward model, which would score"
                " responses while the engines use the devices; use ppo.engine.sleep_level=0"
            )
        if level == 2 and self.syncs_adapter:
            yield (
                f"{name} drops weights that a sync does not send with ppo.weight_sync.lora=adapter; use"
                " ppo.engine.sleep_level=1"
            )
        trained = {"policy": self.policy_deepspeed}
        if self.uses_critic:
            trained["critic"] = self.critic_deepspeed
        for role, deepspeed in trained.items():
            if deepspeed.zero_stage == 0 or deepspeed.offload != "none":
                yield (
                    f"{name} needs ppo.{role}_deepspeed.zero_stage of at least 1 and no offload, because"
                    f" DeepSpeed moves no other states; got zero_stage={deepspeed.zero_stage} and"
                    f" offload={deepspeed.offload}; use zero_stage=1"
                )

    def _of_sync(self) -> Iterator[str]:
        # NCCL refuses two processes on one GPU, and the IPC backend passes handles of memory of one GPU.
        backend = self.weight_sync.backend
        if backend == "ipc" and self.colocate != "all":
            yield (
                "ppo.weight_sync.backend=ipc needs engines that share GPUs with the policy, but with"
                f" ppo.colocate={self.colocate} they do not share them; use auto"
            )
        if backend == "nccl" and self.colocate == "all":
            yield (
                "ppo.weight_sync.backend=nccl needs engines that do not share GPUs with the policy, but"
                " with ppo.colocate=all they share them; use auto"
            )
