"""Bundles that no node can hold are refused before Ray waits for them without a limit.

- a group of ranks (hpz) and an engine of several GPUs must fit on one node; the message has the amounts
- the same for several bundles of which some do not fit, although the sums are large enough
- a wait for what another run uses says what is needed and what is free
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rlhf_core.cluster.placement import check_room, reserve, reserve_ranks
from rlhf_core.errors import ConfigError, WorkerStuck
from tests.support.scripted_cluster import ScriptedCluster, node


@pytest.fixture
def cluster() -> ScriptedCluster:
    """Two nodes with 8 CPUs and 2 GPUs each, one of which another run uses; and one that has died."""
    nodes = [node(str(number), f"gpu-{number}", {"CPU": 8.0, "GPU": 2.0}) for number in (1, 2, 3)]
    nodes[2]["Alive"] = False
    return ScriptedCluster(nodes, used={"CPU": 4.0, "GPU": 1.0})


def never(_pending: Any, what: str) -> Any:
    raise WorkerStuck(f"while waiting for {what} (run.timeouts): no process works on it")


def test_a_group_of_ranks_that_no_node_can_hold_is_refused(cluster: ScriptedCluster) -> None:
    with pytest.raises(ConfigError) as caught:
        reserve_ranks(4, "training rank", gpus_per_rank=1, neighbours=4, wait=never, cluster=cluster)
    assert caught.value.message == (
        "4 training ranks in groups of 4 on one node (hpz) need 1 times 4 CPUs and 4 GPUs, each on one node,"
        " but the Ray cluster has room for 0 (gpu-1: 8 CPUs and 2 GPUs; gpu-2: 8 CPUs and 2 GPUs); use a"
        " smaller hpz"
    )


def test_an_engine_that_no_node_can_hold_is_refused(cluster: ScriptedCluster) -> None:
    with pytest.raises(ConfigError, match=r"1 times 1 CPUs and 4 GPUs.*; lower ppo.engine.tensor_parallel"):
        reserve_ranks(1, "engine", gpus_per_rank=4, neighbours=1, wait=never, cluster=cluster)


def test_too_few_cores_or_gpus_in_total_are_an_error_with_both_numbers(cluster: ScriptedCluster) -> None:
    with pytest.raises(ConfigError, match=r"need 5 CPUs and 5 GPUs, but .* has 16 CPUs and 4 GPUs"):
        reserve_ranks(5, "training rank", gpus_per_rank=1, neighbours=1, wait=never, cluster=cluster)
    with pytest.raises(ConfigError, match=r"need 17 CPUs, but .* has 16 CPUs and 4 GPUs"):
        reserve_ranks(17, "training rank", gpus_per_rank=0, neighbours=1, wait=never, cluster=cluster)


def test_bundles_that_do_not_divide_the_nodes_are_refused() -> None:
    nodes = [(f"n{number}", {"CPU": 16.0, "GPU": 3.0}) for number in range(10)]
    check_room([{"CPU": 2, "GPU": 2}] * 10, nodes, "20 ranks", "use fewer")
    with pytest.raises(ConfigError, match=r"room for 10 \(n0: .*; n7: .*; \.\.\.\); use fewer"):
        check_room([{"CPU": 2, "GPU": 2}] * 11, nodes, "22 ranks", "use fewer")
    check_room([{"CPU": 1, "GPU": 0.1}] * 30, nodes[:1] * 2, "30 ranks", "use fewer")


def test_a_wait_for_another_run_is_logged(cluster: ScriptedCluster, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(WorkerStuck, match="12 of 16 CPUs and 3 of 4 GPUs are free; if another run"),
    ):
        reserve([{"CPU": 1, "GPU": 1}] * 4, "4 ranks", "use fewer", never, cluster, patience=0.01)
    assert "4 ranks need 4 CPUs and 4 GPUs, and wait for them: 12 of 16 CPUs" in caplog.text
