"""Checkpoints: the newest intact one is used, after damage the one before, and only the last attempt may
commit.

- save and latest; the newest are kept; leftovers are ignored
- an attempt that finds none, although it is not the first, says so
- damage falls back to the checkpoint before, and never to a silent fresh start
- fencing of saves, numbers of attempts, files that a store lost
- clearing, also if it is interrupted
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rlhf_core.errors import ConfigError, CorruptArtifact, StoreError, Superseded
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from tests.support.checkpoints import keep
from tests.support.claims import claim
from tests.support.corruption import forged, set_versions
from tests.support.scripted_store import ScriptedStore

KEY = "stage0"


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(tmp_path / "store")


def checkpoints(store: Store, tmp_path: Path, newest: int = 2) -> CheckpointStore:
    return CheckpointStore(store, KEY, tmp_path / "work", keep(newest), claim(store, KEY))


def state(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f"state-{text}"
    (folder / "rank0").mkdir(parents=True)
    (folder / "rank0" / "optimizer.bin").write_text(f"optimizer {text}")
    (folder / "rank1.bin").write_text(f"rank one  {text}")
    return folder


def files(store: Store, step: int) -> dict[str, Path]:
    root = Path(store.uri(f"checkpoints/{KEY}/step-{step:08d}"))
    return {path.name: path for path in root.rglob("*") if path.is_file()}


def steps(store: Store) -> list[int]:
    names = {key.split("/")[2] for key in store.list(f"checkpoints/{KEY}")}
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


def test_the_newest_checkpoint_comes_back_bit_by_bit(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path)
    assert saver.latest() is None
    saver.save(9, state(tmp_path, "9"))
    saver.save(10, state(tmp_path, "10"))
    found = checkpoints(store, tmp_path).latest()
    assert found is not None and found[0] == 10
    assert (found[1] / "rank0" / "optimizer.bin").read_text() == "optimizer 10"
    assert not (tmp_path / "state-10").exists(), "save consumes the folder"


def test_an_attempt_after_one_without_a_checkpoint_says_that_it_starts_at_step_1(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlhf_core")  # also after a test that has set up the log of a command
    assert checkpoints(store, tmp_path).latest() is None
    assert not caplog.messages, "the first attempt has nothing to continue from"
    saver = checkpoints(store, tmp_path)
    assert saver.latest() is None
    assert caplog.messages == ["there is no checkpoint yet: attempt 2 starts at step 1"]
    saver.save(9, state(tmp_path, "9"))
    assert checkpoints(store, tmp_path).latest() is not None
    assert len(caplog.messages) == 1


def test_seconds_exclude_work_after_the_checkpoint(store: Store, tmp_path: Path) -> None:
    now = 100.0

    def opened() -> CheckpointStore:
        return CheckpointStore(store, KEY, tmp_path / "work", keep(2), claim(store, KEY), clock=lambda: now)

    first = opened()
    now += 30
    first.save(1, state(tmp_path, "1"))
    now += 500  # lost
    second = opened()
    assert second.latest() is not None
    now += 12
    assert second.seconds == pytest.approx(42)


def test_a_checkpoint_of_other_code_is_refused_unless_that_is_allowed(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints(store, tmp_path).save(1, state(tmp_path, "1"))
    set_versions(store, KEY, 1, mlflow="99.0")
    assert checkpoints(store, tmp_path).latest() is not None, "it decides about no bit"
    set_versions(store, KEY, 1, mlflow=version("mlflow"), torch="99.0")
    with pytest.raises(
        ConfigError,
        match=rf"store\.allow_other_code: .* step 1 .*\(torch 99\.0 -> {re.escape(version('torch'))}\)",
    ):
        checkpoints(store, tmp_path).latest()
    allowed = CheckpointStore(
        store, KEY, tmp_path / "work", keep(2, allow_other_code=True), claim(store, KEY)
    )
    assert allowed.latest() is not None
    assert "was made with other versions or threads (torch" in caplog.text


def test_checkpoint_of_other_rounding_is_used_with_a_warning(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(size: str) -> CheckpointStore:
        settings = {"ppo.micro_batch_tokens": size}
        return CheckpointStore(store, KEY, tmp_path / "work", keep(2), claim(store, KEY), settings=settings)

    opened("4096").save(1, state(tmp_path, "1"))
    assert opened("4096").latest() is not None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert opened("2048").latest() is not None
    assert "made with other settings (ppo.micro_batch_tokens 4096 -> 2048)" in caplog.text


def test_checkpoint_of_other_threads_is_used_with_a_warning(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    checkpoints(store, tmp_path).save(1, state(tmp_path, "1"))
    assert checkpoints(store, tmp_path).latest() is not None
    assert "other versions" not in caplog.text
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert checkpoints(store, tmp_path).latest() is not None
    assert "step 1 was made with other versions or threads (threads 2 -> 4)" in caplog.text


def test_only_the_newest_checkpoints_are_kept(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path, newest=2)
    for step in range(5):
        saver.save(step, state(tmp_path, str(step)))
    assert steps(store) == [3, 4]


def test_old_ones_go_only_after_the_new_one_is_committed(store: ScriptedStore, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path, newest=1)
    saver.save(1, state(tmp_path, "1"))
    store.before("put_if_absent", StoreError("no space left"), key="manifest.json")
    with pytest.raises(StoreError, match="no space"):
        saver.save(2, state(tmp_path, "2"))
    found = saver.latest()
    assert found is not None and found[0] == 1


class LossyStore(Store):
    """A store that does not keep the file of one rank."""

    @override
    def put_file(self, local: Path, key: str, *, link: bool = False, sha256: str | None = None) -> None:
        if not key.endswith("rank1.bin"):
            super().put_file(local, key, link=link, sha256=sha256)


def test_lost_file_is_noticed_before_the_manifest(store: Store, tmp_path: Path) -> None:
    checkpoints(store, tmp_path).save(1, state(tmp_path, "1"))
    saver = checkpoints(LossyStore(tmp_path / "store"), tmp_path)
    with pytest.raises(
        StoreError, match=r"did not keep .*rank1\.bin, which is missing; the same command tries again"
    ):
        saver.save(2, state(tmp_path, "2"))
    assert steps(store) == [1]


def test_files_without_a_manifest_do_not_exist_and_go_later(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path, newest=1)
    saver.save(1, state(tmp_path, "1"))
    store.put_bytes(f"checkpoints/{KEY}/step-00000002/000007-abcdef/rank1.bin", b"half")
    found = saver.latest()
    assert found is not None and found[0] == 1
    saver.save(3, state(tmp_path, "3"))
    assert steps(store) == [3]


def test_a_step_saved_twice_keeps_the_first(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpoints(store, tmp_path)
    saver.save(1, state(tmp_path, "first"))
    saver.save(1, state(tmp_path, "second"))
    found = saver.latest()
    assert found is not None and (found[1] / "rank1.bin").read_text() == "rank one  first"
    assert "existing one is kept" in caplog.text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped byte": ("rank1.bin", flip),
    "missing": ("rank1.bin", Path.unlink),
    "empty manifest": ("manifest.json", lambda path: path.write_bytes(b"")),
}
"""One of each way to notice it; the whole table is in test_damage."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_marked_and_the_one_before_used(
    store: Store, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpoints(store, tmp_path)
    saver.save(1, state(tmp_path, "1"))
    saver.save(2, state(tmp_path, "2"))
    name, mutate = DAMAGE[damage]
    mutate(files(store, 2)[name])
    resumed = checkpoints(store, tmp_path)
    with caplog.at_level(logging.ERROR):
        found = resumed.latest()
    assert found is not None and found[0] == 1
    assert (found[1] / "rank1.bin").read_text() == "rank one  1"
    assert "step 2 is damaged" in caplog.text
    assert any(name.startswith("damaged-") for name in files(store, 2)), "set aside, not deleted"

    resumed.save(2, state(tmp_path, "2b"))
    again = resumed.latest()
    assert again is not None and again[0] == 2
    assert (again[1] / "rank1.bin").read_text() == "rank one  2b"


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": None}, {"seconds": "x"},
        {"settings": "x"}, {"made_with": ["python"]}, {"step": "2"},
    ],
)  # fmt: skip
def test_a_checkpoint_with_a_wrong_entry_in_its_manifest_is_damaged(
    store: Store, tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    saver = CheckpointStore(store, KEY, tmp_path / "work", keep(2), claim(store, KEY))
    for step in (1, 2):
        saver.save(step, state(tmp_path, str(step)))
    key = f"checkpoints/{KEY}/step-00000002/manifest.json"
    raw = store.read_bytes(key) or b""
    altered = forged(lambda manifest: manifest.update(change))(raw) or b""
    store.put_bytes(key, altered)
    found = saver.latest()
    assert found is not None and found[0] == 1
    assert f"has a wrong entry {next(iter(change))}" in caplog.text


def damage_all(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path)
    for step in (1, 2):
        saver.save(step, state(tmp_path, str(step)))
        flip(files(store, step)["rank1.bin"])


def test_only_damaged_checkpoints_need_allow_fresh_start(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage_all(store, tmp_path)
    for _ in range(2):
        with pytest.raises(
            CorruptArtifact, match=r"No intact checkpoint is left.*store\.allow_fresh_start=true"
        ):
            checkpoints(store, tmp_path).latest()
    allowed = CheckpointStore(
        store, KEY, tmp_path / "work", keep(2, allow_fresh_start=True), claim(store, KEY)
    )
    assert allowed.latest() is None
    assert "the stage starts from its beginning" in caplog.text
    allowed.save(1, state(tmp_path, "fresh"))
    found = checkpoints(store, tmp_path).latest()
    assert found is not None and (found[1] / "rank1.bin").read_text() == "rank one  fresh"


def test_damaged_first_checkpoint_is_no_silent_fresh_start(store: Store, tmp_path: Path) -> None:
    checkpoints(store, tmp_path).save(1, state(tmp_path, "1"))
    store.delete([f"checkpoints/{KEY}/newest.json"])
    flip(files(store, 1)["rank1.bin"])
    for _ in range(2):
        with pytest.raises(CorruptArtifact, match="No intact checkpoint is left"):
            checkpoints(store, tmp_path).latest()


def test_missing_manifest_falls_back_to_the_one_before(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = checkpoints(store, tmp_path)
    for step in (1, 2):
        saver.save(step, state(tmp_path, str(step)))
    files(store, 2)["manifest.json"].unlink()
    found = saver.latest()
    assert found is not None and found[0] == 1
    assert "step 2" in caplog.text and "is gone: it has no manifest" in caplog.text
    files(store, 1)["manifest.json"].unlink()
    with pytest.raises(CorruptArtifact, match="No intact checkpoint is left"):
        saver.latest()


def test_damaged_checkpoints_survive_pruning_and_clearing(store: Store, tmp_path: Path) -> None:
    saver = CheckpointStore(store, KEY, tmp_path / "work", keep(1, allow_fresh_start=True))
    saver.save(1, state(tmp_path, "1"))
    flip(files(store, 1)["rank1.bin"])
    assert saver.latest() is None
    saver.save(2, state(tmp_path, "2"))
    saver.save(3, state(tmp_path, "3"))
    saver.clear()
    assert set(files(store, 1)) >= {"rank1.bin", "optimizer.bin"}
    record = next(path for name, path in files(store, 1).items() if name.startswith("damaged-"))
    assert "rank1.bin" in json.loads(record.read_text())["reason"]
    assert files(store, 2) == files(store, 3) == {}
    assert saver.latest() is None


def test_files_of_an_unreadable_manifest_stay(store: Store, tmp_path: Path) -> None:
    saver = CheckpointStore(store, KEY, tmp_path / "work", keep(1, allow_fresh_start=True))
    saver.save(1, state(tmp_path, "1"))
    files(store, 1)["manifest.json"].write_bytes(b"")
    assert saver.latest() is None
    saver.clear()
    assert set(files(store, 1)) >= {"rank1.bin", "optimizer.bin"}


def test_scripts_in_a_checkpoint_are_not_stored(store: Store, tmp_path: Path) -> None:
    folder = state(tmp_path, "1")
    (folder / "zero_to_fp32.py").write_text("print()")
    checkpoints(store, tmp_path).save(1, folder)
    assert not [key for key in store.list("checkpoints") if key.endswith(".py")]


def test_attempts_are_numbered_and_only_the_last_may_commit(store: Store, tmp_path: Path) -> None:
    first = claim(store, KEY)
    first.check()
    second = claim(store, KEY)
    assert (first.attempt, second.attempt) == (1, 2)
    second.check()
    with pytest.raises(
        Superseded, match=r"attempt 2 \(process \d+ of this machine, running since .+\) has taken over"
    ):
        first.check()
    claim(store, "another stage")
    second.check()


def test_racing_claims_get_different_numbers(store: Store) -> None:
    attempts: list[int] = []
    threads = [threading.Thread(target=lambda: attempts.append(claim(store, KEY).attempt)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(attempts) == list(range(1, 9))


def test_a_superseded_attempt_cannot_save_and_harms_nothing(store: Store, tmp_path: Path) -> None:
    old = checkpoints(store, tmp_path)
    old.save(1, state(tmp_path, "1"))
    new = checkpoints(store, tmp_path)
    with pytest.raises(Superseded):
        old.save(2, state(tmp_path, "stale"))
    found = new.latest()
    assert found is not None and found[0] == 1


def test_superseded_save_cannot_change_the_successors_checkpoint(
    store: ScriptedStore, tmp_path: Path
) -> None:
    old = checkpoints(store, tmp_path)
    store.before("put_file", lambda: checkpoints(store, tmp_path).save(1, state(tmp_path, "new")))
    with pytest.raises(Superseded):
        old.save(1, state(tmp_path, "old"))
    found = checkpoints(store, tmp_path).latest()
    assert found is not None and (found[1] / "rank1.bin").read_text() == "rank one  new"


def test_clearing_keeps_the_attempts(store: Store, tmp_path: Path) -> None:
    saver = checkpoints(store, tmp_path)
    saver.save(1, state(tmp_path, "1"))
    saver.clear()
    assert store.list(f"checkpoints/{KEY}") == [f"checkpoints/{KEY}/attempts/000001.json"]
    assert claim(store, KEY).attempt == 2


DELETIONS = 1 + 2 * 3
"""The name of the newest, and of each of two checkpoints its manifest and two files."""


@pytest.mark.parametrize("deletions", range(DELETIONS + 1))
def test_interrupted_clear_leaves_no_damage(
    store: ScriptedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, deletions: int
) -> None:
    saver = checkpoints(store, tmp_path)
    for step in (1, 2):
        saver.save(step, state(tmp_path, str(step)))
    # They are deleted one by one, in the order of their names: of a checkpoint, that would have the manifest
    # last.
    store.before("delete", StoreError("killed"), call=deletions + 1)
    with nullcontext() if deletions == DELETIONS else pytest.raises(StoreError):
        saver.clear()
    store.reset()
    checkpoints(store, tmp_path).latest()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
