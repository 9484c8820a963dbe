"""Ranks of a stage on a Ray cluster of two nodes: two raylets on this host, with one CPU each.

- training by two ranks under ZeRO-3, one on each node, gives the bits of two ranks on one node; rank order is
  node order
- a node that is lost is noticed, and its rank named
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from rlhf_core.cluster.ranks import map_ranks, run_ranks
from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig, SFTConfig
from rlhf_core.errors import WorkerDied
from rlhf_core.system.heartbeat import Monitor
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module", autouse=True)
def _by_value() -> None:
    # pytest imports this module by a name that other processes cannot import.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
    from ray.cluster_utils import Cluster

    # As `connect` and `ray.init` do it. Ray reads both once in a process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    enable_token_auth_by_default()
    # Paths of sockets are short.
    folder = tempfile.mkdtemp(prefix="r-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _train(rank: Any, model: Path, _context: Any) -> tuple[str, list[str]]:
    """Digest of the weights after two steps, and the node of each rank."""
    import torch.distributed as dist

    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.models.batching import TokenSequence
    from rlhf_core.models.policy import load_policy
    from rlhf_core.stages.sft import train_step

    policy = load_policy(model, dtype="float32", attention="sdpa", device="cpu", pack=False)
    sizes = DeepSpeedConfig.model_validate({"ranks": 2, "zero_stage": 3})
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant")
    engine = TrainingEngine(policy, sizes, optimizer, rank)
    batch = [TokenSequence(tuple(range(3, 9 + i)), (0,) * 2 + (1,) * (4 + i)) for i in range(5)]
    config = SFTConfig().model_copy(update={"pack": False})
    for _ in range(2):
        train_step(engine, batch, config, 2, 0)
    digest = hashlib.sha256()
    for name, tensor in engine.weights():
        digest.update(name.encode() + tensor.numpy().tobytes())
    nodes: list[Any] = [None, None]
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    return digest.hexdigest(), nodes


def _waits(_rank: Any, _context: Any) -> None:
    time.sleep(120)


def test_two_nodes_give_the_bits_of_one_and_a_lost_node_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_llama(tmp_path / "model")
    here, one_node = run_ranks(_train, 2, "cpu", model, context=None)
    assert len(set(one_node)) == 1
    with two_nodes(monkeypatch) as cluster:
        digest, nodes = run_ranks(_train, 2, "cpu", model, context=None)
        assert len(set(nodes)) == 2 and nodes == sorted(nodes)
        assert digest == here
        _lose_a_node(cluster, nodes, tmp_path)


def _lose_a_node(cluster: Any, nodes: list[str], tmp_path: Path) -> None:
    (lost,) = cluster.worker_nodes
    died = "training rank 1" if lost.node_id == nodes[1] else "training rank 0"
    with Monitor(tmp_path / "monitor") as monitor:
        killing = threading.Thread(target=_kill_when_running, args=(monitor, lost), daemon=True)
        killing.start()
        with pytest.raises(WorkerDied, match=rf"^{died} on \S+ \([0-9.]+\) died; "):
            map_ranks(_waits, 2, "cpu", context=None, label="training rank", monitor=monitor)


def _kill_when_running(monitor: Monitor, lost: Any) -> None:
    names = ("training rank 0", "training rank 1")
    while True:
        found = [monitor.participant(name) for name in names]
        if all(each is not None and each.activity == "start" for each in found):
            break
        time.sleep(0.1)
    lost.kill_raylet(check_alive=False)
