"""What each host has of a checkpoint, and what the driver makes of the parts.

- a host needs space for what its ranks write of a checkpoint, and not for all of it
- a rank's own files are fetched only where that rank runs, all files if another number of ranks continues
- hosts hash and upload their parts at the same time, and one manifest commits them all; without one part
  nothing is committed
- parts for a bucket are uploaded while the next step is trained; if that fails, the next save says so, and
  the next attempt continues from the checkpoint before
- hosts share a folder only if its mark is of the same attempt; what a killed attempt has left is deleted
- a base model that a host has verified is not read again
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlhf_core.cluster.agent import MARK, NodeAgent, mark_text
from rlhf_core.cluster.base_model import BaseModel
from rlhf_core.cluster.stored_output import needed_files, written_bytes
from rlhf_core.config import PipelineConfig
from rlhf_core.data.sources import model_digest, model_digests
from rlhf_core.errors import DataError, StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, Manifest
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.files import held
from tests.support.checkpoints import keep
from tests.support.claims import claim
from tests.support.demo_data import with_demo_data
from tests.support.other_host import Elsewhere, bucket, two_nodes
from tests.support.scripted_store import ScriptedStore

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

    def needed(unsharded: int | None) -> list[int]:
        return [written_bytes(1000, unsharded, ranks, node) for node in [*ranks, "driver"]]

    assert needed(None) == [1000, 600, 200, 0, 0]
    assert needed(0) == [200, 600, 200, 0, 0]
    assert needed(500) == [500 + 100, 300, 100, 0, 0]
    assert needed(1000) == [1000, 0, 0, 0, 0]
    # The critic may be small, or the policy.
    ppo = {"one": {"policy": {0, 1}, "critic": {0}}, "two": {"critic": {1}}}
    assert [written_bytes(1000, 0, ppo, node) for node in ppo] == [1000, 500]


def test_each_host_needs_space_for_its_own_ranks(tmp_path: Path) -> None:
    """The ranks of the driver's host write half of it, which fits. The agent checks what it is asked for."""
    attempt = Attempt(tmp_path, Store(tmp_path / "store"))
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(StoreError, match=r"^state on host .* needs .* free some space there"):
        attempt.checkpoints.prepare(1, tmp_path / "one" / "state", free * 3 // 2)
    with pytest.raises(StoreError, match=r"^The checkpoint of step 1 needs .* free some space there"):
        attempt.checkpoints.prepare(1, tmp_path / "one" / "state", free * 3)


# -- two hosts, without Ray --


class OneOtherHost:
    """The agent of a second host, which finds a folder of the first one below `root`."""

    def __init__(self, root: Path, store: Store) -> None:
        self.root = root
        self.connect(store)

    def connect(self, store: Store) -> None:
        """Use this store from now on."""
        config = PipelineConfig.model_validate({"run": {"home": str(self.root / "home")}})
        json = config.model_dump_json(by_alias=True)
        self.agent = NodeAgent(json, self.root / "work", self.root / "stacks", "one", store)

    def there(self, folder: Path) -> Path:
        return self.root / folder.relative_to("/")

    def prepare(self, folder: Path, size: int, unsharded: int | None) -> None:
        self.agent.prepare(self.there(folder), size)

    def bytes_here(self, size: int, unsharded: int | None) -> int:
        return size // 2

    def add(self, folder: Path, target: str) -> Callable[[], Sequence[Sequence[FileEntry]]]:
        part = self.agent.add(self.there(folder), target)
        return lambda: [part]

    def upload(self, target: str) -> Callable[[], None]:
        return lambda: self.agent.upload(target)

    def fetch(self, manifest: Manifest, work: Path) -> Callable[[], None]:
        return lambda: self.agent.fetch(manifest, self.there(work), frozenset({"rank1", "latest"}))

    def needed_here(self, manifest: Manifest) -> Callable[[str], bool]:
        return lambda path: path in ("rank0", "latest")


class Attempt:
    """An attempt on two hosts."""

    def __init__(
        self, folder: Path, store: Store, kept: int = 2, other: type[OneOtherHost] | None = None
    ) -> None:
        self.folder = folder
        self.other = (other or OneOtherHost)(folder / "two", store)
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


class WritesLate(OneOtherHost):
    """While this host hashes its part, the driver's host gets one file before it hashes, and one after."""

    def add(self, folder: Path, target: str) -> Callable[[], Sequence[Sequence[FileEntry]]]:
        (folder / "before").write_text("seen")
        wait = super().add(folder, target)

        def write_and_wait() -> Sequence[Sequence[FileEntry]]:
            (folder / "after").write_text("not seen")
            return wait()

        return write_and_wait


def test_hosts_hash_their_parts_at_the_same_time(tmp_path: Path, store: Store) -> None:
    first = Attempt(tmp_path, store, other=WritesLate)
    first.save(3)
    first.checkpoints.finish()
    manifest = bundles.read(store, "checkpoints/k/step-00000003")
    assert manifest is not None
    assert [entry.path for entry in manifest.files] == ["before", "latest", "rank0", "rank1"]


def test_part_that_cannot_be_uploaded_prevents_the_commit(tmp_path: Path) -> None:
    store = bucket(tmp_path)
    first = Attempt(tmp_path, store)
    first.save(3)
    first.checkpoints.finish()
    first.other.connect(bucket(tmp_path, is_down=True))
    first.save(4)
    with pytest.raises(StoreError, match="does not answer"):
        first.save(5)
    assert bundles.read(store, "checkpoints/k/step-00000004") is None
    latest = Attempt(tmp_path, store).checkpoints.latest()
    assert latest is not None and latest[0] == 3
    assert sorted(path.name for path in latest[1].iterdir()) == ["latest", "rank0"]


def test_the_next_step_is_written_while_the_parts_are_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ScriptedStore(tmp_path / "bucket", remote=True)
    first = Attempt(tmp_path, store)
    go = threading.Event()
    store.before("put_file", lambda: go.wait(10), lasting=True)
    first.save(3)
    assert not (tmp_path / "one" / "state").exists()
    assert bundles.read(store, "checkpoints/k/step-00000003") is None
    second = threading.Thread(target=lambda: first.save(4))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "at most one upload at a time"
    first.checkpoints.finish(0.05)
    assert "step 3 is unfinished; the same command continues from the one before." in caplog.text
    go.set()
    second.join()
    first.checkpoints.finish()
    for step in (3, 4):
        manifest = bundles.read(store, f"checkpoints/k/step-{step:08d}")
        assert manifest is not None
        assert store.read_bytes(f"{manifest.data}/rank1") == f"step {step} of rank 1".encode()
    assert not list(tmp_path.rglob("one/000001-*")) + list(tmp_path.rglob("two/**/000001-*"))


def test_what_killed_attempts_at_other_stages_have_left_is_deleted(tmp_path: Path) -> None:
    works = tmp_path / "home" / "work"
    killed, alive = works / "sft-a", works / "reward-b"
    for folder in (killed, alive):
        (folder / "attempt-000001").mkdir(parents=True)
    with held(killed):
        pass
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path / "home")}})
    json = config.model_dump_json(by_alias=True)
    agent = NodeAgent(json, works / "ppo-c" / "attempt-000001", tmp_path / "stacks", "one")
    with held(alive):
        agent.start("node-2", "this")
    assert not killed.exists() and (alive / "attempt-000001").exists()
    agent.close()


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


def test_only_the_driver_fetches_the_record(
    tmp_path: Path, other: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[frozenset[str]] = []
    monkeypatch.setattr(other, "fetch", lambda manifest, work, needed: asked.append(needed))
    nodes = two_nodes(tmp_path, other)
    nodes.join({"1": {"policy": {0}}, "2": {"policy": {1}}})
    paths = ["controller.json", "record/ppo-00000001.parquet"]
    manifest = Manifest("checkpoints/k/1", "a", tuple(FileEntry(path, 1, "0" * 64) for path in paths), {})
    nodes.fetch(manifest, tmp_path)()
    assert asked == [{"controller.json"}]
    assert all(map(nodes.needed_here(manifest), paths))


def test_the_base_model_of_another_host_must_have_the_files_of_the_driver(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    tree = with_demo_data({"model": {"path": str(model)}, "run": {"home": str(tmp_path)}})
    config = PipelineConfig.model_validate(tree, strict=False)
    (tmp_path / "work" / "scratch").mkdir(parents=True)
    agent = NodeAgent(config.model_dump_json(by_alias=True), tmp_path / "work", tmp_path, "driver")
    agent.fetch_base_model(BaseModel("sft", model_digests(config)["model"]))
    with pytest.raises(DataError, match=r"model\.path=.* has other files on host"):
        agent.fetch_base_model(BaseModel("sft", "0"))


def test_the_base_model_of_the_judge_is_compared_as_that_of_the_policy(tmp_path: Path) -> None:
    model = tmp_path / "judge"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    tree = {"reward": {"judge": {"path": str(model)}}, "run": {"home": str(tmp_path)}}
    config = PipelineConfig.model_validate(tree, strict=False)
    (tmp_path / "work" / "scratch").mkdir(parents=True)
    agent = NodeAgent(config.model_dump_json(by_alias=True), tmp_path / "work", tmp_path, "driver")
    agent.fetch_base_model(BaseModel("judge", model_digest(str(model), None)))
    with pytest.raises(DataError, match=r"reward\.judge\.path=.* has other files on host"):
        agent.fetch_base_model(BaseModel("judge", "0"))
