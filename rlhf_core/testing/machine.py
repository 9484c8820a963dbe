"""Another machine than this one, for tests of checks, plans and keys that depend on GPUs or packages.

from rlhf_core.testing.machine import ScriptedMachine, on_machine

with on_machine(ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"] * 8)):
    assert config_from_tree({}).sft.deepspeed.dtype == "bfloat16"
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from typing_extensions import override

from rlhf_core.system.machine import MACHINE, Disk, Machine

_BUILDS = {"cpu": {}, "cuda": {"cuda": "13.0"}, "rocm": {"hip": "7.1.52802"}}
"""Values in `torch/version.py` of each build."""


class ScriptedMachine(Machine):
    """A machine with the given cores, GPUs and packages, independent of those of this one.

    Variables such as CUDA_VISIBLE_DEVICES are those of this process.

    Args:
        cores: CPU cores.
        memory: Bytes of main memory.
        disk: Space of every folder. None: the real one.
        gpus: Names of NVIDIA's GPUs, as `nvidia-smi -L` prints them. AMD's are files below `root`.
        torch: The build of torch. None: `cuda` if there are `gpus`, else `cpu`.
        packages: Packages that can be imported, such as `flash_attn`.
        versions: Versions of installed distributions, such as `nvidia-nccl-cu13`.
        root: Folder of `proc` and `sys`. Default: one without files.
    """

    def __init__(
        self,
        *,
        cores: int = 2,
        memory: int = 16 * 2**30,
        disk: Disk | None = None,
        gpus: Sequence[str] = (),
        torch: Literal["cpu", "cuda", "rocm"] | None = None,
        packages: Collection[str] = (),
        versions: Mapping[str, str] | None = None,
        root: Path = Path("/nonexistent"),
    ) -> None:
        super().__init__(root)
        self._cores = cores
        self._memory = memory
        self._disk = disk
        self._gpus = tuple(gpus)
        self._torch = torch or ("cuda" if gpus else "cpu")
        self._packages = frozenset(packages)
        self._versions = dict(versions or {})

    @override
    def cores(self) -> int:
        return self._cores

    @override
    def memory(self) -> int:
        return self._memory

    @override
    def disk(self, folder: Path) -> Disk:
        return self._disk or super().disk(folder)

    @override
    def has_package(self, name: str) -> bool:
        return name in self._packages

    @override
    def package_version(self, distribution: str) -> str | None:
        if distribution == "torch":
            return f"2.13.0+{self._torch}"
        return self._versions.get(distribution)

    @override
    def _torch_version_file(self) -> str:
        return "\n".join(f"{name} = {value!r}" for name, value in _BUILDS[self._torch].items())

    @override
    def _listed_gpus(self) -> list[str]:
        return [f"GPU {i}: {name} (UUID: GPU-{i})" for i, name in enumerate(self._gpus)]


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """Have `rlhf_core` see this machine in place of the real one. Other threads and processes see the real
    one.

    Args:
        machine: Usually a `ScriptedMachine`.
    """
    token = MACHINE.set(machine)
    try:
        yield
    finally:
        MACHINE.reset(token)
