"""A listing is no proof that an object is missing.

- whatever a listing lacks is asked for by its key before it counts as missing: files of artifacts, claims,
  checkpoints, artifacts that others descend from
- a folder that cannot be listed (ESTALE, EIO, EACCES) is an error of the store, and no damage
- a process that only reads artifacts marks none as damaged, and says what to do
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rlhf_core.errors import CorruptArtifact, StoreError, Superseded
from rlhf_core.storage.artifacts import ArtifactStore, Provenance, parse_artifact_address
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import acquire, observe
from rlhf_core.storage.inventory import ArtifactName, add_unlisted, read_inventory
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef
from tests.support.checkpoints import keep
from tests.support.claims import claim
from tests.support.late_listings import LateListings

KEY = "0123456789abcdef"
MANIFEST = f"artifacts/ppo/{KEY}/manifest.json"


@pytest.fixture
def store(tmp_path: Path) -> LateListings:
    return LateListings(tmp_path / "store")


def output(folder: Path, text: str = "") -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_text(f"weights {text}")
    (folder / "policy" / "config.json").write_text("{}")
    return folder


def publish(store: Store, tmp_path: Path, **provenance: Any) -> ArtifactRef:
    artifacts = ArtifactStore(store, tmp_path / "cache")
    return artifacts.publish("ppo", KEY, output(tmp_path / "out"), Provenance(**provenance))


@pytest.mark.parametrize("hidden", [r"model\.safetensors", "policy/", KEY])
def test_an_artifact_with_files_that_a_listing_lacks_is_intact(
    store: LateListings, tmp_path: Path, hidden: str
) -> None:
    ref = publish(store, tmp_path)
    store.hidden = hidden
    artifacts = ArtifactStore(store, tmp_path / "cache")
    assert artifacts.find("ppo", KEY) == ref
    assert artifacts.fetch(ref).is_dir()
    again = artifacts.publish("ppo", KEY, output(tmp_path / "out"), Provenance())
    assert again == ref, "the existing one is kept"


def test_a_file_that_only_a_listing_has_is_no_damage(store: LateListings, tmp_path: Path) -> None:
    ref = publish(store, tmp_path)

    class Stale(Store):
        @override
        def sizes(self, prefix: str) -> dict[str, int]:
            return {**super().sizes(prefix), f"{prefix}/deleted.json": 3}

    assert ArtifactStore(Stale(store.url), tmp_path / "cache").find("ppo", KEY) == ref


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("folder", ["policy", "artifact"])
def test_a_folder_that_cannot_be_listed_is_an_error_and_no_damage(
    store: LateListings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folder: str
) -> None:
    ref = publish(store, tmp_path)
    place = Path(ref.uri, "policy") if folder == "policy" else Path(ref.uri)
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == place:
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for read_only in (True, False):
        with pytest.raises(StoreError, match=os.strerror(code)):
            ArtifactStore(store, tmp_path / "cache", read_only=read_only).find("ppo", KEY)
    monkeypatch.undo()
    assert ArtifactStore(store, tmp_path / "cache").find("ppo", KEY) == ref


def _delete_weights(ref: ArtifactRef) -> None:
    Path(ref.uri, "policy", "model.safetensors").unlink()


def _flip_weights(ref: ArtifactRef) -> None:
    Path(ref.uri, "policy", "model.safetensors").write_text("WEIGHTS ")


@pytest.mark.parametrize("damage", [_delete_weights, _flip_weights])
def test_a_reader_marks_nothing_as_damaged_and_says_what_to_do(
    store: Store, tmp_path: Path, damage: Callable[[ArtifactRef], None], caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(store, tmp_path)
    damage(ref)
    before = store.read_bytes(MANIFEST)
    address = parse_artifact_address(ref.uri)
    assert address is not None
    reader = address.open_store(Home.of(str(tmp_path / "home")), None)
    if damage is _delete_weights:
        assert reader.find("ppo", KEY) is None
        assert f"model.safetensors, which is missing. Restore the file. If you cannot, delete {tmp_path}" in (
            caplog.text
        )
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors.* Restore the file\. If you cannot, del"):
        reader.fetch(ref)
    assert store.read_bytes(MANIFEST) == before
    with pytest.raises(CorruptArtifact, match="is marked as damaged"):
        ArtifactStore(store, tmp_path / "cache").fetch(ref)
    assert store.read_bytes(MANIFEST) is None


@pytest.mark.parametrize("hidden", [r"attempts/000002\.json", "attempts/"])
def test_a_claim_that_a_listing_lacks_supersedes_the_one_before(store: LateListings, hidden: str) -> None:
    first, second = claim(store, KEY), claim(store, KEY)
    store.hidden = hidden
    second.check()
    with pytest.raises(Superseded, match="attempt 2 "):
        first.check()
    assert observe(store, [KEY])[KEY].attempt == 2
    assert acquire(store, KEY, "ppo").attempt == 3


def save(store: Store, tmp_path: Path, *steps: int) -> None:
    saver = CheckpointStore(store, KEY, tmp_path / "work", keep(1), claim(store, KEY))
    for step in steps:
        saver.save(step, output(tmp_path / f"state-{step}", str(step)))


@pytest.mark.parametrize("hidden", ["step-00000002/manifest", "step-00000002/", "checkpoints/"])
def test_the_newest_checkpoint_is_resumed_if_a_listing_lacks_it(
    store: LateListings, tmp_path: Path, hidden: str
) -> None:
    save(store, tmp_path, 1, 2)
    store.hidden = hidden
    found = CheckpointStore(store, KEY, tmp_path / "work", keep(1), claim(store, KEY)).latest()
    assert found is not None and found[0] == 2


def test_what_an_unlisted_artifact_descends_from_is_in_the_inventory(
    store: LateListings, tmp_path: Path
) -> None:
    sft = ArtifactRef("sft", "f" * 16, "d" * 64, "/x")
    publish(store, tmp_path, parents={"sft": sft})
    store.hidden = f"artifacts/ppo/{KEY}/"
    inventory = read_inventory(store)
    assert not inventory.artifacts
    policy = ArtifactName("ppo", KEY)
    [found] = add_unlisted(store, inventory, [policy, ArtifactName("ppo", "../x")]).artifacts
    assert found.name == policy and found.descends_from == frozenset([ArtifactName("sft", "f" * 16)])


def test_the_time_of_a_checkpoint_is_known_if_a_listing_lacks_its_manifest(
    store: LateListings, tmp_path: Path
) -> None:
    save(store, tmp_path, 1)
    [listed] = read_inventory(store).checkpoints
    store.hidden = "step-00000001/manifest"
    [unlisted] = read_inventory(store).checkpoints
    assert unlisted.saved == listed.saved and listed.saved
