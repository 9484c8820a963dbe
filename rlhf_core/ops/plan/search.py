"""Search for the fastest split of each stage that fits: ranks, sharding, micro-batches, engines, colocation.

    sft, reward,   ranks x sharding                                       -> the largest micro-batch that fits
    dpo
    ppo            colocate (pairs, all) x ranks of each group x sharding x micro-batch x engines x their GPUs

A split changes nothing that the training depends on: neither batches nor lengths, precision or adapters. The
phases of a PPO step depend on different parts of a split, so that each part is computed once and not once for
every combination. The result is checked by `fit.compare_memory` as any other configuration.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from rlhf_core.config import PipelineConfig
from rlhf_core.config.engine import EngineConfig
from rlhf_core.config.pipeline import TrainingStage, section_of
from rlhf_core.config.placement import Group, PlacementPlan, plan
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, TrainingSection
from rlhf_core.errors import InputError
from rlhf_core.models.shape import ModelShape
from rlhf_core.ops.plan.options import lowest_stage, micro_batches, rank_counts, shardings
from rlhf_core.ops.plan.speed import (
    PHASES,
    Seconds,
    gather_time,
    group_time,
    optimizer_step_time,
    rollout_time,
    send_time,
    step_seconds,
    step_time,
    turn_time,
)
from rlhf_core.planning.advice import Changes, changed_fields, with_changes
from rlhf_core.planning.fit import compare_memory, host_memory
from rlhf_core.planning.hardware import Hardware
from rlhf_core.planning.layout import Layout, layout, room_for_engines
from rlhf_core.planning.loads import (
    CONTEXT,
    FRAGMENTATION,
    JUDGE,
    DeviceLoad,
    group_loads,
    largest_pass,
    largest_pass_of_ppo,
    ppo_models,
    sequences_of_step,
    stage_loads,
    trained_model,
)
from rlhf_core.planning.memory import ENGINE_CONTEXT, engine_memory

_KEPT = 40
"""Number of the fastest splits of PPO that are checked until one is a valid configuration that fits."""
_LAYOUT = (
    "ppo.colocate",
    "ppo.policy_deepspeed.ranks",
    "ppo.critic_deepspeed.ranks",
    "ppo.reward_ranks",
    "ppo.engine.count",
    "ppo.engine.tensor_parallel",
    "ppo.engine.sleep_level",
)
"""Fields that say which process of PPO uses which device, and when."""
_OTHERS = 2
"""Number of further splits of PPO."""


@dataclass(frozen=True)
class Split:
    """The fastest settings of one stage."""

    stage: str
    changes: Changes
    """Fields whose values differ from the configuration."""
    seconds: float
    """Duration of an optimizer step, or of a PPO step."""
    phases: dict[str, Seconds]
    host: float
    """Bytes of offloaded state on each host."""
    others: tuple[Split, ...] = ()
    """At most two other splits of PPO: the fastest ones with another layout, then those with other
    micro-batches.
    """


@dataclass(frozen=True)
class NoSplit:
    """A stage for which nothing fits."""

    stage: str
    reason: str


def fastest(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> tuple[Split | NoSplit, ...]:
    """Return the fastest split of each training stage, or what is missing where nothing fits."""
    results = [_training(stage, config, shape, hardware) for stage in config.training_sections]
    if config.ppo.enabled:
        results.append(_PPOSearch(config, shape, hardware).run())
    return tuple(results)


# -- sft, reward and dpo --


def _training(
    stage: TrainingStage, config: PipelineConfig, shape: ModelShape, hardware: Hardware
) -> Split | NoSplit:
    """Return the fastest split of a stage that trains one model, or why none fits."""
    section = config.training_sections[stage]
    sequences = sequences_of_step(section)
    longest = largest_pass(config, stage).longest
    smallest = longest * sequences // section.batch_size
    best: tuple[Seconds, Changes, float] | None = None
    closest: DeviceLoad | None = None
    for ranks in rank_counts(min(hardware.count, section.batch_size), hardware.per_host):
        largest = math.ceil(sequences / ranks) * longest
        for sharding in shardings(section.deepspeed, ranks, hardware, section.lora):
            model = trained_model(config, shape, stage, sharding)
            for tokens in micro_batches(section.micro_batch_tokens, smallest, largest):
                candidate = section.model_copy(update={"deepspeed": sharding, "micro_batch_tokens": tokens})
                changed = _with_section(config, stage, candidate)
                peak = max(stage_loads(changed, shape, stage, "cuda"), key=lambda load: load.total)
                if not _fits_hosts([peak], hardware):
                    continue
                if closest is None or peak.total < closest.total:
                    closest = peak
                if peak.total > hardware.device.memory:
                    continue
                # A smaller micro-batch is never faster.
                budget = largest_pass(changed, stage).tokens
                seconds = optimizer_step_time(model, sequences, longest, budget, hardware)
                # The first of equally fast ones is the simplest.
                if best is None or seconds.total < best[0].total * (1 - 1e-9):
                    fields = _trainer_fields(f"{section_of(stage)}.deepspeed", sharding)
                    fields[f"{section_of(stage)}.micro_batch_tokens"] = str(tokens)
                    best = (seconds, fields, host_memory([peak], hardware))
                break
    assert closest is not None, "one rank is always tried"
    if best is None:
        return NoSplit(stage, _missing(closest, hardware))
    seconds, fields, host = best
    return Split(stage, changed_fields(config, fields), seconds.total, {"step": seconds}, host)


def _with_section(config: PipelineConfig, stage: TrainingStage, section: TrainingSection) -> PipelineConfig:
    """Return the configuration with other settings of a stage that trains one model."""
    if stage != "judge":
        return config.model_copy(update={stage: section})
    assert config.reward.judge is not None
    own = {"deepspeed": section.deepspeed, "micro_batch_tokens": section.micro_batch_tokens}
    judge = config.reward.judge.model_copy(update=own)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"judge": judge})})


def _fits_hosts(loads: list[DeviceLoad], hardware: Hardware) -> bool:
    return hardware.host_memory is None or host_memory(loads, hardware) <= hardware.host_memory


def _missing(load: DeviceLoad, hardware: Hardware) -> str:
    gib = 2**30
    return (
        f"{load.stage}: {load.what} needs at least {load.total / gib:.1f} GiB on each device"
        f" ({load.phase}, on {load.devices}); {hardware.device.name} has {hardware.device.memory / gib:.1f},"
        f" {(load.total - hardware.device.memory) / gib:.1f} too little"
    )


def _trainer_fields(section: str, sharding: DeepSpeedConfig) -> Changes:
    return {
        f"{section}.ranks": str(sharding.ranks),
        f"{section}.zero_stage": str(sharding.zero_stage),
        f"{section}.hpz": str(sharding.hpz),
        f"{section}.offload": sharding.offload,
        f"{section}.gradient_checkpointing": str(sharding.gradient_checkpointing).lower(),
    }


# -- ppo --


@dataclass(frozen=True)
class _Option:
    """One way to run a group of ranks, with a size of micro-batches."""

    scoring: Seconds
    training: Seconds
    gather: Seconds
    """Time of a sync in the policy's group."""
    sharding: DeepSpeedConfig
    peak: DeviceLoad


@dataclass(order=True)
class _SplitCandidate:
    seconds: float
    order: int
    fields: Changes = field(compare=False)


class _PPOSearch:
    """The search for PPO, with what it has computed."""

    def __init__(self, config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> None:
        self._config, self._shape, self._hardware = config, shape, hardware
        self._longest = config.max_sequence_tokens
        self._options: dict[tuple[object, ...], list[_Option]] = {}
        self._rollouts: dict[tuple[int, int, float], Seconds | None] = {}
        self._closest: dict[tuple[str, ...], DeviceLoad] = {}
        """The smallest peak of each group."""
        self._tried = 0

    def run(self) -> Split | NoSplit:
        """Return the fastest split with those of other layouts, or why nothing fits."""
        by_layout: dict[tuple[str | None, ...], _SplitCandidate] = {}
        by_size: dict[tuple[str | None, ...], _SplitCandidate] = {}

        def noted() -> Iterator[_SplitCandidate]:
            for candidate in self._candidates():
                for best, names in ((by_layout, _LAYOUT), (by_size, (*_LAYOUT, "ppo.micro_batch_tokens"))):
                    key = tuple(map(candidate.fields.get, names))
                    best[key] = min(candidate, best.get(key, candidate))
                yield candidate

        for candidate in heapq.nsmallest(_KEPT, noted()):
            if split := self._checked(candidate):
                others: list[Split] = []
                for other in (*sorted(by_layout.values())[:_KEPT], *sorted(by_size.values())[:_KEPT]):
                    checked = self._checked(other)
                    if checked and all(known.changes != checked.changes for known in (split, *others)):
                        others.append(checked)
                    if len(others) == _OTHERS:
                        break
                return replace(split, others=tuple(others))
        return NoSplit("ppo", self._reason())

    def _checked(self, candidate: _SplitCandidate) -> Split | None:
        """Return the split of a candidate, or None if it is no valid configuration that fits."""
        changes = changed_fields(self._config, candidate.fields)
        try:
            changed = with_changes(self._config, changes)
        except InputError:
            return None
        verdict = compare_memory(changed, self._shape, self._hardware)
        if any(problem.stage == "ppo" for problem in verdict.problems):
            return None
        changes |= self._evaluation(changes)
        time = step_time(changed, self._shape, self._hardware)
        phases: dict[str, Seconds] = {name: time.phase(name) for name in PHASES}
        loads = [load for load in verdict.loads if (load.stage, load.phase) == ("ppo", "step")]
        return Split("ppo", changes, time.total, phases, host_memory(loads, self._hardware))

    def _evaluation(self, changes: Changes) -> Changes:
        """Return the smallest number of ranks on which the evaluation fits, if it needs other ones."""
        for ranks in (
            self._config.evaluate.ranks,
            *rank_counts(self._hardware.count, self._hardware.per_host),
        ):
            more = {} if ranks == self._config.evaluate.ranks else {"evaluate.ranks": str(ranks)}
            changed = with_changes(self._config, {**changes, **more})
            verdict = compare_memory(changed, self._shape, self._hardware)
            # A local judge runs in engines, and more ranks do not help it.
            problems = [each for each in verdict.problems if each.what != JUDGE]
            if not any(problem.stage == "evaluate" for problem in problems):
                return more
        return {}

    def _reason(self) -> str:
        if not self._tensor_parallel_that_fits():
            ways = max(self._tensor_parallel(), default=1)
            return (
                f"ppo: an engine on {ways} of {self._hardware.per_host} devices of a host has no room for one"
                f" sequence of {self._longest} tokens in addition to the weights"
            )
        needed, parts = min(self._tensor_parallel_that_fits()), []
        for group in plan(self._config.ppo.model_copy(update={"colocate": "pairs"})).groups:
            ranks = self._fewest_ranks(group)
            if ranks is None:
                return _missing(self._closest[group.roles], self._hardware)
            needed += ranks
            parts.append(f"{ranks} for {group.label}")
        return (
            f"ppo: the smallest split tried needs {needed} devices ({', '.join(parts)}, the others for an"
            f" engine); there are {self._hardware.count}"
        )

    def _fewest_ranks(self, group: Group) -> int | None:
        """Return the smallest number of ranks on which a group fits, with the smallest micro-batches."""
        limit = min(self._hardware.count, self._config.ppo.minibatch_size)
        for ranks in rank_counts(limit, self._hardware.per_host):
            spans = ranks > self._hardware.per_host
            if self._group("pairs", group.roles, ranks, self._longest, spans):
                return ranks
        return None

    def _tensor_parallel_that_fits(self) -> list[int]:
        share = self._share("pairs")
        return [ways for ways in self._tensor_parallel() if self._rollout(1, ways, share) is not None]

    def _candidates(self) -> Iterator[_SplitCandidate]:
        # With staleness, the engines need devices of their own.
        colocations = ("pairs",) if self._config.ppo.staleness else ("pairs", "all")
        for colocate in colocations:
            ppo = self._config.ppo.model_copy(update={"colocate": colocate})
            groups = plan(ppo).groups
            counts = rank_counts(
                min(self._hardware.count, self._config.ppo.minibatch_size), self._hardware.per_host
            )
            # With `pairs`, at least one device is left for an engine.
            reserved = 1 if colocate == "pairs" else 0
            for ranks in product(counts, repeat=len(groups)):
                if sum(ranks) <= self._hardware.count - reserved:
                    yield from self._with_ranks(colocate, groups, ranks)

    def _with_ranks(
        self, colocate: str, groups: tuple[Group, ...], ranks: tuple[int, ...]
    ) -> Iterator[_SplitCandidate]:
        """Yield the fastest settings of the groups with every number of engines."""
        sized = tuple(replace(group, ranks=count) for group, count in zip(groups, ranks, strict=True))
        placement = PlacementPlan(sized, 0, 1, colocated=colocate == "all")
        if placement.colocated:
            alone = layout(placement, self._hardware)
            if alone is not None:
                # All roles are in one group.
                [hosts] = alone.groups
                for tokens, (option,) in self._settings(colocate, groups, ranks, alone):
                    for ways in self._tensor_parallel():
                        shared_by = replace(placement, tensor_parallel=ways)
                        count = sum(room_for_engines(shared_by, self._hardware))
                        if count:
                            update = {"count": count, "tensor_parallel": ways}
                            shared = self._config.ppo.engine.model_copy(update=update)
                            yield from self._colocated(shared, tokens, option, hosts)
                            yield from self._in_turns(shared, tokens, option, hosts)
            return
        share, left = self._share("pairs"), self._hardware.count - sum(ranks)
        # The fastest settings for each combination of groups that span hosts.
        best: dict[tuple[bool, ...], tuple[float, Changes] | None] = {}
        for ways in self._tensor_parallel():
            for count in rank_counts(left // ways, self._hardware.per_host):
                where = layout(replace(placement, engines=count, tensor_parallel=ways), self._hardware)
                rollout = None if where is None else self._rollout(count, ways, share)
                if where is None or rollout is None:
                    continue
                spans = tuple(len(hosts) > 1 for hosts in where.groups)
                if spans not in best:
                    best[spans] = self._best(groups, ranks, where)
                chosen = best[spans]
                if chosen is None:
                    continue
                send = send_time(self._config, self._shape, self._hardware, where.groups[0], where.engines)
                engine = {"ppo.engine.count": str(count), "ppo.engine.tensor_parallel": str(ways)}
                staleness, every = self._config.ppo.staleness, self._config.ppo.sync_every
                seconds = step_seconds(
                    rollout.total, chosen[0], send.total, staleness=staleness, sync_every=every
                )
                yield self._candidate(seconds, {**chosen[1], **engine})

    def _best(
        self, groups: tuple[Group, ...], ranks: tuple[int, ...], where: Layout
    ) -> tuple[float, Changes] | None:
        """Return the seconds and the fields of the fastest settings of groups without engines."""
        best: tuple[float, Changes] | None = None
        for tokens, options in self._settings("pairs", groups, ranks, where):
            seconds = _longest_of(options)
            if best is None or seconds < best[0]:
                best = seconds, self._fields("pairs", groups, tokens, options)
        return best

    def _settings(
        self, colocate: str, groups: tuple[Group, ...], ranks: tuple[int, ...], where: Layout
    ) -> Iterator[tuple[int, tuple[_Option, ...]]]:
        """Yield the tokens of a micro-batch with the settings of all groups that fit."""
        largest = math.ceil(self._config.ppo.rollout_batch_size / min(ranks)) * self._longest
        for tokens in micro_batches(self._config.ppo.micro_batch_tokens, self._longest, largest):
            choices = [
                self._group(colocate, group.roles, count, tokens, len(hosts) > 1)
                for group, count, hosts in zip(groups, ranks, where.groups, strict=True)
            ]
            for options in product(*choices):
                if _fits_hosts([option.peak for option in options], self._hardware):
                    yield tokens, options

    def _colocated(
        self, engine: EngineConfig, tokens: int, option: _Option, hosts: tuple[int, ...]
    ) -> Iterator[_SplitCandidate]:
        """Yield engines on the devices of the ranks, with the memory that is left there."""
        memory = self._hardware.device.memory
        share = math.floor(100 * (memory - option.peak.total - ENGINE_CONTEXT) / memory) / 100
        share = min(share, 0.95)
        rollout = self._rollout(engine.count, engine.tensor_parallel, share) if share > 0.05 else None
        if rollout is None:
            return
        send = send_time(self._config, self._shape, self._hardware, hosts, hosts)
        groups = plan(self._config.ppo.model_copy(update={"colocate": "all"})).groups
        fields = self._fields("all", groups, tokens, (option,))
        fields |= _engine_fields(engine, share)
        yield self._candidate(_longest_of((option,)) + rollout.total + send.total, fields)

    def _in_turns(
        self, engine: EngineConfig, tokens: int, option: _Option, hosts: tuple[int, ...]
    ) -> Iterator[_SplitCandidate]:
        """Yield engines that sleep while the ranks compute (`ppo.engine.sleep_level`)."""
        ppo, memory = self._config.ppo, self._hardware.device.memory
        if option.sharding.zero_stage == 0 or option.sharding.offload != "none":
            return
        level = 1 if ppo.syncs_adapter else 2
        engine = engine.model_copy(update={"sleep_level": level})
        together = {"policy_deepspeed": option.sharding, "critic_deepspeed": option.sharding}
        ppo = ppo.model_copy(
            update={"colocate": "all", "micro_batch_tokens": tokens, "engine": engine, **together}
        )
        changed = self._config.model_copy(update={"ppo": ppo})
        [group] = plan(ppo).groups
        models = ppo_models(changed, self._shape, group).values()
        kept = FRAGMENTATION * sum(model.while_sampling.total for model in models) + CONTEXT["cuda"]
        share = min(0.95, math.floor(100 * (memory - kept - ENGINE_CONTEXT) / memory) / 100)
        rollout = self._rollout(engine.count, engine.tensor_parallel, share) if share > 0.05 else None
        if rollout is None:
            return
        engine = engine.model_copy(update={"gpu_memory_utilization": share})
        serving = engine_memory(self._shape, engine, self._hardware.device, self._config.model.head_dtype)
        loads = list(group_loads(changed, self._shape, group, "cuda", serving.bytes))
        # All phases have the same bytes in host memory.
        if max(load.total for load in loads) > memory or not _fits_hosts(loads[:1], self._hardware):
            return
        send = send_time(self._config, self._shape, self._hardware, hosts, hosts)
        fields = self._fields("all", (group,), tokens, (option,))
        fields |= _engine_fields(engine, share)
        fields["ppo.engine.sleep_level"] = str(level)
        moving = send.total + turn_time(changed, self._shape, group).total
        yield self._candidate(_longest_of((option,)) + rollout.total + moving, fields)

    def _candidate(self, seconds: float, fields: Changes) -> _SplitCandidate:
        self._tried += 1
        return _SplitCandidate(seconds, self._tried, fields)

    def _group(
        self, colocate: str, roles: tuple[str, ...], ranks: int, tokens: int, spans: bool
    ) -> list[_Option]:
        """Return the ways to run a group that fit, without those that another one is better than."""
        ppo = self._config.ppo
        update = {"colocate": colocate, "micro_batch_tokens": tokens}
        sized = self._config.model_copy(update={"ppo": ppo.model_copy(update=update)})
        passes = [largest_pass_of_ppo(sized, update=training, ranks=ranks) for training in (True, False)]
        key = (colocate, roles, ranks, spans, *passes)
        if key in self._options:
            return self._options[key]
        base = ppo.policy_deepspeed if "policy" in roles else ppo.critic_deepspeed
        shared = colocate == "all"
        options: list[_Option] = []
        for sharding in shardings(base, ranks, self._hardware, ppo.lora):
            # Where memory is left, saving it only costs time, unless an engine can use it.
            if not shared and any(_saves_more(sharding, option.sharding) for option in options):
                continue
            changed = sized.model_copy(update={"ppo": _with_group(sized, roles, sharding)})
            [group] = [group for group in plan(changed.ppo).groups if group.roles == roles]
            if not group.trains and not _plain(sharding):
                continue  # frozen models have weights only
            loads = group_loads(changed, self._shape, group, "cuda")
            peak = max(loads, key=lambda load: load.total)
            if not _fits_hosts([peak], self._hardware):
                continue
            closest = self._closest.get(roles)
            if closest is None or peak.total < closest.total:
                self._closest[roles] = peak
            if peak.total > self._hardware.device.memory:
                continue
            scoring, training = group_time(changed, self._shape, group, self._hardware, spans=spans)
            gather = Seconds()
            if "policy" in roles:
                gather = gather_time(changed, self._shape, self._hardware, spans=spans)
            option = _Option(scoring, training, gather, sharding, peak)
            if not any(_is_better(other, option, shared=shared) for other in options):
                options = [other for other in options if not _is_better(option, other, shared=shared)]
                options.append(option)
        self._options[key] = options
        return options

    def _rollout(self, count: int, ways: int, share: float) -> Seconds | None:
        """Return the time of the rollout, or None if an engine has no room for a sequence."""
        key = (count, ways, share)
        if key not in self._rollouts:
            engine = self._config.ppo.engine.model_copy(
                update={"count": count, "tensor_parallel": ways, "gpu_memory_utilization": share}
            )
            memory = engine_memory(self._shape, engine, self._hardware.device, self._config.model.head_dtype)
            if memory.tokens < self._longest:
                self._rollouts[key] = None
            else:
                ppo = self._config.ppo.model_copy(update={"engine": engine})
                changed = self._config.model_copy(update={"ppo": ppo})
                self._rollouts[key] = rollout_time(changed, self._shape, self._hardware)
        return self._rollouts[key]

    def _tensor_parallel(self) -> list[int]:
        """Return the numbers of GPUs of an engine that are tried: powers of two that divide the heads."""
        ways = []
        size = 1
        while size <= self._hardware.per_host:
            if self._shape.heads % size == 0:
                ways.append(size)
            size *= 2
        return ways

    def _share(self, colocate: str) -> float:
        """Return the part of a device that an engine uses."""
        configured = self._config.ppo.engine.gpu_memory_utilization
        # The configured share is for engines that share their devices with training ranks.
        return 0.9 if colocate == "pairs" and self._config.ppo.colocate == "all" else configured

    def _fields(
        self, colocate: str, groups: tuple[Group, ...], tokens: int, options: tuple[_Option, ...]
    ) -> Changes:
        fields = {
            "ppo.colocate": colocate,
            "ppo.micro_batch_tokens": str(tokens),
            "ppo.engine.gpu_memory_utilization": f"{self._share(colocate):.2f}",
            "ppo.engine.sleep_level": "0",
        }
        backend, senders = self._config.ppo.weight_sync.backend, self._config.ppo.weight_sync.senders
        # NCCL refuses two processes on one GPU, and `ipc` passes handles of memory of one GPU.
        if (backend, colocate) in (("nccl", "all"), ("ipc", "pairs")):
            fields["ppo.weight_sync.backend"] = "auto"
        for group, option in zip(groups, options, strict=True):
            if "policy" in group.roles:
                fields |= _trainer_fields("ppo.policy_deepspeed", option.sharding)
                if senders != "auto" and senders > option.sharding.ranks:
                    fields["ppo.weight_sync.senders"] = "auto"
            if "critic" in group.roles or "reward" in group.roles:
                fields |= _trainer_fields("ppo.critic_deepspeed", option.sharding)
            if group.roles == ("reward",):
                fields["ppo.reward_ranks"] = str(option.sharding.ranks)
        return fields


def _with_group(config: PipelineConfig, roles: tuple[str, ...], sharding: DeepSpeedConfig) -> PPOConfig:
    """Return the section `ppo` with one group's sharding."""
    update: dict[str, object] = {}
    if "policy" in roles:
        update["policy_deepspeed"] = sharding
    if "critic" in roles or "reward" in roles:
        update["critic_deepspeed"] = sharding
    if roles == ("reward",):
        update["reward_ranks"] = sharding.ranks
    return config.ppo.model_copy(update=update)


def _engine_fields(engine: EngineConfig, share: float) -> Changes:
    return {
        "ppo.engine.count": str(engine.count),
        "ppo.engine.tensor_parallel": str(engine.tensor_parallel),
        "ppo.engine.gpu_memory_utilization": f"{share:.2f}",
    }


def _plain(sharding: DeepSpeedConfig) -> bool:
    return (
        sharding.zero_stage in (lowest_stage(sharding), 3)
        and sharding.offload == "none"
        and sharding.hpz == 1
        and not sharding.gradient_checkpointing
    )


def _saves_more(one: DeepSpeedConfig, other: DeepSpeedConfig) -> bool:
    """Return whether `one` is `other` with more that saves memory and costs time."""
    order = ("none", "optimizer", "all")
    return (
        (one.zero_stage, one.hpz) == (other.zero_stage, other.hpz)
        and order.index(one.offload) >= order.index(other.offload)
        and one.gradient_checkpointing >= other.gradient_checkpointing
    )


def _longest_of(options: tuple[_Option, ...]) -> float:
    """Return the seconds of scoring and training, where groups wait for each other, and of gathering."""
    scoring = max(option.scoring.total for option in options)
    training = max(option.training.total for option in options)
    return scoring + training + sum(option.gather.total for option in options)


def _is_better(one: _Option, other: _Option, *, shared: bool) -> bool:
    """Return whether `one` is at least as good as `other` in everything. Less memory on the device is better
    only if an engine shares it.
    """
    return (
        one.scoring.total <= other.scoring.total
        and one.training.total <= other.training.total
        and one.gather.total <= other.gather.total
        and one.peak.host <= other.peak.host
        and (not shared or one.peak.total <= other.peak.total)
    )
