"""Warnings for settings that are valid but rarely intended. Each names the field, the value and a fix.

Only the configuration is examined. `rlhf run` and `rlhf plan` print the warnings, and the MLflow run stores
them in the tag `rlhf.warnings`. Invalid settings are refused by the configuration sections themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.ppo import MAX_ENGINE_RANK, PPOConfig
from rlhf_core.config.training import LoraConfig

_FAR = 10
"""A KL limit above this multiple of the target has no practical effect."""


def doubts(config: PipelineConfig) -> Iterator[str]:
    """Yield one sentence for each warning."""
    ppo = config.ppo
    yield from _kl(ppo)
    yield from _critic(ppo)
    yield from _merge(ppo)
    if config.data.eval_fraction > 0.5:
        yield (
            f"data.eval_fraction is {config.data.eval_fraction:g}: more prompts are held out than trained on;"
            " 0.1 is usual"
        )
    if config.evaluate.prompts < config.register_.min_prompts:
        yield (
            f"evaluate.prompts: {config.evaluate.prompts} is below register.min_prompts"
            f" ({config.register_.min_prompts}): no candidate can become champion; raise it, or lower"
            " register.min_prompts"
        )
    if config.evaluation_temperature != ppo.temperature:
        yield (
            f"evaluate.temperature is {config.evaluation_temperature:g}, but the policy is trained at"
            f" ppo.temperature={ppo.temperature:g}: evaluation then judges a different distribution than the"
            " trained one; leave it out"
        )
    if ppo.uses_reward_model and ppo.max_new_tokens > config.data.max_response_tokens:
        yield (
            f"ppo.max_new_tokens: {ppo.max_new_tokens} is above data.max_response_tokens"
            f" ({config.data.max_response_tokens}): the reward model scores longer responses than in its"
            " training; lower it, or raise data.max_response_tokens"
        )


def _kl(ppo: PPOConfig) -> Iterator[str]:
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
    steps = ppo.steps - ppo.warmup_steps
    log_most = steps * math.log1p(0.2 * ppo.rollout_batch_size / ppo.kl_horizon)
    if log_most < math.log(2):
        yield (
            f"ppo.kl.horizon: {ppo.kl_horizon} responses are too many: the coefficient changes by a factor of"
            f" {math.exp(log_most):.2f} at most in {steps} steps of {ppo.rollout_batch_size} responses and"
            f" cannot follow ppo.kl.target; leave it out ({20 * ppo.rollout_batch_size}), or leave the"
            " target out"
        )
    if ppo.kl_limit > _FAR * kl.target:
        yield (
            f"ppo.max_kl: {ppo.kl_limit:g} is far above ppo.kl.target ({kl.target:g}), so a policy far from "
            f"its target is not stopped; leave it out ({5 * kl.target:g})"
        )


def _critic(ppo: PPOConfig) -> Iterator[str]:
    rising = round(ppo.critic.warmup_ratio * ppo.critic_optimizer_steps)
    warm_up = ppo.warmup_steps * ppo.epochs * ppo.minibatches
    if warm_up and rising:
        yield (
            f"ppo.critic.warmup_ratio: {ppo.critic.warmup_ratio:g} increases the critic's learning rate over"
            f" {rising} optimizer steps, but the critic's warm-up (ppo.critic_warmup_steps) has only"
            f" {warm_up}, so the critic learns little before the policy is trained; set it to 0"
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
