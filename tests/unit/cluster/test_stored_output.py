"""The output that a rank on another host has written, in a store that both hosts reach.

- the other host uploads it, the driver gets the small files, and commits an artifact with the manifest of one
  made on one host
- the driver's digest of the weights is that of the files, which it does not have
- processes of the stage that read them afterwards get them from the store, also on the driver's host
- if the other host cannot upload it, the attempt ends with the error of the store
- if the driver cannot commit, the next attempt makes the output again, and its commit deletes the first one
- a stage that fails leaves nothing in the store, also of an upload that failed or whose host was lost
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import CorruptArtifact, InputError, RLHFError, StoreError, WorkerDied
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance, attempt_folder
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.home import output_folder
from rlhf_core.types import ArtifactRef
from tests.support.claims import claim
from tests.support.other_host import Elsewhere, backend_of, bucket
from tests.support.scripted_cluster import ScriptedCluster, node
from tests.support.scripted_store import ScriptedStore

WRITTEN = {
    "policy/config.json": "{}",
    "policy/model-00001-of-00002.safetensors": "w" * 25,
    "policy/model-00002-of-00002.safetensors": "v" * 30,
    "adapter/adapter_model.safetensors": "a",
}
WEIGHTS = {name for name in WRITTEN if name.endswith(".safetensors")}


def write(folder: Path) -> None:
    for name, text in WRITTEN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


class TwoHosts:
    """A stage whose driver is on one host, and whose rank 0 is on another."""

    def __init__(self, folder: Path, there: Store | None = None) -> None:
        self.here, self.there = bucket(folder), there or bucket(folder)
        config = PipelineConfig.model_validate({"run": {"home": str(folder / "home")}})
        work = folder / "home" / "attempts" / "1"
        self.out = output_folder(work)
        self.fence = claim(self.here, "k")
        self.stored = StoredOutput(self.out, self.here, attempt_folder("ppo", "k", self.fence))
        self.agent = Elsewhere(folder / "two", config, work, self.there)
        cluster = ScriptedCluster([node("1", "one"), node("2", "two")], actors={"2": self.agent})
        self.outbox = Outbox(self.here, folder / "outbox")
        self.artifacts = ArtifactStore(self.here, folder / "cache", self.outbox)
        self.out.mkdir(parents=True)
        monitor = Monitor(folder / "stacks")
        self.nodes = ClusterNodes(config, work, [], self.stored, monitor, cluster=cluster)
        self.nodes.join({"2": {"": {0}}})

    def gather(self) -> None:
        """Rank 0 saves the model, and the driver adds the tokenizer."""
        write(self.agent.there(self.out))
        for folder in ("policy", "adapter"):
            self.nodes.gather(self.out / folder)
        (self.out / "policy" / "tokenizer.json").write_text("{}")

    def publish(self) -> ArtifactRef:
        return self.artifacts.publish(
            "ppo", "k", self.out, Provenance(), self.fence, stored=self.stored.files
        )


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = TwoHosts(tmp_path / "two-hosts")
    yield found
    found.agent.close()


def on_one_host(folder: Path) -> tuple[Store, ArtifactRef]:
    """Return the same artifact, made by a process that has all files."""
    store = bucket(folder)
    write(folder / "out")
    (folder / "out" / "policy" / "tokenizer.json").write_text("{}")
    artifacts = ArtifactStore(store, folder / "cache", Outbox(store, folder / "outbox"))
    return store, artifacts.publish("ppo", "k", folder / "out", Provenance(), claim(store, "k"))


def manifest_of(store: Store) -> bundles.Manifest:
    found = bundles.read(store, "artifacts/ppo/k")
    assert found is not None
    return found


def names(keys: list[str]) -> set[str]:
    return {key.removeprefix("artifacts/ppo/k/000001/") for key in keys}


def test_other_host_uploads_weights_and_the_driver_commits_the_manifest(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    hosts.gather()
    assert not list(hosts.out.rglob("*.safetensors")), "the driver has no copy"
    assert set(names(list(backend_of(hosts.here).fetched))) == {"policy/config.json"}
    ref = hosts.publish()
    assert names(backend_of(hosts.there).sent) == set(WRITTEN)
    assert names(backend_of(hosts.here).sent) == {"policy/config.json", "policy/tokenizer.json"}
    store, alone = on_one_host(tmp_path / "one-host")
    assert (ref.digest, ref.attributes) == (alone.digest, alone.attributes)
    made, expected = manifest_of(hosts.here), manifest_of(store)
    assert (made.folder, made.files) == (expected.folder, expected.files)
    assert set(made.body) == set(expected.body)
    folder = hosts.artifacts.fetch(ref)
    assert {name: (folder / name).read_text() for name in WRITTEN} == WRITTEN


def test_digest_of_weights_needs_no_copy(tmp_path: Path, hosts: TwoHosts) -> None:
    hosts.gather()
    write(tmp_path / "out")
    for name in ("policy", "adapter"):
        folder = hosts.out / name
        stored = {path.name: digest for path, digest in hosts.nodes.stored.items() if path.parent == folder}
        assert bundles.weights_sha256(folder, stored) == bundles.weights_sha256(tmp_path / "out" / name)


def test_processes_that_read_the_weights_get_them_from_the_store(hosts: TwoHosts) -> None:
    hosts.gather()
    policy = hosts.out / "policy"
    there = hosts.agent.there(policy)
    expected = {name.removeprefix("policy/"): text for name, text in WRITTEN.items() if "policy" in name}
    hosts.nodes.share(policy)
    assert {name: (there / name).read_text() for name in expected} == expected
    assert (there / "tokenizer.json").exists(), "what the driver has written is sent"
    assert not list(policy.glob("*.safetensors")), "no process of the stage is on the driver's host"
    before = len(backend_of(hosts.there).sent)
    hosts.nodes.gather(hosts.out)
    assert len(backend_of(hosts.there).sent) == before, "nothing is new"
    hosts.nodes.join({"1": {"": {0}}, "2": {"": {1}}})  # one engine on each host
    hosts.nodes.share(policy)
    assert {name: (policy / name).read_text() for name in expected} == expected
    hosts.nodes.share(policy)
    for store in (hosts.here, hosts.there):
        assert set(backend_of(store).fetched.values()) == {1}, "by each host once"
    ref = hosts.publish()
    assert not names(backend_of(hosts.here).sent) & WEIGHTS
    assert (hosts.artifacts.fetch(ref) / "policy" / "tokenizer.json").exists()


def test_weights_that_the_store_has_changed_are_not_read(hosts: TwoHosts) -> None:
    hosts.gather()
    weights = "policy/model-00001-of-00002.safetensors"
    hosts.here.put_bytes(f"artifacts/ppo/k/000001/{weights}", b"x" * 25)
    with pytest.raises(CorruptArtifact, match=r"model-00001-of-00002\.safetensors does not have the sha256"):
        hosts.nodes.share(hosts.out / "policy")


def test_output_that_cannot_be_uploaded_stays_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    hosts = TwoHosts(tmp_path, bucket(tmp_path, is_down=True))
    with pytest.raises(StoreError, match="The bucket does not answer"):
        hosts.gather()
    policy = hosts.agent.there(hosts.out / "policy")
    assert {path.name for path in policy.iterdir()} == {
        name.removeprefix("policy/") for name in WRITTEN if name.startswith("policy/")
    }
    assert not list(hosts.out.iterdir()) and not hosts.stored.files
    hosts.agent.close()


def test_an_output_that_the_driver_cannot_commit_is_made_again(hosts: TwoHosts) -> None:
    hosts.gather()
    backend_of(hosts.here).is_down = True
    with pytest.raises(StoreError, match="does not answer"):
        hosts.publish()
    backend_of(hosts.here).is_down = False
    fence = claim(hosts.here, "k")
    assert hosts.artifacts.find("ppo", "k") is None
    assert hosts.artifacts.upload_pending("ppo", "k", fence) is None
    write(hosts.out)
    hosts.artifacts.publish("ppo", "k", hosts.out, Provenance(), fence)
    assert {key.split("/")[3] for key in hosts.here.list("artifacts/ppo/k")} == {"000002", "manifest.json"}


def test_failed_stage_leaves_no_weights(hosts: TwoHosts) -> None:
    hosts.gather()
    assert names(hosts.here.list("artifacts/ppo/k")) == set(WRITTEN)
    hosts.stored.delete()
    assert not hosts.here.list("artifacts/ppo/k")


@pytest.mark.parametrize("error", [StoreError("503"), WorkerDied("The agent is gone.")])
def test_failed_stage_leaves_nothing_of_an_upload_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RLHFError
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    first, second = sorted(name for name in WEIGHTS if name.startswith("policy/"))
    there = ScriptedStore(tmp_path / "bucket", remote=True)
    there.before("put_file", error, key=second)
    hosts = TwoHosts(tmp_path, there)
    write(hosts.agent.there(hosts.out))
    with pytest.raises(type(error)):
        hosts.nodes.gather(hosts.out / "policy")
    left = names(hosts.here.list("artifacts/ppo/k"))
    assert first in left and second not in left
    assert not hosts.stored.files
    hosts.stored.delete()
    assert not hosts.here.list("artifacts/ppo/k")
    hosts.agent.close()


def test_programs_of_the_other_host_are_refused(hosts: TwoHosts) -> None:
    hosts.gather()
    hosts.agent.there(hosts.out / "run.py").touch()
    hosts.nodes.gather(hosts.out)
    with pytest.raises(InputError, match=r"left run\.py"):
        hosts.publish()
    shutil.rmtree(hosts.out)
