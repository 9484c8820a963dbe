"""Cores, memory, GPUs and Python packages of this machine, without importing torch or initializing a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

_CPUS = "proc/cpuinfo"
_NVIDIA_GPUS = "proc/driver/nvidia/gpus"
_AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
"""AMD's driver lists the GPUs and CPUs here, also inside a container."""
_DRIVERS = {"NVIDIA": "sys/module/nvidia/version", "amdgpu": "sys/module/amdgpu/version"}
"""Files in which the kernel modules of GPUs tell their versions, also inside a container."""

# Reading a version takes a millisecond, and loading a configuration reads that of torch.
_version = cache(importlib.metadata.version)


class Disk(NamedTuple):
    """Space of a file system, in bytes."""

    total: int
    """0 for one that is no disk, such as /proc."""
    free: int


class Machine:
    """This machine, as this process sees it. Each call looks again, but for versions of packages.

    Args:
        root: Folder of `proc` and `sys`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    # -- processors, memory, disks --

    def cores(self) -> int:
        """Return the number of CPU cores that this process may use, rounded down and at least 1."""
        cores = len(os.sched_getaffinity(0))
        for quota, period in self._limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
            cores = min(cores, max(1, quota // period))
        return cores

    def memory(self) -> int:
        """Return the bytes of the main memory that this process may use."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limits = self._limits("memory", "memory.max", "memory.limit_in_bytes")
        return min([memory, *chain.from_iterable(limits)])

    def _limits(self, controller: str, *files: str) -> Iterator[list[int]]:
        """Yield the numbers in `files` of each control group around this process that has a limit.

        `files` has the names of version 2 and of version 1, where `controller` has a folder of its own.
        """
        groups = self._root / "proc/self/cgroup"
        if not groups.exists():
            return
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self._root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.lstrip("/")
            # In a container, `path` can be that of the host, and `top` is then the group itself.
            for folder in (group, *group.parents):
                present = [folder / name for name in files if (folder / name).is_file()]
                values = " ".join(file.read_text() for file in present).split()
                if values and all(map(str.isdigit, values)):  # without a limit: `max` or -1
                    yield list(map(int, values))

    def disk(self, folder: Path) -> Disk:
        """Return the space of the file system of `folder`, which exists."""
        usage = shutil.disk_usage(folder)
        return Disk(usage.total, usage.free)

    def has_fast_bfloat16(self) -> bool:
        """Return whether the CPU multiplies more numbers per second in bfloat16 than in float32 (decision
        44).
        """
        try:
            words = set((self._root / _CPUS).read_text().split())
        except OSError:
            return False
        # Intel's avx512_bf16 has half the rate of float32, which only amx_bf16 exceeds.
        return "amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words

    # -- packages --

    def has_package(self, name: str) -> bool:
        """Return whether a package can be imported. The parents of `a.b` are imported to find it."""
        return find_spec(name) is not None

    def package_version(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, such as `nvidia-nccl-cu13`; None without it."""
        try:
            return _version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def torch_built_with(self, name: str) -> str:
        """Return the value of `torch.version.<name>`, or an empty string. Importing torch takes seconds."""
        match = re.search(rf"^{name}\b[^=\n]*= *'([^']+)'", self._torch_version_file(), re.MULTILINE)
        return match[1] if match else ""

    def _torch_version_file(self) -> str:
        """Return the text of `torch/version.py`, or an empty string."""
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        try:
            return (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
        except OSError:
            return ""

    # -- GPUs --

    def visible_gpus(self) -> int:
        """Return the number of GPUs that a new process would see: 0 with a CPU build of torch.

        They are NVIDIA's, or AMD's with a build of torch for ROCm, which calls them CUDA devices too.
        """
        if (self.package_version("torch") or "").endswith("+cpu"):
            return 0
        present = self._installed_gpus()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.torch_built_with("hip"):
            # As torch does. Ray sets HIP_VISIBLE_DEVICES.
            for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
                if name in os.environ:
                    chosen = os.environ[name]
                    break
        if chosen is None or present == 0:
            return present
        return _count_chosen(chosen, present)

    def gpu_names(self) -> list[str]:
        """Return the driver's names of the installed GPUs, such as `NVIDIA A100-SXM4-80GB` or `AMD gfx942`.
        Empty if they are unknown.
        """
        if self.torch_built_with("hip"):
            return self._amd_gpus()
        names = []
        for file in sorted((self._root / _NVIDIA_GPUS).glob("*/information")):
            for line in file.read_text().splitlines():
                if line.startswith("Model:"):
                    names.append(line.partition(":")[2].strip())
        return names or [line.partition(":")[2].partition("(")[0].strip() for line in self._listed_gpus()]

    def gpu_driver(self) -> str | None:
        """Return the driver of the GPUs with its version, such as `NVIDIA 580.95.05`; None without one."""
        for name, file in _DRIVERS.items():
            try:
                return f"{name} {(self._root / file).read_text().strip()}"
            except OSError:
                continue
        return None

    def _installed_gpus(self) -> int:
        if self.torch_built_with("hip"):
            return len(self._amd_gpus())
        folder = self._root / _NVIDIA_GPUS
        return len(list(folder.iterdir())) if folder.is_dir() else len(self._listed_gpus())

    def _amd_gpus(self) -> list[str]:
        """Return the instruction set of each AMD GPU. The driver's files have no product names."""
        names = []
        files = (self._root / _AMD_NODES).glob("*/properties")
        for file in sorted(files, key=lambda file: int(file.parent.name)):
            try:
                found = re.search(r"^gfx_target_version (\d+)$", file.read_text(), re.MULTILINE)
            except OSError:
                continue  # the GPUs of other containers
            version = int(found[1]) if found else 0
            if version:  # 0 for a CPU; 90402 is gfx942 and 90010 gfx90a, as the last part is hexadecimal
                names.append(f"AMD gfx{version // 10000}{version // 100 % 100}{version % 100:x}")
        return names

    def _listed_gpus(self) -> list[str]:
        """Return a line for each GPU, such as `GPU 0: NVIDIA H100 80GB HBM3 (UUID: ...)`."""
        if shutil.which("nvidia-smi") is None:
            return []
        command = ["nvidia-smi", "-L"]
        try:
            # A driver that hangs must not hold up the checks before a run, which a person waits for.
            listed = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


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


_THIS = Machine()
MACHINE: ContextVar[Machine] = ContextVar("machine")
"""The machine that checks, plans and keys are for, if it is not this one, as in tests."""


def machine() -> Machine:
    """Return the machine that checks, plans and keys are for.

    Another one than this machine is seen only by the thread that set it. Versions that are recorded with a
    run are always those of this machine.
    """
    return MACHINE.get(_THIS)
