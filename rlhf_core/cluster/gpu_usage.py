"""How busy the GPU of an actor is, and how much of its memory is in use.

The figures are the driver's, for all processes on the GPU. A thread reads them while methods of the actor
run, through NVML (package `nvidia-ml-py`) or AMD SMI, which do not wait for the GPU.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 0.25
"""Between two samples. The driver's figure covers the last 0.17 to 1 s."""


@dataclass(frozen=True)
class GpuSample:
    """One reading."""

    busy: float
    """Share of the last sample period of the driver in which a kernel ran."""
    memory: float
    """Share of the memory that is in use."""


def read_gpu() -> GpuSample:
    """Read the figures of the current GPU. Raises what torch raises where the driver does not tell them."""
    import torch

    # Not `mem_get_info`, which is a call to CUDA and breaks the capture of a graph in another thread.
    total = torch.cuda.get_device_properties(0).total_memory
    return GpuSample(torch.cuda.utilization(0) / 100, torch.cuda.device_memory_used(0) / total)


def uses_gpu() -> bool:
    """Return whether this process has initialized a GPU, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class GpuSampler:
    """Samples the GPU while methods run, until the process ends or the driver does not tell its figures.

    Args:
        running: Returns the name of the method that runs; "" for none.
        read: Reads the figures.
        seconds: Between two samples.
    """

    def __init__(
        self,
        running: Callable[[], str],
        read: Callable[[], GpuSample] = read_gpu,
        seconds: float = SECONDS,
    ) -> None:
        self._running = running
        self._read = read
        self._counters: dict[str, float] = defaultdict(float)
        self._most_memory: float | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._sample, args=(seconds,), daemon=True, name="gpu-usage").start()

    def counters(self) -> dict[str, float]:
        """Return sums since the start: `gpu_samples/<method>`, and `gpu_busy/<method>` of their shares."""
        return dict(self._counters)

    def take_memory(self) -> float | None:
        """Return the largest share of memory in use since the last call; None without a sample."""
        most, self._most_memory = self._most_memory, None
        return most

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _sample(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            method = self._running()
            if not method:
                continue
            try:
                sample = self._read()
            # Without nvidia-ml-py, on virtual devices, or after the driver's library was lost: each library
            # has errors of its own, and nothing depends on the figures.
            except Exception:
                return
            self._counters[f"gpu_samples/{method}"] += 1
            self._counters[f"gpu_busy/{method}"] += sample.busy
            self._most_memory = max(self._most_memory or 0.0, sample.memory)
