"""Advice on settings that would make the steps of PPO faster.

    metrics of a step -> rules -> several steps in a row -> one sentence with field and value: a warning in
                                                            the log, and a tag of the MLflow run

A rule has a metric, a limit, and a function that returns the sentence, or None if no setting would help with
this configuration. docs/tuning.md lists the rules.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import MAX_ENGINE_RANK, checkpoint_interval
from rlhf_core.config.rewards import ExternalReward, LanguageModelReward, RemoteReward

log = logging.getLogger(__name__)

PATIENCE = 3
"""Consecutive steps for which a condition must hold."""


@dataclass(frozen=True)
class Situation:
    """The measurements that a rule uses."""

    ppo: PPOConfig
    device: str
    """ "cpu" or "cuda"."""
    metrics: Mapping[str, float]
    """Metrics of the step."""

    @property
    def separate_engines(self) -> bool:
        """Whether the engines have devices of their own. On CPUs all processes share the cores."""
        return self.device == "cuda" and self.ppo.colocate != "all"

    def share(self, phase: str) -> float:
        """Return the share of a phase in the step."""
        return self.metrics.get(f"timing/{phase}", 0.0) / self.metrics["timing/step"]


@dataclass(frozen=True)
class Rule:
    """The rule `name`: its sentence is given if `metric` is at least `limit`."""

    name: str
    metric: str
    limit: float
    sentence: Callable[[Situation], str | None]


class Advice:
    """Gives each sentence once in an attempt."""

    def __init__(self, ppo: PPOConfig, device: str) -> None:
        self._ppo = ppo
        self._device = device
        self._in_a_row: dict[str, int] = {}
        self._given: set[str] = set()

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the advice that follows from the metrics of a step and of those before it."""
        situation = Situation(self._ppo, self._device, metrics)
        for rule in RULES:
            sentence = None
            # -1 is below every limit, so a metric that was not measured gives no advice.
            if metrics.get(rule.metric, -1.0) >= rule.limit:
                sentence = rule.sentence(situation)
            count = self._in_a_row.get(rule.name, 0) + 1 if sentence else 0
            self._in_a_row[rule.name] = count
            if count == PATIENCE and rule.name not in self._given:
                self._given.add(rule.name)
                log.warning("advice, step %d: %s", step, sentence, extra={"advice": rule.name})


# -- sentences --


def _idle_engines(situation: Situation) -> str | None:
    """With separate engines, a step could take as long as the longer one of sampling and training."""
    ppo, metrics = situation.ppo, situation.metrics
    if not situation.separate_engines or ppo.staleness:
        return None
    rollout, sync = metrics["timing/rollout"], metrics["timing/sync"]
    overlapped = max(rollout, metrics["timing/step"] - rollout - sync) + sync
    # For less than 15 % it is not worth training on older rollouts.
    if overlapped > 0.85 * metrics["timing/step"]:
        return None
    return (
        f"engines idle {metrics['utilisation/idle/engines']:.0%} of a step: ppo.staleness=1 would let them"
        f" sample the next step during scoring and training, about {overlapped:.2g} s a step instead of"
        f" {metrics['timing/step']:.2g} s"
    )


def _many_engines(situation: Situation) -> str | None:
    ppo, idle = situation.ppo, situation.metrics["utilisation/idle/engines"]
    if not situation.separate_engines or not ppo.staleness:
        return None
    # They sample during the whole step, with a tenth of it to spare.
    enough = math.ceil(ppo.engine.count * (1 - idle) / 0.9)
    if enough >= ppo.engine.count:
        return None
    return f"engines idle {idle:.0%} of a step: ppo.engine.count={enough} would do"


def _few_engines(situation: Situation) -> str | None:
    count, share = situation.ppo.engine.count, situation.share("rollout")
    # More engines cost devices: a setting of the present ones that would help is advised alone.
    if not situation.separate_engines or share < 0.5 or _eager(situation) or _few_sequences(situation):
        return None
    idle = situation.metrics["utilisation/idle/policy"]
    return (
        f"the policy idles {idle:.0%} of a step, and the rollout takes {share:.0%}:"
        f" ppo.engine.count={2 * count} would halve the rollout"
    )


def _slow_critic(situation: Situation) -> str | None:
    return _slow_group(situation, "critic", "policy")


def _slow_policy(situation: Situation) -> str | None:
    return _slow_group(situation, "policy", "critic") if situation.ppo.uses_critic else None


def _slow_group(situation: Situation, slow: str, fast: str) -> str | None:
    """Both are trained at the same time, so the faster one waits."""
    ppo, metrics = situation.ppo, situation.metrics
    if not situation.separate_engines:
        return None
    slow_rate = metrics.get(f"utilisation/tokens_per_s/{slow}", 0.0)
    fast_rate = metrics.get(f"utilisation/tokens_per_s/{fast}", 0.0)
    if slow_rate == 0 or fast_rate < 1.5 * slow_rate or situation.share("training") < 0.3:
        return None
    ranks = (ppo.critic_deepspeed if slow == "critic" else ppo.policy_deepspeed).ranks
    # More ranks than responses in a minibatch are refused by the configuration.
    wanted = min(ppo.minibatch_size, math.floor(ranks * fast_rate / slow_rate + 0.5))
    if wanted <= ranks:
        return None
    return (
        f"the {fast} idles {metrics[f'utilisation/idle/{fast}']:.0%} of a step and waits for the {slow},"
        f" which trains {slow_rate:.0f} tokens/s and the {fast} {fast_rate:.0f}:"
        f" ppo.{slow}_deepspeed.ranks={wanted} would balance them"
    )


def _padding(situation: Situation) -> str | None:
    share = situation.metrics["utilisation/padding"]
    tokens = situation.ppo.micro_batch_tokens
    if situation.ppo.pack is False:
        return f"{share:.0%} of the tokens of scoring and training are padding: ppo.pack=auto would avoid it"
    # The model does not support packed rows.
    return (
        f"{share:.0%} of the tokens of scoring and training are padding: ppo.micro_batch_tokens={tokens // 2}"
        " (half) would put rows of more similar lengths together"
    )


def _sync(situation: Situation) -> str | None:
    ppo, metrics = situation.ppo, situation.metrics
    found = (
        f"the weight sync takes {metrics['sync/share']:.0%} of a step, {metrics['sync/gb_per_s']:.2g} GB/s"
    )
    lora = ppo.lora
    # A quantized adapter belongs to rounded weights, which the engines do not have, and vLLM has a largest
    # rank.
    can_send_adapter = lora is not None and lora.quantize is None and lora.r <= MAX_ENGINE_RANK
    if can_send_adapter and not ppo.syncs_adapter and ppo.served_dtype != "float32":
        return f"{found}: ppo.weight_sync.lora=adapter would send the adapter alone"
    if situation.device == "cuda" and ppo.weight_sync.backend == "gloo":
        return f"{found}: ppo.weight_sync.backend=auto would send from GPU to GPU"
    if ppo.engine.dtype == "float32" and ppo.policy_deepspeed.dtype != "float32":
        return f"{found}: ppo.engine.dtype={ppo.policy_deepspeed.dtype} would send half as many bytes"
    return None


def _idle_gpu(situation: Situation) -> str | None:
    """Small micro-batches leave a GPU waiting for the next kernel."""
    metrics, present = situation.metrics, situation.ppo.micro_batch_tokens
    busy, memory = metrics["gpu/utilisation/training"], metrics.get("gpu/memory/policy", 1.0)
    # A larger limit changes nothing where one micro-batch already has the whole minibatch of a rank.
    is_one = metrics.get("utilisation/tokens_per_minibatch", 0.0) <= present
    if busy > 0.6 or memory > 0.6 or is_one or situation.share("training") < 0.3:
        return None
    return (
        f"the GPUs compute {busy:.0%} of the training, and {memory:.0%} of the memory of the policy's is in"
        f" use: ppo.micro_batch_tokens={2 * present} would give them more at a time"
    )


def _full_gpu(situation: Situation) -> str | None:
    ppo = situation.ppo
    found = f"{situation.metrics['gpu/memory/policy']:.0%} of the GPU memory of the policy"
    if ppo.colocate == "all" and not ppo.engine.sleep_level:
        share = ppo.engine.gpu_memory_utilization
        return (
            f"{found} is in use: ppo.engine.gpu_memory_utilization={share - 0.1:.2g} would leave it a reserve"
            " for longer responses"
        )
    return (
        f"{found} is in use: ppo.micro_batch_tokens={ppo.micro_batch_tokens // 2} would leave it a reserve"
        " for longer responses"
    )


def _rewards(situation: Situation) -> str | None:
    """A reward that is computed while the models score costs nothing."""
    ppo, metrics = situation.ppo, situation.metrics
    share = min(situation.share("rewards"), metrics["utilisation/data_wait"])
    if share < 0.2:
        return None
    found = f"all models wait {share:.0%} of a step for the rewards"
    for index, source in enumerate(ppo.rewards):
        if isinstance(source, RemoteReward | LanguageModelReward):
            wanted = 2 * source.concurrency
            return f"{found}: ppo.rewards.{index}.concurrency={wanted} would send more requests at a time"
    for index, source in enumerate(ppo.rewards):
        if isinstance(source, ExternalReward):
            return f"{found}: ppo.rewards.{index}.type=remote would compute them in several processes"
    return None


def _few_sequences(situation: Situation) -> str | None:
    ppo = situation.ppo
    sequences = math.ceil(ppo.rollout_batch_size / ppo.engine.count)
    limit = ppo.engine.max_num_seqs
    if sequences <= limit or situation.share("rollout") < 0.4:
        return None
    return (
        f"the rollout takes {situation.share('rollout'):.0%} of a step, and an engine decodes {limit} of its"
        f" {sequences} sequences at a time: ppo.engine.max_num_seqs={sequences} would decode all together"
    )


def _eager(situation: Situation) -> str | None:
    metrics = situation.metrics
    launching = situation.device == "cuda" and situation.ppo.engine.enforce_eager
    if not launching or situation.share("rollout") < 0.4:
        return None
    return (
        f"the rollout takes {situation.share('rollout'):.0%} of a step, a token"
        f" {1000 * metrics['rollout/token_latency']:.1f} ms: ppo.engine.enforce_eager=false would use CUDA"
        " graphs"
    )


def _checkpoints(situation: Situation) -> str | None:
    metrics = situation.metrics
    ppo = situation.ppo
    now = checkpoint_interval(ppo.checkpoint_every, ppo.evaluation_interval, ppo.sync_every)
    every = math.ceil(metrics["utilisation/checkpoint"] / 0.05 * now)
    return (
        f"checkpoints take {metrics['utilisation/checkpoint']:.0%} of the time:"
        f" ppo.checkpoint_every={every} would make it 5 %"
    )


RULES = (
    Rule("idle_engines", "utilisation/idle/engines", 0.2, _idle_engines),
    Rule("many_engines", "utilisation/idle/engines", 0.4, _many_engines),
    Rule("few_engines", "utilisation/idle/policy", 0.5, _few_engines),
    Rule("slow_critic", "utilisation/idle/policy", 0.2, _slow_critic),
    Rule("slow_policy", "utilisation/idle/critic", 0.2, _slow_policy),
    Rule("padding", "utilisation/padding", 0.2, _padding),
    Rule("sync", "sync/share", 0.15, _sync),
    # Wherever there are figures: the conditions are in the function.
    Rule("idle_gpu", "gpu/utilisation/training", 0.0, _idle_gpu),
    Rule("full_gpu", "gpu/memory/policy", 0.97, _full_gpu),
    Rule("rewards", "utilisation/data_wait", 0.2, _rewards),
    # Whenever an engine has sampled: the conditions are in the function.
    Rule("few_sequences", "rollout/decode_steps", 1.0, _few_sequences),
    Rule("eager", "rollout/token_latency", 0.005, _eager),
    Rule("checkpoints", "utilisation/checkpoint", 0.1, _checkpoints),
)
