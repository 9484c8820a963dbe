"""What this machine offers and what a configuration asks of it, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from rlhf_core.config.pipeline import PipelineConfig

_DRIVER = Path("/proc/driver/nvidia/gpus")


def cpu_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """CUDA devices that a process started now would see; 0 with a torch built for the CPU."""
    if _torch_is_cpu_build():
        return 0
    present = _installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or present == 0:
        return present
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if "-1" in names:
        names = names[: names.index("-1")]
    return len([name for name in names if not name.isdigit() or int(name) < present])


def leads_to_gpu(device: str) -> bool:
    """Whether `auto`, `cpu` or `cuda` leads to the GPUs on this machine."""
    return device == "cuda" or (device == "auto" and visible_gpus() > 0)


def runs_on_gpu(config: PipelineConfig) -> bool:
    """Where `run.device` leads on this machine."""
    return leads_to_gpu(config.run.device)


def _torch_is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def gpu_names() -> list[str]:
    """What the driver calls the GPUs of this machine, such as `NVIDIA A100-SXM4-80GB`; empty if it does not
    say.
    """
    files = [folder / "information" for folder in sorted(_DRIVER.iterdir())] if _DRIVER.is_dir() else []
    lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names or [line.partition(":")[2].partition("(")[0].strip() for line in _listed_gpus()]


def _installed_gpus() -> int:
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else len(_listed_gpus())


def _listed_gpus() -> list[str]:
    """`GPU 0: NVIDIA H100 80GB HBM3 (UUID: ...)`, a line for each."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
