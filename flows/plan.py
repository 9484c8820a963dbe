"""`rlhf plan`: what a configuration will need, on the terminal, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.report import duration
from rlhf_core.config import PipelineConfig
from rlhf_core.config.devices import visible_gpus
from rlhf_core.config.load import load_config
from rlhf_core.config.placement import plan as place
from rlhf_core.config.preflight import describe
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.errors import ConfigError
from rlhf_core.planning.fit import Verdict, advise, judge
from rlhf_core.planning.hardware import GIB, Device, parse_gpus
from rlhf_core.planning.shape import ModelShape, shape_of
from rlhf_core.planning.speed import DECODE_BANDWIDTH, SCORING_MFU, TRAINING_MFU, step_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KINDS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "gathered": "gather",
    "activations": "activ",
    "logits": "logits",
}
"""What lies in memory, and its column."""


def show_plan(
    config_path: str, overrides: Sequence[str], gpus: str | None, model_config: str | None, console: Console
) -> bool:
    """Print the plan; False if it does not fit `gpus` (such as `8xA100-80G`; None: no accelerator)."""
    config = load_config(config_path, overrides)
    devices = parse_gpus(gpus) if gpus is not None else None
    shape = shape_of(config, Path(model_config) if model_config else None)
    if gpus is None and (config.run.device == "cuda" or (config.run.device == "auto" and visible_gpus())):
        raise ConfigError("--gpus: this configuration runs on GPUs; say which, such as --gpus 8xA100-80G")
    console.print(f"{shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers, width {shape.hidden}")
    console.print(describe(config, gpus), highlight=False, markup=False)
    if devices is None:
        console.print(_host_table(config, shape))
        return True
    count, device = devices
    verdict = judge(config, shape, count, device)
    console.print(_memory_table(verdict, device))
    _print_notes(config, shape, device, verdict, console)
    if verdict.fits:
        console.print(f"fits {count} x {device.name}")
        return True
    for problem in verdict.problems:
        console.print(f"does not fit: {problem}", highlight=False)
    changes = advise(config_path, overrides, config, lambda changed: judge(changed, shape, count, device))
    if changes is not None:
        console.print(f"fits with: {' '.join(changes)}", highlight=False)
    else:
        console.print("no change of micro-batches, ZeRO stage, checkpointing or offload makes it fit: use more devices")
    return False


def _memory_table(verdict: Verdict, device: Device) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"GiB on each device; {device.name}: {device.memory / GIB:.1f}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("phase", "part", "n", *KINDS.values(), "total"):
        table.add_column(column, justify="left" if column in ("phase", "part") else "right", overflow="fold")
    for load in verdict.loads:
        sums = {kind: sum(part.bytes.get(kind, 0.0) for part in load.parts) for kind in KINDS}
        cells = [f"{value / GIB:.1f}" if value else "" for value in sums.values()]
        style = "red" if load.total > device.memory else None
        table.add_row(load.phase, load.what, str(load.devices), *cells, f"{load.total / GIB:.1f}", style=style)
    return table


def _print_notes(config: PipelineConfig, shape: ModelShape, device: Device, verdict: Verdict, console: Console) -> None:
    host: dict[str, float] = {}
    for load in verdict.loads:
        host[load.phase] = host.get(load.phase, 0.0) + load.host
    if max(host.values()):
        phase = max(host, key=lambda name: host[name])
        console.print(
            f"host memory for offloaded optimizer state: {host[phase] / GIB:.0f} GiB in {phase}", highlight=False
        )
    engine = config.ppo.engine
    sequences = verdict.kv_tokens // config.max_sequence_tokens
    console.print(
        f"KV cache of an engine: {verdict.kv_tokens} tokens, {sequences} whole sequences at once "
        f"(max_num_seqs {engine.max_num_seqs})",
        highlight=False,
    )
    time = step_time(config, shape, device)
    console.print(
        f"a step of ppo, all sequences full: {duration(time.total)} = rollout {duration(time.rollout)} + scoring "
        f"{duration(time.scoring)} + training {duration(time.training)} + sync {duration(time.sync)}; "
        f"{config.ppo.steps} steps: {duration(time.total * config.ppo.steps)} (assuming {TRAINING_MFU:.0%} and "
        f"{SCORING_MFU:.0%} of peak arithmetic, {DECODE_BANDWIDTH:.0%} of memory bandwidth)",
        highlight=False,
    )


def _host_table(config: PipelineConfig, shape: ModelShape) -> Table:
    """On the CPU: parameters, gradients and optimizer state of each role, over all its ranks."""
    from rich.table import Table

    from rlhf_core.planning.memory import state_bytes

    table = Table(title="MiB in host memory on the CPU, all ranks; activations and engines come on top")
    for column in ("phase", "role", "ranks", "weights", "gradients", "optimizer"):
        table.add_column(column, justify="left" if column in ("phase", "role") else "right")
    rows: list[tuple[str, str, DeepSpeedConfig, int, bool]] = [
        ("sft", "policy", config.sft.deepspeed, shape.parameters, True)
    ]
    if config.reward.enabled:
        rows.append(("reward", "reward", config.reward.deepspeed, shape.score_parameters, True))
    for group in place(config.ppo).groups:
        for role in group.roles:
            deepspeed = config.ppo.policy_deepspeed if role in ("policy", "reference") else config.ppo.critic_deepspeed
            count = shape.parameters if role in ("policy", "reference") else shape.score_parameters
            rows.append(("ppo", role, deepspeed, count, role in ("policy", "critic")))
    for phase, name, deepspeed, count, trained in rows:
        kinds, _ = state_bytes(count, deepspeed, trained=trained)
        cells = [
            f"{kinds.get(kind, 0.0) * deepspeed.ranks / 2**20:.1f}" for kind in ("weights", "gradients", "optimizer")
        ]
        table.add_row(phase, name, str(deepspeed.ranks), *cells)
    return table
