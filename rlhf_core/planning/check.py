"""Check of a configuration against the GPUs, cores and disk of this machine, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from rlhf_core.config.consistency import deepspeed_sections
from rlhf_core.config.pipeline import PipelineConfig, runs_on_gpu, section_of
from rlhf_core.config.placement import TRAINED
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.shape import tiny_shape
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.planning.checkpoints import bytes_per_parameter, keeps_best
from rlhf_core.storage.versions import gpu_versions
from rlhf_core.system.files import existing_parent
from rlhf_core.system.machine import machine

_MIN_FREE_BYTES = 30_000_000
"""Space for databases and logs alone."""
_NCCL_OF_M2N = (2, 30, 5)
"""The oldest NCCL that nccl-extensions supports (`NCCL_M2N_MIN_NCCL_VERSION_CODE` in its header)."""


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
        yield from _nccl_extensions(config, stages)
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
    for field, ranks in _ranks_outside_ppo(config):
        if ranks > gpus:
            error = f"{field}.ranks: must be at most the {gpus} {which} GPUs; got {ranks}; use {gpus}"
            yield _for_stages(config, field, error, stages)
    engines, each = config.evaluate.engines, config.ppo.engine.tensor_parallel
    if engines * each > gpus:
        error = (
            f"evaluate.engines: {engines} engines with {each} GPUs each (ppo.engine.tensor_parallel) must"
            f" have at most the {gpus} {which} GPUs; got {engines * each}; use {max(1, gpus // each)}"
        )
        yield _for_stages(config, "evaluate.engines", error, stages)
    placement = plan_placement(config.ppo)
    if config.ppo.enabled and placement.devices > gpus:
        error = (
            f"ppo: needs {placement.devices} GPUs ({placement.describe()}; colocate={config.ppo.colocate});"
            f" got {gpus} {which}; lower ranks or ppo.engine.count, or use ppo.colocate=all"
        )
        yield _for_stages(config, "ppo", error, stages)


def _for_stages(config: PipelineConfig, field: str, problem: str, stages: Collection[StageName]) -> Finding:
    """Return an error if one of `stages` reads a field about devices, otherwise a warning."""
    if not set(_readers(config, field)).isdisjoint(stages):
        return ConfigError(problem)
    return f"{problem}; only stages that this run has passed, or does not come to, need it"


def _readers(config: PipelineConfig, field: str) -> list[StageName]:
    """Return the stages that read a field about devices."""
    scoring: list[StageName] = ["sample", "evaluate", "register"]
    if field.startswith("evaluate"):
        # At its end, PPO loads the files of an adapter on the ranks of the evaluation.
        return ["ppo", *scoring] if field == "evaluate" and config.ppo.lora is not None else scoring
    section = field.removesuffix(".dtype").removesuffix(".deepspeed")
    readers: list[StageName] = [stage for stage in config.training_sections if section_of(stage) == section]
    if section == "reward" and "judge" not in config.training_sections:
        readers.append("judge")
    if section.startswith("ppo"):
        readers.append("ppo")
    # They load the policy and the reward model in the precision of their training.
    if field in ("ppo.policy_deepspeed.dtype", "reward.deepspeed.dtype"):
        readers += scoring
    return readers


def _ranks_outside_ppo(config: PipelineConfig) -> list[tuple[str, int]]:
    """Return the ranks of the other stages, with the section that sets them."""
    sections = config.training_sections.items()
    trained = [(f"{section_of(stage)}.deepspeed", section.deepspeed.ranks) for stage, section in sections]
    return [*trained, ("evaluate", config.evaluate.ranks)]


def _flash_attention(config: PipelineConfig) -> Iterator[Finding]:
    if config.model.attention != "flash_attention_2":
        return
    if not machine().has_package("flash_attn"):
        yield ConfigError(
            "model.attention: flash_attention_2 needs the package flash_attn, which is not installed; install"
            " it, or use sdpa"
        )
    exact = [
        f"{field}.dtype" for field, deepspeed in deepspeed_sections(config) if deepspeed.dtype == "float32"
    ]
    if exact:
        verb = "is" if len(exact) == 1 else "are"
        yield ConfigError(
            f"model.attention: flash_attention_2 has no float32, which {', '.join(exact)}"
            f" {verb} here; use bfloat16 there, or model.attention=sdpa"
        )


def _nccl_extensions(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[Finding]:
    if config.ppo.weight_sync.backend != "nccl_m2n":
        return
    # The package adds `m2n` to the package `nccl`, which may be missing itself.
    if not machine().has_package("nccl") or not machine().has_package("nccl.m2n"):
        error = (
            "ppo.weight_sync.backend: nccl_m2n needs the package nccl-extensions, which is not installed;"
            " install it, or use nccl"
        )
        yield _for_stages(config, "ppo.weight_sync", error, stages)
    version = gpu_versions(machine()).get("nccl")
    if version is not None and tuple(map(int, version.split(".")[:3])) < _NCCL_OF_M2N:
        error = (
            f"ppo.weight_sync.backend: nccl_m2n needs NCCL {'.'.join(map(str, _NCCL_OF_M2N))} or newer; got"
            f" {version}, the version that torch asks for; install a newer one over it, or use nccl"
        )
        yield _for_stages(config, "ppo.weight_sync", error, stages)


def _cpu_settings(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[Finding]:
    backend = config.ppo.weight_sync.backend
    if backend in ("nccl", "ipc", "nccl_m2n"):
        error = f"ppo.weight_sync.backend: {backend} needs GPUs; got 0 visible; use auto or gloo"
        yield _for_stages(config, "ppo.weight_sync", error, stages)
    if config.model.attention == "flash_attention_2":
        yield ConfigError("model.attention: flash_attention_2 needs a GPU; got 0 visible; use sdpa")
    level = config.ppo.engine.sleep_level
    if level > 0:
        error = f"ppo.engine.sleep_level: {level} needs GPUs; got 0 visible; use 0"
        yield _for_stages(config, "ppo.engine", error, stages)
    for field, deepspeed in deepspeed_sections(config):
        if deepspeed.offload != "none":
            error = (
                f"{field}.offload: {deepspeed.offload} needs a GPU to offload from; got 0 visible; use none"
            )
            yield _for_stages(config, field, error, stages)
        if deepspeed.dtype == "float16":
            field = f"{field}.dtype"
            error = f"{field}: float16 needs a GPU; got 0 visible; use float32 or bfloat16"
            yield _for_stages(config, field, error, stages)


def _cpu_bfloat16(config: PipelineConfig) -> Iterator[Finding]:
    fields = [
        f"{field}.dtype" for field, deepspeed in deepspeed_sections(config) if deepspeed.dtype == "bfloat16"
    ]
    if config.ppo.engine.dtype == "bfloat16":
        fields.append("ppo.engine.dtype")
    if fields and not machine().has_fast_bfloat16():
        yield (
            f"{', '.join(fields)}: bfloat16 is slower than float32 on this CPU, which has neither amx_bf16"
            " nor AMD's avx512_bf16; use float32 for speed"
        )


def _cpu_limits(config: PipelineConfig, stages: Collection[StageName]) -> Iterator[Finding]:
    """Yield settings that need more cores or memory than this machine has, for a run on CPUs."""
    cores, placement = machine().cores(), plan_placement(config.ppo)
    for field, ranks in _ranks_outside_ppo(config):
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
    counts = {"evaluate.engines": config.evaluate.engines}
    if config.ppo.enabled:
        counts = {"ppo.engine.count": config.ppo.engine.count} | counts
    for field in sorted(counts, key=counts.__getitem__, reverse=True):
        memory = counts[field] * each
        if memory > total:
            error = (
                f"ppo.engine.kv_cache_gib: {counts[field]} engines ({field}) x {each:g} GiB = {memory:g} GiB"
                f" must fit in memory; got {total:.0f} GiB; lower one of them"
            )
            finding = _for_stages(config, field, error, stages)
            yield finding
            if isinstance(finding, ConfigError):
                return  # the other field has the same problem, and the same fix


def check_disk(config: PipelineConfig) -> Iterator[Finding]:
    """Check the free space of `run.home`. An error only if there is hardly any."""
    folder = existing_parent(Path(config.run.home))
    copies = 1
    if config.store_folder is not None:
        # One more, because the new checkpoint is committed before an old one is deleted.
        copies = config.store.keep_checkpoints + config.store.keep_best + 1
    # Each model is also saved once.
    needed = 200_000_000 + _parameters(config) * sum(4 + copies * size for size in _checkpoint_bytes(config))
    disk = machine().disk(folder)
    if problem := full_disk(folder):
        yield ConfigError(f"run.home: {problem}, or set run.home")
    elif disk.free < needed:
        yield (
            f"run.home: {folder} has {disk.free / 1e9:.1f} GB free, but the models of"
            f" {'PPO' if config.ppo.enabled else 'DPO'} with {copies} checkpoints need about"
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


def _checkpoint_bytes(config: PipelineConfig) -> Iterator[int]:
    """Yield the bytes of a parameter in the checkpoints of PPO, or of DPO without PPO, for each trained
    model. Adapters are small and count as 0.
    """
    dpo = config.dpo
    if not config.ppo.enabled:
        best = dpo.early_stop is not None
        yield 0 if dpo.lora is not None else bytes_per_parameter(dpo.deepspeed, best=best)
        return
    for group in plan_placement(config.ppo).groups:
        for role in group.roles:
            if role not in TRAINED:
                continue
            if config.ppo.lora is not None:
                yield 0
                continue
            average = role == "policy" and config.ppo.ema_decay is not None
            best = keeps_best(config, role)
            yield bytes_per_parameter(group.deepspeed(role, config.ppo), average=average, best=best)


def _parameters(config: PipelineConfig) -> int:
    """Return the number of parameters of the base model, or 0 if it is not on this machine."""
    if config.model.path is None:
        return tiny_shape(config.model.tiny).parameters
    return ModelFolder(config.model.path).parameters
