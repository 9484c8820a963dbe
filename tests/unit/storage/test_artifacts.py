"""Artifacts exist completely or not at all, are verified before use, and are made once.

- round trip and content of the manifest; the digest depends on the content alone
- damage is named and marked, and the artifact is made again
- the first publisher wins; a superseded attempt cannot publish; interrupted publishing leaves nothing visible
- programs and links are refused; leftovers of dead attempts are deleted
- files that an attempt is uploading are no artifact, and no reason for a warning
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import CorruptArtifact, InputError, StoreError, Superseded
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef
from tests.support.claims import claim
from tests.support.corruption import forged
from tests.support.scripted_store import ScriptedStore

KEY = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(tmp_path / "store")


@pytest.fixture
def artifacts(store: Store, tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(store, tmp_path / "cache")


def output(tmp_path: Path, name: str = "out", extra: str = "") -> Path:
    folder = tmp_path / name
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "model.safetensors").write_bytes(bytes(range(256)) * 8 + extra.encode())
    (folder / "policy" / "config.json").write_text('{"hidden": 32}')
    (folder / "empty.txt").write_bytes(b"")
    return folder


def publish(
    artifacts: ArtifactStore, folder: Path, fence: Fence | None = None, **changes: object
) -> ArtifactRef:
    parent = ArtifactRef("sft", "f" * 16, "d" * 64, "/x")
    given: dict[str, Any] = {
        "parents": {"sft": parent},
        "metrics": {"kl": 1.5},
        "config": {"a": 1},
        "attributes": {"weights_sha256": "w"},
    }
    provenance = Provenance(**{**given, **changes}, mlflow_run_id="run")
    return artifacts.publish("ppo", KEY, folder, provenance, fence)


def test_a_published_folder_is_found_and_fetched_with_the_same_bytes(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    assert artifacts.find("ppo", KEY) is None
    expected = {
        p.relative_to(tmp_path / "a").as_posix(): p.read_bytes() for p in output(tmp_path, "a").rglob("*.*")
    }
    ref = publish(artifacts, output(tmp_path))
    assert artifacts.find("ppo", KEY) == ref
    assert (ref.kind, ref.key, ref.metrics, ref.attributes, ref.mlflow_run_id) == (
        "ppo", KEY, {"kl": 1.5}, {"weights_sha256": "w"}, "run",
    )  # fmt: skip
    folder = artifacts.fetch(ref)
    assert str(folder) == ref.uri
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")} == expected
    assert not (tmp_path / "out").exists(), "publish consumes the folder"


def test_the_manifest_has_files_parents_config_and_versions(
    artifacts: ArtifactStore, store: Store, tmp_path: Path
) -> None:
    publish(artifacts, output(tmp_path), claim(store, KEY))
    manifest = json.loads(store.read_bytes(f"artifacts/ppo/{KEY}/manifest.json") or b"")
    assert [entry["path"] for entry in manifest["files"]] == [
        "empty.txt",
        "policy/config.json",
        "policy/model.safetensors",
    ]
    assert manifest["files"][1]["size"] == 14
    # printf '' | sha256sum
    assert (
        manifest["files"][0]["sha256"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    assert manifest["parents"] == {"sft": {"key": "f" * 16, "digest": "d" * 64}}
    assert manifest["config"] == {"a": 1}
    assert {"python", "torch", "rlhf-pipeline"} <= set(manifest["versions"])
    assert manifest["folder"] == "000001"


def test_the_digest_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    digests = []
    for number, extra in enumerate(["", "", "x"]):
        artifacts = ArtifactStore(Store(tmp_path / f"s{number}"), tmp_path / "cache")
        digests.append(
            publish(artifacts, output(tmp_path, extra=extra), metrics={"kl": float(number)}).digest
        )
    assert digests[0] == digests[1] != digests[2]


def test_a_number_that_is_not_finite_stays_out_of_the_manifest(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    ref = publish(artifacts, output(tmp_path), metrics={"a": float("nan"), "b": float("inf"), "c": 2.0})
    assert artifacts.find("ppo", KEY) == ref
    assert ref.metrics == {"c": 2.0}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def replace_by_link(path: Path) -> None:
    target = path.parents[2] / "x"
    shutil.move(path, target)
    path.symlink_to(target)


FILE_DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped byte": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a link": replace_by_link,
}
"""One of each way to notice it; the whole table is in test_damage."""


@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_every_damage_is_named_and_marked(
    artifacts: ArtifactStore, store: Store, tmp_path: Path, damage: str
) -> None:
    ref = publish(artifacts, output(tmp_path))
    FILE_DAMAGE[damage](Path(ref.uri) / "policy" / "model.safetensors")
    with pytest.raises(CorruptArtifact, match=r"policy/model\.safetensors") as caught:
        artifacts.fetch(ref)
    assert "a run of its configuration makes it again" in str(caught.value)
    assert artifacts.find("ppo", KEY) is None
    assert len([key for key in store.list("artifacts") if "/damaged-" in key]) == 1, "set aside, not deleted"
    again = publish(artifacts, output(tmp_path), claim(store, KEY))
    assert again.digest == ref.digest
    assert artifacts.fetch(again).joinpath("policy", "config.json").read_text() == '{"hidden": 32}'
    assert len([key for key in store.list("artifacts") if "/damaged-" in key]) == 1


def test_artifact_with_a_damaged_manifest_is_made_again(
    artifacts: ArtifactStore, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(artifacts, output(tmp_path))
    store.put_bytes(f"artifacts/ppo/{KEY}/manifest.json", b"<html>503 Slow Down</html>")
    assert artifacts.find("ppo", KEY) is None
    assert "is not a manifest" in caplog.text
    assert publish(artifacts, output(tmp_path)).digest == ref.digest


WRONG_ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "config": lambda body: body.pop("config"),
    "config: null": lambda body: body.update(config=None),
    "config: text": lambda body: body.update(config="a: 1"),
    "metrics": lambda body: body.pop("metrics"),
    "metrics.kl: text": lambda body: body["metrics"].update(kl="1.5"),
    "facts": lambda body: body.update(facts=[]),
    "facts.weights_sha256: number": lambda body: body["facts"].update(weights_sha256=1),
    "parents": lambda body: body.pop("parents"),
    "parents.sft": lambda body: body["parents"].update(sft=None),
    "parents.sft.digest": lambda body: body["parents"]["sft"].pop("digest"),
    "mlflow_run_id": lambda body: body.update(mlflow_run_id=7),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_a_manifest_with_a_wrong_entry_is_damage_for_every_reader(
    artifacts: ArtifactStore, store: Store, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(artifacts, output(tmp_path))
    key = f"artifacts/ppo/{KEY}/manifest.json"
    store.put_bytes(key, forged(WRONG_ENTRIES[name])(store.read_bytes(key) or b"") or b"")
    entry = name.partition(":")[0]
    reader = ArtifactStore(store, tmp_path / "cache", read_only=True)
    assert reader.find("ppo", KEY) is None and f"has a wrong entry {entry}: " in caplog.text
    reads: list[Callable[[], object]] = [
        lambda: reader.fetch(ref),
        lambda: reader.config(ref),
        lambda: reader.parent(ref, "sft"),
        lambda: reader.address(ref, "policy"),
    ]
    for read in reads:
        with pytest.raises(CorruptArtifact, match=f"has a wrong entry {entry}: "):
            read()
    assert artifacts.find("ppo", KEY) is None
    assert publish(artifacts, output(tmp_path)).digest == ref.digest


def test_a_configuration_without_its_sections_is_named(artifacts: ArtifactStore, tmp_path: Path) -> None:
    ref = publish(artifacts, output(tmp_path), config={"data": {}, "model": None})
    with pytest.raises(CorruptArtifact, match="no section `model` in its entry config"):
        artifacts.config(ref)


def test_replacement_of_a_damaged_artifact_is_left_alone(
    artifacts: ArtifactStore, store: ScriptedStore, tmp_path: Path
) -> None:
    damaged = publish(artifacts, output(tmp_path))
    flip(Path(damaged.uri) / "policy" / "model.safetensors")
    replaced: list[ArtifactRef] = []

    def replace() -> None:
        bundles.mark_damaged(store, f"artifacts/ppo/{KEY}", "found by another")
        replaced.append(publish(artifacts, output(tmp_path, extra="whole")))

    # Before this one hashes, another finds the damage first and makes the artifact again.
    store.before("sizes", replace)
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors does not have the sha256"):
        artifacts.fetch(damaged)
    assert artifacts.find("ppo", KEY) == replaced[0]


def test_an_artifact_is_found_by_its_file_unless_it_is_invalid(
    artifacts: ArtifactStore, tmp_path: Path
) -> None:
    folder = output(tmp_path, "a")
    (folder / "match-1.json").write_text("{}")
    ref = publish(artifacts, folder)
    assert artifacts.find_file("ppo", "match-1.json") == ref
    assert artifacts.find_file("ppo", "match-2.json") is None
    assert artifacts.find_file("ppo", "1.json") is None
    assert artifacts.find_file("sft", "match-1.json") is None
    artifacts.invalidate(ref, "It is not true any more.")
    assert artifacts.find_file("ppo", "match-1.json") is None
    publish(artifacts, output(tmp_path, "b"))
    assert artifacts.find_file("ppo", "match-1.json") is None, "only the invalid one has the file"


def test_a_reference_to_content_that_was_replaced_is_refused(
    artifacts: ArtifactStore, store: Store, tmp_path: Path
) -> None:
    ref = publish(artifacts, output(tmp_path))
    store.delete_prefix(f"artifacts/ppo/{KEY}")
    with pytest.raises(CorruptArtifact, match="is gone"):
        artifacts.fetch(ref)
    publish(artifacts, output(tmp_path, extra="other"))
    with pytest.raises(CorruptArtifact, match="not the one this run started with"):
        artifacts.fetch(ref)


def test_second_publisher_gets_the_first_ones_artifact(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (ArtifactStore(store, tmp_path / "cache") for _ in range(2))
    first = publish(one, output(tmp_path, "a"))
    assert publish(two, output(tmp_path, "b")) == first
    assert "other content" not in caplog.text
    assert publish(two, output(tmp_path, "c", extra="different")) == first
    assert "other content" in caplog.text
    assert two.fetch(first).joinpath("policy", "model.safetensors").stat().st_size == 2048


def test_one_attempt_publishing_twice_does_not_touch_what_it_published(
    artifacts: ArtifactStore, store: Store, tmp_path: Path
) -> None:
    fence = claim(store, KEY)
    first = publish(artifacts, output(tmp_path, "a"), fence)
    assert publish(artifacts, output(tmp_path, "b", extra="different"), fence) == first
    assert ArtifactStore(store, tmp_path / "cache").fetch(first) == Path(first.uri)


def test_one_of_two_concurrent_publishers_wins(store: ScriptedStore, tmp_path: Path) -> None:
    slow, quick = (ArtifactStore(store, tmp_path / "cache") for _ in range(2))
    # The other one publishes after this one has stored its files and just before its manifest.
    store.before("put_if_absent", lambda: publish(quick, output(tmp_path, "b", extra="quick")))
    ref = publish(slow, output(tmp_path, "a", extra="slow"))
    assert (slow.fetch(ref) / "policy" / "model.safetensors").read_bytes().endswith(b"quick")
    folders = {key.split("/")[3] for key in store.list(f"artifacts/ppo/{KEY}")}
    assert len(folders) == 2, "the manifest and the winner's folder"


def test_a_superseded_attempt_cannot_publish(artifacts: ArtifactStore, store: Store, tmp_path: Path) -> None:
    old = claim(store, KEY)
    new = claim(store, KEY)
    with pytest.raises(Superseded, match="attempt 2"):
        publish(artifacts, output(tmp_path, "a"), old)
    assert artifacts.find("ppo", KEY) is None
    assert publish(artifacts, output(tmp_path, "b"), new) == artifacts.find("ppo", KEY)


def test_an_attempt_superseded_during_the_upload_publishes_nothing_and_changes_nothing(
    artifacts: ArtifactStore, store: ScriptedStore, tmp_path: Path
) -> None:
    old = claim(store, KEY)
    store.before(
        "put_file", lambda: publish(artifacts, output(tmp_path, "b", extra="new"), claim(store, KEY))
    )
    with pytest.raises(Superseded):
        publish(artifacts, output(tmp_path, "a", extra="old"), old)
    ref = artifacts.find("ppo", KEY)
    assert ref is not None
    assert (artifacts.fetch(ref) / "policy" / "model.safetensors").read_bytes().endswith(b"new")


def test_failing_store_leaves_nothing_visible(
    artifacts: ArtifactStore, store: ScriptedStore, tmp_path: Path
) -> None:
    store.before("put_file", StoreError("503"), call=3)
    folder = output(tmp_path)
    with pytest.raises(StoreError, match="503"):
        publish(artifacts, folder, claim(store, KEY))
    assert artifacts.find("ppo", KEY) is None
    ref = publish(artifacts, folder, claim(store, KEY))
    assert artifacts.find("ppo", KEY) == ref
    assert {key.split("/")[3] for key in store.list(f"artifacts/ppo/{KEY}")} == {"000002", "manifest.json"}


@pytest.mark.parametrize("name", ["run.py", "weights.pt", "policy/pytorch_model.BIN", "x.pkl", "lib.so"])
def test_a_file_that_may_run_code_is_refused_by_name(
    artifacts: ArtifactStore, tmp_path: Path, name: str
) -> None:
    folder = output(tmp_path)
    (folder / name).write_bytes(b"x")
    with pytest.raises(InputError, match="may run code"):
        publish(artifacts, folder)
    assert artifacts.find("ppo", KEY) is None


def test_a_link_in_the_folder_is_refused(artifacts: ArtifactStore, tmp_path: Path) -> None:
    folder = output(tmp_path)
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="symbolic link"):
        publish(artifacts, folder)


def test_the_digest_of_weights_covers_every_shard(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    # printf 1 | sha256sum
    assert weights_sha256(tmp_path) == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    (tmp_path / "b.safetensors").write_bytes(b"2")
    two = weights_sha256(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"3")
    assert len({two, weights_sha256(tmp_path), "6b86"}) == 3


def test_files_of_an_upload_are_no_artifact_and_no_reason_for_a_warning(
    artifacts: ArtifactStore, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.put_bytes(f"artifacts/ppo/{KEY}/000001/policy/model.safetensors", b"weights")
    assert artifacts.find("ppo", KEY) is None
    assert not caplog.records
