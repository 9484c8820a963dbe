"""Uploads to a bucket: complete on the local disk first, then in the background of the training.

- save returns before its upload has ended, and waits for the previous one; errors are raised by the next save
- the next attempt uploads what a failed, killed or superseded attempt left, and continues from it
- an upload that is repeated after a lost answer destroys nothing; damage in the outbox is not uploaded
- an unfinished upload is reported
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from rlhf_core.errors import StoreError, Superseded
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from tests.support.checkpoints import keep
from tests.support.claims import claim
from tests.support.scripted_store import ScriptedStore


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    """A folder that behaves like a bucket: nothing of it is on this machine."""
    return ScriptedStore(tmp_path / "bucket", remote=True)


@pytest.fixture
def outbox(store: Store, tmp_path: Path) -> Outbox:
    return Outbox(store, tmp_path / "outbox")


def refuse_files(store: ScriptedStore) -> None:
    store.before("put_file", StoreError("The store could not write it: access denied."), lasting=True)


def saver(store: Store, outbox: Outbox, tmp_path: Path, fence: Fence | None = None) -> CheckpointStore:
    return CheckpointStore(store, "k", tmp_path / "work", keep(2), fence or claim(store, "k"), outbox=outbox)


def state(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f"state{text}"
    folder.mkdir()
    (folder / "rank0.safetensors").write_text(f"state {text}")
    return folder


def content(found: tuple[int, Path] | None) -> tuple[int, str]:
    assert found is not None
    return found[0], (found[1] / "rank0.safetensors").read_text()


def waiting(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "outbox").rglob("*") if path.is_file()]


def test_save_waits_only_for_the_previous_upload(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path
) -> None:
    go = threading.Event()
    store.before("put_file", lambda: go.wait(10), lasting=True)
    first = saver(store, outbox, tmp_path)
    first.save(1, state(tmp_path, "1"))
    assert not (tmp_path / "state1").exists(), "the training may go on and write the next one"
    assert not store.exists("checkpoints/k/step-00000001/manifest.json")
    second = threading.Thread(target=lambda: first.save(2, state(tmp_path, "2")))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "at most one upload at a time"
    go.set()
    second.join()
    first.finish()
    assert content(saver(store, outbox, tmp_path).latest()) == (2, "state 2")
    assert store.exists("checkpoints/k/step-00000001/manifest.json")
    assert waiting(tmp_path) == []


def test_failed_upload_is_raised_by_the_next_save(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path
) -> None:
    first = saver(store, outbox, tmp_path)
    first.save(1, state(tmp_path, "1"))
    first.finish()
    refuse_files(store)
    first.save(2, state(tmp_path, "2"))
    with pytest.raises(
        StoreError, match=r"access denied\. It is kept in /.*outbox.*; the same command uploads it"
    ):
        first.save(3, state(tmp_path, "3"))
    store.reset()
    second = saver(store, outbox, tmp_path)
    assert content(second.latest()) == (
        3,
        "state 3",
    ), "what could not be handed over any more is kept as well"
    assert [int(key[-22:-14]) for key in store.list("checkpoints/k") if key.endswith("manifest.json")] == [
        2,
        3,
    ]
    assert waiting(tmp_path) == []


def test_unfinished_upload_is_reported_and_finished_later(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    store.before("put_file", lambda: go.wait(10), lasting=True)
    first = saver(store, outbox, tmp_path)
    first.save(4, state(tmp_path, "4"))
    first.finish(0.05)
    assert (
        "The upload of the checkpoint of step 4 is unfinished; the same command finishes it." in caplog.text
    )
    store.reset()
    second = saver(store, outbox, tmp_path)
    with caplog.at_level(logging.INFO):
        assert content(second.latest()) == (4, "state 4")
    assert "uploading the checkpoint of step 4" in caplog.text
    go.set()  # the first one wakes up: it is superseded, and its bundle is committed already
    assert content(second.latest()) == (4, "state 4")


def test_clearing_waits_for_the_last_upload_and_leaves_nothing(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path
) -> None:
    store.before("put_file", lambda: time.sleep(0.1), lasting=True)
    first = saver(store, outbox, tmp_path)
    first.save(1, state(tmp_path, "1"))
    first.clear()
    assert store.list("checkpoints/k") == ["checkpoints/k/attempts/000001.json"]
    refuse_files(store)
    first.save(2, state(tmp_path, "2"))
    first.clear()
    assert waiting(tmp_path) == []


def test_pending_uploads_can_be_discarded(store: Store, outbox: Outbox, tmp_path: Path) -> None:
    for root in ("artifacts/sft/k", "artifacts/sft/k2", "artifacts/reward/k"):
        bundle = state(tmp_path, root.replace("/", "-"))
        outbox.add(bundles.Manifest(f"{root}/1", "f", bundles.hash_folder(bundle), {}), bundle)
    outbox.discard_all("artifacts/sft/k")
    assert outbox.pending("artifacts") == ["artifacts/reward/k/1", "artifacts/sft/k2/1"]
    assert not [path for path in waiting(tmp_path) if "artifacts/sft/k/" in path.as_posix()]


def test_pending_artifact_is_uploaded_and_not_made_again(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path
) -> None:
    artifacts, fence = ArtifactStore(store, tmp_path / "cache", outbox), claim(store, "k")
    assert artifacts.upload_pending("ppo", "k", fence) is None
    refuse_files(store)
    with pytest.raises(StoreError, match=r"the same command uploads it"):
        artifacts.publish("ppo", "k", state(tmp_path, "1"), Provenance(metrics={"kl": 1.5}), fence=fence)
    assert artifacts.find("ppo", "k") is None
    store.reset()
    ref = artifacts.upload_pending("ppo", "k", claim(store, "k"))
    assert ref is not None and ref == artifacts.find("ppo", "k") and ref.metrics == {"kl": 1.5}
    assert (artifacts.fetch(ref) / "rank0.safetensors").read_text() == "state 1"
    assert waiting(tmp_path) == []


def test_a_delivery_repeated_after_a_kill_destroys_nothing(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path
) -> None:
    fence = claim(store, "k")
    artifacts = ArtifactStore(store, tmp_path / "cache", outbox)
    pending, copy = tmp_path / "outbox", tmp_path / "copy"
    store.before("put_if_absent", lambda: shutil.copytree(pending, copy), key="manifest.json")
    ref = artifacts.publish("ppo", "k", state(tmp_path, "1"), Provenance(), fence=fence)
    assert waiting(tmp_path) == []
    # As if it had been killed after the commit and before the outbox was emptied.
    shutil.copytree(copy, pending, dirs_exist_ok=True)
    assert waiting(tmp_path) != []
    assert artifacts.upload_pending("ppo", "k", claim(store, "k")) == ref
    assert (
        ArtifactStore(store, tmp_path / "other").fetch(ref) / "rank0.safetensors"
    ).read_text() == "state 1"
    assert waiting(tmp_path) == []


def test_damage_in_the_outbox_is_not_uploaded(
    store: ScriptedStore, outbox: Outbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = saver(store, outbox, tmp_path)
    first.save(1, state(tmp_path, "1"))
    first.finish()
    refuse_files(store)
    first.save(2, state(tmp_path, "2"))
    first.finish()
    [file] = [path for path in waiting(tmp_path) if path.name == "rank0.safetensors"]
    file.write_text("state X")
    store.reset()
    assert content(saver(store, outbox, tmp_path).latest()) == (1, "state 1")
    assert "cannot be uploaded and is marked as damaged" in caplog.text
    assert [path.name for path in waiting(tmp_path) if path.name.startswith("damaged-")] != []


def test_superseded_attempt_uploads_nothing(store: ScriptedStore, outbox: Outbox, tmp_path: Path) -> None:
    old = saver(store, outbox, tmp_path)
    refuse_files(store)
    old.save(1, state(tmp_path, "1"))
    old.finish()
    store.reset()
    new_fence = claim(store, "k")
    with pytest.raises(Superseded):
        old.latest()
    assert content(saver(store, outbox, tmp_path, new_fence).latest()) == (1, "state 1")
