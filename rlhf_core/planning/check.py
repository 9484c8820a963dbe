"""Checks of a configuration against GPUs, memory, cores and disk, without importing torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from rlhf_core.config.consistency import deepspeed_sections, learning_rates
from rlhf_core.config.pipeline import PipelineConfig, TrainingStage, runs_on_gpu, section_of
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.errors import ConfigError, Finding, ModelError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape, count_in_words
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.hardware import Hardware, cpu_hardware, visible_hardware
from rlhf_core.planning.loads import (
    EVALUATION,
    PPO,
    checkpoint_sizes,
    evaluating_stages,
    stages_on_evaluation_ranks,
)
from rlhf_core.planning.search import advise, compare_memory, stages_with
from rlhf_core.system.files import existing_parent
from rlhf_core.system.machine import machine

_SMALL_MODEL = 100_000_000
"""Models with fewer parameters learn little with the default learning rates."""
_MIN_FREE_BYTES = 30_000_000
"""Space for databases and logs alone."""


def check_devices(config: PipelineConfig, stages: Collection[StageName] = tuple(STAGES)) -> Iterator[Finding]:
    """Check that the GPUs, or the cores and the memory without GPUs, are enough for all ranks and engines.

    What only other stages than `stages` need is a warning.
    """
    if config.run.is_remote:
        return  # this machine only submits jobs
    # The stages reserve the devices of a Ray cluster, which counts them itself.
    on_cluster = bool(os.environ.get("RAY_ADDRESS"))
    gpus = machine().visible_gpus()
    if config.run.device == "cuda" and gpus == 0 and not on_cluster:
        yield ConfigError(
            "run.device: cuda needs a GPU and a CUDA build of torch; got 0 visible GPUs; use auto or cpu"
        )
    elif runs_on_gpu(config):
        if not on_cluster:
            yield from check_gpu_counts(config, gpus, stages=stages)
        yield from _flash_attention(config)
    elif on_cluster:
        if config.run.device == "auto":
            yield (
                "run.device: auto looks for GPUs on this machine, which has none, so all stages run on CPUs;"
                " set cuda to use those of the cluster"
            )
    else:
        yield from _cpu_settings(config, stages)
        yield from _cpu_bfloat16(config)
        yield from _cpu_limits(config, stages)


def check_gpu_counts(
    config: PipelineConfig,
    gpus: int,
    which: Literal["visible", "registered"] = "visible",
    stages: Collection[StageName] = tuple(STAGES),
) -> Iterator[Finding]:
    """Check that `gpus` GPUs are enough for each stage: those visible here, or registered with Ray.

    Too few for other stages than `stages` are a warning.
    """
    for field, ranks, users in _ranks_outside_ppo(config):
        if ranks > gpus:
            error = f"{field}.ranks: must be at most the {gpus} {which} GPUs; got {ranks}; use {gpus}"
            yield _for_stages(users, error, stages)
    engines, each = config.evaluate.engines, config.ppo.engine.tensor_parallel
    if engines * each > gpus:
        error = (
            f"evaluate.engines: {engines} engines with {each} GPUs each (ppo.engine.tensor_parallel) must"
            f" have at most the {gpus} {which} GPUs; got {engines * each}; use {max(1, gpus // each)}"
        )
        yield _for_stages(evaluating_stages(), error, stages)
    placement = plan_placement(config.ppo)
    if config.ppo.enabled and placement.devices > gpus:
        error = (
            f"ppo: needs {placement.devices} GPUs ({placement.describe()}; colocate={config.ppo.colocate});"
            f" got {gpus} {which}; lower ranks or ppo.engine.count, or use ppo.colocate=all"
        )
        yield _for_stages([PPO], error, stages)


def _for_stages(users: Collection[StageName], problem: str, stages: Collection[StageName]) -> Finding:
    """Return an error if one of `stages` is among those that have the problem, otherwise a warning."""
    if not set(users).isdisjoint(stages):
        return ConfigError(problem)
    return f"{problem}; only stages that this run has passed, or does not come to, need it"


def _training_with(config: PipelineConfig, stage: TrainingStage) -> list[StageName]:
    """Return the stages that train with the section of `stage`."""
    found = []
    for name, row in STAGES.items():
        # A judge without settings of its own trains with those of the reward model.
        settings = name if name in config.training_sections else row.sections[0]
        if settings == stage:
            found.append(name)
    return found


def _ranks_outside_ppo(config: PipelineConfig) -> Iterator[tuple[str, int, list[StageName]]]:
    """Yield the ranks of the other stages, with the section that sets them and the stages that use them."""
    for stage, section in config.training_sections.items():
        yield f"{section_of(stage)}.deepspeed", section.deepspeed.ranks, _training_with(config, stage)
    yield EVALUATION, config.evaluate.ranks, stages_on_evaluation_ranks(config)


def _flash_attention(config: PipelineConfig) -> Iterator[Finding]:
    if config.model.attention != "flash_attention_2":
        return
    if not machine().has_package("flash_attn"):
        yield ConfigError(
            "model.attention: flash_attention_2 needs the package flash_attn, which is not installed; install"
            " it, or use sdpa"
        )
    if exact := _dtype_fields(config, "float32"):
        verb = "is" if len(exact) == 1 else "are"
        yield ConfigError(
            f"model.attention: flash_attention_2 has no float32, which {', '.join(exact)}"
            f" {verb} here; use bfloat16 there, or model.attention=sdpa"
        )


def _cpu_settings(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[Finding]:
    backend = config.ppo.weight_sync.backend
    if backend in ("nccl", "ipc"):
        error = f"ppo.weight_sync.backend: {backend} needs GPUs; got 0 visible; use auto or gloo"
        yield _for_stages([PPO], error, stages)
    if config.model.attention == "flash_attention_2":
        yield ConfigError("model.attention: flash_attention_2 needs a GPU; got 0 visible; use sdpa")
    level = config.ppo.engine.sleep_level
    if level > 0:
        error = f"ppo.engine.sleep_level: {level} needs GPUs; got 0 visible; use 0"
        yield _for_stages([PPO], error, stages)
    trained = {f"{section_of(stage)}.deepspeed": stage for stage in config.training_sections}
    for field, deepspeed in deepspeed_sections(config):
        users: list[StageName] = _training_with(config, trained[field]) if field in trained else [PPO]
        if deepspeed.offload != "none":
            error = (
                f"{field}.offload: {deepspeed.offload} needs a GPU to offload from; got 0 visible; use none"
            )
            yield _for_stages(users, error, stages)
        if deepspeed.dtype == "float16":
            # An evaluation loads the policy and the reward model in the precision of their training.
            if field in ("ppo.policy_deepspeed", "reward.deepspeed"):
                users += evaluating_stages()
            error = f"{field}.dtype: float16 needs a GPU; got 0 visible; use float32 or bfloat16"
            yield _for_stages(users, error, stages)


def _dtype_fields(config: PipelineConfig, dtype: str) -> list[str]:
    """Return the fields of the trained models that have this precision."""
    return [f"{field}.dtype" for field, section in deepspeed_sections(config) if section.dtype == dtype]


def _cpu_bfloat16(config: PipelineConfig) -> Iterator[Finding]:
    fields = _dtype_fields(config, "bfloat16")
    if config.ppo.engine.dtype == "bfloat16":
        fields.append("ppo.engine.dtype")
    # No error: bfloat16 halves the memory, and lets a configuration for GPUs be tried on a CPU (decision 5).
    if fields and not machine().has_fast_bfloat16():
        yield (
            f"{', '.join(fields)}: bfloat16 is slower than float32 on this CPU, which has neither amx_bf16"
            " nor AMD's avx512_bf16; use float32 for speed"
        )


def _cpu_limits(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[Finding]:
    """Yield settings that need more cores or memory than this machine has, for a run on CPUs."""
    cores, placement = machine().cores(), plan_placement(config.ppo)
    for field, ranks, _ in _ranks_outside_ppo(config):
        if ranks > cores:
            yield (
                f"{field}.ranks is {ranks} on {cores} CPU cores: the ranks will take turns, each"
                " with a copy of the model; lower it"
            )
    if config.ppo.enabled and placement.concurrent > cores:
        yield (
            f"ppo has {placement.concurrent} processes at work at once ({placement.describe()}) on {cores}"
            " CPU cores: they will take turns; lower ranks or ppo.engine.count for speed"
        )
    if config.evaluate.engines > cores:
        yield (
            f"evaluate.engines is {config.evaluate.engines} on {cores} CPU cores: the engines will take"
            " turns, each with a copy of the model; lower it"
        )
    each = config.ppo.engine.kv_cache_gib
    total = machine().memory() / 2**30
    engines = [("evaluate.engines", config.evaluate.engines, evaluating_stages())]
    if config.ppo.enabled:
        engines.insert(0, ("ppo.engine.count", config.ppo.engine.count, [PPO]))
    # The larger number first, so that one error names what has to change.
    for field, count, users in sorted(engines, key=lambda entry: entry[1], reverse=True):
        memory = count * each
        if memory > total:
            error = (
                f"ppo.engine.kv_cache_gib: {count} engines ({field}) x {each:g} GiB = {memory:g} GiB"
                f" must fit in memory; got {total:.0f} GiB; lower one of them"
            )
            finding = _for_stages(users, error, stages)
            yield finding
            if isinstance(finding, ConfigError):
                return  # the other field has the same problem, and the same fix


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
    problem, others = _misfits(config, hardware, stages)
    if problem:
        yield ConfigError(problem)
    elif others:
        yield (
            f"stages that this run has passed, or does not come to, do not fit: {others}; `rlhf plan` shows a"
            " fix"
        )


def small_model_rates(config: PipelineConfig) -> Iterator[str]:
    """Warn about default learning rates, which are those of billions of parameters, for a small model."""
    if config.model.path is None:
        return
    shape = _known_shape(config)
    low = [each for each in learning_rates(config) if not each.adapters and each.rate <= each.default]
    if low and shape is not None and shape.parameters < _SMALL_MODEL:
        names = ", ".join(f"{each.field} ({each.rate:g})" for each in low)
        yield (
            f"model.path: the model has {count_in_words(shape.parameters)} parameters, but {names}: values"
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
    problem, others = _misfits(config, hardware, stages)
    if problem:
        return ConfigError(f"RAY_ADDRESS: not all stages fit on its GPUs: {problem}")
    if others:
        return (
            f"not all stages fit on GPUs like those of this cluster: {others}; `rlhf plan --gpus` shows a fix"
        )
    return None


def _misfits(config: PipelineConfig, hardware: Hardware, stages: Collection[StageName]) -> tuple[str, str]:
    """Return what of `stages` does not fit, with a fix, and what of other stages, without numbers and layouts
    of GPUs. Both are empty if the shape of the model is unknown.
    """
    shape = _known_shape(config)
    if shape is None:
        return "", ""
    problems, others = [], []
    for each in compare_memory(config, shape, hardware).problems:
        if not stages_with(each, config).isdisjoint(stages):
            problems.append(each.text)
        elif each.what not in ("devices", "engine layout"):
            others.append(each.text)
    if not problems:
        return "", "\n".join(others)
    changes = None
    # All processes on a CPU share its memory. If one copy of the weights in 16 bits does not fit, no setting
    # helps.
    if not hardware.device.is_cpu or 2 * shape.parameters < hardware.device.memory:
        changes = advise(config, shape, hardware, stages)
    fix = "use a smaller model or more memory" if hardware.device.is_cpu else "use more or larger GPUs"
    if changes is not None:
        # Quoted, because it is pasted into a shell: a section as `ppo.lora={r: 16, alpha: 32}` has blanks.
        fix = f"it fits with {shlex.join(changes)}"
    return "\n".join(problems) + f"; {fix}", ""


def _known_shape(config: PipelineConfig) -> ModelShape | None:
    try:
        return base_model_shape(config, local_only=True)
    except ModelError:
        return None


def check_disk(config: PipelineConfig) -> Iterator[Finding]:
    """Check the free space of `run.home`. An error only if there is hardly any."""
    folder = existing_parent(Path(config.run.home))
    copies = 1
    if config.store_folder is not None:
        # One more, because the new checkpoint is committed before an old one is deleted.
        copies = config.store.keep_checkpoints + 1
    shape = _known_shape(config)
    sizes = checkpoint_sizes(config, shape) if shape is not None else {}
    needed, what = 200_000_000, "logs and small files"
    if sizes:
        stage = max(sizes, key=sizes.__getitem__)
        needed += copies * sizes[stage]
        what = f"{copies} checkpoints of the stage {stage}"
    disk = machine().disk(folder)
    if problem := full_disk(folder):
        yield ConfigError(f"run.home: {problem}, or set run.home")
    elif disk.free < needed:
        yield (
            f"run.home: {folder} has {disk.free / 1e9:.1f} GB free, but {what} need about"
            f" {needed / 1e9:.1f} GB; free some, or set run.home and store.url"
        )


def full_disk(folder: Path) -> str | None:
    """Return that the disk of `folder` has no space even for databases and logs, with a fix, or None."""
    existing = existing_parent(folder)
    disk = machine().disk(existing)
    # File systems that are not disks, such as /proc, have a total of 0.
    if disk.total == 0 or disk.free >= _MIN_FREE_BYTES:
        return None
    return (
        f"{existing} has {disk.free / 1e6:.0f} MB free; databases and logs alone need"
        f" {_MIN_FREE_BYTES / 1e6:.0f} MB; free some"
    )
