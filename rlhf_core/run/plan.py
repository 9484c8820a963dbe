"""`rlhf plan`: what a configuration will need, on the terminal or as JSON, before anything starts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import unusual_settings
from rlhf_core.config.devices import runs_on_gpu
from rlhf_core.config.load import load_config
from rlhf_core.errors import ConfigError, checking
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.batches import describe_batches
from rlhf_core.planning.fit import Verdict, advise, judge
from rlhf_core.planning.hardware import GIB, Hardware, cpu_hardware, parse_gpus, visible_hardware
from rlhf_core.planning.loads import DeviceLoad, largest_pass
from rlhf_core.planning.memory import Model
from rlhf_core.planning.speed import (
    DECODE_BANDWIDTH,
    LINK,
    SCORING_MFU,
    TRAINING_MFU,
    StepTime,
    optimizer_step_time,
    step_time,
)
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


@dataclass(frozen=True)
class Plan:
    """The result of `rlhf plan`."""

    config: PipelineConfig
    shape: ModelShape
    hardware: Hardware
    verdict: Verdict
    changes: tuple[str, ...] | None
    """Overrides that make it fit; None if it fits, or if none were found."""
    time: StepTime
    optimizer_steps: dict[str, float]
    """Seconds of one optimizer step of sft and reward."""


def make_plan(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    gpus: str | None = None,
    model_config: str | None = None,
) -> Plan:
    """Compute the memory and time that a configuration needs, and whether it fits its devices.

    Args:
        config_path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        gpus: Count and kind of GPUs, such as `8xA100-80G`. None: the GPUs of this machine, or its CPU.
        model_config: `config.json` with the model's shape, if `model.path` is on the hub.

    Raises:
        ConfigError: The configuration or `gpus` is wrong.
        ModelError: The model's shape cannot be read.
    """
    with checking(str(config_path)):
        config = load_config(config_path, overrides)
        if gpus is not None and config.run.device == "auto":
            config = load_config(config_path, [*overrides, "run.device=cuda"])  # GPUs imply CUDA
    hardware = _hardware(config, gpus)
    with checking(model_config or "model.path"):
        shape = base_model_shape(config, Path(model_config) if model_config else None)
    verdict = judge(config, shape, hardware)
    changes = None if verdict.fits else advise(config, lambda changed: judge(changed, shape, hardware))
    time = step_time(config, shape, hardware.device)
    return Plan(config, shape, hardware, verdict, changes, time, _optimizer_steps(config, shape, hardware))


def _hardware(config: PipelineConfig, gpus: str | None) -> Hardware:
    if gpus is not None:
        return parse_gpus(gpus)
    if not runs_on_gpu(config):
        return cpu_hardware()
    visible = visible_hardware()
    if visible is None:
        raise ConfigError("--gpus: this configuration runs on GPUs; say which, such as --gpus 8xA100-80G")
    return visible


def _optimizer_steps(config: PipelineConfig, shape: ModelShape, hardware: Hardware) -> dict[str, float]:
    seconds = {}
    for stage, section, sequences in (("sft", config.sft, 1), ("reward", config.reward, 2)):
        if stage == "sft" or config.reward.enabled:
            model = Model(shape, section.deepspeed, scores=stage == "reward", lora=section.lora)
            batch = largest_pass(config, stage)
            seconds[stage] = optimizer_step_time(
                model, sequences * section.batch_size, batch.longest, batch.tokens, hardware.device
            )
    return seconds


# -- shown --


def show(plan: Plan, console: Console) -> None:
    """Batches, memory, time, and the verdict."""
    config, shape, device = plan.config, plan.shape, plan.hardware.device

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for doubt in unusual_settings(config):
        console.print(f"warning: {doubt}", highlight=False, markup=False, soft_wrap=True)
    say(
        f"{config.model.path or 'a model from scratch'}: {shape.parameters / 1e9:.3g} billion parameters, "
        f"{shape.layers} layers, width {shape.hidden}\n"
    )
    console.print(_batch_table(config))
    console.print(_memory_table(plan))
    if not device.is_cpu:
        _say_cache(plan, say)
    time = plan.time
    say(
        f"time: a step of ppo {duration(time.total)} = rollout {duration(time.rollout)} + scoring "
        f"{duration(time.scoring)} + training {duration(time.training)} + sync {duration(time.sync)}, all "
        f"{config.ppo.steps} in {duration(time.total * config.ppo.steps)}; an optimizer step of "
        + ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in plan.optimizer_steps.items())
    )
    say(
        f"assumed: every sequence of full length; {TRAINING_MFU:.0%} of peak arithmetic in training and"
        f" {SCORING_MFU:.0%} in scoring, {DECODE_BANDWIDTH:.0%} of memory bandwidth in decoding, {LINK:.0%}"
        " of the link\n"
    )
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
    """Everything in bytes and seconds."""
    found: dict[str, Any] = {
        "fits": plan.verdict.fits,
        "hardware": {"count": plan.hardware.count, "device": plan.hardware.device.name},
        "parameters": plan.shape.parameters,
        "batches": dict(describe_batches(plan.config)),
        "memory": [_row(load) for load in plan.verdict.loads],
        "kv_cache_tokens": plan.verdict.kv_tokens,
        "ppo_step_seconds": asdict(plan.time),
        "optimizer_step_seconds": plan.optimizer_steps,
        "warnings": list(unusual_settings(plan.config)),
        "problems": [problem.text for problem in plan.verdict.problems],
        "changes": plan.changes,
    }
    return json.dumps(found, indent=2)


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
        style = "red" if load.total > device.memory else "bold" if largest else None
        total = _number(load.total / unit) + ("*" if largest else " ")
        table.add_row(f"  {load.phase}", *cells, total, style=style)
    table.caption = "* the largest; total: with the process itself" + (
        "" if device.is_cpu else " and fragmentation"
    )
    return table


def _number(value: float) -> str:
    return "" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _say_cache(plan: Plan, say: Any) -> None:
    engine, longest = plan.config.ppo.engine, plan.config.max_sequence_tokens
    held = plan.verdict.kv_tokens // longest
    say(
        f"KV cache of an engine: {plan.verdict.kv_tokens} tokens = {held} sequences of {longest} at once "
        f"(max_num_seqs {engine.max_num_seqs})"
    )
    host: dict[str, float] = {}
    for load in plan.verdict.loads:
        if load.phase == "step":
            host[load.stage] = host.get(load.stage, 0.0) + load.host * load.devices
    if needed := max(host.values()):
        stage = max(host, key=lambda name: host[name])
        say(f"host memory for offloaded optimizer state: {needed / GIB:.0f} GiB in {stage}")
