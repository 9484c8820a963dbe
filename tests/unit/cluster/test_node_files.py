"""What each host has of a checkpoint, and what the driver makes of the parts.

- a host needs space for what its ranks write of a checkpoint, and not for all of it
- a rank's own files are fetched only where that rank runs, all files if another number of ranks continues
- hosts hash and upload their parts at the same time, and one manifest commits them all; without one part
  nothing is committed
- a part that was not uploaded is uploaded by the next attempt; if its host is gone, the checkpoint before it
  is used
- a part on a host that runs the driver later is not taken for a checkpoint
- an agent deletes parts of finished stages, of steps that were passed, and old ones
- hosts share a folder only if its mark is of the same attempt; what a killed attempt has left is deleted
- a folder is copied to another host, and back, in parts; a file that changes on its way is noticed
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster import agent as agent_module
from rlhf_core.cluster import nodes as nodes_module
from rlhf_core.cluster.agent import MARK, NodeAgent, mark_text
from rlhf_core.cluster.nodes import ClusterNodes, needed_files, written_bytes
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import CorruptArtifact, StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, Manifest
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import claim
from rlhf_core.storage.local import LocalFiles
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.system.home import Home
from tests.support.checkpoints import keep

ZERO_3 = [
    "policy/latest",
    "policy/ranks",
    "policy/state/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "policy/state/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "policy/state/zero_pp_rank_1_mp_rank_00_model_states.pt",
    "policy/state/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "policy/ema-rank0.safetensors",
    "policy/ema-rank1.safetensors",
    "critic/state/mp_rank_00_model_states.pt",
    "critic/best-rank0.safetensors",
    "controller.json",
]


def rank_files(paths: frozenset[str]) -> list[str]:
    return sorted(path.rsplit("/", 1)[-1] for path in paths if "rank_0_" in path or "rank_1_" in path)


def test_files_of_a_rank_are_fetched_where_it_runs() -> None:
    ranks = {"one": {"policy": {0}, "critic": {0, 1}}, "two": {"policy": {1}}}
    one, two = (needed_files(ZERO_3, ranks, node) for node in ("one", "two"))
    assert one | two == set(ZERO_3)
    assert "policy/ema-rank1.safetensors" in two - one
    assert rank_files(two) == [f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
    # Not sharded: saved by one rank, read by both.
    assert "critic/best-rank0.safetensors" in one & two
    assert {"controller.json", "policy/latest", "policy/ranks"} <= one & two


@pytest.mark.parametrize("ranks", [{0}, {0, 1, 2}])
def test_another_number_of_ranks_needs_all_files(ranks: set[int]) -> None:
    assert needed_files(ZERO_3, {"one": {"policy": ranks}}, "one") == set(ZERO_3)


def test_loops_have_their_files_at_the_top() -> None:
    paths = ["loop.json", *(path.removeprefix("policy/") for path in ZERO_3 if path.startswith("policy/"))]
    needed = needed_files(paths, {"one": {"": {0}}, "two": {"": {1}}}, "two")
    assert "loop.json" in needed
    assert len(rank_files(needed)) == 2


def test_a_host_needs_space_for_what_its_ranks_write() -> None:
    ranks = {"one": {"": {0}}, "two": {"": {1, 2, 3}}, "three": {"": {4}}, "engines": {}}
    needed = {node: written_bytes(1000, ranks, node) for node in [*ranks, "driver"]}
    assert needed == {"one": 1000, "two": 600, "three": 200, "engines": 0, "driver": 0}


def test_the_driver_needs_space_for_the_ranks_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, Store(tmp_path / "store"))
    asked: list[int] = []
    monkeypatch.setattr(bundles, "require_free", lambda _folder, size, _what: asked.append(size))
    attempt.checkpoints.prepare(1, tmp_path / "one" / "state", 1000)
    assert asked == [500, 1000], "the agent checks what it gets"


# -- two hosts, without Ray --


class Bucket(LocalFiles):
    """A folder that behaves like a bucket: nothing of it is on this machine."""

    def local_path(self, key: str) -> Path | None:
        return None


def bucket(folder: Path) -> Store:
    store = Store(folder / "bucket")
    store._backend = Bucket(folder / "bucket")
    return store


class OneOtherHost:
    """The agent of a second host, which finds a folder of the first one below `root`."""

    def __init__(self, root: Path, store: Store) -> None:
        config = PipelineConfig.model_validate({"run": {"home": str(root / "home")}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agent_module, "open_store", lambda _config: store)
            self.agent = NodeAgent(
                config.model_dump_json(by_alias=True), root / "work", root / "stacks", "one"
            )
        self.root = root

    def there(self, folder: Path) -> Path:
        return self.root / folder.relative_to("/")

    def prepare(self, folder: Path, size: int) -> None:
        self.agent.prepare(self.there(folder), size)

    def bytes_here(self, size: int) -> int:
        return size // 2

    def add(self, prefix: str, folder: Path, name: str) -> Callable[[], Sequence[Sequence[FileEntry]]]:
        part = self.agent.add(prefix, self.there(folder), name)
        return lambda: [part]

    def pending(self, prefix: str, name: str) -> Sequence[Sequence[FileEntry]]:
        return [part for part in [self.agent.pending(prefix, name)] if part]

    def upload(self, prefix: str, name: str) -> Callable[[], None]:
        return lambda: self.agent.upload(prefix, name)

    def discard(self, prefix: str) -> None:
        self.agent.discard(prefix)

    def fetch(self, manifest: Manifest, work: Path) -> Callable[[], None]:
        return lambda: self.agent.fetch(manifest, self.there(work), frozenset({"rank1", "latest"}))

    def needed_here(self, manifest: Manifest) -> Callable[[str], bool]:
        return lambda path: path in ("rank0", "latest")


class Attempt:
    """An attempt on two hosts."""

    def __init__(self, folder: Path, store: Store, kept: int = 2) -> None:
        self.folder = folder
        self.other = OneOtherHost(folder / "two", store)
        outbox = None if store.is_local else Outbox(store, folder / "one" / "outbox")
        self.checkpoints = CheckpointStore(
            store,
            "k",
            folder / "one" / "work",
            keep(kept),
            claim(store, "k"),
            outbox=outbox,
            hosts=self.other,
        )

    def save(self, step: int) -> None:
        state = self.folder / "one" / "state"
        self.checkpoints.prepare(step, state, 10)
        (state / "rank0").write_text(f"step {step} of rank 0")
        (state / "latest").write_text("state")
        (self.other.there(state) / "rank1").write_text(f"step {step} of rank 1")
        self.checkpoints.save(step, state)


@pytest.fixture(params=["folder", "bucket"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    return bucket(tmp_path) if request.param == "bucket" else Store(tmp_path / "store")


def test_one_manifest_commits_the_parts_of_all_hosts(tmp_path: Path, store: Store) -> None:
    first = Attempt(tmp_path, store)
    first.save(3)
    first.checkpoints.finish()
    manifest = bundles.read(store, "checkpoints/k/step-00000003")
    assert manifest is not None
    assert [entry.path for entry in manifest.files] == ["latest", "rank0", "rank1"]
    assert not list((tmp_path / "two").rglob("rank1")), "the part is in the store and not on the host"
    latest = Attempt(tmp_path, store).checkpoints.latest()
    assert latest is not None and latest[0] == 3
    assert (latest[1] / "rank0").read_text() == "step 3 of rank 0"
    if not store.is_local:
        assert not (latest[1] / "rank1").exists()
        there = first.other.there(latest[1])
        assert sorted(path.name for path in there.iterdir()) == ["latest", "rank1"]


def test_hosts_hash_their_parts_at_the_same_time(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Attempt(tmp_path, store)
    both = threading.Barrier(2, timeout=10)
    original = bundles.hash_folder

    def hash_folder(folder: Path, **options: Any) -> tuple[FileEntry, ...]:
        both.wait()  # breaks if one begins after the other has ended
        return original(folder, **options)

    def add(host: OneOtherHost, prefix: str, folder: Path, name: str) -> Any:
        with_agent = ThreadPoolExecutor(1)
        part = with_agent.submit(host.agent.add, prefix, host.there(folder), name)
        return lambda: [part.result()]

    monkeypatch.setattr(bundles, "hash_folder", hash_folder)
    monkeypatch.setattr(OneOtherHost, "add", add)
    first.save(3)
    first.checkpoints.finish()
    manifest = bundles.read(store, "checkpoints/k/step-00000003")
    assert manifest is not None and len(manifest.files) == 3


def test_part_that_cannot_be_uploaded_prevents_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket(tmp_path)

    def refuse(_agent: NodeAgent, _prefix: str, _name: str) -> None:
        raise StoreError("access denied")

    monkeypatch.setattr(NodeAgent, "upload", refuse)
    first = Attempt(tmp_path, store)
    first.save(3)
    with pytest.raises(StoreError, match="access denied"):
        first.save(4)
    assert bundles.read(store, "checkpoints/k/step-00000003") is None
    monkeypatch.undo()
    latest = Attempt(tmp_path, store).checkpoints.latest()
    assert latest is not None and latest[0] == 4, "both steps were pending on both hosts"


def test_checkpoint_with_a_part_on_a_host_that_is_gone_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = bucket(tmp_path)
    first = Attempt(tmp_path, store)
    first.save(3)
    first.checkpoints.finish()
    monkeypatch.setattr(OneOtherHost, "upload", lambda *_args: (_ for _ in ()).throw(StoreError("down")))
    first.save(4)
    first.checkpoints.finish()
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "two")
    latest = Attempt(tmp_path, store).checkpoints.latest()
    assert latest is not None and latest[0] == 3
    assert "1 of the 1 other hosts with a part of it are gone" in caplog.text


def test_part_of_a_host_that_becomes_the_driver_is_not_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket(tmp_path)
    first = Attempt(tmp_path, store, kept=1)
    first.save(2)
    first.checkpoints.finish()
    monkeypatch.setattr(OneOtherHost, "upload", lambda *_args: (_ for _ in ()).throw(StoreError("down")))
    first.save(3)
    first.checkpoints.finish()
    monkeypatch.undo()
    # The host "one" with its part is gone; the same command runs on "two".
    outbox = Outbox(store, Home.of(tmp_path / "two" / "home").outbox)
    work = tmp_path / "two" / "checkpoints"
    second = CheckpointStore(store, "k", work, keep(1), claim(store, "k"), outbox=outbox)
    latest = second.latest()
    assert latest is not None and latest[0] == 2
    assert sorted(path.name for path in latest[1].iterdir()) == ["latest", "rank0", "rank1"]


def test_parts_that_are_not_needed_any_more_are_deleted(tmp_path: Path) -> None:
    store = bucket(tmp_path)
    agent = OneOtherHost(tmp_path / "two", store).agent
    parts = Outbox(store, Home.of(tmp_path / "two" / "home").parts)

    def leave(key: str, step: int) -> str:
        part = tmp_path / "part"
        part.mkdir()
        (part / "rank1").write_text("a part")
        prefix = f"checkpoints/{key}/step-{step:08d}"
        agent.add(prefix, part, "000001-a")
        return prefix

    finished = leave("finished", 4)
    store.put_bytes("artifacts/sft/finished/manifest.json", b"{}")
    passed, next_one = leave("passed", 4), leave("passed", 6)
    store.put_bytes("checkpoints/passed/step-00000005/manifest.json", b"{}")
    store.put_bytes("checkpoints/passed/step-00000007/000001-a/rank0", b"not committed")
    young, old = leave("young", 1), leave("old", 1)
    manifest = tmp_path / "two" / "home" / "parts" / old / "manifest.json"
    a_week_ago = manifest.stat().st_mtime - 8 * 86_400
    os.utime(manifest, (a_week_ago, a_week_ago))
    assert set(parts.pending("checkpoints")) == {finished, passed, next_one, young, old}
    agent.discard_old_parts()
    assert set(parts.pending("checkpoints")) == {next_one, young}
    assert not (tmp_path / "two" / "home" / "parts" / finished).exists()


def test_parts_that_cannot_be_looked_up_stay_and_end_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = bucket(tmp_path)
    agent = OneOtherHost(tmp_path / "two", store).agent
    parts = Outbox(store, Home.of(tmp_path / "two" / "home").parts)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "rank1").write_text("a part")
    agent.add("checkpoints/k/step-00000001", tmp_path / "part", "000001-a")

    def refuse(*_args: object) -> bool:
        raise StoreError("The bucket does not answer.")

    monkeypatch.setattr(agent._store, "exists", refuse)
    agent.discard_old_parts()
    assert parts.pending("checkpoints") == ["checkpoints/k/step-00000001"]
    assert "The bucket does not answer." in caplog.text
    assert parts.age("checkpoints/k/step-00000009") == 0, "another process has removed it"


def test_pending_bundle_without_the_step_is_not_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = bucket(tmp_path)
    outbox = Outbox(store, tmp_path / "outbox")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "rank1").write_text("a part")
    files = bundles.hash_folder(tmp_path / "part")
    outbox.add("checkpoints/k/step-00000003", tmp_path / "part", files, folder="000001-a", body={})
    assert CheckpointStore(store, "k", tmp_path / "work", keep(2), outbox=outbox).latest() is None
    assert bundles.read(store, "checkpoints/k/step-00000003") is None
    assert "is not the checkpoint of step 3" in caplog.text
    assert not outbox.pending("checkpoints/k")


def test_a_mark_of_a_killed_attempt_is_not_of_a_shared_folder(tmp_path: Path) -> None:
    work = tmp_path / "home" / "work" / "attempt-000002"
    work.mkdir(parents=True)
    (work / MARK).write_text(mark_text("killed", "node-1"))
    (work / "left").write_text("a shard")
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path / "home")}})
    json = config.model_dump_json(by_alias=True)
    first, second = (NodeAgent(json, work, tmp_path / "stacks", "one") for _ in range(2))
    try:
        assert first.start("node-2", "this").files_of == "node-2"
        assert not (work / "left").exists() and (work / "scratch").is_dir()
        assert second.start("node-3", "this").files_of == "node-2", "both are of this attempt"
    finally:
        second.close()
        assert work.exists(), "the first has its files there"
        first.close()


class Called:
    """An agent that is called in this process. It finds each folder below `root`."""

    def __init__(self, agent: NodeAgent, root: Path) -> None:
        self._agent = agent
        self._root = root

    def call(self, method: Callable[..., Any], *args: Any) -> Pending[Any]:
        there = [self._root / arg.relative_to("/") if isinstance(arg, Path) else arg for arg in args]
        return Pending(method(self._agent, *there))


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterNodes:
    """The driver's view of one other host, whose files are below `two`."""
    monkeypatch.setattr(nodes_module, "fetch", lambda pending, _seconds: [call.reference for call in pending])
    monkeypatch.setattr(nodes_module, "CHUNK_BYTES", 10)
    monkeypatch.setattr(agent_module, "CHUNK_BYTES", 10)
    monkeypatch.setattr("ray.put", lambda value: value)
    other = OneOtherHost(tmp_path / "two", Store(tmp_path / "store"))
    nodes = ClusterNodes(PipelineConfig(), tmp_path / "work", [], Monitor(tmp_path / "stacks"))
    actor: Any = Called(other.agent, other.root)
    nodes._hosts = [nodes_module._Host("id", actor, "two", "id")]
    return nodes


def test_folder_is_copied_to_another_host_and_back(tmp_path: Path, two_hosts: ClusterNodes) -> None:
    folder = tmp_path / "one" / "model"
    (folder / "parts").mkdir(parents=True)
    content = {"parts/weights": "w" * 25, "config.json": "{}", "empty": ""}
    for name, text in content.items():
        (folder / name).write_text(text)
    two_hosts.share(folder)
    there = tmp_path / "two" / folder.relative_to("/")
    assert {name: (there / name).read_text() for name in content} == content
    # Files that are there already are not sent again.
    before = (there / "config.json").stat().st_mtime_ns
    (folder / "more").write_text("more")
    two_hosts.share(folder)
    assert (there / "more").read_text() == "more"
    assert (there / "config.json").stat().st_mtime_ns == before
    # Another content of the same size is found.
    (there / "parts/weights").write_text("v" * 25)
    two_hosts.share(folder)
    assert (there / "parts/weights").read_text() == "w" * 25
    shutil.rmtree(folder)
    two_hosts.gather(folder)
    assert {name: (folder / name).read_text() for name in content} == content
    assert list(there.iterdir()) == [], "moved"


def test_shared_files_do_not_come_back(
    tmp_path: Path, two_hosts: ClusterNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "weights").write_text("w" * 25)
    two_hosts.share(folder)
    read: list[Path] = []
    there = tmp_path / "two" / folder.relative_to("/")
    original = NodeAgent.read

    def record(agent: NodeAgent, file: Path, offset: int) -> bytes:
        read.append(file)
        return original(agent, file, offset)

    monkeypatch.setattr(NodeAgent, "read", record)
    two_hosts.gather(folder)
    assert not read and (there / "weights").exists(), "and the next call finds them there"
    (there / "log").write_text("new")
    two_hosts.gather(folder)
    assert read == [there / "log"]
    assert (folder / "log").read_text() == "new"


def test_file_that_changes_on_its_way_is_noticed(
    tmp_path: Path, two_hosts: ClusterNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "weights").write_text("w" * 25)
    monkeypatch.setattr("ray.put", lambda value: value.replace(b"w", b"x"))
    with pytest.raises(CorruptArtifact, match="weights changed on its way to host two"):
        two_hosts.share(folder)
