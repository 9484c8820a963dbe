"""GPUs and cores of this machine, and whether a configuration uses the GPUs, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from rlhf_core.config.pipeline import PipelineConfig

_DRIVER = Path("/proc/driver/nvidia/gpus")


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """Return the number of CUDA devices that a new process would see: 0 with a CPU build of torch."""
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


def uses_gpu(device: str) -> bool:
    """Return whether `auto`, `cpu` or `cuda` uses the GPUs of this machine."""
    return device == "cuda" or (device == "auto" and visible_gpus() > 0)


def runs_on_gpu(config: PipelineConfig) -> bool:
    """Return whether `run.device` uses the GPUs of this machine."""
    return uses_gpu(config.run.device)


def _torch_is_cpu_build() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def gpu_names() -> list[str]:
    """Return the driver's names of the GPUs, such as `NVIDIA A100-SXM4-80GB`. Empty if they are unknown."""
    names = []
    for file in sorted(_DRIVER.glob("*/information")):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names or [line.partition(":")[2].partition("(")[0].strip() for line in _listed_gpus()]


def _installed_gpus() -> int:
    return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else len(_listed_gpus())


def _listed_gpus() -> list[str]:
    """Return a line for each GPU, such as `GPU 0: NVIDIA H100 80GB HBM3 (UUID: ...)`."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
