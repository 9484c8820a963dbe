"""Which bundle of the placement group each process of PPO gets.

- on one node, ranks and engines have one bundle each
- ranks are sorted by node, although Ray mixes nodes
- engines are on the nodes of the policy as far as there is room, before the other groups
- the ranks of an hpZ group are on one node, or the run is refused
- an engine of several GPUs has a bundle of that size; a colocated one has that of its policy rank
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PlacementPlan, plan
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.placement import Placement, assign


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
