"""Rules between the sections of a configuration, and warnings for settings that are rarely intended.

Only the configuration is examined, and no files or devices. Each message names the field, the value and a
fix. `rlhf run` and `rlhf plan` print the warnings, and the MLflow run stores them in the tag `rlhf.warnings`.
Rules within one section are in the section itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf_core.config.engine import MAX_ENGINE_RANK
from rlhf_core.config.guards import guard_limit
from rlhf_core.config.pipeline import PipelineConfig, runs_on_gpu, section_of
from rlhf_core.config.ppo import MINIBATCH, PPOConfig
from rlhf_core.config.ppo_sections import checkpoint_interval
from rlhf_core.config.rewards import ModelReward, measured_graders
from rlhf_core.config.training import DeepSpeedConfig, DPOConfig, LoraConfig, adapter_rate
from rlhf_core.errors import ConfigError, Finding

_USELESS_LIMIT = 10
"""A KL limit above this multiple of the target has no practical effect."""
_LARGEST_INITIAL_WEIGHT = 0.1
"""A published moving average in which the SFT model has a larger weight is hardly a trained policy."""
_OFFLOAD_STAGES = {"optimizer": (1, 2, 3), "all": (3,)}
"""ZeRO stages that support each kind of offload."""


LEAST_PROMPTS = 50
"""Groups of held-out prompts for which the evaluation leaves out those that choose the policy. It is the
default of `register.min_prompts`, and not its value, which is not part of the evaluation's key.
"""
_TESTS_OF_A_YEAR = 65
"""With weekly matches, a test has this part of `register.alpha` (`rlhf_core.evaluation.evidence`)."""


def check_consistency(config: PipelineConfig) -> Iterator[Finding]:
    """Check rules between the sections of a configuration."""
    judge, ppo = config.evaluate.judge, config.ppo
    rules = [source for source in ppo.rewards if not isinstance(source, ModelReward) and source.weight]
    if config.reward.enabled and not config.data.preference:
        yield ConfigError(
            "reward.enabled: is true, but data.preference is empty; add pairs, or set reward.enabled=false"
        )
    elif config.reward.enabled and not ppo.uses_reward_model:
        yield (
            "reward.enabled: a reward model is trained, but ppo.rewards has no source of type model: it only"
            " judges"
        )
    elif config.reward.enabled and config.reward.judge is None and not config.scores_by_reward_model:
        yield (
            "reward.enabled: a reward model is trained, but ppo.enabled is false: it only judges; if another"
            " judge is enough, set reward.enabled=false"
        )
    if judge == "reward_model" and not config.reward.enabled:
        yield ConfigError(
            "evaluate.judge: reward_model needs reward.enabled=true; got false; use auto or rules"
        )
    yield from _language_model(config)
    if config.sample is not None and config.sample.judge == "judge_model" and config.reward.judge is None:
        yield ConfigError(
            "sample.judge: judge_model needs reward.judge; got none; add reward.judge={}, or use reward"
        )
    yield from _labels_of_people(config)
    if judge == "rules" and not rules:
        yield ConfigError(
            "evaluate.judge: rules needs a rule of some weight in ppo.rewards; got none; use auto or"
            " reward_model"
        )
    if judge == "judge_model" and config.reward.judge is None:
        yield ConfigError(
            "evaluate.judge: judge_model needs reward.judge; got none; add reward.judge={}, or use auto"
        )
    if judge == "gold" and not config.generates_prompts:
        yield ConfigError(
            "evaluate.judge: gold supports the demo task only; got other data.prompts; use auto"
        )
    if ppo.colocate == "all" and ppo.uses_critic and ppo.policy_deepspeed.hpz != ppo.critic_deepspeed.hpz:
        yield ConfigError(
            f"ppo.critic_deepspeed.hpz: must be that of the policy ({ppo.policy_deepspeed.hpz}) where both"
            f" share processes (ppo.colocate=all); got {ppo.critic_deepspeed.hpz}"
        )
    for field, deepspeed in deepspeed_sections(config):
        if deepspeed.grad_accum_dtype is not None and deepspeed.dtype == "float16":
            yield ConfigError(
                f"{field}.grad_accum_dtype: float32 needs {field}.dtype=bfloat16 (or float32); got float16;"
                " leave it out"
            )
        yield from sharding_problems(field, deepspeed)


def _language_model(config: PipelineConfig) -> Iterator[Finding]:
    judge, language_model = config.evaluate.judge, config.evaluate.language_model
    if language_model is None:
        if judge == "language_model":
            yield ConfigError(
                "evaluate.judge: language_model needs evaluate.language_model; got none; add it, or use auto"
            )
        if config.labels_by_language_model:
            yield ConfigError(
                "sample.judge: language_model needs evaluate.language_model; got none; add it, or use reward"
            )
        return
    if not config.judging_stages:
        yield ConfigError(
            f"evaluate.language_model: is not asked, because evaluate.judge is {judge}; leave one of them out"
        )
    if not config.data.preference:
        yield ConfigError(
            "evaluate.language_model: its agreement is measured with held-out pairs, but data.preference is"
            " empty; add pairs"
        )
    elif config.judging_stages and _only_models_labelled(config):
        yield ConfigError(
            "evaluate.language_model: its agreement is measured with held-out pairs that people labelled, but"
            " all sources of data.preference have labelled_by; add pairs of people, or use another judge"
        )


def _only_models_labelled(config: PipelineConfig) -> bool:
    pairs = config.data.preference
    return bool(pairs) and all(source.labelled_by is not None for source in pairs)


def _labels_of_people(config: PipelineConfig) -> Iterator[Finding]:
    if config.sample is None or not config.labels_by_people:
        return
    if config.sample.min_score is not None:
        yield ConfigError(
            f"sample.min_score: people give no scores; got {config.sample.min_score:g} with"
            " sample.judge=people; leave one of them out"
        )
    executor = config.run.executor_of("data")
    if executor != "local":
        yield ConfigError(
            "sample.judge: people needs the stage data on this machine, because votes are recorded in its"
            f" run.home; got run.executor={executor}; set run.resources.data.executor=local"
        )


def sharding_problems(field: str, deepspeed: DeepSpeedConfig) -> Iterator[ConfigError]:
    """Check that DeepSpeed supports the combination of ZeRO stage, offload and hpz with the data types.

    Args:
        field: Name of the section, for messages.
        deepspeed: The section.
    """
    if deepspeed.hpz > 1 and deepspeed.zero_stage != 3:
        yield ConfigError(
            f"{field}.hpz: needs {field}.zero_stage=3; got {deepspeed.zero_stage}; set it, or hpz=1"
        )
    offloads = _OFFLOAD_STAGES.get(deepspeed.offload)
    if offloads is not None and deepspeed.zero_stage not in offloads:
        yield ConfigError(
            f"{field}.offload: {deepspeed.offload} needs {field}.zero_stage {_either(offloads)}; got "
            f"{deepspeed.zero_stage}; set it, or offload=none"
        )
    if deepspeed.dtype == "float16" and deepspeed.zero_stage == 0:
        yield ConfigError(
            f"{field}.dtype: float16 needs {field}.zero_stage 1, 2 or 3; got 0; set it, or dtype=bfloat16"
        )
    if deepspeed.grad_accum_dtype is None or deepspeed.dtype == "float32":
        return
    # float32 sums of 16-bit gradients: DeepSpeed 0.19 supports them under ZeRO 2 and 3, without offload.
    rule = f"{field}.grad_accum_dtype: float32 needs"
    if deepspeed.zero_stage < 2:
        yield ConfigError(
            f"{rule} {field}.zero_stage 2 or 3; got {deepspeed.zero_stage}; set zero_stage=2, also on one"
            " rank, or leave it out"
        )
    if deepspeed.offload != "none":
        yield ConfigError(f"{rule} {field}.offload=none; got {deepspeed.offload}; set it, or leave it out")


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def deepspeed_sections(config: PipelineConfig) -> list[tuple[str, DeepSpeedConfig]]:
    """Return the DeepSpeed sections that this configuration uses, with their fields.

    The reward model in PPO has that of the critic. Without PPO, the evaluation has the precision of the
    policy's section.
    """
    ppo = config.ppo
    has_critic = ppo.enabled and (ppo.uses_critic or ppo.uses_reward_model)
    critic = [("ppo.critic_deepspeed", ppo.critic_deepspeed)] if has_critic else []
    return [
        *(
            (f"{section_of(stage)}.deepspeed", section.deepspeed)
            for stage, section in config.training_sections.items()
        ),
        ("ppo.policy_deepspeed", ppo.policy_deepspeed),
        *critic,
    ]


def unusual_settings(config: PipelineConfig) -> Iterator[str]:
    """Yield one sentence for each valid setting that is rarely intended."""
    ppo = config.ppo
    yield from _ppo(config) if ppo.enabled else _without_ppo(config)
    yield from _adapter_rates(config)
    graders = measured_graders(ppo.rewards)
    if graders and _only_models_labelled(config):
        names = ", ".join(source.model for source in graders)
        yield (
            f"ppo.rewards: the agreement of {names} with people is not measured, because all sources of"
            " data.preference have labelled_by; add pairs of people, or set min_agreement to null"
        )
    if config.data.eval_fraction > 0.5:
        yield (
            f"data.eval_fraction is {config.data.eval_fraction:g}: more prompts are held out than trained on;"
            " 0.1 is usual"
        )
    for field, prompts in (
        ("evaluate.prompts", config.evaluate.prompts),
        ("data.max_eval", config.data.max_eval),
    ):
        if prompts < config.register_.min_prompts:
            yield (
                f"{field}: {prompts} is below register.min_prompts ({config.register_.min_prompts}): no"
                " candidate can become champion; raise it, or lower register.min_prompts"
            )
    yield from _held_out_prompts(config)
    yield from _match_prompts(config)
    if config.sample is not None and config.sample.policy not in ("sft", config.register_.policy):
        yield (
            f"sample.policy is {config.sample.policy}, but register.policy is {config.register_.policy}: the"
            " policy that is registered is not the one whose answers are data; set both to the same stage"
        )
    scores = ppo.uses_reward_model if ppo.enabled else config.reward.enabled
    limits = config.given_limits
    if scores and limits.new is not None and limits.response is not None and limits.new > limits.response:
        yield (
            f"ppo.max_new_tokens: {limits.new} is above data.max_response_tokens ({limits.response}): the"
            " reward model scores longer responses than in its training; lower it, or raise"
            " data.max_response_tokens"
        )


class LearningRate(NamedTuple):
    """A learning rate of the pipeline."""

    field: str
    rate: float
    default: float
    """The default without adapters, for models with billions of parameters."""
    adapters: bool


def learning_rates(config: PipelineConfig) -> list[LearningRate]:
    """Return the learning rates of everything that is trained."""
    ppo, default = config.ppo, PPOConfig()
    rates = []
    for stage, section in config.training_sections.items():
        field = f"{section_of(stage)}.optimizer.learning_rate"
        usual = type(section)().optimizer.learning_rate
        rates.append(LearningRate(field, section.optimizer.learning_rate, usual, section.lora is not None))
    trained = [("policy", ppo.policy, default.policy)] if ppo.enabled else []
    if ppo.enabled and ppo.uses_critic:
        trained.append(("critic", ppo.critic, default.critic))
    for name, own, usual_one in trained:
        field = f"ppo.{name}.learning_rate"
        rates.append(LearningRate(field, own.learning_rate, usual_one.learning_rate, ppo.lora is not None))
    return rates


def _adapter_rates(config: PipelineConfig) -> Iterator[str]:
    """Warn about adapters with a learning rate of all parameters."""
    for field, rate, default, adapters in learning_rates(config):
        if adapters and rate <= default:
            yield (
                f"{field}: {rate:g} is that of all parameters, and adapters learn little with it; use"
                f" {adapter_rate(rate):g}, or leave it out ({adapter_rate(default):g})"
            )


def _ppo(config: PipelineConfig) -> Iterator[str]:
    """Warn about settings of PPO."""
    ppo = config.ppo
    yield from _kl(ppo)
    yield from _critic(ppo)
    yield from _average(ppo)
    yield from _merge(ppo)
    yield from _guards(config)
    if runs_on_gpu(config) and ppo.minibatch_size < MINIBATCH:
        yield (
            f"ppo.minibatches: an optimizer step has {ppo.minibatch_size} responses; below {MINIBATCH} the"
            " gradients of a real model are noisy; lower it, or raise ppo.prompts_per_step"
        )
    if not any(source.weight for source in ppo.rewards):
        yield "ppo.rewards: all weights are 0, so only the KL trains the policy; give a source a weight"
    if ppo.publish == "best" and ppo.trains_on_reward_model and config.reward.judge is None:
        yield (
            "ppo.publish is best, but the reward model that the policy is trained with decides: under"
            " over-optimisation its score rises until the end; add reward.judge={}"
        )
    yield from _staleness(ppo)
    if config.store.keep_best:
        yield from _unscored_checkpoints(ppo)
    if ppo.publish == "best" and ppo.kl.coef == 0 and math.isinf(ppo.publish_kl_limit):
        yield (
            "ppo.publish is best, but ppo.kl.coef is 0 and ppo.publish_max_kl is null, so nothing counts"
            " against a version far from the SFT model; set one of them"
        )
    if config.evaluate.judge == "reward_model" and ppo.trains_on_reward_model:
        yield (
            "evaluate.judge is the reward model that the policy is trained with, whose scores also rise under"
            " over-optimisation; use reward.judge={} or a language model, and leave evaluate.judge out"
        )
    if config.evaluation_temperature != ppo.temperature:
        yield (
            f"evaluate.temperature is {config.evaluation_temperature:g}, but the policy is trained at"
            f" ppo.temperature={ppo.temperature:g}: evaluation then judges a different distribution than the"
            " trained one; leave it out"
        )


def _without_ppo(config: PipelineConfig) -> Iterator[str]:
    """Warn about settings that need PPO, or that are not those of DPO, in a pipeline without PPO."""
    ppo, temperature = config.ppo, config.evaluation_temperature
    chosen = {
        "ppo.publish": ppo.publish if ppo.publish != "last" else None,
        "ppo.stop_patience": ppo.stop_patience,
    }
    for field, value in chosen.items():
        if value is not None:
            yield (
                f"{field}: {value} has no effect, because ppo.enabled is false; leave it out (dpo.early_stop"
                " chooses the version of DPO's policy)"
            )
    if temperature != 1:
        yield (
            f"evaluate.temperature is {temperature:g} (its default is ppo.temperature), but DPO trains at"
            " temperature 1: evaluation then judges a different distribution than the trained one; set it to"
            " 1"
        )


def _held_out_prompts(config: PipelineConfig) -> Iterator[str]:
    """Warn of held-out prompts that are too few as far as their number is known: if they are generated, about
    how many there are, and else only the most.
    """
    if not config.generates_prompts:
        yield from _shared_prompts(config, config.data.max_eval)
        return
    generated = round(config.data.synthetic.prompts * config.data.eval_fraction)
    yield from too_few_held_out(config, generated, f"data.synthetic.prompts: about {generated}")


def too_few_held_out(config: PipelineConfig, count: int, where: str) -> Iterator[str]:
    """Warn if too few prompts are held out for a champion, or to choose the policy with others than those
    that judge it.

    Args:
        config: Configuration of the pipeline.
        count: Number of held-out prompts.
        where: Beginning of the first message: the field and the number.
    """
    least, most = config.register_.min_prompts, min(config.data.max_eval, count)
    # `evaluate.prompts` and `data.max_eval` below the least are warnings of their own.
    if count < least <= min(config.evaluate.prompts, config.data.max_eval):
        yield (
            f"{where} prompts are held out (data.eval_fraction), fewer than register.min_prompts ({least}):"
            " no candidate can become champion; raise it, or lower register.min_prompts"
        )
    yield from _shared_prompts(config, most)


def _shared_prompts(config: PipelineConfig, most: int) -> Iterator[str]:
    """Warn of prompts that choose the policy and judge it as well, or of too few others for a champion, if at
    most `most` are held out.
    """
    ppo, prompts, least = config.ppo, config.evaluate.prompts, config.register_.min_prompts
    shared = min(prompts, most) + min(ppo.evaluate_prompts, most) - most
    others = most - ppo.evaluate_prompts
    if config.evaluations_choose and others < min(LEAST_PROMPTS, prompts):
        yield (
            f"ppo.evaluate_prompts: at most {most} prompts are held out (data.max_eval, data.eval_fraction),"
            f" so {shared} or more of those that choose the policy also judge it, and results of evaluation"
            f" and match are slightly too high; {prompts + ppo.evaluate_prompts} held-out prompts are enough"
        )
    elif config.evaluations_choose and others < least <= min(prompts, most):
        yield (
            f"ppo.evaluate_prompts: {ppo.evaluate_prompts} of at most {most} held-out prompts choose the"
            f" policy, so {others} judge it, fewer than register.min_prompts ({least}): no candidate can"
            f" become champion; hold out {least + ppo.evaluate_prompts} (data.max_eval, data.eval_fraction),"
            " or lower register.min_prompts"
        )


def prompts_for_level(rate: float, level: float) -> int | None:
    """Return the number of prompts without a tie with which a win rate can be significant; None if it is not
    above one half.

    A win rate w increases the logarithm of the evidence by at most w ln 2w + (1 - w) ln 2(1 - w) for each
    prompt. With so many prompts, the p-value of an exact sign test is at most the level (Chernoff).
    """
    if rate <= 0.5:
        return None
    gain = sum(share * math.log(2 * share) for share in (rate, 1 - rate) if share > 0)
    return math.ceil(math.log(1 / level) / gain)


def _match_prompts(config: PipelineConfig) -> Iterator[str]:
    """Warn if a match with the champion rarely finds the win rate that is asked for against the SFT model."""
    rate, prompts = config.register_.min_win_rate, min(config.evaluate.prompts, config.data.max_eval)
    needed = prompts_for_level(rate, config.register_.alpha / _TESTS_OF_A_YEAR)
    if needed is not None and prompts < needed:
        yield (
            f"register.min_win_rate: a win rate of {rate:g} over a champion is rarely found with {prompts}"
            f" prompts (evaluate.prompts, data.max_eval); weekly matches need about {needed}; raise both"
        )


def _kl(ppo: PPOConfig) -> Iterator[str]:
    """Yield settings of the KL penalty that have no effect, contradict others or have a wrong gradient."""
    kl = ppo.kl
    if kl.place == "reward" and kl.used_estimator != "k1":
        yield (
            f"ppo.kl.estimator: {kl.used_estimator} in the reward has a gradient different from that of the"
            " KL, partly with the wrong sign (arXiv 2512.21852); leave it out for k1, or set"
            " ppo.kl.place=loss with k2"
        )
    if kl.place == "loss" and kl.used_estimator != "k2":
        yield (
            f"ppo.kl.estimator: {kl.used_estimator} in the loss has a gradient different from that of the KL"
            " (arXiv 2512.21852); leave it out for k2"
        )
    if kl.target is None:
        if kl.horizon is not None:
            yield (
                f"ppo.kl.horizon: {kl.horizon} has no effect without ppo.kl.target; set the target, or leave"
                " it out"
            )
        return
    steps = ppo.steps - ppo.longest_warmup
    # The controller multiplies the coefficient by at most 1 + 0.2 n / horizon in each step. A logarithm,
    # because the power for all steps can overflow.
    log_most = steps * math.log1p(0.2 * ppo.rollout_batch_size / ppo.kl_horizon)
    if log_most < math.log(2):
        after = " after the longest warm-up of the critic" if ppo.longest_warmup > ppo.warmup_steps else ""
        fix = "use more steps" if kl.horizon is None else f"leave it out ({20 * ppo.rollout_batch_size})"
        yield (
            f"ppo.kl.horizon: {ppo.kl_horizon} responses are too many: the coefficient changes by a factor of"
            f" {math.exp(log_most):.2f} at most in {steps} steps of {ppo.rollout_batch_size}"
            f" responses{after} and cannot follow ppo.kl.target; {fix}, or leave the target out"
        )
    if ppo.publish_max_kl is not None and ppo.publish_max_kl <= kl.target:
        yield (
            f"ppo.publish_max_kl: {ppo.publish_max_kl:g} is not above ppo.kl.target ({kl.target:g}), so a"
            " policy at its target is not published; raise it, or leave it out"
        )
    if ppo.kl_limit > _USELESS_LIMIT * kl.target:
        yield (
            f"ppo.max_kl: {ppo.kl_limit:g} is far above ppo.kl.target ({kl.target:g}), so a policy far from "
            f"its target is not stopped; leave it out ({5 * kl.target:g})"
        )


def _unscored_checkpoints(ppo: PPOConfig) -> Iterator[str]:
    """Warn about checkpoints between evaluations, unless they come from a default that is a divisor."""
    every = ppo.evaluation_interval
    if every is None:
        return
    default = checkpoint_interval(None, every, ppo.sync_every)
    used = checkpoint_interval(ppo.checkpoint_every, every, ppo.sync_every)
    default_fits = default % every == 0 or every % default == 0
    if used % every == 0 or (ppo.checkpoint_every is None and default_fits):
        return
    yield (
        f"ppo.checkpoint_every is {used}, but the policy is evaluated every {every} steps. A checkpoint"
        " between two evaluations has no score and is not kept as the best one; set ppo.checkpoint_every to"
        f" a multiple of ppo.evaluate_every{', or leave it out' if default_fits else ''}"
    )


def _guards(config: PipelineConfig) -> Iterator[str]:
    """Warn about guards that cannot be raised in this run."""
    ppo, stops_blind = config.ppo, config.ppo.guards.get("blind_critic") == "stop"
    if ppo.guards.get("overoptimization") == "stop" and config.reward.judge is None:
        yield (
            "ppo.guards.overoptimization: stop has no effect, because it compares the reward model with a"
            " second one; add reward.judge={}"
        )
    if stops_blind and not ppo.uses_critic:
        yield (
            f"ppo.guards.blind_critic: stop has no effect, because ppo.algorithm={ppo.algorithm} has no"
            " critic; leave it out"
        )
    trained_steps = ppo.steps - ppo.warmup_steps
    blind_steps = guard_limit(ppo.guard_limits, "blind_critic")
    if stops_blind and ppo.uses_critic and blind_steps > trained_steps:
        yield (
            f"ppo.guard_limits.blind_critic: {blind_steps:g} steps after the critic's warm-up are"
            f" needed for ppo.guards.blind_critic=stop, but there are {trained_steps}, so it cannot be"
            " raised; lower it"
        )
    # Not of the default: runs of so few steps are trials. `model_fields_set` has all fields after loading.
    if ppo.guard_patience != PPOConfig().guard_patience and ppo.guard_patience >= ppo.steps:
        yield (
            f"ppo.guard_patience: {ppo.guard_patience} steps after the first one are needed for a warning,"
            f" but ppo.steps is {ppo.steps}, so most guards cannot be raised; lower it"
        )


def _staleness(ppo: PPOConfig) -> Iterator[str]:
    for name, chosen in (("evaluate_every", ppo.evaluate_every), ("checkpoint_every", ppo.checkpoint_every)):
        if chosen and chosen % ppo.sync_every:
            yield (
                f"ppo.{name} is {chosen}, but the weights are synced every {ppo.sync_every} steps"
                " (ppo.staleness), and the engines wait where both do not meet; use a multiple, or leave it"
                " out"
            )
    if 1 < ppo.sync_every >= ppo.steps - 1:
        yield (
            f"ppo.staleness is {ppo.staleness}, but ppo.steps is {ppo.steps}: the first {ppo.sync_every + 1}"
            " steps are sampled from the SFT model, so no response is of a trained policy; lower it"
        )


def _critic(ppo: PPOConfig) -> Iterator[str]:
    if ppo.longest_warmup == ppo.warmup_steps:
        field, limit = "ppo.critic_warmup_steps", "only"
    else:
        field, limit = "ppo.critic_warmup_max_steps", "at most"
    rising_steps = round(ppo.critic.warmup_ratio * ppo.critic_optimizer_steps)
    warmup_steps = ppo.longest_warmup * ppo.epochs * ppo.minibatches
    if warmup_steps and rising_steps:
        yield (
            f"ppo.critic.warmup_ratio: {ppo.critic.warmup_ratio:g} increases the critic's learning rate over"
            f" {rising_steps} optimizer steps, but the critic's warm-up ({field}) has {limit}"
            f" {warmup_steps}, so the critic learns little before the policy is trained; set it to 0"
        )
    if ppo.longest_warmup > ppo.steps / 2:
        yield (
            f"{field}: {ppo.longest_warmup} of {ppo.steps} steps can train the critic only, so the policy may"
            f" be trained in no more than {ppo.steps - ppo.longest_warmup}; lower it"
        )


def _average(ppo: PPOConfig) -> Iterator[str]:
    """Warn if the published moving average has a large part of the SFT model, with which it begins."""
    if ppo.publish != "average" or ppo.ema_decay is None:
        return
    steps = ppo.policy_optimizer_steps
    weight = ppo.ema_decay**steps
    if weight > _LARGEST_INITIAL_WEIGHT:
        # Rounded down, so that the suggested value causes no warning.
        largest = math.floor(1e5 * _LARGEST_INITIAL_WEIGHT ** (1 / steps)) / 1e5
        yield (
            f"ppo.ema_decay: {ppo.ema_decay:g} gives the SFT model a weight of {weight:.2g} in the average"
            f" that is published (ppo.publish=average), because the policy makes {steps} optimizer steps; use"
            f" at most {largest:g}, or ppo.publish=last"
        )


def why_merged(lora: LoraConfig) -> tuple[str, str]:
    """Return (setting, fix) if the engines receive merged weights instead of the adapter: the cause and how
    to change it.
    """
    if lora.quantize is not None:
        return f"ppo.lora.quantize: {lora.quantize}", "leave it out"
    if lora.r > MAX_ENGINE_RANK:
        return f"ppo.lora.r: {lora.r}", f"use at most {MAX_ENGINE_RANK}"
    return "ppo.weight_sync.lora: merged", "leave it out, or use adapter"


def evaluates_adapter(dpo: DPOConfig, ppo: PPOConfig) -> bool:
    """Return whether the policy of DPO is sampled and scored as the SFT model with a separate adapter.

    A merge in float32 is not rounded, so it loses nothing of a small update.
    """
    if dpo.lora is None or dpo.lora.quantize is not None or dpo.lora.r > MAX_ENGINE_RANK:
        return False
    return {dpo.deepspeed.dtype, ppo.engine.dtype, ppo.policy_deepspeed.dtype} != {"float32"}


def _merge(ppo: PPOConfig) -> Iterator[str]:
    """Warn about settings for which `ppo.published_loss_limit` may fail the stage at the end of the run."""
    rounded = {ppo.engine.dtype, ppo.policy_deepspeed.dtype} - {"float32"}
    if ppo.lora is None or ppo.syncs_adapter or not rounded:
        return
    cause, fix = why_merged(ppo.lora)
    yield (
        f"{cause} merges the adapter into weights that are rounded to {', '.join(sorted(rounded))}, which"
        " loses a large part of a small update: rollouts and evaluation use a different policy than the"
        " trained one, and the stage fails at its end if the loss exceeds ppo.published_loss_limit"
        f" ({ppo.published_loss_limit:g}); {fix}, or compute in float32"
    )
