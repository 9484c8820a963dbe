"""A GPU whose figures are scripted, for `rlhf_core.cluster.rpc.GpuSampler`.

from rlhf_core.cluster.rpc import GpuSample, GpuSampler
from rlhf_core.testing.gpu import ScriptedGpu

gpu = ScriptedGpu([GpuSample(busy=0.5, memory=0.25)])
sampler = GpuSampler(lambda: "update_policy", gpu.read, seconds=0.001)
gpu.exhausted.wait(5)
assert sampler.counters()["gpu_busy/update_policy"] == 0.5
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rlhf_core.cluster.rpc import GpuSample


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
