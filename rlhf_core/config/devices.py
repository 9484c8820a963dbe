"""GPUs and cores of this machine, and whether a configuration uses the GPUs, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from rlhf_core.config.pipeline import PipelineConfig

_DRIVER = Path("/proc/driver/nvidia/gpus")
_CPUS = Path("/proc/cpuinfo")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""AMD's driver lists the GPUs and CPUs here, also inside a container."""


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def has_fast_bfloat16() -> bool:
    """Return whether the CPU multiplies more numbers per second in bfloat16 than in float32 (decision 44)."""
    try:
        words = set(_CPUS.read_text().split())
    except OSError:
        return False
    # Intel's avx512_bf16 has half the rate of float32, which only amx_bf16 exceeds.
    return "amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words


def visible_gpus() -> int:
    """Return the number of GPUs that a new process would see: 0 with a CPU build of torch.

    They are NVIDIA's, or AMD's with a build of torch for ROCm, which calls them CUDA devices too.
    """
    if _torch_is_cpu_build():
        return 0
    present = _installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch_built_with("hip"):
        # As torch does. Ray sets HIP_VISIBLE_DEVICES.
        for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            if name in os.environ:
                chosen = os.environ[name]
                break
    if chosen is None or present == 0:
        return present
    return _count_chosen(chosen, present)


def _count_chosen(chosen: str, present: int) -> int:
    """Return how many of `present` GPUs a value of CUDA_VISIBLE_DEVICES selects.

    As in `_parse_visible_devices` of torch/cuda/__init__.py, the list ends before the first entry that is no
    GPU, and selects none if an entry occurs twice.
    """
    is_uuid = chosen.startswith(("GPU-", "MIG-"))
    pattern = f"{chosen[:4]}.*" if is_uuid else r"\s*\+?\d+"
    names: list[str] = []
    for entry in chosen.split(","):
        found = re.match(pattern, entry)
        if found is None:
            break
        name = found[0] if is_uuid else str(int(found[0]))
        if name in names:
            return 0
        names.append(name)
    return len(list(takewhile(lambda name: is_uuid or int(name) < present, names)))


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


def torch_built_with(name: str) -> str:
    """Return the value of `torch.version.<name>`, or an empty string. Importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
    return match[1] if match else ""


def gpu_names() -> list[str]:
    """Return the driver's names of the GPUs, such as `NVIDIA A100-SXM4-80GB` or `AMD gfx942`. Empty if they
    are unknown.
    """
    if torch_built_with("hip"):
        return _amd_gpus()
    names = []
    for file in sorted(_DRIVER.glob("*/information")):
        for line in file.read_text().splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return names or [line.partition(":")[2].partition("(")[0].strip() for line in _listed_gpus()]


def _amd_gpus() -> list[str]:
    """Return the instruction set of each AMD GPU. The driver's files have no product names."""
    names = []
    for file in sorted(_AMD_NODES.glob("*/properties"), key=lambda file: int(file.parent.name)):
        try:
            found = re.search(r"^gfx_target_version (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue  # the GPUs of other containers
        version = int(found[1]) if found else 0
        if version:  # 0 for a CPU; 90402 is gfx942 and 90010 gfx90a, as the last part is hexadecimal
            names.append(f"AMD gfx{version // 10000}{version // 100 % 100}{version % 100:x}")
    return names


def _installed_gpus() -> int:
    if torch_built_with("hip"):
        return len(_amd_gpus())
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
