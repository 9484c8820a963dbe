"""`rlhf plan`: what a configuration will need, on the terminal or as JSON, before anything starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Limits
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.config.placement import needed_devices
from rlhf_core.data.check import with_assumed_limits
from rlhf_core.errors import ConfigError, Finding, InputError, checking
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape, count_in_words, known_models, known_shape
from rlhf_core.ops.data_table import DataTable, data_table, show_counts, show_problems
from rlhf_core.ops.plan.rows import StageWork, batches, describe_ppo, stage_work, why_unread
from rlhf_core.ops.plan.speed import (
    DECODE_BANDWIDTH,
    LINK,
    MEASURED,
    NETWORK,
    SCORING_MFU,
    TRAINING_MFU,
    StepTime,
    evaluation_time,
    evaluations_during_ppo,
    seconds_of_step,
    starting_time,
    step_time,
)
from rlhf_core.pipeline import StageName
from rlhf_core.planning.hardware import GIB, Hardware, cpu_hardware, parse_gpus, visible_hardware
from rlhf_core.planning.loads import PPO, DeviceLoad, checkpoint_sizes, training_stages
from rlhf_core.planning.search import (
    Changes,
    FitVerdict,
    advise,
    as_overrides,
    compare_memory,
    fastest,
    host_memory,
    with_changes,
)
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
Say = Callable[..., None]
"""Prints a text or a table, without colours of its own."""
_FASTER = 1.25
"""How many times as fast as the configuration other settings must be to be shown: both are estimates."""
_TIGHT = 0.9
"""Share of a device's memory from which its use is shown in detail."""


@dataclass(frozen=True)
class Plan:
    """The result of `rlhf plan`."""

    config: PipelineConfig
    shape: ModelShape
    hardware: Hardware
    verdict: FitVerdict
    changes: tuple[str, ...] | None
    """Overrides that make it fit; None if it fits, or if none were found."""
    time: StepTime | None
    """Time of a step of PPO; None without PPO."""
    steps: dict[StageName, float]
    """Seconds of a step of each training stage: of PPO, or an optimizer step."""
    checkpoints: dict[StageName, int]
    """Bytes of a checkpoint of each training stage."""
    fastest: dict[StageName, list[tuple[float, Changes]]]
    """For each training stage, at most three settings that fit, the fastest first: seconds of a step, and the
    changed fields. Those of PPO have different placements. Empty without GPUs, and if nothing fits.
    """
    warnings: tuple[str, ...]
    """Those of the checks before a run."""
    limits_are_assumed: bool
    """Whether a length limit is estimated from the first rows of the data."""
    table: DataTable | None = None
    """What is made of the first rows; None if they were not read."""
    work: tuple[StageWork, ...] = ()
    """Rows, steps and time of each stage that trains; empty if no rows were read."""
    unread: str | None = None
    """Why no rows were read although this was wanted."""
    starts: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest time in which the processes of all stages start."""
    evaluations: float = 0.0
    """Time of the evaluations during and after the training."""

    @property
    def whole(self) -> tuple[float, float]:
        """Seconds of all stages but `data`: with rows of median and of full length, and with the shortest and
        the longest starts.
        """
        least, most = self.starts
        least += sum(work.at_median for work in self.work)
        most += sum(work.seconds for work in self.work)
        return least + self.evaluations, most + self.evaluations

    @property
    def device_hours(self) -> tuple[float, float]:
        """`whole` in hours of a device. Stages that train nothing count as the largest one."""
        devices: dict[str, int] = {}
        if not self.hardware.device.is_cpu:
            devices = {work.stage: needed_devices(self.config, work.stage) for work in self.work}
        others = max(devices.values(), default=1)
        least, most = (others * (seconds + self.evaluations) for seconds in self.starts)
        for work in self.work:
            least += devices.get(work.stage, 1) * work.at_median
            most += devices.get(work.stage, 1) * work.seconds
        return least / 3600, most / 3600

    @property
    def fullest(self) -> DeviceLoad:
        """The largest load of a device."""
        return max(self.verdict.loads, key=lambda load: load.total)


def make_plan(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    gpus: str | None = None,
    model_config: str | None = None,
    *,
    link: str | None = None,
    host_memory_gib: float | None = None,
    rows: int | None = None,
) -> Plan:
    """Compute the memory that a configuration needs, estimate its time, and look for settings that fit and
    for faster ones.

    Args:
        config_path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        gpus: Count and kind of GPUs, such as `8xA100-80G`, or `2x8xA100-80G` for two hosts. None: the GPUs
            of this machine, or its CPU.
        model_config: `config.json` with the model's shape, or the name of a known model, if `model.path` is
            on the hub.
        link: Network of a host with several hosts, such as `400gbit` or `8x400gbit`.
        host_memory_gib: Memory of a host, to compare offloaded state with. None: not compared.
        rows: Rows of each source that are made into examples as in the stage `data`, if model and data are on
            this machine. None: none, and limits are estimated from the characters of a few.

    Raises:
        ConfigError: The configuration or `gpus` is wrong, or `link` or `host_memory_gib` is given without
            `gpus`.
        DataError: The stage `data` would end with it.
        ModelError: The model's shape or tokenizer cannot be read.
    """
    with checking(str(config_path)):
        config = load_config(config_path, overrides)
        if gpus is not None and config.run.device == "auto":
            config = load_config(config_path, [*overrides, "run.device=cuda"])  # GPUs imply CUDA
        # The store of a reference is not asked for a model whose shape is given.
        if model_config is None:
            config = resolve(config).config
    hardware = _hardware(config, gpus, link, host_memory_gib)
    given = config
    # The checks and the memory need lengths, which otherwise only the stage `data` knows.
    config = with_assumed_limits(config)
    warnings = _checked(config, model_config, hardware, this_machine=gpus is None)
    unread = None if rows is None else why_unread(given)
    table = None
    if rows is not None and unread is None:
        # Most first runs fail at their rows and not at their memory, so these are read first.
        table = data_table(given, rows)
        config = given.with_limits(Limits(*(table.card["limits"][name] for name in Limits._fields)))
    shape = _shape(config, model_config)
    verdict = compare_memory(config, shape, hardware)
    changes = () if verdict.fits else advise(config, shape, hardware)
    found: dict[StageName, list[tuple[float, Changes]]] = {}
    if changes is not None and not hardware.device.is_cpu:
        found = fastest_settings(config, changes, shape, hardware)
    steps = {stage: seconds_of_step(config, shape, hardware, stage) for stage in training_stages(config)}
    return Plan(
        config,
        shape,
        hardware,
        verdict,
        changes or None,
        step_time(config, shape, hardware) if config.ppo.enabled else None,
        steps,
        checkpoint_sizes(config, shape),
        found,
        warnings,
        None in given.given_limits,
        table,
        () if table is None else tuple(stage_work(config, table, steps)),
        unread,
        starting_time(config),
        evaluation_time(config, shape, hardware) + evaluations_during_ppo(config, shape, hardware),
    )


def fastest_settings(
    config: PipelineConfig, changes: tuple[str, ...], shape: ModelShape, hardware: Hardware
) -> dict[StageName, list[tuple[float, Changes]]]:
    """Return the seconds and the changes of the fastest settings of each training stage, at most three.

    `changes` are those with which the configuration fits.
    """
    fitting = with_changes(config, dict(change.split("=", 1) for change in changes))
    assert fitting is not None
    found: dict[StageName, list[tuple[float, Changes]]] = {}
    for stage in training_stages(config):
        # PPO may only fit together with other changes: of its adapters, and of the evaluation.
        start = fitting if stage == PPO else config
        seconds = partial(seconds_of_step, shape=shape, hardware=hardware, stage=stage)
        # Sorted once more: without the changes that it does not need, one can be faster than it was found.
        some = islice(fastest(config, start, stage, shape, hardware, seconds), 3)
        found[stage] = sorted(some, key=itemgetter(0))
    return found


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
        # `check` takes a generator of findings, and a plan shows what does not fit in its own place.
        yield from ()

    try:
        return tuple(check(config, this_machine=this_machine, memory=read_shape))
    except InputError as error:
        # The same class, which decides the exit code.
        raise type(error)("\n".join([error.message, *misfits])) from error


def _shape(config: PipelineConfig, model_config: str | None) -> ModelShape:
    if model_config is None:
        path = config.model.path
        # A local folder can have the name of a known model, and another shape.
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


# -- shown --


def show(plan: Plan, console: Console, *, details: bool = False) -> None:
    """Print rows, time, memory and the verdict.

    Batches, the memory of each process and the phases of a step are `details`. Memory is also shown if it is
    tight or does not fit.
    """
    config, shape, device = plan.config, plan.shape, plan.hardware.device
    say = partial(console.print, highlight=False, markup=False)
    for doubt in plan.warnings:
        say(f"warning: {doubt}", soft_wrap=True)
    say(
        f"{config.model.path or 'a model from scratch'}: {count_in_words(shape.parameters)} parameters, "
        f"{shape.layers} layers, width {shape.hidden}\n"
    )
    _say_rows(plan, console, say)
    if details:
        say(_batch_table(config))
        if config.ppo.enabled:
            say("\n".join(describe_ppo(config)))
    if details or not plan.verdict.fits or plan.fullest.total > _TIGHT * device.memory:
        say(_memory_table(plan))
        if not device.is_cpu:
            _say_cache(plan, say)
    sizes = ", ".join(f"{stage} {_bytes_in_words(size)}" for stage, size in plan.checkpoints.items())
    say(f"checkpoints: {sizes}")
    if details:
        _say_phases(plan, say)
    _say_fastest(plan, say)
    if plan.verdict.fits:
        say(_fits(plan))
        return
    for problem in plan.verdict.problems:
        say(f"does not fit: {problem.text}")
    if plan.changes is not None:
        say(f"fits with: {shlex.join(plan.changes)}", soft_wrap=True)
    else:
        say("none of the changes tried makes it fit: use more or larger devices")


def _fits(plan: Plan) -> str:
    device, load = plan.hardware.device, plan.fullest
    if device.is_cpu:
        return f"fits {plan.hardware}; the largest process needs {load.total / 2**20:,.0f} MiB ({load.stage})"
    return f"fits {plan.hardware}, with {1 - load.total / device.memory:.0%} of a device to spare"


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, in bytes and seconds."""
    best: dict[StageName, dict[str, Any]] = {}
    for stage, settings in plan.fastest.items():
        if settings:
            seconds, changes = settings[0]
            best[stage] = {"seconds": seconds, "changes": changes}
    found: dict[str, Any] = {
        "fits": plan.verdict.fits,
        "hardware": {
            "count": plan.hardware.count,
            "device": plan.hardware.device.name,
            "hosts": plan.hardware.hosts,
            "network": None if plan.hardware.network is None else asdict(plan.hardware.network),
        },
        "parameters": plan.shape.parameters,
        "rows": plan.table and plan.table.card["counts"],
        "work": list(map(asdict, plan.work)),
        "start_seconds": plan.starts,
        "evaluation_seconds": plan.evaluations,
        "unread": plan.unread,
        "limits": {**plan.config.limits._asdict(), "estimated": plan.limits_are_assumed},
        "batches": list(map(asdict, batches(plan.config))),
        "memory": list(map(_row, plan.verdict.loads)),
        "kv_cache_tokens": plan.verdict.kv_tokens,
        "ppo_step_seconds": plan.time and plan.time.phases,
        "step_seconds": plan.steps,
        "measured_over_estimated": MEASURED,
        "checkpoints": plan.checkpoints,
        "fastest": best,
        "warnings": plan.warnings,
        "problems": [problem.text for problem in plan.verdict.problems],
        "changes": plan.changes,
    }
    return json.dumps(found, indent=2)


def _row(load: DeviceLoad) -> dict[str, Any]:
    place = {"stage": load.stage, "what": load.what, "phase": load.phase, "devices": load.devices}
    return {**place, **asdict(load.bytes), "total": load.total, "host": load.host}


def _batch_table(config: PipelineConfig) -> Table:
    from rich.table import Table

    table = Table("a batch of", "rows", "of a rank", "longest", "micro-batches", "tokens of one")
    for batch in batches(config):
        table.add_row(*map(str, astuple(batch)))
    return table


def _memory_table(plan: Plan) -> Table:
    """Return the memory of each phase of each stage on a device, by kind."""
    from rich import box
    from rich.table import Table

    device = plan.hardware.device
    unit, name, where = GIB, "GiB", f"on each device; {device.name}"
    if device.is_cpu:
        unit, name, where = 2**20, "MiB", "for each process; the machine"
    table = Table(
        title=f"\n{name} {where} has {device.memory / unit:,.1f}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("stage: on n devices", overflow="fold")
    for column in (*KINDS.values(), "total"):
        table.add_column(column, justify="right", no_wrap=True)
    shown = None
    peaks: dict[tuple[str, str], float] = {}
    for load in plan.verdict.loads:
        part = (load.stage, load.what)
        peaks[part] = max(peaks.get(part, 0.0), load.total)
    for load in plan.verdict.loads:
        if (load.stage, load.what) != shown:
            shown = (load.stage, load.what)
            table.add_row(f"{load.stage}: {load.what} on {load.devices}")
        cells = [_number(getattr(load.bytes, kind) / unit) for kind in KINDS]
        mark, style = " ", None
        if load.total == peaks[shown]:
            mark, style = "*", "bold"
        if load.total > device.memory:
            style = "red"
        table.add_row(f"  {load.phase}", *cells, _number(load.total / unit) + mark, style=style)
    table.caption = "* the largest; total: with the process itself"
    if not device.is_cpu:
        table.caption += " and fragmentation"
    return table


def _number(value: float) -> str:
    if not value:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _say_cache(plan: Plan, say: Say) -> None:
    engine, longest = plan.config.ppo.engine, plan.config.max_sequence_tokens
    held = plan.verdict.kv_tokens // longest
    say(
        f"KV cache of an engine: {plan.verdict.kv_tokens} tokens = {held} sequences of {longest} at once "
        f"(max_num_seqs {engine.max_num_seqs})"
    )
    steps: dict[StageName, list[DeviceLoad]] = {}
    for load in plan.verdict.loads:
        if load.phase == "step":
            steps.setdefault(load.stage, []).append(load)
    needed, stage = max((host_memory(loads, plan.hardware), stage) for stage, loads in steps.items())
    if needed:
        each = "on each host " if plan.hardware.hosts > 1 else ""
        say(f"host memory for offloaded optimizer state: {needed / GIB:.0f} GiB {each}in {stage}")


def _bytes_in_words(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e6:.3g} MB"


def _say_rows(plan: Plan, console: Console, say: Say) -> None:
    """Show what is made of the rows, and how long each stage trains on them."""
    from rich.table import Table

    if plan.table is not None:
        show_counts(plan.table, console)
        show_problems(plan.table, console)
    elif plan.limits_are_assumed:
        limits = plan.config.limits
        say(
            f"limits, estimated from the first rows: prompts of {limits.prompt} tokens, responses of"
            f" {limits.response} (sampled ones of {limits.new}), texts of {limits.text}. The stage data"
            " measures all rows\n"
        )
    if plan.unread is not None:
        say(f"rows are not counted: {plan.unread}; `rlhf data` reads it\n")
    if not plan.work:
        steps = [f"a step of {stage} {duration(seconds)}" for stage, seconds in plan.steps.items()]
        if PPO in plan.steps:
            count = plan.config.ppo.steps
            steps.append(f"all {count} of {PPO} {duration(count * plan.steps[PPO])}")
        say(f"time, estimated: {', '.join(steps)}.{_doubt(plan)}\n")
        return
    table = Table("stage", "trains on", "steps", "a step", "in all")
    for work in plan.work:
        times = (duration(work.seconds / max(1, work.steps)), duration(work.seconds))
        table.add_row(work.stage, f"{work.rows:,} {work.what}", f"{work.steps:,}", *times)
    say(table)
    least, most = map(duration, plan.whole)
    starts = " to ".join(map(duration, plan.starts))
    say(
        f"a run, estimated: {least} (rows of median length) to {most} (of full length), with evaluations"
        f" ({duration(plan.evaluations)}) and starts of processes ({starts}), without the stage data."
        f"{_doubt(plan)}\n"
    )
    if (budget := plan.config.run.budget) is not None:
        least_hours, most_hours = map(budget.spoken, plan.device_hours)
        say(f"budget: {budget.spoken(budget.device_hours)}; the run needs {least_hours} to {most_hours}\n")


def _doubt(plan: Plan) -> str:
    if plan.hardware.device.is_cpu:
        return ""
    return f" The one PPO step that was measured, on one GPU, took {MEASURED} times as long as estimated."


def _say_phases(plan: Plan, say: Say) -> None:
    """Show the parts of a step of PPO, and what is assumed."""
    if plan.time is not None:
        parts = {name: f"{name} {duration(seconds)}" for name, seconds in plan.time.phases.items()}
        phases = " + ".join(parts.values())
        if plan.time.staleness:
            phases = f"({parts['rollout']} during {parts['scoring']} + {parts['training']}) + {parts['sync']}"
        if plan.time.sync_every > 1:
            phases += f" in every {plan.time.sync_every} steps"
        say(f"a step of ppo = {phases}")
    network = f" and {NETWORK:.0%} of the network" if plan.hardware.hosts > 1 else ""
    say(
        f"Assumed: every sequence of full length; {TRAINING_MFU:.0%} of peak arithmetic in training and"
        f" {SCORING_MFU:.0%} in scoring, {DECODE_BANDWIDTH:.0%} of memory bandwidth in decoding, {LINK:.0%}"
        f" of the link{network}\n"
    )


def _say_fastest(plan: Plan, say: Say) -> None:
    """Show the fastest settings of the stages that they make faster, and the overrides."""
    unfit = {problem.stage for problem in plan.verdict.problems}
    changes: Changes = {}
    for stage, found in plan.fastest.items():
        if not found:
            continue
        seconds, changed = found[0]
        times = plan.steps[stage] / seconds
        if not changed or (stage not in unfit and times < _FASTER):
            continue
        than = "as configured, it does not fit" if stage in unfit else f"{times:.1f} times as fast"
        say(f"{stage}: a step {duration(seconds)} ({than})")
        changes |= changed
    if changes:
        say(f"estimated to be faster with: {shlex.join(as_overrides(changes))}\n", soft_wrap=True)
