"""`rlhf plan`: what a configuration will need, on the terminal or as JSON, before anything starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.data.check import with_assumed_limits
from rlhf_core.errors import ConfigError, Finding, InputError, checking
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape, known_models, known_shape
from rlhf_core.ops.plan.batches import describe_batches
from rlhf_core.ops.plan.search import NoSplit, Split, fastest
from rlhf_core.ops.plan.speed import (
    DECODE_BANDWIDTH,
    LINK,
    NETWORK,
    PHASES,
    SCORING_MFU,
    TRAINING_MFU,
    Phase,
    Seconds,
    StepTime,
    optimizer_step_time,
    step_time,
)
from rlhf_core.pipeline import StageName
from rlhf_core.planning.advice import Changes, advise, as_overrides
from rlhf_core.planning.checkpoints import UPLOAD_BYTES, CheckpointSize, checkpoint_sizes
from rlhf_core.planning.fit import FitVerdict, compare_memory, host_memory
from rlhf_core.planning.hardware import GIB, Hardware, cpu_hardware, parse_gpus, visible_hardware
from rlhf_core.planning.loads import DeviceLoad, largest_pass, sequences_of_step, trained_model
from rlhf_core.preflight import check
from rlhf_core.run.references import resolve
from rlhf_core.run.summary import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KINDS = {
    "weights": "weight",
    "gradients": "grad",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logit",
    "buffers": "buffer",
    "cache": "cache",
}
"""Kinds of memory and the headings of their columns."""
LIMITS = {
    "arithmetic": "the arithmetic of the devices",
    "memory": "the memory bandwidth of the devices",
    "link": "the links inside a host",
    "network": "the network between hosts",
    "host": "copies to host memory and its CPUs",
}
"""What limits a phase, by the fields of `Seconds`."""


@dataclass(frozen=True)
class Plan:
    """The result of `rlhf plan`."""

    config: PipelineConfig
    shape: ModelShape
    hardware: Hardware
    verdict: FitVerdict
    changes: tuple[str, ...] | None
    """Overrides that make it fit: the smallest changes found, or else those of `splits` that are needed.

    None if it fits, or if none were found.
    """
    time: StepTime | None
    """Time of a step of PPO; None without PPO."""
    optimizer_steps: dict[str, Seconds]
    """Time of one optimizer step of each stage that trains one model."""
    checkpoints: tuple[CheckpointSize, ...]
    splits: tuple[Split | NoSplit, ...]
    """The fastest split of each stage. Empty without GPUs."""
    warnings: tuple[str, ...]
    """Those of the checks before a run."""
    limits_are_assumed: bool
    """Whether a length limit is estimated from the first rows of the data."""


def make_plan(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    gpus: str | None = None,
    model_config: str | None = None,
    *,
    link: str | None = None,
    host_memory_gib: float | None = None,
) -> Plan:
    """Compute the memory and time that a configuration needs, whether it fits its devices, and which split of
    the devices is the fastest.

    Args:
        config_path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        gpus: Count and kind of GPUs, such as `8xA100-80G`, or `2x8xA100-80G` for two hosts. None: the GPUs
            of this machine, or its CPU.
        model_config: `config.json` with the model's shape, or the name of a known model, if `model.path` is
            on the hub.
        link: Network of a host with several hosts, such as `400gbit` or `8x400gbit`.
        host_memory_gib: Memory of a host, to compare offloaded state with. None: not compared.

    Raises:
        ConfigError: The configuration or `gpus` is wrong, or `link` or `host_memory_gib` is given without
            `gpus`.
        ModelError: The model's shape cannot be read.
    """
    with checking(str(config_path)):
        config = load_config(config_path, overrides)
        if gpus is not None and config.run.device == "auto":
            config = load_config(config_path, [*overrides, "run.device=cuda"])  # GPUs imply CUDA
        if model_config is None:
            config = resolve(config).config
    hardware = _hardware(config, gpus, link, host_memory_gib)
    is_assumed = None in config.given_limits
    config = with_assumed_limits(config)
    warnings = _checked(config, model_config, hardware, this_machine=gpus is None)
    shape = _shape(config, model_config)
    verdict = compare_memory(config, shape, hardware)
    splits: tuple[Split | NoSplit, ...] = ()
    if not hardware.device.is_cpu:
        splits = fastest(config, shape, hardware)
    changes = None
    if not verdict.fits:
        compare = partial(compare_memory, shape=shape, hardware=hardware)
        changes = advise(config, compare, _changes(splits))
    return Plan(
        config,
        shape,
        hardware,
        verdict,
        changes,
        step_time(config, shape, hardware) if config.ppo.enabled else None,
        _optimizer_steps(config, shape, hardware),
        tuple(checkpoint_sizes(config, shape, hardware)),
        splits,
        warnings,
        is_assumed,
    )


def _checked(
    config: PipelineConfig, model_config: str | None, hardware: Hardware, *, this_machine: bool
) -> tuple[str, ...]:
    """Return the warnings of the checks that `rlhf run` makes.

    Raises InputError with all problems. What does not fit is among them only if there are others, because a
    plan shows it.
    """
    misfits: list[str] = []

    def read_shape(config: PipelineConfig) -> Iterator[Finding]:
        verdict = compare_memory(config, _shape(config, model_config), hardware)
        misfits.extend(f"does not fit: {problem.text}" for problem in verdict.problems)
        yield from ()

    try:
        return tuple(check(config, this_machine=this_machine, memory=read_shape))
    except InputError as error:
        raise type(error)("\n".join([error.message, *misfits])) from error


def _changes(splits: Sequence[Split | NoSplit]) -> Changes:
    """Return the values of the fields that all splits change, by their names."""
    changes: Changes = {}
    for split in splits:
        if isinstance(split, Split):
            changes |= split.changes
    return changes


def _shape(config: PipelineConfig, model_config: str | None) -> ModelShape:
    if model_config is None:
        path = config.model.path
        known = known_shape(path) if path is not None and not Path(path).exists() else None
        return known or base_model_shape(config)
    if Path(model_config).exists():
        return base_model_shape(config, Path(model_config))
    known = known_shape(model_config)
    if known is None:
        raise ConfigError(
            f"--model-config: must be a readable config.json or a known model; got {model_config!r}, which is"
            f" no file; known: {', '.join(known_models())}"
        )
    return known


def _hardware(
    config: PipelineConfig, gpus: str | None, link: str | None, host_memory_gib: float | None
) -> Hardware:
    if gpus is not None:
        return parse_gpus(gpus, link, host_memory_gib)
    for option, value in (("--link", link), ("--host-memory", host_memory_gib)):
        if value is not None:
            raise ConfigError(f"{option}: describes the hosts of --gpus; got no --gpus; add it")
    if not runs_on_gpu(config):
        return cpu_hardware()
    visible = visible_hardware()
    if visible is None:
        raise ConfigError("--gpus: this configuration runs on GPUs; say which, such as --gpus 8xA100-80G")
    return visible


def _optimizer_steps(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> dict[str, Seconds]:
    seconds: dict[str, Seconds] = {}
    for stage, section in config.training_sections.items():
        model = trained_model(config, shape, stage, section.deepspeed)
        batch = largest_pass(config, stage)
        seconds[stage] = optimizer_step_time(
            model, sequences_of_step(section), batch.longest, batch.tokens, hardware
        )
    return seconds


# -- shown --


def show(plan: Plan, console: Console) -> None:
    """Print batches, memory, time, and the verdict."""
    config, shape, device = plan.config, plan.shape, plan.hardware.device

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for doubt in plan.warnings:
        console.print(f"warning: {doubt}", highlight=False, markup=False, soft_wrap=True)
    say(
        f"{config.model.path or 'a model from scratch'}: {shape.parameters / 1e9:.3g} billion parameters, "
        f"{shape.layers} layers, width {shape.hidden}\n"
    )
    if plan.limits_are_assumed:
        limits = config.limits
        say(
            f"limits, estimated from the first rows: prompts of {limits.prompt} tokens, responses of"
            f" {limits.response} (sampled ones of {limits.new}), texts of {limits.text}. The stage data"
            " measures all rows\n"
        )
    console.print(_batch_table(config))
    console.print(_memory_table(plan))
    if not device.is_cpu:
        _say_cache(plan, say)
    _say_checkpoints(plan, say)
    say(
        f"time: {_step_of_ppo(plan)}an optimizer step of "
        + ", ".join(f"{stage} {duration(step.total)}" for stage, step in plan.optimizer_steps.items())
    )
    network = f" and {NETWORK:.0%} of the network" if plan.hardware.hosts > 1 else ""
    say(
        f"assumed: every sequence of full length; {TRAINING_MFU:.0%} of peak arithmetic in training and"
        f" {SCORING_MFU:.0%} in scoring, {DECODE_BANDWIDTH:.0%} of memory bandwidth in decoding, {LINK:.0%}"
        f" of the link{network}\n"
    )
    if plan.splits:
        _show_splits(plan, console)
    if plan.verdict.fits:
        fullest = max(load.total for load in plan.verdict.loads) / device.memory
        say(
            f"fits {plan.hardware}"
            + (f", with {1 - fullest:.0%} of a device to spare" if not device.is_cpu else "")
        )
        return
    for problem in plan.verdict.problems:
        say(f"does not fit: {problem.text}")
    if plan.changes is not None:
        console.print(f"fits with: {shlex.join(plan.changes)}", highlight=False, markup=False, soft_wrap=True)
    else:
        say("none of the changes tried makes it fit: use more or larger devices")


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, in bytes and seconds."""
    found: dict[str, Any] = {
        "fits": plan.verdict.fits,
        "hardware": {
            "count": plan.hardware.count,
            "device": plan.hardware.device.name,
            "hosts": plan.hardware.hosts,
            "network": None if plan.hardware.network is None else asdict(plan.hardware.network),
        },
        "parameters": plan.shape.parameters,
        "limits": {**plan.config.limits._asdict(), "estimated": plan.limits_are_assumed},
        "batches": dict(describe_batches(plan.config)),
        "memory": [_row(load) for load in plan.verdict.loads],
        "kv_cache_tokens": plan.verdict.kv_tokens,
        "ppo_step_seconds": plan.time and {name: plan.time.phase(name).total for name in PHASES},
        "optimizer_step_seconds": {stage: step.total for stage, step in plan.optimizer_steps.items()},
        "checkpoints": [asdict(size) for size in plan.checkpoints],
        "fastest": [_split(split) for split in plan.splits],
        "warnings": plan.warnings,
        "problems": [problem.text for problem in plan.verdict.problems],
        "changes": plan.changes,
    }
    return json.dumps(found, indent=2)


def _split(split: Split | NoSplit) -> dict[str, Any]:
    if isinstance(split, NoSplit):
        return {"stage": split.stage, "seconds": None, "reason": split.reason}
    phases = {name: asdict(seconds) for name, seconds in split.phases.items()}
    return {"stage": split.stage, "seconds": split.seconds, "phases": phases, "changes": split.changes}


def _row(load: DeviceLoad) -> dict[str, Any]:
    place = {"stage": load.stage, "what": load.what, "phase": load.phase, "devices": load.devices}
    return {**place, **asdict(load.bytes), "total": load.total, "host": load.host}


def _batch_table(config: PipelineConfig) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for stage, text in describe_batches(config):
        table.add_row(stage, text)
    return table


def _memory_table(plan: Plan) -> Table:
    """Return the memory of each phase of each stage on a device, by kind."""
    from rich import box
    from rich.table import Table

    device = plan.hardware.device
    unit, name = (2**20, "MiB") if device.is_cpu else (GIB, "GiB")
    where = "for each process; the machine" if device.is_cpu else f"on each device; {device.name}"
    table = Table(
        title=f"\n{name} {where} has {device.memory / unit:,.1f}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("stage: on n devices", overflow="fold")
    for column in (*KINDS.values(), "total"):
        table.add_column(column, justify="right", no_wrap=True)
    shown = None
    peaks = {(load.stage, load.what): 0.0 for load in plan.verdict.loads}
    for load in plan.verdict.loads:
        peaks[load.stage, load.what] = max(peaks[load.stage, load.what], load.total)
    for load in plan.verdict.loads:
        if (load.stage, load.what) != shown:
            shown = (load.stage, load.what)
            table.add_row(f"{load.stage}: {load.what} on {load.devices}")
        cells = [_number(getattr(load.bytes, kind) / unit) for kind in KINDS]
        largest = load.total == peaks[shown]
        style = "bold" if largest else None
        if load.total > device.memory:
            style = "red"
        total = _number(load.total / unit) + ("*" if largest else " ")
        table.add_row(f"  {load.phase}", *cells, total, style=style)
    table.caption = "* the largest; total: with the process itself" + (
        "" if device.is_cpu else " and fragmentation"
    )
    return table


def _number(value: float) -> str:
    if not value:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _say_cache(plan: Plan, say: Any) -> None:
    engine, longest = plan.config.ppo.engine, plan.config.max_sequence_tokens
    held = plan.verdict.kv_tokens // longest
    say(
        f"KV cache of an engine: {plan.verdict.kv_tokens} tokens = {held} sequences of {longest} at once "
        f"(max_num_seqs {engine.max_num_seqs})"
    )
    steps = [load for load in plan.verdict.loads if load.phase == "step"]
    host: dict[StageName, float] = {}
    for stage in {load.stage for load in steps}:
        host[stage] = host_memory([load for load in steps if load.stage == stage], plan.hardware)
    if needed := max(host.values()):
        stage = max(host, key=lambda name: host[name])
        each = "on each host " if plan.hardware.hosts > 1 else ""
        say(f"host memory for offloaded optimizer state: {needed / GIB:.0f} GiB {each}in {stage}")


def _say_checkpoints(plan: Plan, say: Any) -> None:
    largest = max(plan.checkpoints, key=lambda size: size.bytes)
    part = f", {_gigabytes(largest.per_host)} of it on one host" if plan.hardware.hosts > 1 else ""
    sizes = ", ".join(f"{size.stage} {_gigabytes(size.bytes)}" for size in plan.checkpoints)
    say(
        f"checkpoints: {sizes}; the largest{part}: {duration(largest.hash_seconds)} to hash with one thread,"
        f" {duration(largest.upload_seconds)} to upload at {UPLOAD_BYTES / 1e9:g} GB/s from each host"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size < 1e12 else f"{size / 1e12:.3g} TB"


def _step_of_ppo(plan: Plan) -> str:
    time, steps = plan.time, plan.config.ppo.steps
    if time is None:
        return ""
    return (
        f"a step of ppo {duration(time.total)} = {_phases(time.phase, plan.config)}, all {steps} in"
        f" {duration(time.total * steps)}; "
    )


def _phases(phase: Callable[[Phase], Seconds], config: PipelineConfig) -> str:
    """Return the time of each phase in words."""
    parts = {name: f"{name} {duration(phase(name).total)}" for name in PHASES}
    if not config.ppo.staleness:
        return " + ".join(parts.values())
    every = config.ppo.sync_every
    often = "" if every == 1 else f" in every {every} steps"
    return f"({parts['rollout']} during {parts['scoring']} + {parts['training']}) + {parts['sync']}{often}"


def _show_splits(plan: Plan, console: Console) -> None:
    """Show the fastest split of each stage, what limits it, and the overrides."""

    def say(text: str, **options: Any) -> None:
        console.print(text, highlight=False, markup=False, **options)

    now = {stage: step.total for stage, step in plan.optimizer_steps.items()}
    if plan.time is not None:
        now["ppo"] = plan.time.total
    unfit = {problem.stage for problem in plan.verdict.problems}
    say(f"fastest split found for {plan.hardware}:")
    say("computed times: the one PPO step measured, on one GPU, took four times as long")
    for split in plan.splits:
        if isinstance(split, NoSplit):
            say(f"- no split fits: {split.reason}")
            continue
        phase, limit = max(split.phases.items(), key=lambda entry: entry[1].total)
        what, parts = "an optimizer step", ""
        if split.stage == "ppo":
            what = "a step"
            parts = f" = {_phases(split.phases.__getitem__, plan.config)}"
        part = getattr(limit, limit.largest) / limit.total
        bottleneck = f"{LIMITS[limit.largest]} ({part:.0%})"
        if split.stage == "ppo":
            bottleneck = f"{phase} ({limit.total / split.seconds:.0%} of the step), limited by {bottleneck}"
        before = ", it does not fit" if split.stage in unfit else f": {duration(now[split.stage])}"
        host = f". It needs {split.host / GIB:,.0f} GiB of memory on each host" if split.host else ""
        say(
            f"- {split.stage}: {what} {duration(split.seconds)}{parts} (as configured{before}). Bottleneck:"
            f" {bottleneck}{host}"
        )
    if overrides := as_overrides(_changes(plan.splits)):
        say(f"fastest with: {shlex.join(overrides)}\n", soft_wrap=True)
    else:
        say("")
