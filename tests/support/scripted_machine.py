"""Another machine than this one, for tests of checks, plans and keys that depend on GPUs or packages; its
clock, and the figures of its GPU.

from tests.support.scripted_machine import ScriptedMachine, on_machine

with on_machine(ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"] * 8)):
    assert config_from_tree({}).sft.deepspeed.dtype == "bfloat16"

A GPU whose figures are scripted, for `rlhf_core.cluster.rpc.GpuSampler`:

gpu = ScriptedGpu([GpuSample(busy=0.5, memory=0.25)])
sampler = GpuSampler(lambda: "update_policy", gpu.read, seconds=0.001)
gpu.exhausted.wait(5)
assert sampler.counters()["gpu_busy/update_policy"] == 0.5
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from typing_extensions import override

from rlhf_core.cluster.rpc import GpuSample
from rlhf_core.system.machine import MACHINE, Disk, Machine
from rlhf_core.system.waiting import Clock

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


class ManualClock(Clock):
    """A clock that only `sleep` moves. Nothing waits.

    Attributes:
        now: what `monotonic` returns, in seconds; tests may change it.
        events: what will happen, as pairs of a time and a call. `sleep` calls and removes those whose time
            has come.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.events: list[tuple[float, Callable[[], object]]] = []

    @override
    def monotonic(self) -> float:
        return self.now

    @override
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()


class ScriptedGpu:
    """Gives its samples one after the other, then fails as a driver does that does not tell its figures.

    Args:
        samples: The readings.
    """

    def __init__(self, samples: Sequence[GpuSample]) -> None:
        self._samples = list(samples)
        self.exhausted = threading.Event()
        """Set after the last sample was counted."""

    def read(self) -> GpuSample:
        """Return the next sample. Raises RuntimeError if there are no more."""
        if not self._samples:
            self.exhausted.set()
            raise RuntimeError("Driver Not Loaded")
        return self._samples.pop(0)
