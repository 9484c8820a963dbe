"""Check whether a configuration fits its devices, and search for the cheapest overrides that make it fit."""

from __future__ import annotations

import heapq
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import learning_rates
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import TrainingStage, runs_on_gpu, section_of
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.config.training import DeepSpeedConfig, adapter_rate
from rlhf_core.errors import ConfigError, Finding, InputError, ModelError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.hardware import GIB, Device, Hardware, cpu_hardware, visible_hardware
from rlhf_core.planning.layout import layout
from rlhf_core.planning.loads import (
    JUDGE,
    DeviceLoad,
    device_loads,
    judge_memory,
    largest_pass,
)
from rlhf_core.planning.memory import engine_memory

_SMALL_MODEL = 100_000_000
"""Models with fewer parameters learn little with the default learning rates."""
_MAX_TRIALS = 1500
"""Maximum number of configurations tried for one problem, which takes about two seconds."""

Changes = dict[str, str]
"""Value of each changed field, in the form of an override."""


@dataclass(frozen=True)
class Problem:
    """A limit of the devices that is exceeded."""

    stage: str
    what: str
    """Roles, `engine`, `memory` (shared by all processes on a CPU), the judge (`JUDGE`), `devices` if there
    are too few, or `engine layout` if no host has enough of them for an engine.
    """
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.stage, self.what


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


def compare_memory(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> FitVerdict:
    """Compare the memory of every phase with that of the devices."""
    device = hardware.device
    loads = device_loads(config, shape, device)
    tokens = engine_memory(shape, config.ppo.engine, device, config.model.head_dtype).tokens
    engines = [*_engine(config, tokens), *_language_model_engine(config, device)]
    if device.is_cpu:
        problems = [*_in_shared_memory(loads, hardware), *engines]
    else:
        problems = [*_on_each_device(loads, hardware), *engines]
        problems += [*_too_few(config, hardware), *_on_each_host(loads, hardware)]
    return FitVerdict(loads, tokens, tuple(problems))


def check_memory(config: PipelineConfig, stages: Collection[StageName] = tuple(STAGES)) -> Iterator[Finding]:
    """Check in the preflight that the GPUs of this machine, or its memory without GPUs, are enough.

    Too small for one of `stages` is an error, and for others a warning. No network requests are made. If the
    GPUs or the shape of the model are unknown on this machine, nothing is checked.
    """
    if config.run.is_remote or os.environ.get("RAY_ADDRESS"):
        return  # other machines: `check_cluster_memory` compares their GPUs
    hardware = visible_hardware() if runs_on_gpu(config) else cpu_hardware()
    if hardware is None:
        return
    if problem := _misfit(config, hardware, stages):
        yield ConfigError(problem)
    elif found := _other_problems(config, hardware):
        yield (
            f"stages that this run has passed, or does not come to, do not fit: {found}; `rlhf plan` shows a"
            " fix"
        )


def small_model_rates(config: PipelineConfig) -> Iterator[str]:
    """Warn about default learning rates, which are those of billions of parameters, for a small model."""
    shape = None if config.model.path is None else _known_shape(config)
    low = [each for each in learning_rates(config) if not each.adapters and each.rate <= each.default]
    if low and shape is not None and shape.parameters < _SMALL_MODEL:
        names = ", ".join(f"{each.field} ({each.rate:g})" for each in low)
        yield (
            f"model.path: the model has {shape.parameters / 1e6:.1f} million parameters, but {names}: values"
            " for billions of parameters, with which a small model learns little; raise them"
        )


def check_cluster_memory(
    config: PipelineConfig, hardware: Hardware, stages: Collection[StageName]
) -> Finding | None:
    """Compare the GPUs of a cluster with the needs of all stages.

    Returns an error with the sentences of the preflight if one of `stages` does not fit. If only others do
    not fit, it is a warning, for which numbers and layouts of GPUs are not compared: these stages may get
    other GPUs. None if everything fits or the shape of the model is unknown on this machine.

    Args:
        config: Configuration of the pipeline.
        hardware: GPUs of all nodes.
        stages: The stages that will run on this cluster.
    """
    if problem := _misfit(config, hardware, stages):
        return ConfigError(f"RAY_ADDRESS: not all stages fit on its GPUs: {problem}")
    found = _other_problems(config, hardware)
    if not found:
        return None
    return f"not all stages fit on GPUs like those of this cluster: {found}; `rlhf plan --gpus` shows a fix"


def _other_problems(config: PipelineConfig, hardware: Hardware) -> str:
    """Return what does not fit, without numbers and layouts of GPUs."""
    shape = _known_shape(config)
    problems = () if shape is None else compare_memory(config, shape, hardware).problems
    return "\n".join(problem.text for problem in problems if problem.what not in ("devices", "engine layout"))


def _misfit(config: PipelineConfig, hardware: Hardware, stages: Collection[str] = tuple(STAGES)) -> str:
    """Return what of `stages` does not fit, and a fix; empty if they fit or the shape of the model is
    unknown.
    """
    shape = _known_shape(config)
    if shape is None:
        return ""

    def compare(changed: PipelineConfig) -> FitVerdict:
        verdict = compare_memory(changed, shape, hardware)
        problems = [each for each in verdict.problems if not _stages_with(each, config).isdisjoint(stages)]
        return replace(verdict, problems=tuple(problems))

    verdict = compare(config)
    if verdict.fits:
        return ""
    changes = None
    # All processes on a CPU share its memory. If one copy of the weights in 16 bits does not fit, no setting
    # helps.
    if not hardware.device.is_cpu or 2 * shape.parameters < hardware.device.memory:
        changes = advise(config, compare)
    other = "use a smaller model or more memory" if hardware.device.is_cpu else "use more or larger GPUs"
    fix = f"it fits with {shlex.join(changes)}" if changes else other
    return "\n".join(problem.text for problem in verdict.problems) + f"; {fix}"


def _stages_with(problem: Problem, config: PipelineConfig) -> set[str]:
    """Return the stages that have the problem, which names one of them."""
    if problem.key == ("ppo", "engine"):
        return {"ppo", "sample", "evaluate"}  # all have engines of `ppo.engine`
    if problem.stage != "evaluate" or problem.what == JUDGE:
        return {problem.stage}
    # At its end, PPO loads the files of an adapter on the ranks of the evaluation.
    is_measured = problem.what == "policy" and config.ppo.lora is not None
    return {"sample", "evaluate", "ppo"} if is_measured else {"sample", "evaluate"}


def _known_shape(config: PipelineConfig) -> ModelShape | None:
    try:
        return base_model_shape(config, local_only=True)
    except ModelError:
        return None


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
        # The models of the evaluation are in memory one after the other.
        total = max(parts) if stage == "evaluate" else sum(parts)
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
        stage = "ppo" if config.ppo.enabled else "evaluate"
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
    needed: dict[StageName, tuple[int, str]] = {}
    for name, section in config.training_sections.items():
        needed[name] = (section.deepspeed.ranks, "")
    if config.ppo.enabled:
        needed["ppo"] = (placement.devices, f" ({placement.describe()})")
    sampling = config.evaluate.engines * config.ppo.engine.tensor_parallel
    needed["evaluate"] = (max(config.evaluate.ranks, sampling), "")
    for stage, (devices, how) in needed.items():
        if devices > hardware.count:
            yield Problem(
                stage, "devices", f"{stage}: needs {devices} devices{how}; there are {hardware.count}"
            )
        elif stage == "ppo" and layout(placement, hardware) is None:
            have = "are on" if placement.colocated else "leave"
            text = (
                f"ppo: the {placement.tensor_parallel} GPUs of an engine must be in one host of"
                f" {hardware.per_host}; the training ranks {have} too few for {placement.engines} engines"
            )
            yield Problem("ppo", "engine layout", text)


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


# -- search --


def advise(config: PipelineConfig, compare: Callable[[PipelineConfig], FitVerdict]) -> tuple[str, ...] | None:
    """Return overrides with which the configuration fits, or None if none of those tried is enough.

    The problems are solved one after the other, each by the cheapest changes (`_moves`) that solve it and add
    no other problem. At the end, every override that is not needed is left out.
    """
    tree = config.model_dump(mode="json", by_alias=True)

    def changed(changes: Changes) -> tuple[PipelineConfig, FitVerdict] | None:
        overrides = [f"{field}={value}" for field, value in changes.items()]
        try:
            candidate = config_from_tree(tree, "plan", overrides)
        except InputError:
            return None
        return candidate, compare(candidate)

    changes: Changes = {}
    now = (config, compare(config))
    while now[1].problems:
        more = _solve(changes, now, changed)
        if more is None:
            return None
        changes = more
        result = changed(changes)
        assert result is not None, "a change that was tried is valid"
        now = result
    for field in list(changes):
        fewer = {name: value for name, value in changes.items() if name != field}
        result = changed(fewer)
        if result is not None and result[1].fits:
            changes = fewer
    changes |= _adapter_rates(config, changes)
    return tuple(f"{field}={value}" for field, value in changes.items())


def _adapter_rates(config: PipelineConfig, changes: Changes) -> Changes:
    """Return the learning rates of the adapters among the changes, for those of all parameters."""
    sections = tuple(name.removesuffix("lora") for name in changes if name.endswith(".lora"))
    rates = {}
    for field, rate, _, adapters in learning_rates(config):
        if not adapters and field.startswith(sections):
            rates[field] = f"{adapter_rate(rate):g}"
    return rates


def _solve(
    start: Changes,
    now: tuple[PipelineConfig, FitVerdict],
    changed: Callable[[Changes], tuple[PipelineConfig, FitVerdict] | None],
) -> Changes | None:
    """Return the cheapest changes that solve the first problem of `now` without a new one.

    A uniform-cost search. None if no solution is found within `_MAX_TRIALS`.
    """
    problem, old_problems = now[1].problems[0], {p.key for p in now[1].problems}
    order = count()
    frontier = [(0.0, next(order), start, now)]
    seen = {frozenset(start.items())}
    while frontier and len(seen) < _MAX_TRIALS:
        cost, _, changes, (config, verdict) = heapq.heappop(frontier)
        unsolved = [p for p in verdict.problems if p.key == problem.key or p.key not in old_problems]
        if not unsolved:
            return changes
        for field, value, price in chain.from_iterable(_moves(config, p) for p in unsolved):
            further = {**changes, field: value}
            key = frozenset(further.items())
            if key in seen:
                continue
            seen.add(key)
            result = changed(further)
            if result is not None:
                # The number breaks ties, because configurations cannot be compared.
                heapq.heappush(frontier, (cost + price, next(order), further, result))
    return None


def _moves(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    """Return (field, next value, price) of changes that may solve a problem.

    Changes that cost some time are cheap. Moving work to other devices costs more, and changing the training
    most.
    """
    if problem.stage in config.training_sections:
        return _moves_of_training(config, problem.stage, problem.what)
    if problem.stage in ("sample", "evaluate"):
        return _moves_of_evaluation(config, problem)
    return _moves_of_ppo(config, problem)


def _moves_of_training(
    config: PipelineConfig, stage: TrainingStage, what: str
) -> Iterator[tuple[str, str, float]]:
    section, name = config.training_sections[stage], section_of(stage)
    if what == "devices":
        yield f"{name}.deepspeed.ranks", str(max(1, section.deepspeed.ranks // 2)), 1.0
        return
    yield from _smaller_passes(name, section.micro_batch_tokens, largest_pass(config, stage).longest)
    yield from _trainer(f"{name}.deepspeed", section.deepspeed)
    if section.lora is None:
        yield f"{name}.lora", "{r: 16, alpha: 32}", 6.0


def _moves_of_evaluation(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    ranks, engines = config.evaluate.ranks, config.evaluate.engines
    if problem.what in ("devices", "memory"):
        yield "evaluate.ranks", str(max(1, ranks // 2)), 1.0
        yield "evaluate.engines", str(max(1, engines // 2)), 1.0
    elif problem.what in (JUDGE, "engine"):
        yield from _larger_engine(config)
    else:
        yield "evaluate.ranks", str(2 * ranks), 0.5
        if config.ppo.policy_deepspeed.zero_stage < 3:
            yield "ppo.policy_deepspeed.zero_stage", "3", 1.0


def _moves_of_ppo(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    ppo, engine = config.ppo, config.ppo.engine
    if problem.what in ("devices", "memory"):
        yield "ppo.engine.count", str(max(1, engine.count - 1)), 1.0
        yield from (("ppo.colocate", way, 2.0) for way in ("pairs", "all") if way != ppo.colocate)
        for name, ranks in (("policy", ppo.policy_deepspeed.ranks), ("critic", ppo.critic_deepspeed.ranks)):
            yield f"ppo.{name}_deepspeed.ranks", str(max(1, ranks // 2)), 1.5
    for level in range(engine.sleep_level):  # adapters need level 1, and offloaded states level 0
        yield "ppo.engine.sleep_level", str(level), 0.5
    # -0.1: an engine on the devices of ranks leaves them more memory. 0.05: one by itself needs more.
    if "engine" in problem.what:
        yield from _larger_engine(config, -0.1 if "+engine" in problem.what else 0.05)
    if problem.what in ("engine", "engine layout", "devices"):
        return
    yield from _smaller_passes("ppo", ppo.micro_batch_tokens, config.max_sequence_tokens)
    if "policy" in problem.what or "reference" in problem.what:
        yield from _trainer("ppo.policy_deepspeed", ppo.policy_deepspeed)
    if "critic" in problem.what or "reward" in problem.what:
        yield from _trainer("ppo.critic_deepspeed", ppo.critic_deepspeed)
    if ppo.lora is None:
        yield "ppo.lora", "{r: 16, alpha: 32}", 6.0


def _larger_engine(config: PipelineConfig, more: float = 0.05) -> Iterator[tuple[str, str, float]]:
    """Yield changes that give the model of an engine more room. `more` is added to the engine's share of the
    device.
    """
    engine = config.ppo.engine
    share = engine.gpu_memory_utilization + more
    if 0.1 < share <= 0.95:
        yield "ppo.engine.gpu_memory_utilization", f"{share:.2f}", 1.0
    if engine.dtype == "float32":
        yield "ppo.engine.dtype", "bfloat16", 2.0
    yield "ppo.engine.tensor_parallel", str(2 * engine.tensor_parallel), 3.0
    yield "ppo.engine.count", str(max(1, engine.count // 2)), 1.0


def _smaller_passes(section: str, budget: int, longest: int) -> Iterator[tuple[str, str, float]]:
    if budget // 2 >= longest:
        yield f"{section}.micro_batch_tokens", str(budget // 2), 1.0


def _trainer(field: str, deepspeed: DeepSpeedConfig) -> Iterator[tuple[str, str, float]]:
    if not deepspeed.gradient_checkpointing:
        yield f"{field}.gradient_checkpointing", "true", 1.0
    if deepspeed.zero_stage < 3:
        yield f"{field}.zero_stage", str(deepspeed.zero_stage + 1), 0.5
    step = 1 if field.startswith("ppo.") else deepspeed.ranks
    yield f"{field}.ranks", str(deepspeed.ranks + step), 1.0
    if deepspeed.dtype == "float32":
        yield f"{field}.dtype", "bfloat16", 1.0
    if deepspeed.offload == "none" and deepspeed.zero_stage > 0:
        yield f"{field}.offload", "optimizer", 4.0
    elif deepspeed.offload == "optimizer" and deepspeed.zero_stage == 3:
        yield f"{field}.offload", "all", 4.0
