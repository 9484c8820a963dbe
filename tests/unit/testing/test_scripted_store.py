"""The scripted store and the manual clock.

- an action runs before the chosen call of an operation, once or lasting; errors are raised by the operation,
  which then does nothing
- files of a remote store are not on this machine, and a deletion of a folder is one of each object
- events of the clock happen when it reaches their time
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import StoreError
from rlhf_core.storage.store import Store
from tests.support.scripted_machine import ManualClock
from tests.support.scripted_store import ScriptedStore, StoreCall


def test_only_the_chosen_call_fails_and_changes_nothing(tmp_path: Path) -> None:
    store = ScriptedStore(tmp_path / "store")
    store.before("put_bytes", StoreError("503"), key="x.json", call=2)
    store.put_bytes("a/x.json", b"1")
    store.put_bytes("a/y.json", b"1")
    assert store.read_bytes("a/x.json") == b"1"
    with pytest.raises(StoreError, match="503"):
        store.put_bytes("b/x.json", b"2")
    assert not store.exists("b/x.json")
    store.put_bytes("b/x.json", b"3")
    assert Store(tmp_path / "store").read_bytes("b/x.json") == b"3"
    assert [call.key for call in store.calls if call.operation == "put_bytes"] == [
        "a/x.json", "a/y.json", "b/x.json", "b/x.json",
    ]  # fmt: skip


def test_lasting_action_runs_before_each_later_call_until_the_reset(tmp_path: Path) -> None:
    store = ScriptedStore(tmp_path)
    seen: list[list[str]] = []
    store.before("put_if_absent", lambda: seen.append(Store(tmp_path).list("a")), call=2, lasting=True)
    for name in "wxy":
        store.put_if_absent(f"a/{name}", b"")
    store.reset()
    store.put_if_absent("a/z", b"")
    assert seen == [["a/w"], ["a/w", "a/x"]]


def test_remote_store_has_no_local_files_and_deletes_one_by_one(tmp_path: Path) -> None:
    store = ScriptedStore(tmp_path / "store", remote=True)
    assert not store.is_local and ScriptedStore(tmp_path / "store").is_local
    (tmp_path / "file").write_bytes(b"1")
    store.put_file(tmp_path / "file", "a/2", link=True)
    assert (tmp_path / "file").stat().st_nlink == 1
    store.put_bytes("a/1", b"")
    store.before("delete", StoreError("killed"), call=2)
    with pytest.raises(StoreError, match="killed"):
        store.delete_prefix("a")
    assert store.list("a") == ["a/2"]
    store.get_file("a/2", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"1"
    assert StoreCall("get_file", "a/2") in store.calls


def test_events_of_the_clock_happen_at_their_time() -> None:
    clock = ManualClock(10.0)
    happened: list[float] = []
    for time in (11.0, 13.0):
        clock.events.append((time, lambda: happened.append(clock.monotonic())))
    clock.sleep(0.5)
    assert happened == []
    clock.sleep(1.0)
    assert happened == [11.5] and len(clock.events) == 1
