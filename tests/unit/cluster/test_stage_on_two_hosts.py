"""The stage `sft` on two hosts without a shared folder, which is continued on one.

Real: the stage, DeepSpeed in a process for each rank, the agent, checkpoints and artifacts. Scripted: Ray,
and the second host, whose rank and agent find each folder below another one.

- each host fetches each file of the input once, and needs as much space as the handshake counts
- each host uploads the shards of its own ranks, and one manifest commits them all
- what continues on one host from this checkpoint ends in the bits of the run on two
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.ranks import RankLayout, folders_in
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.stages import sft
from rlhf_core.stages.training import Folders
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.home import Home, output_folder
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.ranks import ScriptedRankGroup, scripted_ranks
from rlhf_core.types import ArtifactRef, SFTExample, StageContext, artifact_prefix
from tests.support.claims import claim
from tests.support.demo_data import with_demo_data
from tests.support.other_host import Bucket, Elsewhere, backend_of, bucket
from tests.support.scripted_cluster import ScriptedCluster, node
from tests.support.tiny_llama import save_tiny_llama

CHECKPOINT = "checkpoints/k/step-00000002"


class TwoProcesses(ScriptedRankGroup):
    """Rank 0 is this process, and rank 1 a fork of it that finds its folders with `there`."""

    there: Callable[[Path], Path]

    def run(
        self, target: Callable[..., Any], args: tuple[Any, ...], context: StageContext | None
    ) -> list[Any]:
        assert context is not None
        if context.nodes is not None:
            context.nodes.join({"1": {"": {0}}, "2": {"": {1}}})
            for folder in folders_in(args):
                context.nodes.share(folder)
        listener = socket.create_server(("127.0.0.1", 0))
        rank = Rank(world_size=2, master_port=listener.getsockname()[1], start=60.0, timeout=60.0)
        child = os.fork()
        if child == 0:
            try:
                listener.close()
                join(replace(rank, rank=1))
                target(replace(rank, rank=1), *map(self._elsewhere, args), None)
                leave()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        try:
            join(replace(rank, listener=listener))
            found = target(rank, *args, context)
        finally:
            leave()
            _, status = os.waitpid(child, 0)
        assert status == 0, "rank 1 failed"
        if context.nodes is not None:
            context.nodes.gather(context.output)
        return [found, None]

    def _elsewhere(self, arg: Any) -> Any:
        if isinstance(arg, Folders):
            inputs = {name: self.there(folder) for name, folder in arg.inputs.items()}
            return Folders(inputs, self.there(arg.work), self.there(arg.out))
        return arg


class Host:
    """The host of the driver.

    Args:
        folder: Its files.
        model: The base model.
        store: The bucket, as it sees it.
    """

    def __init__(self, folder: Path, model: Path, store: Store) -> None:
        tree = {
            "model": {"path": str(model)},
            "run": {"home": str(folder / "home"), "device": "cpu"},
            "sft": {
                "epochs": 1,
                "batch_size": 4,
                "checkpoint_every": 2,
                "threads": 1,
                "deepspeed": {"ranks": 2, "zero_stage": 2},
            },
        }
        self.config = PipelineConfig.model_validate(with_demo_data(tree), strict=False)
        self.home, self.store = Home.of(folder / "home").make(), store
        self.work = self.home.work("sft", "k") / "attempt-000001"
        self.work.mkdir(parents=True)

    def run(self, data: ArtifactRef, nodes: ClusterNodes | None, there: Callable[[Path], Path]) -> bytes:
        """Run the stage and return the weights that it makes."""
        checkpoints = CheckpointStore(
            self.store,
            "k",
            self.work / "checkpoints",
            self.config.store,
            claim(self.store, "k"),
            outbox=Outbox.of(self.store, self.home.outbox),
            hosts=nodes,
        )
        if nodes is not None:
            nodes.before_leave = checkpoints.finish
        folder = ArtifactStore(self.store, self.home.cache).fetch(data)
        context = replace(
            stage_context(self.work, inputs={"data": folder}, checkpoints=checkpoints),
            nodes=nodes,
            monitor=Monitor(self.work / "stacks"),
        )

        def group(layout: RankLayout, limits: TimeoutsConfig, monitor: Monitor) -> TwoProcesses:
            ranks = TwoProcesses(layout, limits, monitor)
            ranks.there = there
            return ranks

        with scripted_ranks(group):
            sft.run(self.config, context)
        checkpoints.finish()
        return (context.output / "model" / "model.safetensors").read_bytes()


def in_a_fork(call: Callable[[], Any]) -> Any:
    """Return the result of `call` in a fork: DeepSpeed keeps its groups until the process ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(call(), pipe)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the stage failed"
    return pickle.loads(result)


def test_sft_on_two_hosts_is_continued_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("deepspeed")  # once, and not in each of the four ranks
    model = save_tiny_llama(tmp_path / "model")
    rows = [SFTExample((1, 5 + i, 7, 9 + i, 2), (0, 0, 1, 1, 1)) for i in range(16)]
    store = bucket(tmp_path)
    made = write_data_artifact(tmp_path / "data", sft=rows, eval_sft=rows[:4])
    data = ArtifactStore(store, tmp_path / "unused").publish("data", "d", made, Provenance())

    def on_two_hosts() -> tuple[bytes, Bucket, Bucket]:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        one, two = Host(tmp_path / "one", model, bucket(tmp_path)), bucket(tmp_path)
        agent = Elsewhere(tmp_path / "two", one.config, one.work, two)
        cluster = ScriptedCluster([node("1", "one"), node("2", "two")], actors={"2": agent})
        output = StoredOutput(output_folder(one.work), one.store, "artifacts/sft/k/000001")
        monitor = Monitor(one.work / "stacks")
        nodes = ClusterNodes(one.config, one.work, [data], output, monitor, cluster=cluster)
        return one.run(data, nodes, agent.there), backend_of(one.store), backend_of(two)

    weights, one, two = in_a_fork(on_two_hosts)
    published = bundles.read(store, artifact_prefix("data", "d"))
    assert published is not None
    name, size = published.copy_name, sum(entry.size for entry in published.files)
    for folder in (tmp_path / "one", tmp_path / "two" / tmp_path.relative_to("/") / "one"):
        files = [file for file in (folder / "home" / "cache" / name).rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) == size
    for host in (one, two):
        assert set(host.fetched.values()) == {1}, host.fetched
        assert len(host.fetched) == len(list(store.list("artifacts/data/d"))) - 1, "all but the manifest"
    manifest = bundles.read(store, CHECKPOINT)
    assert manifest is not None
    names = [f"{manifest.data}/{entry.path}" for entry in manifest.files]
    shards = [{name for name in names if f"zero_pp_rank_{rank}_" in name} for rank in (0, 1)]
    assert shards[0] and shards[1]
    assert shards[0] <= set(one.sent) and not shards[0] & set(two.sent)
    assert shards[1] <= set(two.sent) and not shards[1] & set(one.sent)
    assert [key for key in store.list("checkpoints/k") if key.endswith("/manifest.json")] == [
        f"{CHECKPOINT}/manifest.json"
    ]

    def on_one() -> tuple[bytes, Bucket]:
        alone = Host(tmp_path / "three", model, bucket(tmp_path))
        return alone.run(data, None, lambda folder: folder), backend_of(alone.store)

    again, three = in_a_fork(on_one)
    assert set(names) <= set(three.fetched), "it has continued"
    assert again == weights
