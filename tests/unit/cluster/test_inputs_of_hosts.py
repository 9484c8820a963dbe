"""Inputs of a stage on its hosts, from a store that is a bucket.

- a driver whose host has no process of the stage fetches no weights; the hosts with processes fetch all files
- when processes start on the driver's host, it fetches the weights that it lacks, and no file twice
- further inputs, as those of a champion, are fetched by the hosts before their next processes start
- a driver without the weights does not know which models one engine can serve, and has an engine for each
- a base model that is a copy of an artifact is fetched from the store of the artifact
- the host of a job fetches it into its own `run.home`, its weights only if they are read there
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_core.cluster.agent import NodeAgent
from rlhf_core.cluster.base_model import BaseModel, copied_base_models, with_own_copies
from rlhf_core.config import PipelineConfig
from rlhf_core.data.sources import model_digest
from rlhf_core.engines.sync.wire import are_interchangeable
from rlhf_core.errors import CorruptArtifact, DataError, ModelError
from rlhf_core.pipeline import StageName
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import (
    ArtifactAddress,
    ArtifactCopy,
    ArtifactStore,
    Provenance,
    parse_artifact_copy,
)
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef, artifact_prefix
from tests.support.demo_data import with_demo_data
from tests.support.other_host import Elsewhere, backend_of, bucket, two_nodes

FILES = {
    "model/config.json": "{}",
    "model/model-00001-of-00002.safetensors": "w" * 25,
    "model/model-00002-of-00002.safetensors": "v" * 30,
}


def published(folder: Path, stage: StageName, key: str = "k" * 16) -> ArtifactRef:
    """Return an artifact in the bucket of `folder`."""
    for name, text in FILES.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_text(text + stage)
    return ArtifactStore(bucket(folder), folder / "unused").publish(stage, key, folder / "out", Provenance())


def names_in(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix() for path in files}


def copy_name(store: Store, ref: ArtifactRef) -> str:
    """Return the name of the folder with a host's copy of the artifact."""
    manifest = bundles.read(store, artifact_prefix(ref.kind, ref.key))
    assert manifest is not None
    return manifest.copy_name


class TwoHosts:
    """The driver's host and another one, of a stage with an artifact as input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = PipelineConfig.model_validate({"run": {"home": str(folder / "home")}})
        self.here, self.there = bucket(folder), bucket(folder)
        self.agent = Elsewhere(folder / "two", config, folder / "attempts" / "1", self.there)
        self.artifacts = ArtifactStore(self.here, Home.of(folder / "home").cache)
        self.ref = published(folder, "sft")
        self.nodes = two_nodes(
            folder,
            self.agent,
            inputs=[self.ref],
            artifacts=self.artifacts,
        )

    def files(self, ref: ArtifactRef) -> tuple[set[str], set[str]]:
        """Return the names of the artifact's files on the driver's host and on the other one."""
        here = self.folder / "home" / "cache" / copy_name(self.here, ref)
        return names_in(here), names_in(self.agent.there(here))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = TwoHosts(tmp_path)
    yield found
    found.agent.close()


def test_weights_are_fetched_where_processes_are(hosts: TwoHosts) -> None:
    hosts.artifacts.fetch(hosts.ref, weights=False)
    hosts.nodes.join({"2": {"": {0}}})
    assert hosts.files(hosts.ref) == ({"model/config.json"}, set(FILES))
    hosts.nodes.join({"1": {}, "2": {}})  # engines
    assert hosts.files(hosts.ref) == (set(FILES), set(FILES))
    hosts.nodes.join({"1": {}, "2": {}})
    for store in (hosts.here, hosts.there):
        assert list(backend_of(store).fetched.values()) == [1, 1, 1]


def test_processes_on_the_drivers_host_alone_have_the_inputs(hosts: TwoHosts) -> None:
    hosts.artifacts.fetch(hosts.ref, weights=False)
    hosts.nodes.join({"1": {"": {0}}})
    assert hosts.files(hosts.ref) == (set(FILES), set())
    hosts.nodes.join({"2": {"": {0}}})  # and ends it
    assert hosts.files(hosts.ref) == (set(FILES), set(FILES))


def test_further_inputs_are_fetched_before_the_next_processes_start(hosts: TwoHosts) -> None:
    hosts.nodes.join({"2": {"": {0}}})
    champion = published(hosts.folder, "ppo")
    hosts.nodes.add_inputs([champion])
    hosts.artifacts.fetch(champion, weights=False)
    hosts.nodes.join({"2": {"": {0}}})
    assert hosts.files(champion) == ({"model/config.json"}, set(FILES))
    assert hosts.files(hosts.ref)[0] == set()
    folder = hosts.artifacts.fetch(champion, weights=False)
    hosts.agent.folders_hashed.clear()
    hosts.nodes.share(folder / "model")
    assert not hosts.agent.folders_hashed, "it is an input that the host has verified"
    hosts.nodes.join({"1": {"": {0}}})
    assert hosts.files(champion)[0] == hosts.files(hosts.ref)[0] == set(FILES)


def test_a_driver_without_weights_starts_an_engine_for_each_model(tmp_path: Path) -> None:
    """Only the tensors show whether one engine can get the weights of both."""
    store = bucket(tmp_path)
    refs: list[ArtifactRef] = []
    made: tuple[tuple[StageName, int], ...] = (("sft", 3), ("ppo", 3), ("dpo", 4))
    for stage, rows in made:
        folder = tmp_path / "out" / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_file({"layer": torch.full((rows, 1), len(refs))}, folder / "model.safetensors")
        publisher = ArtifactStore(store, tmp_path / "unused")
        refs.append(publisher.publish(stage, "k" * 16, tmp_path / "out", Provenance()))
    artifacts = ArtifactStore(store, tmp_path / "cache")
    sft, ppo, dpo = (artifacts.fetch(ref, weights=False) / "model" for ref in refs)
    assert names_in(sft) == {"config.json"}
    assert not are_interchangeable(sft, ppo)
    assert all(key.endswith(".json") for key in backend_of(store).fetched)
    for ref in refs:
        artifacts.fetch(ref)
    assert are_interchangeable(sft, ppo) and not are_interchangeable(sft, dpo)


def test_a_partial_copy_is_completed_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    ref, store = published(tmp_path, "sft"), bucket(tmp_path)
    folder = ArtifactStore(store, tmp_path / "cache").fetch(ref, weights=False)
    assert names_in(folder) == {"model/config.json"}
    inode = (folder / "model" / "config.json").stat().st_ino
    artifacts = ArtifactStore(store, tmp_path / "cache")
    assert artifacts.fetch(ref, weights=False) == artifacts.fetch(ref) == folder
    assert names_in(folder) == set(FILES)
    assert (folder / "model" / "config.json").stat().st_ino == inode
    assert list(backend_of(store).fetched.values()) == [1, 1, 1]
    (folder / "model" / "config.json").write_text("[]sft")
    assert artifacts.fetch(ref) == folder
    assert (folder / "model" / "config.json").read_text() == "{}sft"
    bad = next(key for key in store.list("artifacts/sft") if key.endswith("00002-of-00002.safetensors"))
    store.put_bytes(bad, b"x" * 33)
    artifacts.fetch(ref)  # the copy is intact
    (folder / "model" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptArtifact, match=r"model-00002-of-00002\.safetensors does not have the sha256"):
        artifacts.fetch(ref)
    assert names_in(folder) == set(FILES) - {"model/model-00002-of-00002.safetensors"}


def test_a_base_model_from_a_bucket_is_fetched_by_each_host(tmp_path: Path) -> None:
    ref, theirs = published(tmp_path, "ppo", "a" * 16), bucket(tmp_path)
    name = copy_name(theirs, ref)

    def config_of(host: str) -> PipelineConfig:
        home = tmp_path / host / "home"
        path = home / "cache" / name / "model"
        tree = with_demo_data({"model": {"path": str(path)}, "run": {"home": str(home)}})
        return PipelineConfig.model_validate_json(json.dumps(tree))

    driver = ArtifactStore(theirs, Home.of(tmp_path / "one" / "home").cache)
    folder = driver.address(ref, "model", local=True)
    digest = model_digest(folder, None)
    config = config_of("one")
    assert config.model.path == folder
    model = BaseModel.of(config, "sft", {"model": digest})
    assert model == BaseModel("sft", digest, ArtifactAddress(theirs.url, "ppo", "a" * 16))
    assert BaseModel.of(config, "sft", {}) is None and BaseModel.of(config, "ppo", {"model": "d"}) is None
    (tmp_path / "work" / "scratch").mkdir(parents=True)
    theirs_as_json = config_of("two").model_dump_json(by_alias=True)
    agent = NodeAgent(theirs_as_json, tmp_path / "work", tmp_path / "stacks", "one", theirs)
    with pytest.raises(ModelError, match="model path not found"):
        agent.fetch_base_model(BaseModel("sft", digest))
    agent.fetch_base_model(model)
    copy = tmp_path / "two" / "home" / "cache" / name
    assert names_in(copy) == set(FILES)
    with pytest.raises(DataError, match=r"model\.path=.* has other files"):
        agent.fetch_base_model(BaseModel("sft", "0", model.origin))
    shutil.rmtree(copy)
    theirs.delete_prefix("artifacts")
    with pytest.raises(ModelError, match="model path not found"):
        agent.fetch_base_model(model)


class BaseOfJob:
    """A base model in a bucket that the flow has a copy of, and a job whose host has none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, bucket(folder)
        self.ref = published(folder, "ppo", "a" * 16)
        flow = ArtifactStore(self.store, Home.of(folder / "flow").cache)
        self.config = self.config_with(flow.address(self.ref, "model", local=True))
        self.digest = model_digest(str(self.config.model.path), None)
        self.copies = copied_base_models(self.config)
        self.artifacts = ArtifactStore(self.store, Home.of(folder / "home").cache)

    def config_with(self, path: str) -> PipelineConfig:
        tree = with_demo_data({"model": {"path": path}, "run": {"home": f"{self.folder}/home"}})
        return PipelineConfig.model_validate_json(json.dumps(tree))

    def fetch(self, *whole: str) -> Path:
        config = with_own_copies(self.config, self.copies, self.artifacts, whole)
        assert config == self.config_with(str(config.model.path))
        return Path(str(config.model.path))


def test_a_job_fetches_its_base_model_to_its_own_host(tmp_path: Path) -> None:
    base = BaseOfJob(tmp_path)
    copy = ArtifactCopy("ppo", "a" * 16, base.ref.digest[:12], "model", base.store.url)
    assert base.copies == {"model.path": copy}
    model = base.fetch()
    assert model.is_relative_to(tmp_path / "home") and names_in(model) == {"config.json"}
    assert parse_artifact_copy(str(model)) == copy
    assert base.fetch("model.path") == model
    assert model_digest(str(model), None) == base.digest


def test_the_artifact_of_a_base_model_must_be_that_of_the_flow(tmp_path: Path) -> None:
    base = BaseOfJob(tmp_path)
    gone = rf"model\.path: the artifact ppo/{'a' * 16} in .* is gone, or another one than when the run began"
    base.store.delete_prefix("artifacts")
    with pytest.raises(DataError, match=gone):
        base.fetch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    base.artifacts.publish("ppo", "a" * 16, tmp_path / "out", Provenance())
    with pytest.raises(DataError, match=gone):
        base.fetch()


def test_the_driver_of_a_job_completes_its_base_model_for_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    base = BaseOfJob(tmp_path)
    model = base.fetch()
    config, digests = base.config_with(str(model)), {"model": base.digest}
    agent = Elsewhere(tmp_path / "two", config, tmp_path / "home" / "attempt", base.store)
    driver = BaseModel.of(config, "sft", digests)
    nodes = two_nodes(tmp_path, agent, artifacts=base.artifacts, model=model, base_model=driver)
    nodes.lacks_base_weights = True
    nodes.join({"1": {"": {0}}})
    assert model_digest(str(model), None) == base.digest
