"""Whether a configuration fits the memory and the number of devices that there are, and other settings of a
stage: the smallest change that fits its devices, or the fastest ones that do.

    candidates of a stage  --- sorted by price, or by estimated seconds --->  the first ones that fit

A candidate has one of a few values of each field: ranks, sharding, tokens of a micro-batch, and for PPO the
placement of ranks and engines. The values are coarse, because the seconds are estimates (`ops.plan.speed`).
A price says how much a change costs the user: little if it costs some time, more if it moves work or state to
other devices. Candidates that change the training (precision, adapters) come after all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import learning_rates, sharding_problems
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import TrainingStage, section_of
from rlhf_core.config.placement import PlacementPlan, needed_devices, plan
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, TrainingSection, adapter_rate
from rlhf_core.errors import InputError
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.hardware import GIB, Device, Hardware
from rlhf_core.planning.loads import (
    EVALUATION,
    JUDGE,
    PPO,
    DeviceLoad,
    device_loads,
    evaluating_stages,
    group_loads,
    judge_memory,
    largest_pass,
    stages_on_evaluation_ranks,
    training_stages,
)
from rlhf_core.planning.memory import Bytes, engine_memory


@dataclass(frozen=True)
class Problem:
    """A limit of the devices that is exceeded."""

    stage: StageName
    what: str
    """Roles, `engine`, `memory` (shared by all processes on a CPU), the judge (`JUDGE`), `devices` if there
    are too few, or `engine layout` if no host has enough of them for an engine.
    """
    text: str


@dataclass(frozen=True)
class FitVerdict:
    """Memory on the devices, by phase, and everything that does not fit."""

    loads: tuple[DeviceLoad, ...]
    kv_tokens: int
    """Tokens that the KV cache of one engine holds."""
    problems: tuple[Problem, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def compare_memory(
    config: PipelineConfig,
    shape: ModelShape,
    hardware: Hardware,
    stages: Collection[StageName] = tuple(STAGES),
) -> FitVerdict:
    """Compare the memory of every phase of `stages` with that of the devices."""
    device = hardware.device
    loads = device_loads(config, shape, device, stages)
    tokens = engine_memory(shape, config.ppo.engine, device, config.model.head_dtype).tokens
    engines = [*_engine(config, tokens), *_language_model_engine(config, device)]
    if device.is_cpu:
        problems = [*_in_shared_memory(loads, hardware), *engines]
    else:
        problems = [*_on_each_device(loads, hardware), *engines]
        problems += [*_too_few(config, hardware), *_on_each_host(loads, hardware)]
    return FitVerdict(loads, tokens, tuple(problem for problem in problems if problem.stage in stages))


def stages_with(problem: Problem, config: PipelineConfig) -> set[StageName]:
    """Return the stages that have the problem, which names one of them."""
    if (problem.stage, problem.what) == (PPO, "engine"):
        return {PPO, *evaluating_stages()}  # all have engines of `ppo.engine`
    if problem.stage != EVALUATION or problem.what == JUDGE:
        return {problem.stage}
    if problem.what == "policy":
        return set(stages_on_evaluation_ranks(config))
    return set(evaluating_stages())


def _on_each_device(loads: tuple[DeviceLoad, ...], hardware: Hardware) -> Iterator[Problem]:
    memory = hardware.device.memory
    for load in _peaks(loads):
        if load.total > memory:
            text = (
                f"{load.stage}: {load.what} needs {load.total / GIB:.1f} GiB on each device ({load.phase}); "
                f"{hardware.device.name} has {memory / GIB:.1f}"
            )
            yield Problem(load.stage, load.what, text)


def _in_shared_memory(loads: tuple[DeviceLoad, ...], hardware: Hardware) -> Iterator[Problem]:
    memory, peaks = hardware.device.memory, _peaks(loads)
    for stage in dict.fromkeys(load.stage for load in peaks):
        parts = [load.total * load.devices for load in peaks if load.stage == stage]
        # The models of an evaluation are in memory one after the other.
        total = max(parts) if STAGES[stage].samples else sum(parts)
        if total > memory:
            text = f"{stage}: all processes need {total / GIB:.1f} GiB; this machine has {memory / GIB:.1f}"
            yield Problem(stage, "memory", text)


def _peaks(loads: tuple[DeviceLoad, ...]) -> list[DeviceLoad]:
    """Return the largest phase of each part of a stage."""
    largest: dict[tuple[str, str], DeviceLoad] = {}
    for load in loads:
        key = (load.stage, load.what)
        if key not in largest or load.total > largest[key].total:
            largest[key] = load
    return list(largest.values())


def _engine(config: PipelineConfig, tokens: int) -> Iterator[Problem]:
    if tokens < config.max_sequence_tokens:
        stage = PPO if config.ppo.enabled else EVALUATION
        text = (
            f"{stage}: an engine's KV cache holds {tokens} tokens, less than one sequence of"
            f" {config.max_sequence_tokens}"
        )
        yield Problem(stage, "engine", text)


def _language_model_engine(config: PipelineConfig, device: Device) -> Iterator[Problem]:
    memory, least = judge_memory(config, device), config.max_sequence_tokens
    if memory is not None and memory.tokens < least:
        for stage in config.judging_stages:
            text = (
                f"{stage}: the KV cache of an engine with evaluate.language_model.path holds {memory.tokens}"
                f" tokens; a question has more than a prompt and a response, which are up to {least}"
            )
            yield Problem(stage, JUDGE, text)


def _too_few(config: PipelineConfig, hardware: Hardware) -> Iterator[Problem]:
    placement = plan_placement(config.ppo)
    stages = [*config.training_sections, *([PPO] if config.ppo.enabled else []), EVALUATION]
    for stage in stages:
        devices = needed_devices(config, stage)
        if devices > hardware.count:
            how = f" ({placement.describe()})" if stage == PPO else ""
            text = f"{stage}: needs {devices} devices{how}; there are {hardware.count}"
            yield Problem(stage, "devices", text)
        elif stage == PPO and room_for_engines(placement, hardware) < placement.engines:
            have = "are on" if placement.colocated else "leave"
            text = (
                f"{stage}: the {placement.tensor_parallel} GPUs of an engine must be in one host of"
                f" {hardware.per_host}; the training ranks {have} too few for {placement.engines} engines"
            )
            yield Problem(stage, "engine layout", text)


def room_for_engines(placement: PlacementPlan, hardware: Hardware) -> int:
    """Return the number of engines that fit, each inside one host, as `ppo.fleet.placement` assigns devices:
    colocated ones on those of the ranks, others on those that the ranks, which take the first ones, leave.
    """
    ranks, per_host = placement.ranks, hardware.per_host
    room = 0
    for first in range(0, hardware.count, per_host):
        with_ranks = min(per_host, max(0, ranks - first))
        usable = with_ranks if placement.colocated else per_host - with_ranks
        room += usable // placement.tensor_parallel
    return room


def _on_each_host(loads: tuple[DeviceLoad, ...], hardware: Hardware) -> Iterator[Problem]:
    """Compare offloaded state with the memory of a host, if that is known."""
    peaks = _peaks(loads)
    for stage in dict.fromkeys(load.stage for load in peaks):
        offloaded = [load for load in peaks if load.stage == stage and load.host]
        needed = host_memory(offloaded, hardware)
        if hardware.host_memory is not None and needed > hardware.host_memory:
            text = (
                f"{stage}: offloaded state needs {needed / GIB:.0f} GiB of memory on each host; it has"
                f" {hardware.host_memory / GIB:.0f}"
            )
            yield Problem(stage, offloaded[0].what, text)


def host_memory(loads: Iterable[DeviceLoad], hardware: Hardware) -> float:
    """Return the bytes of offloaded state on a host with ranks of all these groups."""
    return sum(load.host * min(load.devices, hardware.per_host) for load in loads)


# -- other settings of a stage --

_ADAPTERS = LoraConfig(r=16, alpha=32)
_ENGINE_SHARE = 0.9
"""Share of a device that an engine uses if it has the device to itself."""
_OFFLOADS = ("none", "optimizer", "all")
"""Values of `offload`, in the order of the memory that they save."""

Changes = dict[str, str]
"""Value of each changed field, in the form of an override."""


@dataclass(frozen=True)
class Candidate:
    """Settings that may fit. The configuration is not validated."""

    config: PipelineConfig
    price: float
    same_training: bool = True
    """Whether precision and trained parameters are those of the configuration."""


def advise(
    config: PipelineConfig,
    shape: ModelShape,
    hardware: Hardware,
    stages: Collection[StageName] = tuple(STAGES),
) -> tuple[str, ...] | None:
    """Return overrides with which `stages` fit, or None if none of those tried is enough.

    Each part is changed by the cheapest candidate that fits. Overrides that are not needed are left out.
    """

    def problems(changed: PipelineConfig, parts: Collection[StageName]) -> list[Problem]:
        found = compare_memory(changed, shape, hardware, parts).problems
        return [each for each in found if not stages_with(each, changed).isdisjoint(stages)]

    now, solved = config, list[StageName]()
    for part in _parts(config):
        # The engines of the last part are those of PPO: what is solved must stay so.
        solved += part
        if not problems(now, part):
            continue
        # Settings that train the same model come first, at any price: another precision or an adapter
        # changes the result.
        candidates = sorted(
            _candidates(now, part, shape, hardware), key=lambda each: (not each.same_training, each.price)
        )
        # Lazy: nothing behind the first one that fits is compared.
        fitting = (each for each in candidates if not problems(each.config, solved))
        changed = next(_valid(now, fitting), None)
        if changed is None:
            return None
        now = changed
    if problems(now, solved):
        return None
    changes = needed(config, now, lambda changed: not problems(changed, solved))
    return as_overrides(changes | _adapter_rates(config, changes))


def fastest(
    config: PipelineConfig,
    fitting: PipelineConfig,
    stage: StageName,
    shape: ModelShape,
    hardware: Hardware,
    seconds: Callable[[PipelineConfig], float],
) -> Iterator[tuple[float, Changes]]:
    """Yield settings of a stage that fit and train the same model, the fastest first, each with another
    placement of the processes: the seconds of a step, and the changes of `config`.

    Args:
        config: The configuration.
        fitting: The configuration that the search starts from: with changes, if the other one does not fit.
        stage: A stage that trains.
        shape: Shape of the model.
        hardware: The devices.
        seconds: Returns the seconds of a step of `stage`.
    """
    stages = [stage]
    if stage == PPO:
        stages += evaluating_stages()

    def fits(changed: PipelineConfig) -> bool:
        return compare_memory(changed, shape, hardware, stages).fits

    candidates = list(_candidates(fitting, (stage,), shape, hardware, same_training=True))
    # Of equally fast ones, the one with the smallest change comes first.
    candidates.sort(key=lambda each: (seconds(each.config), each.price))
    seen: set[tuple[object, ...]] = set()

    def placement(each: PipelineConfig) -> tuple[object, ...]:
        return plan(each.ppo), each.ppo.engine.sleep_level

    # Before the validation, which takes longest.
    new = (each for each in candidates if placement(each.config) not in seen and fits(each.config))
    for changed in _valid(fitting, new):
        seen.add(placement(changed))
        least = seconds(changed)

        def is_as_good(each: PipelineConfig, least: float = least) -> bool:
            # With a tolerance, because equal times can be sums in another order.
            return fits(each) and seconds(each) <= least * (1 + 1e-9)

        changes = needed(config, changed, is_as_good)
        # Without what it does not need, it can be one of the faster ones.
        if tuple(changes.items()) not in seen:
            seen.add(tuple(changes.items()))
            shown = with_changes(config, changes)
            assert shown is not None
            yield seconds(shown), changes


def _parts(config: PipelineConfig) -> list[tuple[StageName, ...]]:
    """Return the stages that are changed together, in the order in which they are."""
    return [*((stage,) for stage in training_stages(config)), tuple(evaluating_stages())]


def _valid(config: PipelineConfig, candidates: Iterator[Candidate]) -> Iterator[PipelineConfig]:
    """Yield the candidates that are valid configurations."""
    for candidate in candidates:
        changed = with_changes(config, difference(config, candidate.config))
        if changed is not None:
            yield changed


# -- changes --


def difference(config: PipelineConfig, changed: PipelineConfig) -> Changes:
    """Return the fields of `changed` that differ from those of `config`."""
    changes: Changes = {}

    def compare(before: Any, after: Any, name: str) -> None:
        if before == after:
            return
        if isinstance(before, dict) and isinstance(after, dict):
            for key in after:
                compare(before.get(key), after[key], f"{name}.{key}")
        else:
            changes[name.removeprefix(".")] = _text(after)

    compare(_tree(config), _tree(changed), "")
    return changes


def _tree(config: PipelineConfig) -> dict[str, Any]:
    # By alias, because the names become overrides: `register_` is `register` there.
    return config.model_dump(mode="json", by_alias=True)


def _text(value: Any) -> str:
    """Return a value as it is written in an override."""
    if isinstance(value, dict):
        fields = (f"{name}: {_text(each)}" for name, each in value.items() if each is not None)
        return "{" + ", ".join(fields) + "}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def with_changes(config: PipelineConfig, changes: Changes) -> PipelineConfig | None:
    """Return the configuration with these fields changed; None if it is not valid."""
    try:
        # By overrides, so that what is tried is what a user pastes.
        return config_from_tree(_tree(config), "plan", as_overrides(changes))
    except InputError:
        return None


def as_overrides(changes: Changes) -> tuple[str, ...]:
    """Return the changes as they are pasted on a command line."""
    return tuple(f"{field}={value}" for field, value in changes.items())


def needed(
    config: PipelineConfig, changed: PipelineConfig, is_good: Callable[[PipelineConfig], bool]
) -> Changes:
    """Return the differences between two configurations, without those that a good one does not need."""
    changes = difference(config, changed)
    # A change can be needed only together with another one, so each is left out of what the others left.
    for field in list(changes):
        fewer = {name: value for name, value in changes.items() if name != field}
        candidate = with_changes(config, fewer)
        if candidate is not None and is_good(candidate):
            changes = fewer
    return changes


def _adapter_rates(config: PipelineConfig, changes: Changes) -> Changes:
    """Return the learning rates of the adapters among the changes, for those of all parameters."""
    sections = tuple(name.removesuffix("lora") for name in changes if name.endswith(".lora"))
    rates = {}
    for field, rate, _, adapters in learning_rates(config):
        if not adapters and field.startswith(sections):
            rates[field] = f"{adapter_rate(rate):g}"
    return rates


# -- candidates --


def _candidates(
    config: PipelineConfig,
    part: tuple[StageName, ...],
    shape: ModelShape,
    hardware: Hardware,
    same_training: bool = False,
) -> Iterator[Candidate]:
    """Yield candidates, with `same_training` only those that train as configured."""
    for stage in config.training_sections:
        if stage in part:
            return _of_training(config, stage, hardware, same_training)
    if PPO in part:
        return _of_ppo(config, shape, hardware, same_training)
    return _of_evaluation(config, shape, hardware)


def _of_training(
    config: PipelineConfig, stage: TrainingStage, hardware: Hardware, same_training: bool
) -> Iterator[Candidate]:
    section = config.training_sections[stage]
    longest = largest_pass(config, stage).longest
    # `PipelineConfig.problems` refuses more ranks than rows of a batch.
    ranks = _numbers(section.deepspeed.ranks, min(hardware.count, section.batch_size))
    tokens = _sizes(section.micro_batch_tokens, longest)
    kinds = _kinds_of_training(section.lora, same_training, section.deepspeed.dtype)
    for count, size, (precision, lora) in product(ranks, tokens, kinds):
        for sharding in _shardings(count, hardware):
            deepspeed = _sharded(section.deepspeed, {"ranks": count, **sharding, **precision})
            if deepspeed is None:
                continue
            values = {"deepspeed": deepspeed, "micro_batch_tokens": size, "lora": lora}
            price = _price(section.deepspeed, deepspeed) + _steps(section.micro_batch_tokens, size)
            price += 6.0 * (lora != section.lora)
            same = lora == section.lora and deepspeed.dtype == section.deepspeed.dtype
            yield Candidate(_with_section(config, stage, section, values), price, same)


def _with_section(
    config: PipelineConfig, stage: TrainingStage, section: TrainingSection, values: dict[str, Any]
) -> PipelineConfig:
    """Return the configuration with other settings of a stage that trains one model."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        # Of a judge, what is equal to the settings of the reward model is none of its own.
        if value != getattr(section, name):
            changed[f"{section_of(stage)}.{name}"] = value
    return config.with_values(changed)


def _of_ppo(
    config: PipelineConfig, shape: ModelShape, hardware: Hardware, same_training: bool
) -> Iterator[Candidate]:
    before = config.ppo
    sizes = _sizes(before.micro_batch_tokens, config.max_sequence_tokens)
    kinds = _kinds_of_training(before.lora, same_training, *_dtypes(before))
    for placed in _placements(before, shape, hardware):
        for size, (precision, lora) in product(sizes, kinds):
            for sharding in _shardings(placed.policy_deepspeed.ranks, hardware):
                policy = _sharded(placed.policy_deepspeed, sharding | precision)
                critic = _sharded(placed.critic_deepspeed, sharding | precision)
                if policy is None or critic is None:
                    continue
                engine = placed.engine.with_values(precision)
                values = {"policy_deepspeed": policy, "critic_deepspeed": critic, "engine": engine}
                ppo = placed.with_values(values | {"micro_batch_tokens": size, "lora": lora})
                for share in _shares(config, ppo, shape, hardware):
                    yield _candidate_of_ppo(config, ppo.with_values({"engine.gpu_memory_utilization": share}))


def _dtypes(ppo: PPOConfig) -> tuple[str, str, str]:
    return ppo.policy_deepspeed.dtype, ppo.critic_deepspeed.dtype, ppo.engine.dtype


def _candidate_of_ppo(config: PipelineConfig, ppo: PPOConfig) -> Candidate:
    before = config.ppo
    price = _price(before.policy_deepspeed, ppo.policy_deepspeed)
    price += _price(before.critic_deepspeed, ppo.critic_deepspeed)
    price += 2.0 * (ppo.colocate != before.colocate)
    price += 0.5 * abs(ppo.engine.sleep_level - before.engine.sleep_level)
    price += 3.0 * _steps(before.engine.tensor_parallel, ppo.engine.tensor_parallel)
    price += _steps(before.engine.count, ppo.engine.count)
    price += 1.0 * (ppo.engine.gpu_memory_utilization != before.engine.gpu_memory_utilization)
    price += _steps(before.micro_batch_tokens, ppo.micro_batch_tokens)
    price += 6.0 * (ppo.lora != before.lora)
    same = ppo.lora == before.lora and _dtypes(ppo) == _dtypes(before)
    return Candidate(config.with_values({"ppo": ppo}), price, same)


def _placements(ppo: PPOConfig, shape: ModelShape, hardware: Hardware) -> Iterator[PPOConfig]:
    """Yield where ranks and engines are: as configured, in pairs, or all on the same devices.

    All groups have the same number of ranks, and engines take what is left, or keep their number.
    """
    ways: list[str] = [ppo.colocate, "pairs"]
    if not ppo.staleness:  # with it, the engines need devices of their own
        ways.append("all")
    for colocate in dict.fromkeys(ways):
        limit = hardware.count
        if colocate != "all":
            # One device is left for an engine.
            limit = max(1, (limit - 1) // len(plan(_with_ranks(ppo, colocate, None)).groups))
        levels = {0, ppo.engine.sleep_level}
        if colocate == "all" and not hardware.device.is_cpu:
            # Level 2 drops the base model, which a sync of the adapter alone does not send again.
            levels.add(1 if ppo.syncs_adapter else 2)
        # `PPOConfig.problems` refuses more ranks than responses of a minibatch.
        for ranks in _numbers(None, min(limit, ppo.minibatch_size)):
            sized = _with_ranks(ppo, colocate, ranks)
            for ways_of_engine in _tensor_parallel(ppo, shape, hardware):
                groups = plan(sized).groups
                placement = PlacementPlan(groups, 0, ways_of_engine, colocated=colocate == "all")
                for count, level in product(_engine_counts(ppo, placement, hardware), sorted(levels)):
                    values = {"engine.count": count, "engine.tensor_parallel": ways_of_engine}
                    yield sized.with_values(values | {"engine.sleep_level": level})


def _with_ranks(ppo: PPOConfig, colocate: str, ranks: int | None) -> PPOConfig:
    """Return the section with a placement, and with `ranks` in each group; None: as configured."""
    values: dict[str, Any] = {"colocate": colocate}
    if colocate != ppo.colocate and ppo.weight_sync.backend != "gloo":
        # NCCL refuses two processes on one GPU, and `ipc` passes handles of memory of one GPU.
        values["weight_sync.backend"] = "auto"
    if ranks is not None:
        # Different numbers are kept where they are configured, and not proposed (decision 29).
        values |= {"policy_deepspeed.ranks": ranks, "critic_deepspeed.ranks": ranks}
    if ranks is not None and ppo.uses_reward_model and not ppo.uses_critic:
        # Without a critic the reward model has a group of its own (`config.placement.plan`).
        values["reward_ranks"] = ranks
    return ppo.with_values(values)


def _tensor_parallel(ppo: PPOConfig, shape: ModelShape, hardware: Hardware) -> list[int]:
    """Return numbers of devices of an engine: the configured one, and powers of two that divide the heads."""
    if hardware.device.is_cpu:
        return [ppo.engine.tensor_parallel]
    # An engine is within one host.
    found = _numbers(ppo.engine.tensor_parallel, hardware.per_host)
    # vLLM gives each GPU whole heads (`models.check.check_tensor_parallel`).
    return [ways for ways in found if shape.heads % ways == 0]


def _engine_counts(ppo: PPOConfig, placement: PlacementPlan, hardware: Hardware) -> list[int]:
    """Return numbers of engines: the configured one, and on GPUs as many as there is room for."""
    configured = ppo.engine.count
    if hardware.device.is_cpu:
        return _halves(configured)
    room = room_for_engines(placement, hardware)
    return sorted({count for count in (configured, room) if 0 < count <= room})


def _shares(config: PipelineConfig, ppo: PPOConfig, shape: ModelShape, hardware: Hardware) -> Iterator[float]:
    """Yield shares of a device that an engine may use: the configured one, and what others leave."""
    configured = ppo.engine.gpu_memory_utilization
    if hardware.device.is_cpu:
        yield configured
    elif ppo.colocate != "all":
        yield from dict.fromkeys((configured, _ENGINE_SHARE))
    else:
        memory = hardware.device.memory
        # With `all`, every role is in one group.
        [group] = plan(ppo).groups
        changed = config.with_values({"ppo": ppo})
        # An engine of one byte: its share is what is computed here, and its process needs a context.
        loads = list(group_loads(changed, shape, group, "cuda", serving=Bytes(weights=1.0)))
        # With `sleep_level`, an engine holds its memory in the rollout only.
        if ppo.engine.sleep_level:
            loads = [load for load in loads if load.phase == "rollout"]
        used = max(load.total for load in loads)
        # Rounded down, so that the suggestion fits.
        left = min(0.95, math.floor(100 * (memory - used) / memory) / 100)
        if left >= configured:
            yield configured
        if left > 0.05:
            yield left


def _of_evaluation(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> Iterator[Candidate]:
    """Yield other numbers of ranks and engines, larger engines, and ranks that share the policy."""
    ppo, now = config.ppo, config.evaluate
    counts = _halves(now.ranks)
    if not hardware.device.is_cpu:
        doubled = [now.ranks << shift for shift in range(1, 9)]
        counts += [count for count in doubled if count <= hardware.count]
    values = product(
        counts,
        _halves(now.engines),
        _tensor_parallel(ppo, shape, hardware),
        dict.fromkeys((ppo.engine.gpu_memory_utilization, _ENGINE_SHARE)),
        dict.fromkeys((ppo.engine.dtype, "bfloat16")),
        dict.fromkeys((ppo.policy_deepspeed.zero_stage, 3)),
    )
    for ranks, engines, ways, share, dtype, zero in values:
        price = 0.5 * _steps(now.ranks, ranks) + _steps(now.engines, engines)
        price += 3.0 * _steps(ppo.engine.tensor_parallel, ways) + 2.0 * (dtype != ppo.engine.dtype)
        price += 1.0 * (share != ppo.engine.gpu_memory_utilization)
        price += 1.0 * (zero != ppo.policy_deepspeed.zero_stage)
        changed = {
            "evaluate.ranks": ranks,
            "evaluate.engines": engines,
            "ppo.engine.tensor_parallel": ways,
            "ppo.engine.gpu_memory_utilization": share,
            "ppo.engine.dtype": dtype,
            "ppo.policy_deepspeed.zero_stage": zero,
        }
        yield Candidate(config.with_values(changed), price, dtype == ppo.engine.dtype)


# -- values of fields --


def _numbers(configured: Any, limit: int) -> list[Any]:
    """Return the configured number, `limit`, and the powers of two below it, down to an eighth."""
    # Coarse, as the estimate is: 400 to 8,000 candidates of a stage, of which none has to be dropped
    # (decision 29).
    powers = [2**exponent for exponent in range(limit.bit_length()) if 8 * 2**exponent >= limit]
    return list(dict.fromkeys((configured, *powers, limit)))


def _halves(number: int) -> list[int]:
    return [number >> shift for shift in range(number.bit_length())]


def _sizes(configured: int, least: int) -> list[int]:
    """Return tokens of a micro-batch: the configured number, four times it, and quarters down to `least`."""
    smaller = [size for size in _halves(configured)[::2] if size > least]
    return list(dict.fromkeys((4 * configured, configured, *smaller, least)))


def _kinds_of_training(
    lora: LoraConfig | None, same_training: bool, *dtypes: str
) -> list[tuple[dict[str, Any], LoraConfig | None]]:
    """Return changes of the precision with the adapters: as configured, all in bfloat16, with adapters."""
    kinds: list[tuple[dict[str, Any], LoraConfig | None]] = [({}, lora)]
    if same_training:
        return kinds
    if "float32" in dtypes:
        kinds.append(({"dtype": "bfloat16"}, lora))
    if lora is None:
        kinds += [(precision, _ADAPTERS) for precision, _ in kinds]
    return kinds


def _shardings(ranks: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Yield ways to distribute a model over `ranks`, as changes of the configured one."""
    yield {}
    # Not ZeRO-0 and 1, which need more memory than ZeRO-2 and reduce more bytes.
    kinds: list[tuple[int, str, int]] = [(2, "none", 1), (3, "none", 1)]
    if ranks > hardware.per_host and ranks % hardware.per_host == 0:
        kinds.append((3, "none", hardware.per_host))
    if not hardware.device.is_cpu:
        kinds += [(2, "optimizer", 1), (3, "optimizer", 1), (3, "all", 1)]
    for (zero_stage, offload, hpz), recomputes in product(kinds, (False, True)):
        if offload != "none" and not recomputes:
            continue  # recomputing is cheaper than moving state to the host
        yield {
            "zero_stage": zero_stage,
            "offload": offload,
            "hpz": hpz,
            "gradient_checkpointing": recomputes,
        }


def _sharded(base: DeepSpeedConfig, sharding: dict[str, Any]) -> DeepSpeedConfig | None:
    """Return `base` with another sharding; None if DeepSpeed does not support it."""
    deepspeed = base.with_values(sharding)
    return None if any(sharding_problems("", deepspeed)) else deepspeed


def _steps(before: int, after: int) -> float:
    """Return how many times a number is doubled or halved."""
    return abs(math.log2(after / before))


def _price(before: DeepSpeedConfig, after: DeepSpeedConfig) -> float:
    price = _steps(before.ranks, after.ranks) + 0.5 * abs(after.zero_stage - before.zero_stage)
    price += 1.0 * (after.gradient_checkpointing != before.gradient_checkpointing)
    price += 1.0 * (after.hpz != before.hpz) + 1.0 * (after.dtype != before.dtype)
    return price + 4.0 * abs(_OFFLOADS.index(after.offload) - _OFFLOADS.index(before.offload))
