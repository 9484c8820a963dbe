"""Samples of the GPU of an actor.

- the sums and the largest memory are those of the samples that were taken while a method ran, by method
- a driver without figures ends the sampling, and an actor without a GPU has no figures
- an actor reports its samples with its other counters
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.cluster.rpc import Actor, GpuSample, GpuSampler, ParticipantSpec, rpc
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.system.heartbeat import unregister
from tests.support.scripted_machine import ScriptedGpu

SAMPLES = [GpuSample(0.25, 0.5), GpuSample(0.75, 0.875), GpuSample(1.0, 0.625)]


def test_samples_are_summed_by_the_method_that_runs() -> None:
    gpu = ScriptedGpu(SAMPLES)
    methods = iter(["scores", "", "update_policy", "update_policy", "", "scores"])
    sampler = GpuSampler(lambda: next(methods), gpu.read, seconds=0.001)
    assert gpu.exhausted.wait(10)
    assert sampler.counters() == {
        "gpu_samples/scores": 1,
        "gpu_busy/scores": 0.25,
        "gpu_samples/update_policy": 2,
        "gpu_busy/update_policy": 1.75,
    }
    assert sampler.take_memory() == 0.875
    assert sampler.take_memory() is None, "only samples since the last call"


def test_a_driver_without_figures_ends_the_sampling() -> None:
    gpu = ScriptedGpu([])
    sampler = GpuSampler(lambda: "scores", gpu.read, seconds=0.001)
    assert gpu.exhausted.wait(10)
    assert sampler.counters() == {} and sampler.take_memory() is None


class Worker(Actor):
    @rpc()
    def scores(self, exhausted: threading.Event) -> str:
        exhausted.wait(10)
        return self.running


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    # Other tests of this process need the packages that an actor hides.
    monkeypatch.setattr(Worker, "unused", ())
    yield Worker(ParticipantSpec("worker", tmp_path, TimeoutsConfig()))
    unregister()


def test_an_actor_reports_its_samples(worker: Worker) -> None:
    gpu = ScriptedGpu(SAMPLES)
    worker._gpu = GpuSampler(lambda: worker.running, gpu.read, seconds=0.001)
    assert worker.scores(gpu.exhausted) == "scores" and worker.running == ""
    usage = worker.usage()
    assert usage.counters["gpu_samples/scores"] == 3 and usage.counters["gpu_busy/scores"] == 2.0
    assert usage.counters["seconds/scores"] > 0 and usage.gpu_memory == 0.875


def test_an_actor_without_a_gpu_has_no_figures(worker: Worker) -> None:
    import torch

    assert "torch" in sys.modules and not torch.cuda.is_initialized()
    for _ in range(2):
        usage = worker.usage()
    assert usage.gpu_memory is None and not any(name.startswith("gpu") for name in usage.counters)
    assert not [thread for thread in threading.enumerate() if thread.name == "gpu-usage"]
