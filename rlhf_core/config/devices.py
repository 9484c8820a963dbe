"""Whether a configuration uses the GPUs of this machine."""

from __future__ import annotations

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.system.machine import machine


def uses_gpu(device: str) -> bool:
    """Return whether `auto`, `cpu` or `cuda` uses the GPUs of this machine."""
    return device == "cuda" or (device == "auto" and machine().visible_gpus() > 0)


def runs_on_gpu(config: PipelineConfig) -> bool:
    """Return whether `run.device` uses the GPUs of this machine."""
    return uses_gpu(config.run.device)
