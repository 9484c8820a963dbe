"""The environment of PPO's ranks and engines.

- an actor that inherits its variables from the process that started Ray has no environment of its own, so
  that it gets a process that Ray has already started
- an actor with another value of a variable, or on a cluster, has one
- nothing starts ahead on a cluster
"""

from __future__ import annotations

import sys

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.pipeline import STAGES
from rlhf_core.ppo.actor_environment import actor_environment, environment_option
from rlhf_core.run.environment import stage_environment


@pytest.mark.parametrize(
    ("threads", "address", "inherits"), [(1, "", True), (8, "", False), (1, "10.0.0.1:1", False)]
)
def test_only_actors_with_other_variables_than_the_stage_have_an_environment(
    threads: int, address: str, inherits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig.model_validate({"run": {"device": "cpu", "threads": threads}})
    for name, value in stage_environment(config).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    variables = actor_environment(config, plan(config.ppo), "cpu")["worker"]
    ranks = plan(config.ppo).ranks
    assert variables["OMP_NUM_THREADS"] == str(max(1, threads // ranks))
    assert environment_option(variables) == ({} if inherits else {"runtime_env": {"env_vars": variables}})


def test_nothing_starts_ahead_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of Ray raises
    STAGES["ppo"].run_ahead(PipelineConfig())
