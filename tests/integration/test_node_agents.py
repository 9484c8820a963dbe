"""Agents on two hosts that share nothing but a bucket, with real Ray and ranks that only write files.

- the inputs of a stage are fetched and verified on the other host
- each host has its part of a checkpoint, one manifest commits them, and a restore brings to each host what
  its rank needs
- a rank that is stuck or dies on the other host is named with its host, and its stacks are on this one
- what a rank writes to the output on the other host is moved to this one, and a folder of this one is copied
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.hosts import missing_right, ray_cluster, s3_server, start_hosts

pytestmark = pytest.mark.skipif(missing_right() is not None, reason=str(missing_right()))

DRIVER = """
import json, os, time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.rpc import Actor, ActorClient, ParticipantSpec, RemoteActor, rpc
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import InfrastructureError
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import open_store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.home import Home
from tests.support.claims import claim


class Rank(Actor):
    @rpc()
    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @rpc()
    def read(self, folder: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(folder.iterdir())}

    @rpc()
    def stall(self) -> None:
        known_function()

    @rpc()
    def die(self) -> None:
        os._exit(1)


def known_function() -> None:
    time.sleep(600)


connect(1, "cpu")
home = Home.of("/tmp/home/run")
config = config_from_tree(
    {"run": {"home": str(home.path), "timeouts": {"stall": 4, "start": 60, "sync": 4}},
     "store": {"url": "s3://rlhf-test/agents"}},
    "test",
)
store = open_store(config)
out = Path("/tmp/home/out")
out.mkdir()
(out / "x.json").write_text("an input")
artifact = ArtifactStore(store, home.cache).publish("data", "d", out, Provenance())
work = home.work("ppo", "k") / "attempt-000001"
(work / "scratch").mkdir(parents=True)
here = ray.get_runtime_context().get_node_id()
(there,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
facts = {}
with Monitor(home.stacks("ppo", "k", 1)) as monitor:
    output = StoredOutput(work / "out", store, "artifacts/ppo/k/000001")
    nodes = ClusterNodes(config, work, [artifact], output, monitor)
    outbox = Outbox.of(store, home.outbox)
    checkpoints = CheckpointStore(
        store, "k", work / "checkpoints", config.store, claim(store, "k"), outbox=outbox, hosts=nodes
    )
    nodes.before_leave = checkpoints.finish
    nodes.join({here: {"": {0}}, there: {"": {1}}})
    client = ActorClient(monitor, config.run.timeouts)

    def start(rank, node_id):
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        spec = ParticipantSpec(f"rank {rank}", monitor.folder, config.run.timeouts)
        return RemoteActor(ray.remote(Rank).options(scheduling_strategy=strategy).remote(spec))

    ranks = [start(0, here), start(1, there)]
    folder = work / "scratch" / "checkpoint"
    checkpoints.prepare(5, folder, 100)
    writes = [
        rank.call(Rank.write, folder / "state" / f"zero_pp_rank_{n}_optim_states.pt", f"rank {n}")
        for n, rank in enumerate(ranks)
    ]
    client.wait([*writes, ranks[0].call(Rank.write, folder / "state" / "latest", "5")], "the checkpoint")
    checkpoints.save(5, folder)
    checkpoints.finish()
    manifest = bundles.read(store, "checkpoints/k/step-00000005")
    facts["manifest"] = [entry.path for entry in manifest.files]
    step, folder = checkpoints.latest()
    facts["restored"] = client.wait([rank.call(Rank.read, folder / "state") for rank in ranks], "restore")
    client.wait([ranks[1].call(Rank.write, work / "out" / "policy" / "weights", "w" * 1000)], "the output")
    nodes.gather(work / "out")
    facts["gathered"] = (work / "out" / "policy" / "weights").read_text() == "w" * 1000
    champion = home.cache / "champion"
    champion.mkdir(parents=True)
    (champion / "weights").write_text("champion")
    (champion / "empty").write_text("")
    nodes.share(champion)
    facts["shared"] = client.wait([rank.call(Rank.read, champion) for rank in ranks], "the champion")
    began = time.monotonic()
    try:
        client.wait([ranks[1].call(Rank.stall)], "a step")
    except InfrastructureError as error:
        facts["stuck"] = [type(error).__name__, error.message, time.monotonic() - began]
    facts["stacks"] = (monitor.folder / "rank_1.stacks").read_text()
    monitor.kill(["rank 1"])
    ranks[1] = start(1, there)
    try:
        client.wait([ranks[1].call(Rank.die)], "another step")
    except InfrastructureError as error:
        facts["dead"] = [type(error).__name__, error.message]
    nodes.leave()
ray.shutdown()
print("FACTS" + json.dumps(facts))
"""


def test_two_hosts_share_nothing_but_the_bucket() -> None:
    with (
        start_hosts(3) as hosts,
        s3_server(hosts[2]) as store,
        ray_cluster(hosts[:2], cpus=4, head_cpus=None, **store) as address,
    ):
        (hosts[0].home / "driver.py").write_text(DRIVER)
        code, output = hosts[0].run(
            sys.executable, "/tmp/home/driver.py", seconds=200, RAY_ADDRESS=address, **store
        )
        assert code == 0, output
        facts = json.loads(output.split("FACTS")[-1])
        there = [path for path in (hosts[1].home / "run").rglob("*") if path.is_file()]
        assert [path.read_text() for path in there if path.name == "x.json"] == ["an input"]
        # The file of the folder's lock stays until the next stage starts there.
        scratch = [path for path in there if "work" in path.parts and path.suffix != ".lock"]
        assert not scratch, "scratch files of the ended attempt"
    shards = [f"zero_pp_rank_{rank}_optim_states.pt" for rank in range(2)]
    assert facts["manifest"] == ["state/latest", *(f"state/{shard}" for shard in shards)]
    assert facts["restored"] == [
        {"latest": "5", shard: f"rank {rank}"} for rank, shard in enumerate(shards)
    ], "each host has what its rank needs, and no more"
    assert facts["gathered"]
    assert facts["shared"] == [{"empty": "", "weights": "champion"}] * 2
    kind, message, seconds = facts["stuck"]
    assert kind == "WorkerStuck"
    assert "rank 1 (process " in message and ' on host host-2) has made no progress in "stall"' in message
    assert 4 < seconds < 15
    assert "known_function" in facts["stacks"]
    assert facts["dead"][0] == "WorkerDied"
    assert "rank 1 (process " in facts["dead"][1] and "on host host-2) has died" in facts["dead"][1]
