"""The GPUs of engines on the devices of the policy's ranks. Ray is real, and its GPUs are declared: nothing
is loaded on them.

- an engine of two GPUs has those of its two ranks, in their order, also after a restart
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.rpc import Actor, ActorClient
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import plan
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.overriding import override


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    import ray

    ray.init(
        address="local", num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    yield
    ray.shutdown()


class _Fleet(Fleet):
    """Starts its processes, which load nothing."""

    def __init__(self, config: PipelineConfig, folder: Path, monitor: Monitor) -> None:
        folders: Any = dict.fromkeys(("policy", "reference", "critic", "reward"), folder)
        super().__init__(config, plan(config.ppo), "cuda", folders, 0)
        self._monitor = monitor
        self._client = ActorClient(monitor, config.run.timeouts)

    @override
    def _load(self, *_groups: Any, **_engines: Any) -> None:
        """Do nothing."""


def test_engines_have_the_gpus_of_their_ranks(four_gpus: None, tmp_path: Path) -> None:
    sharded = {"ranks": 4, "zero_stage": 3}
    ppo = {"colocate": "all", "policy_deepspeed": sharded, "critic_deepspeed": sharded}
    engine = {"count": 2, "tensor_parallel": 2}
    config = PipelineConfig.model_validate({"ppo": {**ppo, "engine": engine}})
    with Monitor() as monitor:
        fleet = _Fleet(config, tmp_path, monitor)
        try:
            fleet._start_actors()
            policy = fleet.groups["policy"]
            ranks = [gpu for _, gpu in fleet.wait(policy.call(Actor.visible_gpus), "ranks")]
            assert sorted(ranks) == ["0", "1", "2", "3"]
            expected = [
                ("CUDA_VISIBLE_DEVICES", f"{first},{second}") for first, second in (ranks[:2], ranks[2:])
            ]
            asked = [engine.call(Actor.visible_gpus) for engine in fleet.engines.actors]
            assert fleet.wait(asked, "engines") == expected
            fleet._client.kill({"engine 1": fleet.engines.actor(1)})
            restarted = fleet._start_engine(1, 1)
            assert fleet.wait([restarted.call(Actor.visible_gpus)], "engine") == expected[1:]
        finally:
            monitor.kill()
