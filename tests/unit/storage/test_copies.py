"""Copies of artifacts from a bucket, which several processes of a host use and repair.

- a copy that another process deletes while files are added to it is complete when it is returned
- a file has its name only with its content, so a damaged one is replaced as a whole
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import Manifest
from rlhf_core.types import ArtifactRef, artifact_prefix
from tests.support.scripted_store import ScriptedStore

KEY = "0123456789abcdef"
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 50, "no.safetensors": b""}


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(tmp_path / "store", remote=True)


@pytest.fixture
def ref(store: ScriptedStore, tmp_path: Path) -> ArtifactRef:
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return ArtifactStore(store, tmp_path / "unused").publish("sft", KEY, folder, Provenance())


@pytest.fixture
def manifest(store: ScriptedStore, ref: ArtifactRef) -> Manifest:
    found = bundles.read(store, artifact_prefix(ref.kind, ref.key))
    assert found is not None
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def partial_copy(store: ScriptedStore, manifest: Manifest, cache: Path) -> Path:
    """Return a copy that has one file."""
    target = bundles.fetch(store, manifest, cache, lambda path: path == "config.json")
    assert set(contents(target)) == {"config.json"}
    return target


def test_a_copy_that_is_deleted_while_it_is_completed_is_complete_in_the_end(
    store: ScriptedStore, manifest: Manifest, tmp_path: Path
) -> None:
    target = partial_copy(store, manifest, tmp_path / "cache")
    store.before("get_file", lambda: shutil.rmtree(target, ignore_errors=True), key="model.safetensors")
    assert contents(bundles.fetch(store, manifest, tmp_path / "cache")) == FILES


def test_a_damaged_file_of_a_copy_is_replaced_as_a_whole(
    store: ScriptedStore, manifest: Manifest, tmp_path: Path
) -> None:
    target = bundles.fetch(store, manifest, tmp_path / "cache")
    (target / "config.json").write_bytes(b"{x")
    (target / "foreign.json").write_bytes(b"{}")
    seen: list[bytes] = []
    store.before("get_file", lambda: seen.append((target / "config.json").read_bytes()))
    assert contents(bundles.fetch(store, manifest, tmp_path / "cache")) == FILES
    assert seen == [b"{x"]


def test_a_file_has_its_name_only_with_its_content(
    store: ScriptedStore, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "store" / manifest.data / "config.json").write_bytes(b"[]")
    with pytest.raises(CorruptArtifact, match=r"store/artifacts/.*config\.json does not have the sha256"):
        bundles.fetch(store, manifest, tmp_path / "cache")
    assert not (tmp_path / "cache" / manifest.copy_name / "config.json").exists()
