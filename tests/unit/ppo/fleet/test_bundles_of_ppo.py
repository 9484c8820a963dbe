"""Which bundle of the placement group each process of PPO gets.

- on one node, ranks and engines have one bundle each
- ranks are sorted by node, although Ray mixes nodes
- engines are on the nodes of the policy as far as there is room, before the other groups
- the ranks of an hpZ group are on one node, or the run is refused
- an engine of several GPUs has a bundle of that size; a colocated one has those of as many neighbouring
  policy ranks on one node, or the run is refused
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PlacementPlan, plan
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.fleet.placement import Placement, assign, use_gpus
from tests.support.scripted_fleet import ScriptedRank


def planned(ranks: int, engines: int, **ppo: Any) -> PlacementPlan:
    """`ranks` for the policy with its reference, and as many for the critic with the reward model."""
    tree = {
        "policy_deepspeed": {"ranks": ranks},
        "critic_deepspeed": {"ranks": ranks},
        "engine": {"count": engines, **ppo.pop("engine", {})},
        **ppo,
    }
    return plan(PipelineConfig.model_validate({"ppo": tree}).ppo)


def nodes_of(bundles: list[int], nodes: list[str]) -> str:
    return "".join(nodes[bundle] for bundle in bundles)


def test_every_process_has_a_bundle_of_its_own() -> None:
    of_rank, of_engine = assign(planned(2, 3), {}, ["a"] * 7, gpus=False)
    assert sorted([*of_rank.values(), *of_engine]) == list(range(7))
    assert [of_rank["policy+reference", rank] for rank in range(2)] == [0, 1]


def test_engines_are_on_the_nodes_of_the_policy_before_other_groups() -> None:
    nodes = list("abababab")  # as Ray may number them
    of_rank, of_engine = assign(planned(2, 4), {}, nodes, gpus=True)
    assert nodes_of([of_rank["policy+reference", rank] for rank in range(2)], nodes) == "aa"
    assert nodes_of(of_engine, nodes) == "aabb"
    assert nodes_of([of_rank["critic+reward", rank] for rank in range(2)], nodes) == "bb"


def test_the_log_names_the_nodes_of_policy_and_engines() -> None:
    nodes, processes = list("abababab"), planned(2, 4)
    names = {"a": "host-a (10.0.0.1)", "b": "host-b (10.0.0.2)"}
    of_rank, of_engine = assign(processes, {}, nodes, gpus=True)
    placed = Placement(None, of_rank, of_engine, nodes, names, processes, colocated=False, gpus=True)
    expected = "policy on host-a (10.0.0.1); engines on host-a (10.0.0.1), host-b (10.0.0.2)"
    assert placed.describe_nodes() == expected
    assert placed.ranks_by_node() == {
        "a": {"policy": {0, 1}, "reference": {0, 1}},
        "b": {"critic": {0, 1}, "reward": {0, 1}},
    }


def test_ranks_are_sorted_by_node_and_hpz_groups_are_on_one() -> None:
    nodes = list("abbbaabb")
    of_rank, _ = assign(planned(4, 0 + 1), {"policy+reference": 2}, [*nodes, "a"], gpus=True)
    assert nodes_of([of_rank["policy+reference", rank] for rank in range(4)], [*nodes, "a"]) == "bbbb"
    nodes = list("aaabbb")
    of_rank, _ = assign(planned(2, 2), {"policy+reference": 2, "critic+reward": 2}, nodes, gpus=False)
    assert nodes_of([of_rank["policy+reference", rank] for rank in range(2)], nodes) == "aa"
    assert nodes_of([of_rank["critic+reward", rank] for rank in range(2)], nodes) == "bb"


def test_hpz_groups_that_no_node_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks of policy .* groups of 4 on one node \(hpz\).* 3, 3, 3"):
        assign(planned(4, 1), {"policy+reference": 4}, list("abcabcabc"), gpus=True)


def test_engines_of_several_gpus_have_bundles_of_their_own() -> None:
    nodes = list("ab" * 2 + "ba")
    of_rank, of_engine = assign(planned(2, 2, engine={"tensor_parallel": 2}), {}, nodes, gpus=True)
    assert sorted(of_rank.values()) == [0, 1, 2, 3]
    assert of_engine == [5, 4], "the one on the policy's node first"


def test_colocated_engines_have_the_bundles_of_the_policy() -> None:
    of_rank, of_engine = assign(planned(4, 4, colocate="all"), {}, list("abab"), gpus=True)
    assert list(of_rank.values()) == of_engine == [0, 2, 1, 3]


def placed(processes: PlacementPlan, nodes: list[str]) -> Placement:
    of_rank, of_engine = assign(processes, {}, nodes, gpus=True)
    names = {node: node for node in nodes}
    return Placement(None, of_rank, of_engine, nodes, names, processes, colocated=True, gpus=True)


def test_a_colocated_engine_has_the_gpus_of_neighbouring_ranks_of_one_node() -> None:
    nodes = list("abbabbb")  # five bundles on b, two on a
    processes = planned(7, 3, colocate="all", engine={"tensor_parallel": 2}, prompts_per_step=128)
    found = placed(processes, nodes)
    bundles = [found.bundle_of_rank[group.name, rank] for group in processes.groups for rank in range(7)]
    assert nodes_of(bundles, nodes) == "bbbbbaa"
    ranks = [found.ranks_of_engine(engine) for engine in range(3)]
    assert ranks == [[0, 1], [2, 3], [5, 6]], "rank 4 is alone on its node"
    for engine, (first, *_) in enumerate(ranks):
        assert found.bundle_of_engine[engine] == bundles[first]
    # Every worker of an engine is on the GPU of a policy rank, which sends to it over CUDA IPC.
    assert {rank for pair in ranks for rank in pair} <= set(range(7))


def test_colocated_engines_of_one_gpu_leave_their_gpus_to_ray() -> None:
    assert placed(planned(2, 2, colocate="all"), ["a", "a"]).ranks_of_engine(1) == []


def test_colocated_engines_that_no_node_has_the_ranks_for_are_refused() -> None:
    processes = planned(6, 3, colocate="all", engine={"tensor_parallel": 2}, prompts_per_step=96)
    expected = r"the 3 engines uses the GPUs of 2 ranks .*; the nodes have 3, 3 ranks, enough for 2;"
    with pytest.raises(ConfigError, match=expected):
        assign(processes, {}, list("ababab"), gpus=True)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_an_engine_gets_the_gpus_of_its_ranks_in_their_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(each, raising=False)
    seen = []
    for gpu in ("3", "1"):
        monkeypatch.setenv(name, gpu)
        seen.append(ScriptedRank().visible_gpus())
    variables = use_gpus(seen)
    assert variables == {name: "3,1", f"RAY_EXPERIMENTAL_NOSET_{name}": "1"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    managers = {
        "CUDA_VISIBLE_DEVICES": NvidiaGPUAcceleratorManager,
        "HIP_VISIBLE_DEVICES": AMDGPUAcceleratorManager,
    }
    managers[name].set_current_process_visible_accelerator_ids(["3"])  # the GPU of the engine's bundle
    assert os.environ[name] == "3,1"
