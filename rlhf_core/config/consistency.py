"""Rules between the sections of a configuration, and warnings for settings that are rarely intended.

Only the configuration is examined, and no files or devices. Each message names the field, the value and a
fix. `rlhf run` and `rlhf plan` print the warnings, and the MLflow run stores them in the tag `rlhf.warnings`.
Rules within one section are in the section itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from rlhf_core.config.pipeline import PipelineConfig, runs_on_gpu, section_of
from rlhf_core.config.ppo import MINIBATCH, PPOConfig
from rlhf_core.config.ppo_sections import MAX_ENGINE_RANK
from rlhf_core.config.rewards import AnyReward, LanguageModelReward, ModelReward, measured_graders
from rlhf_core.config.training import DeepSpeedConfig, DPOConfig, LoraConfig, adapter_rate
from rlhf_core.errors import ConfigError, Finding

_LARGEST_INITIAL_WEIGHT = 0.1
"""A published moving average in which the SFT model has a larger weight is hardly a trained policy."""
_OFFLOAD_STAGES = {"none": (0, ""), "optimizer": (1, "1, 2 or 3"), "all": (3, "3")}
"""The lowest ZeRO stage that supports each kind of offload, and all of them in words."""


LEAST_PROMPTS = 50
"""Groups of held-out prompts for which the evaluation leaves out those that choose the policy. It is the
default of `register.min_prompts`, and not its value, which is not part of the evaluation's key.
"""


def check_consistency(config: PipelineConfig) -> Iterator[Finding]:
    """Check rules between the sections of a configuration."""
    ppo = config.ppo
    if config.reward.enabled and not config.data.preference:
        yield ConfigError(
            "reward.enabled: is true, but data.preference is empty; add pairs, or set reward.enabled=false"
        )
    elif config.reward.enabled and not ppo.uses_reward_model:
        yield (
            "reward.enabled: a reward model is trained, but ppo.rewards has no source of type model: it only"
            " judges"
        )
    elif _is_spare_judge(config):
        yield (
            "reward.enabled: a reward model is trained, but ppo.enabled is false: it only judges; if the"
            " other judge is enough, set reward.enabled=false"
        )
    yield from _judge(config)
    yield from _language_model(config)
    if config.sample is not None and config.sample.judge == "judge_model" and config.reward.judge is None:
        yield ConfigError(
            "sample.judge: judge_model needs reward.judge; got none; add reward.judge={}, or use reward"
        )
    yield from _labels_of_people(config)
    # DeepSpeed has one group for hpZ in a process, and refuses to make another (`engines.sharding`).
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


def _is_spare_judge(config: PipelineConfig) -> bool:
    """Return whether the reward model is only a judge, and the evaluation has another one without it."""
    if not config.reward.enabled or config.reward.judge is not None or config.scores_by_reward_model:
        return False
    return bool(config.evaluate.language_model or _rules(config) or config.generates_prompts)


def _rules(config: PipelineConfig) -> list[AnyReward]:
    """Return the rewards that can be the judge `rules`."""
    return [source for source in config.ppo.rewards if not isinstance(source, ModelReward) and source.weight]


def _judge(config: PipelineConfig) -> Iterator[Finding]:
    """Check that what `evaluate.judge` names exists."""
    rules = _rules(config)
    # Whether it exists, what it is, and the fix.
    needs = {
        "reward_model": (config.reward.enabled, "reward.enabled=true; got false; use auto or rules"),
        "judge_model": (config.reward.judge, "reward.judge; got none; add reward.judge={}, or use auto"),
        "language_model": (
            config.evaluate.language_model,
            "evaluate.language_model; got none; add it, or use auto",
        ),
        "rules": (rules, "a rule of some weight in ppo.rewards; got none; use auto or reward_model"),
        "gold": (config.generates_prompts, "the prompts of the demo; got other data.prompts; use auto"),
    }
    judge = config.evaluate.judge
    exists, text = needs.get(judge, (True, ""))
    if not exists:
        yield ConfigError(f"evaluate.judge: {judge} needs {text}")


def _language_model(config: PipelineConfig) -> Iterator[Finding]:
    if config.evaluate.language_model is None:
        if config.labels_by_language_model:
            yield ConfigError(
                "sample.judge: language_model needs evaluate.language_model; got none; add it, or use reward"
            )
        return
    if not config.judging_stages:
        yield ConfigError(
            f"evaluate.language_model: is not asked, because evaluate.judge is {config.evaluate.judge}; leave"
            " one of them out"
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
    lowest, stages = _OFFLOAD_STAGES[deepspeed.offload]
    if deepspeed.zero_stage < lowest:
        yield ConfigError(
            f"{field}.offload: {deepspeed.offload} needs {field}.zero_stage {stages}; got "
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
    # Without ZeRO DeepSpeed refuses it, and under ZeRO 1 its optimizer does not skip gradients that are not
    # finite (decision 7).
    if deepspeed.zero_stage < 2:
        yield ConfigError(
            f"{rule} {field}.zero_stage 2 or 3; got {deepspeed.zero_stage}; set zero_stage=2, also on one"
            " rank, or leave it out"
        )
    # DeepSpeed ignores the setting with offload (decision 7).
    if deepspeed.offload != "none":
        yield ConfigError(f"{rule} {field}.offload=none; got {deepspeed.offload}; set it, or leave it out")


def deepspeed_sections(config: PipelineConfig) -> list[tuple[str, DeepSpeedConfig]]:
    """Return the DeepSpeed sections that this configuration uses, with their fields.

    The reward model in PPO has that of the critic. Without PPO, the evaluation has the precision of the
    policy's section. A model that is not trained is saved in the precision of `sft.deepspeed`.
    """
    ppo = config.ppo
    sections = {"sft.deepspeed": config.sft.deepspeed}
    for stage, section in config.training_sections.items():
        sections[f"{section_of(stage)}.deepspeed"] = section.deepspeed
    sections["ppo.policy_deepspeed"] = ppo.policy_deepspeed
    if ppo.enabled and (ppo.uses_critic or ppo.uses_reward_model):
        sections["ppo.critic_deepspeed"] = ppo.critic_deepspeed
    return list(sections.items())


def unusual_settings(config: PipelineConfig) -> Iterator[str]:
    """Yield one sentence for each valid setting that is rarely intended."""
    ppo = config.ppo
    if ppo.enabled:
        yield from _ppo(config)
    yield from _temperature(config)
    yield from _adapter_rates(config)
    graders = measured_graders(ppo.rewards)
    if graders and _only_models_labelled(config):
        names = ", ".join(source.model for source in graders)
        yield (
            f"ppo.rewards: the agreement of {names} with people is not measured, because all sources of"
            " data.preference have labelled_by; add pairs of people, or set min_agreement to null"
        )
    judge = config.evaluate.language_model
    models = [each.model for each in ppo.rewards if isinstance(each, LanguageModelReward) and each.weight]
    if judge is not None and judge.model in models:
        yield (
            f"evaluate.language_model: its model {judge.model} is also a reward of PPO, so its verdict about"
            " the policy is no independent evidence; name another model"
        )
    held_out = {"evaluate.prompts": config.evaluate.prompts, "data.max_eval": config.data.max_eval}
    for field, prompts in held_out.items():
        if prompts < config.register_.min_prompts:
            yield (
                f"{field}: {prompts} is below register.min_prompts ({config.register_.min_prompts}): no"
                " candidate can become champion; raise it, or lower register.min_prompts"
            )
    if config.sample is not None and config.sample.policy not in ("sft", config.register_.policy):
        yield (
            f"sample.policy is {config.sample.policy}, but register.policy is {config.register_.policy}: the"
            " policy that is registered is not the one whose answers are data; set both to the same stage"
        )
    limits = config.given_limits
    is_longer = limits.new is not None and limits.response is not None and limits.new > limits.response
    if is_longer and (ppo.uses_reward_model if ppo.enabled else config.reward.enabled):
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
        # Of a new section: `load_config` derives the default of adapters from it.
        usual = type(section)().optimizer.learning_rate
        rates.append(LearningRate(field, section.optimizer.learning_rate, usual, section.lora is not None))
    trained = []
    if ppo.enabled:
        trained.append(("policy", ppo.policy, default.policy))
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
    yield from _average(ppo)
    yield from _merge(ppo)
    yield from _guards(config)
    if runs_on_gpu(config) and ppo.minibatch_size < MINIBATCH:
        yield (
            f"ppo.minibatches: an optimizer step has {ppo.minibatch_size} responses; below {MINIBATCH} the"
            " gradients of a real model are noisy; lower it, or raise ppo.prompts_per_step"
        )
    if ppo.teacher is None and not any(source.weight for source in ppo.rewards):
        yield "ppo.rewards: all weights are 0, so only the KL trains the policy; give a source a weight"
    if ppo.publish == "best" and ppo.trains_on_reward_model and config.reward.judge is None:
        yield (
            "ppo.publish is best, but the reward model that the policy is trained with decides: under"
            " over-optimisation its score rises until the end; add reward.judge={}"
        )
    if config.evaluate.judge == "reward_model" and ppo.trains_on_reward_model:
        yield (
            "evaluate.judge is the reward model that the policy is trained with, whose scores also rise under"
            " over-optimisation; use reward.judge={} or a language model, and leave evaluate.judge out"
        )


def _temperature(config: PipelineConfig) -> Iterator[str]:
    trained, field = 1.0, ""
    if config.ppo.enabled:
        trained, field = config.ppo.temperature, "ppo.temperature="
    if config.evaluation_temperature != trained:
        yield (
            f"evaluate.temperature is {config.evaluation_temperature:g}, but the policy is trained at"
            f" {field}{trained:g}: evaluation then judges a different distribution than the trained one;"
            f" set it to {trained:g}"
        )


def _kl(ppo: PPOConfig) -> Iterator[str]:
    """Warn about estimators with a wrong gradient."""
    kl = ppo.kl
    usual = "k1" if kl.place == "reward" else "k2"
    if kl.used_estimator != usual:
        yield (
            f"ppo.kl.estimator: {kl.used_estimator} in the {kl.place} has a gradient different from that of"
            f" the KL (arXiv 2512.21852); leave it out for {usual}"
        )


def _guards(config: PipelineConfig) -> Iterator[str]:
    """Warn about guards that cannot be raised in this run."""
    ppo = config.ppo
    if ppo.guards.get("overoptimization") == "stop" and config.reward.judge is None:
        yield (
            "ppo.guards.overoptimization: stop has no effect, because it compares the reward model with a"
            " second one; add reward.judge={}"
        )
    if ppo.guards.get("blind_critic") == "stop" and not ppo.uses_critic:
        yield (
            f"ppo.guards.blind_critic: stop has no effect, because ppo.algorithm={ppo.algorithm} has no"
            " critic; leave it out"
        )


def _average(ppo: PPOConfig) -> Iterator[str]:
    """Warn if the published moving average has a large part of the SFT model, with which it begins."""
    if ppo.publish != "average" or ppo.ema_decay is None:
        return
    steps = ppo.policy_optimizer_steps
    # The average starts as a copy of the SFT model, and each step multiplies the share of that by the decay.
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
