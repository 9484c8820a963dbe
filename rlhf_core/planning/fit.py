"""Compare the memory and the number of devices that a configuration needs with those that there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PlacementPlan, needed_devices
from rlhf_core.config.placement import plan as plan_placement
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
    judge_memory,
    stages_on_evaluation_ranks,
)
from rlhf_core.planning.memory import engine_memory


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
