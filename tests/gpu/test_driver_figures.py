"""On a GPU, the driver's figures follow what the GPU does: memory that is allocated, kernels that run."""

from __future__ import annotations

import time

import pytest
import torch

from rlhf_core.cluster.rpc import GpuSampler, read_gpu, uses_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_figures_follow_the_gpu() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    assert uses_gpu()
    before = read_gpu().memory
    held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    assert read_gpu().memory - before == pytest.approx(held.numel() / total, rel=0.1)
    sampler = GpuSampler(lambda: "update_policy")
    end = time.monotonic() + 4
    while time.monotonic() < end:
        matrix = torch.nn.functional.normalize(matrix @ matrix)
        torch.cuda.synchronize()
    found = sampler.counters()
    assert found["gpu_samples/update_policy"] >= 10
    assert found["gpu_busy/update_policy"] / found["gpu_samples/update_policy"] > 0.5
