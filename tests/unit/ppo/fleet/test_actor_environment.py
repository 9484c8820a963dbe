"""The environment of PPO's ranks and engines.

- an actor that inherits its variables from the process that started Ray has no environment of its own, so
  that it gets a process that Ray has already started
- an actor with another value of a variable, or on a cluster, has one
- on GPUs, processes that share memory do not use expandable segments, which those of the stage do
"""

from __future__ import annotations

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PlacementPlan, plan
from rlhf_core.executors.spec import stage_environment
from rlhf_core.ppo.fleet.placement import actor_environment, environment_option


def stage_of(
    device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[PipelineConfig, PlacementPlan]:
    """Give this process the environment of a stage with this device and number of threads."""
    config = PipelineConfig.model_validate({"run": {"device": device, "threads": threads}})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    for name, value in stage_environment(config).items():
        monkeypatch.setenv(name, value)
    return config, plan(config.ppo)


def check(variables: dict[str, str], *, inherits: bool) -> None:
    assert environment_option(variables) == ({} if inherits else {"runtime_env": {"env_vars": variables}})


@pytest.mark.parametrize(
    ("threads", "address", "worker_inherits", "engine_inherits"),
    [(1, "", True, True), (8, "", False, True), (1, "10.0.0.1:1", False, False)],
)
def test_only_actors_with_other_variables_than_the_stage_have_an_environment(
    threads: int,
    address: str,
    worker_inherits: bool,
    engine_inherits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    config, processes = stage_of("cpu", threads, monkeypatch)
    assert processes.ranks > 1 and processes.engines == 1
    variables = actor_environment(config.run.threads, processes, "cpu")
    assert variables["worker"]["OMP_NUM_THREADS"] == str(max(1, threads // processes.ranks))
    assert variables["engine"]["OMP_NUM_THREADS"] == str(threads)  # trainers and engine compute in turns
    check(variables["worker"], inherits=worker_inherits)
    check(variables["engine"], inherits=engine_inherits)


@pytest.mark.parametrize("shares_weights", [False, True])
def test_on_gpus_the_processes_that_share_memory_have_an_environment(
    shares_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    config, processes = stage_of("cuda", 1, monkeypatch)
    variables = actor_environment(config.run.threads, processes, "cuda", shares_weights=shares_weights)
    shared = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert variables["engine"].items() >= shared.items()
    assert (variables["worker"].items() >= shared.items()) == shares_weights
    check(variables["engine"], inherits=False)
    check(variables["worker"], inherits=not shares_weights)
