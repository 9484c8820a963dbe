"""What a process that waits for the inputs of `ppo` starts, with the real Ray:

- the fleet uses the Ray that was started, and its actors the processes that Ray has started
- of Ray's daemons, only those that are used are started
- it starts Ray again if that has died, or could not be started
- nothing is left of it if nobody takes the process
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rlhf_core.cluster.connect import connect, start_ray
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.executors.child import NextStage, StageProcess, start_child
from rlhf_core.executors.spec import stage_environment
from rlhf_core.ppo.fleet.placement import actor_environment, environment_option
from rlhf_core.system.machine import machine
from rlhf_core.system.processes import ProcessId

CONFIG = PipelineConfig.model_validate({"run": {"device": "cpu", "threads": 1}})


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process the environment of a stage."""
    for name, value in stage_environment(CONFIG).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    ray.shutdown()


def start_ranks(count: int) -> dict[int, str]:
    """Connect as the fleet does, start ranks, and return their threads by process."""

    class Rank:  # local, so that Ray sends its code
        def process(self) -> tuple[int, str]:
            return os.getpid(), os.environ["OMP_NUM_THREADS"]

    processes = plan(CONFIG.ppo)
    option = environment_option(actor_environment(CONFIG.run.threads, processes, "cpu")["worker"])
    connect(processes.cores(gpus=False), "cpu", CONFIG.run)
    ranks = [ray.remote(num_cpus=1, **option)(Rank).remote() for _ in range(count)]
    return dict(ray.get([rank.process.remote() for rank in ranks], timeout=120))


def processes_of_ray(name: str) -> list[psutil.Process]:
    """Return the processes that Ray has started here whose command begins with `name`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if Path((process.cmdline() or [""])[0]).name.startswith(name):
                found.append(process)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_actors_get_processes_that_ray_has_started_ahead(stage: None) -> None:
    count = plan(CONFIG.ppo).processes
    expected = min(count, machine().cores())  # Ray starts one process for each core
    start_ray(CONFIG)
    wait_until(lambda: len(processes_of_ray("ray::IDLE")) >= expected)
    idle = {process.pid for process in processes_of_ray("ray::IDLE")}
    found = start_ranks(count)
    assert list(found.values()) == ["1"] * count
    assert len(idle & found.keys()) == min(count, len(idle))
    programs = " ".join(" ".join(each.cmdline()) for each in processes_of_ray("python"))
    assert "log_monitor.py" in programs
    assert "autoscaler" not in programs and "dashboard.py" not in programs


def test_ray_that_has_died_in_the_meantime_is_started_again(
    stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default Ray takes 15 s to notice it.
    monkeypatch.setenv("RAY_health_check_period_ms", "300")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "2")
    start_ray(CONFIG)
    [raylet] = processes_of_ray("raylet")
    raylet.kill()
    wait_until(lambda: not any(node["Alive"] for node in ray.nodes()))
    assert ray.is_initialized()
    assert list(start_ranks(1).values()) == ["1"]


def test_a_start_that_fails_leaves_nothing_and_ray_starts_again(
    stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_driver(*_args: Any, **_named: Any) -> None:
        assert processes_of_ray("raylet")
        raise RuntimeError("no connection")

    with monkeypatch.context() as patch:
        patch.setattr("ray._private.worker.connect", connect_driver)
        with pytest.raises(RuntimeError, match="no connection"):
            start_ray(CONFIG)
    wait_until(lambda: not processes_of_ray("raylet") and not processes_of_ray("gcs_server"))
    assert list(start_ranks(1).values()) == ["1"]


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
        reaper = psutil.Process(waiting[0].process.pid)
        deadline = time.monotonic() + 240.0
        started: list[psutil.Process] = []
        while not any(process.name() == "raylet" for process in started):
            assert time.monotonic() < deadline and reaper.is_running()
            time.sleep(0.5)
            started = reaper.children(recursive=True)
        left = [process for each in started if (process := ProcessId.of(each.pid)) is not None]
    finally:
        following.close()
    assert len(left) > 2
    assert not any(process.alive() for process in left)
