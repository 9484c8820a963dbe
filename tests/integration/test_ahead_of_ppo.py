"""What a process that waits for the inputs of `ppo` starts, with the real Ray:

- the fleet uses the Ray that was started, and its actors the processes that Ray has started
- nothing is left of it if nobody takes the process
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.cluster.connect import connect
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.ppo.actor_environment import actor_environment, environment_option
from rlhf_core.ppo.ahead import start_ahead
from rlhf_core.run.child import StageProcess, start_child
from rlhf_core.run.environment import stage_environment
from rlhf_core.run.next_stage import NextStage
from rlhf_core.system.processes import ProcessId

CONFIG = PipelineConfig.model_validate({"run": {"device": "cpu", "threads": 1}})


def test_actors_get_processes_that_ray_has_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Rank:
        def process(self) -> tuple[int, str]:
            return os.getpid(), os.environ["OMP_NUM_THREADS"]

    for name, value in stage_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    processes = plan(CONFIG.ppo)
    option = environment_option(actor_environment(CONFIG, processes, "cpu")["worker"])
    try:
        start_ahead(CONFIG)
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        connect(processes.cores(gpus=False), "cpu", CONFIG)
        ranks = [ray.remote(num_cpus=1, **option)(Rank).remote() for _ in range(processes.processes)]
        found = dict(ray.get([rank.process.remote() for rank in ranks], timeout=120))
    finally:
        ray.shutdown()
    assert list(found.values()) == ["1"] * len(ranks)
    assert before & set(found)


def test_an_unused_process_leaves_nothing_of_ray(tmp_path: Path) -> None:
    waiting: list[StageProcess] = []

    def start(*args: Any, **named: Any) -> StageProcess:
        waiting.append(start_child(*args, **named))
        return waiting[0]

    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"home": str(tmp_path / "home")})})
    environment = stage_environment(config) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RAY_ADDRESS", None)
    following = NextStage(start)
    following.prepare("ppo", config, environment, tmp_path / "ppo-01.log")
    try:
        guard = psutil.Process(waiting[0].process.pid)
        deadline = time.monotonic() + 240.0
        started: list[psutil.Process] = []
        while not any(process.name() == "raylet" for process in started):
            assert time.monotonic() < deadline and guard.is_running()
            time.sleep(0.5)
            started = guard.children(recursive=True)
        left = [process for each in started if (process := ProcessId.of(each.pid)) is not None]
    finally:
        following.close()
    assert len(left) > 2
    assert not any(process.alive() for process in left)
