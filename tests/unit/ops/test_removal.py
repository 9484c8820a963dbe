"""Deletion from a store: no artifact is ever visible without all its files.

- a failure before any request, and a kill before any deletion, leave artifacts that are whole or not visible;
  the same deletion again, or that of files without a manifest, finishes it
- two processes that delete at the same time, and a stage that is made again during the deletion
- an artifact that has changed, was claimed, or is being made is not touched; damaged files stay
- the store's own claims are kept, so that no number is used twice
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlhf_core.errors import StoreError
from rlhf_core.ops.prune import remove
from rlhf_core.storage.fencing import Claim, acquire, observe, renewed
from rlhf_core.storage.inventory import (
    ArtifactName,
    Inventory,
    StoredArtifact,
    read_inventory,
)
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from tests.support.champions import forked
from tests.support.claims import claim
from tests.support.old_runs import OldRuns, key_of, names
from tests.support.scripted_store import ScriptedStore

SFT = ArtifactName("sft", key_of("old", "sft"))
HOME = Home.of("unused")


@pytest.fixture(params=[False, True], ids=["folder", "bucket"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> ScriptedStore:
    return ScriptedStore(tmp_path / "store", remote=request.param)


@pytest.fixture
def runs(store: ScriptedStore, tmp_path: Path) -> OldRuns:
    return OldRuns(store, tmp_path / "work")


def found(store: Store) -> tuple[Inventory, dict[str, Claim]]:
    inventory = read_inventory(store)
    return inventory, observe(store, inventory.keys)


def the_artifact(store: Store, name: ArtifactName = SFT) -> tuple[StoredArtifact, Claim]:
    inventory, claims = found(store)
    [artifact] = [each for each in inventory.artifacts if each.name == name]
    return artifact, claims[name.key]


def remove_all(store: Store) -> None:
    """Delete every SFT model and its leftovers, as often as something can be deleted."""
    inventory, claims = found(store)
    for artifact in inventory.artifacts:
        if artifact.name.stage == "sft":
            remove(store, artifact, claims[artifact.name.key], HOME)
    inventory, claims = found(store)
    for leftover in inventory.leftovers:
        remove(store, leftover, claims[leftover.name.key], HOME)


def count_calls(tmp_path: Path, remote: bool) -> int:
    """Return the number of operations of one deletion."""
    store = ScriptedStore(tmp_path / "counted", remote=remote)
    OldRuns(store, tmp_path / "counted-work").publish("old", "sft")
    artifact, observed = the_artifact(store)
    store.calls.clear()
    assert remove(store, artifact, observed, HOME)
    return len(store.calls)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing is written after it."""


@pytest.mark.parametrize("remote", [False, True], ids=["folder", "bucket"])
def test_a_kill_before_any_operation_leaves_no_artifact_without_files(
    tmp_path: Path, remote: bool, sampled: Callable[[Sequence[int], int], list[int]]
) -> None:
    count = count_calls(tmp_path, remote)
    assert count > 8
    for number in sampled(range(1, count + 1), 4):
        # A store of its own: each look verifies all that there is.
        store = ScriptedStore(tmp_path / f"store {number}", remote=remote)
        runs = OldRuns(store, tmp_path / f"work {number}")
        made = runs.run("old")
        artifact, observed = the_artifact(store)
        is_dead = _kill_at(store, number)
        with pytest.raises(Killed):
            remove(store, artifact, observed, HOME)
        assert is_dead()
        store.reset()
        # Every artifact that has a manifest is fetched and verified.
        assert names(made) - runs.present() in (set(), {SFT}), number
        remove_all(store)
        assert SFT not in runs.present()
        assert not store.list(f"artifacts/sft/{SFT.key}"), number
        assert names(made) - runs.present() == {SFT}


def _kill_at(store: ScriptedStore, number: int) -> Callable[[], bool]:
    """Have the store raise `Killed` at the operation `number` from now, and at all later ones."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise Killed

    for operation in ("put_bytes", "put_if_absent", "read_bytes", "size", "sizes", "folders", "delete"):
        store.before(operation, count, lasting=True)
    return lambda: calls >= number


@pytest.mark.parametrize("deletion", [1, 2, 3, 4])
def test_a_killed_process_does_not_block_the_next_one(tmp_path: Path, deletion: int) -> None:
    store = Store(tmp_path / "store")
    runs = OldRuns(store, tmp_path / "work")
    runs.publish("old", "sft")
    dying = ScriptedStore(tmp_path / "store")
    artifact, seen = the_artifact(dying)
    dying.before("delete", lambda: os.kill(os.getpid(), signal.SIGKILL), call=deletion)
    child = forked(lambda: remove(dying, artifact, seen, HOME))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert runs.present() == ({SFT} if deletion == 1 else set())
    [observed] = found(store)[1].values()
    assert not observed.held and observed.attempt == 2
    remove_all(store)
    assert not store.list("artifacts")


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_store_that_fails_loses_nothing(store: ScriptedStore, runs: OldRuns, call: int) -> None:
    runs.publish("old", "sft")
    artifact, observed = the_artifact(store)
    store.before("delete", StoreError("503"), call=call)
    with pytest.raises(StoreError, match="503"):
        remove(store, artifact, observed, HOME)
    assert runs.present() == ({SFT} if call == 1 else set())
    assert not found(store)[1][SFT.key].held, "the claim is released"
    remove_all(store)
    assert not store.list("artifacts")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_second_deletion_at_the_same_time_does_nothing(
    store: ScriptedStore, runs: OldRuns, call: int
) -> None:
    runs.publish("old", "sft")
    artifact, observed = the_artifact(store)
    second: list[bool] = []
    store.before("delete", lambda: second.append(remove(store, artifact, observed, HOME)), call=call)
    assert remove(store, artifact, observed, HOME)
    assert second == [False]
    assert not store.list("artifacts")


@pytest.mark.parametrize("call", [2, 3, 4])
def test_the_stage_is_made_again_during_the_deletion(store: ScriptedStore, runs: OldRuns, call: int) -> None:
    """By an attempt that did not wait for the claim, as after a suspension of this process."""
    first = runs.publish("old", "sft")
    artifact, observed = the_artifact(store)
    store.before("delete", lambda: runs.publish("old", "sft"), call=call)
    remove(store, artifact, observed, HOME)
    again, _ = the_artifact(store)
    assert again.folders[0] == "000003" and again.digest == first.digest
    assert runs.present() == {SFT}


def test_an_attempt_that_uploads_from_its_outbox_stops_the_deletion(
    store: ScriptedStore, runs: OldRuns, tmp_path: Path
) -> None:
    """It uses the folder that its bundle had before."""
    runs.publish("old", "sft")
    artifact, observed = the_artifact(store)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "store" / "artifacts", kept)

    def upload() -> None:
        claim(store, SFT.key)
        shutil.copytree(kept, tmp_path / "store" / "artifacts", dirs_exist_ok=True)

    store.before("size", upload, key="/000003.json", call=3)
    remove(store, artifact, observed, HOME)
    assert runs.present() == {SFT}


def test_an_artifact_that_was_replaced_is_not_deleted(store: ScriptedStore, runs: OldRuns) -> None:
    ref = runs.publish("old", "sft")
    artifact, _ = the_artifact(store)
    runs.artifacts.invalidate(ref, "it is not true any more")
    runs.publish("old", "sft")
    _, observed = the_artifact(store)
    assert not remove(store, artifact, observed, HOME)
    assert runs.present() == {SFT}


def test_an_attempt_that_has_begun_since_then_is_respected(store: ScriptedStore, runs: OldRuns) -> None:
    runs.publish("old", "sft")
    artifact, observed = the_artifact(store)
    with renewed(acquire(store, SFT.key, "sft", inputs=["data/x"])):
        assert not remove(store, artifact, observed, HOME)
    observed = observe(store, [SFT.key])[SFT.key]
    assert (observed.attempt, observed.inputs) == (2, frozenset(["data/x"]))
    assert runs.present() == {SFT}


def test_an_upload_in_progress_is_no_leftover_and_damaged_files_stay(
    store: ScriptedStore, runs: OldRuns
) -> None:
    ref = runs.publish("old", "sft")
    runs.artifacts.invalidate(ref, "it is not true any more")
    store.put_bytes(f"artifacts/ppo/{'1' * 16}/000001/policy/a.safetensors", b"x")
    [ppo, sft] = read_inventory(store).leftovers
    assert (ppo.is_damaged, sft.is_damaged) == (False, True)
    assert ppo.folders == ("000001",) and ppo.size == 1
    store.put_bytes(f"artifacts/ppo/{'1' * 16}/manifest.json", b"{}")
    assert not remove(store, ppo, Claim(0, False, math.inf, frozenset()), HOME), "it has a manifest now"


def test_claims_stay_and_later_attempts_have_other_numbers(store: ScriptedStore, runs: OldRuns) -> None:
    runs.publish("old", "sft")
    before = observe(store, [SFT.key])[SFT.key]
    remove_all(store)
    after = observe(store, [SFT.key])[SFT.key]
    # The start is that of the last stage: a deletion is no sign that the stage goes on.
    assert (after.attempt, after.begun, after.held) == (2, before.begun, False)
    assert acquire(store, SFT.key, "sft").attempt == 3


def test_the_inventory_has_the_lineage_and_changes_nothing(
    store: ScriptedStore, runs: OldRuns, tmp_path: Path
) -> None:
    first = runs.run("first")
    base = f"{store.url}/artifacts/ppo/{first['ppo'].key}/000001/policy"
    second = runs.run("second", base=base)
    copy = tmp_path / "cache" / f"artifacts-reward-{first['reward'].key}-{'0' * 12}" / "model"
    third = runs.run("third", base=str(copy))
    store.calls.clear()
    by_name = {each.name: each for each in read_inventory(store).artifacts}
    assert {call.operation for call in store.calls} == {"folders", "read_bytes", "sizes"}
    [sft], [of_third] = names(second, "sft"), names(third, "sft")
    assert by_name[sft].descends_from == names(second, "data") | names(first, "ppo")
    assert by_name[of_third].descends_from == names(third, "data") | names(first, "reward")
    [register] = names(first, "register")
    assert by_name[register].registered == ("policy", "first")
    assert by_name[register].descends_from == names(first) - {register}
    [ppo] = names(first, "ppo")
    assert by_name[ppo].has_weights and by_name[ppo].size > 0 and not by_name[register].has_weights
    # A request for each artifact and each key, and some for the folders.
    assert len(store.calls) < 2 * 3 * len(first) + 12


def test_what_cannot_be_read_is_kept(store: ScriptedStore, runs: OldRuns, tmp_path: Path) -> None:
    runs.publish("old", "sft")
    manifest = tmp_path / "store" / "artifacts" / "sft" / SFT.key / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "created": "1999-01-01"}))
    inventory, _ = found(store)
    assert not inventory.artifacts and inventory.leftovers[0].is_damaged
    (tmp_path / "store" / "artifacts" / "notes of people").mkdir()
    (tmp_path / "store" / "artifacts" / "sft" / "copy of it").mkdir()
    assert read_inventory(store) == inventory
    assert not list(manifest.parent.glob("damaged-*")), "nothing is marked"


def test_checkpoints_have_the_time_of_the_last_save(store: ScriptedStore) -> None:
    key = "2" * 16
    for step in (4, 8):
        store.put_bytes(f"checkpoints/{key}/step-{step:08d}/x/loop.json", b"{}")
    [unfinished] = read_inventory(store).checkpoints
    assert (unfinished.key, unfinished.steps, unfinished.saved) == (key, (4, 8), 0.0)
    claim(store, key)
    assert read_inventory(store).checkpoints == (unfinished,), "claims are no checkpoints"
    store.put_bytes(f"checkpoints/{key}/step-00000008/manifest.json", b"{}")
    [unfinished] = read_inventory(store).checkpoints
    assert unfinished.saved == math.inf, "the manifest cannot be read"
