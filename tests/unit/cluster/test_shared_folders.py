"""Folders that the driver shares with the other hosts of a stage.

- a folder is copied to another host, and back, through the store; a file that changes on its way is noticed
- only files of the output stay where the artifact has them
- inputs that a host has verified are not read again
- a folder outside run.home is compared, and nothing is written there, also through a link
- scratch files of the run are below run.home also if `work` is a link to another disk
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.cluster.agent import NodeAgent
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.errors import CorruptArtifact, DataError, InputError
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import FileEntry
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef
from tests.support.other_host import Elsewhere, two_nodes


def joined(folder: Path, agent: NodeAgent, inputs: Sequence[ArtifactRef] = ()) -> ClusterNodes:
    """Return the driver's view of one other host."""
    nodes = two_nodes(folder, agent, inputs)
    nodes.join({"1": {}, "2": {}})
    return nodes


@pytest.fixture
def two_hosts(tmp_path: Path, other: Elsewhere) -> ClusterNodes:
    return joined(tmp_path, other)


def test_folder_is_copied_to_another_host_and_back(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere
) -> None:
    folder = tmp_path / "home" / "attempt" / "out" / "model"
    (folder / "parts").mkdir(parents=True)
    content = {"parts/rows": "w" * 25, "config.json": "{}", "empty": ""}
    for name, text in content.items():
        (folder / name).write_text(text)
    two_hosts.share(folder)
    there = other.there(folder)
    assert {name: (there / name).read_text() for name in content} == content
    # Files that are there already are not sent again.
    before = (there / "config.json").stat().st_mtime_ns
    (folder / "more").write_text("more")
    two_hosts.share(folder)
    assert (there / "more").read_text() == "more"
    assert (there / "config.json").stat().st_mtime_ns == before
    # Another content of the same size is found.
    (there / "parts/rows").write_text("v" * 25)
    two_hosts.share(folder)
    assert (there / "parts/rows").read_text() == "w" * 25
    shutil.rmtree(folder)
    two_hosts.gather(folder)
    assert {name: (folder / name).read_text() for name in content} == content
    assert list(there.iterdir()) == [], "moved"


def test_other_folders_of_the_run_leave_nothing_in_the_artifact(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere
) -> None:
    folder = tmp_path / "home" / "attempt" / "scratch" / "converted"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("w" * 25)
    two_hosts.share(folder)
    assert (other.there(folder) / "model.safetensors").read_text() == "w" * 25
    store = Store(tmp_path / "store")
    assert not store.list("artifacts/sft/k/000001") and store.list("artifacts/sft/k/000001-shared")
    two_hosts.output.delete()
    assert not store.list("artifacts/sft/k")


def test_shared_files_do_not_come_back(tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere) -> None:
    folder = tmp_path / "home" / "attempt" / "out"
    folder.mkdir(parents=True)
    (folder / "rows").write_text("w" * 25)
    two_hosts.share(folder)
    there = other.there(folder)
    two_hosts.gather(folder)
    assert (there / "rows").exists(), "and the next call finds them there"
    (folder / "rows").write_text("v" * 25)
    two_hosts.share(folder)
    (there / "log").write_text("new")
    two_hosts.gather(folder)
    assert (folder / "log").read_text() == "new" and (folder / "rows").read_text() == "v" * 25


def test_file_that_changes_on_its_way_is_noticed(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "home" / "attempt" / "out"
    folder.mkdir(parents=True)
    (folder / "rows").write_text("w" * 25)
    get_file = other._store.get_file

    def damage(key: str, local: Path, size: int | None = None) -> None:
        get_file(key, local, size)
        local.write_text("x" * 25)

    monkeypatch.setattr(other._store, "get_file", damage)
    with pytest.raises(CorruptArtifact, match="rows does not have the sha256"):
        two_hosts.share(folder)


def test_folder_of_the_user_is_compared_and_not_written(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere
) -> None:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "model.safetensors").write_text("w" * 25)
    there = other.there(folder)
    with pytest.raises(DataError, match=r"judge has other files on host .*model\.safetensors;"):
        two_hosts.share(folder)
    assert not there.exists()
    there.mkdir()
    # A file of the user's other model, to which the folder links.
    blob = other.there(tmp_path) / "blob"
    blob.write_text("v" * 25)
    (there / "model.safetensors").symlink_to(blob)
    with pytest.raises(DataError, match="copy the folder to every host"):
        two_hosts.share(folder)
    assert blob.read_text() == "v" * 25
    blob.write_text("w" * 25)
    (there / ".DS_Store").write_text("not of the model")
    two_hosts.share(folder)
    (there / "model-2.safetensors").write_text("an engine would read it")
    with pytest.raises(DataError, match=r"model-2\.safetensors"):
        two_hosts.share(folder)


def test_agent_changes_nothing_outside_run_home(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere
) -> None:
    folder = tmp_path / "judge"
    other.there(folder).mkdir(parents=True)
    (other.there(folder) / "config.json").write_text("{}")
    link = tmp_path / "home" / "link"
    other.there(link).parent.mkdir(parents=True, exist_ok=True)
    other.there(link).symlink_to(other.there(folder))
    for outside in (folder, link):
        with pytest.raises(InputError, match=r"is not below run\.home=.*; nothing was changed"):
            other.fetch_files("artifacts", [FileEntry("config.json", 2, "0" * 64)], outside)
        with pytest.raises(InputError, match=r"is not below run\.home"):
            other.remove(outside)
    assert (other.there(folder) / "config.json").read_text() == "{}"


def test_scratch_files_may_be_on_another_disk(
    tmp_path: Path, two_hosts: ClusterNodes, other: Elsewhere
) -> None:
    works, disk = tmp_path / "home" / "work", tmp_path / "disk"
    for link, target in ((works, disk), (other.there(works), other.there(disk))):
        target.mkdir(parents=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    folder = works / "sft-k" / "out"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("w" * 25)
    two_hosts.share(folder)
    there = other.there(disk) / "sft-k" / "out"
    assert (there / "weights").read_text() == "w" * 25
    (there / "log").write_text("new")
    two_hosts.gather(folder)
    assert (folder / "log").read_text() == "new" and list(there.iterdir()) == []
    users = disk / "judge"  # by its own path, it is not of the run
    for outside in (users, works, works / ".." / "link" / "judge", works / ".." / ".." / "judge"):
        with pytest.raises(InputError, match=r"is not below run\.home"):
            other.remove(outside)


def test_inputs_that_a_host_has_verified_are_not_read_again(tmp_path: Path, other: Elsewhere) -> None:
    artifacts = ArtifactStore(Store(tmp_path / "store"), tmp_path / "cache")
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "weights").write_text("w" * 25)
    ref = artifacts.publish("sft", "k", tmp_path / "out", Provenance())
    nodes = joined(tmp_path, other, inputs=[ref])
    nodes.share(artifacts.fetch(ref) / "model")
    assert not other.folders_hashed
    own = tmp_path / "home" / "scratch"
    own.mkdir(parents=True)
    nodes.share(own)
    assert other.folders_hashed == [own]
