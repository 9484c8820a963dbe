"""Folders, pipes, devices and foreign records at the paths of objects of a local store.

They count as damage. Nothing hangs, nothing outside of the store is changed, and the next run makes its
result.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, CorruptArtifact, StoreError
from rlhf_core.storage import fencing
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import LeaseTimes, acquire
from rlhf_core.storage.local import LocalFiles
from rlhf_core.storage.store import Store, check_backend
from rlhf_core.system.overriding import override
from rlhf_core.system.processes import ProcessId
from rlhf_core.types import ArtifactRef
from tests.support.checkpoints import keep
from tests.support.claims import claim


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("keep me")


STRANGE: dict[str, Callable[[Path], None]] = {
    "a folder": _folder,
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def publish(store: Store, folder: Path) -> tuple[ArtifactStore, ArtifactRef]:
    artifacts = ArtifactStore(store, folder / "cache")
    (folder / "out").mkdir()
    (folder / "out" / "x.json").write_text("1")
    return artifacts, artifacts.publish("data", "k", folder / "out", Provenance())


@pytest.mark.parametrize("what", STRANGE)
def test_folder_at_the_path_of_a_manifest_is_renamed(what: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    artifacts, ref = publish(store, tmp_path)
    manifest = tmp_path / "store" / "artifacts" / "data" / "k" / "manifest.json"
    manifest.unlink()
    STRANGE[what](manifest)
    assert artifacts.find("data", "k") is None
    again = publish(store, tmp_path)[1]
    assert again.digest == ref.digest and artifacts.find("data", "k") == again
    if what == "a folder":
        [kept] = manifest.parent.glob("aside-*-manifest.json/mine")
        assert kept.read_text() == "keep me"


@pytest.mark.parametrize("what", STRANGE)
def test_folder_at_newest_json_leaves_the_checkpoints(what: str, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(Store(tmp_path / "store"), "k", tmp_path / "work", keep(2))

    def save(step: int) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "rank0").write_text(str(step))
        checkpoints.save(step, tmp_path / "state")

    save(3)
    newest = tmp_path / "store" / "checkpoints" / "k" / "newest.json"
    newest.unlink()
    STRANGE[what](newest)
    assert (checkpoints.latest() or (0,))[0] == 3
    save(4)
    assert (checkpoints.latest() or (0,))[0] == 4
    assert json.loads(newest.read_text())["step"] == 4


RECORDS: dict[str, str] = {
    "a pid below 0": '{"pid": -1, "started": 1.0, "host": "HOST", "time": "2026-01-01"}',
    "a pid of 0": '{"pid": 0, "started": 1.0, "host": "HOST", "time": "2026-01-01"}',
    "a pid above all": '{"pid": 100000000000000000000, "started": 1.0, "host": "HOST", "time": "2026-01-01"}',
    "a pid that is infinite": '{"pid": Infinity, "started": 1.0, "host": "HOST", "time": "2026-01-01"}',
    "nested too deep": "[" * 100_000,
    "a list": "[1]",
    "a number": "3",
    "nothing": "",
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("record", RECORDS)
def test_unreadable_claim_is_not_waited_for(record: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = claim(store, "k")
    text = RECORDS[record].replace("HOST", socket.gethostname())
    (tmp_path / "checkpoints" / "k" / "attempts" / "000002.json").write_bytes(
        text.encode(errors="surrogateescape")
    )
    assert acquire(store, "k", "ppo", LeaseTimes(wait=0.0)).attempt == 3  # StageHeld, if it waited
    with pytest.raises(Exception, match=r"attempt 3 .* has taken over"):
        first.check()


@pytest.mark.parametrize("name", ["\u00b2", "\u0663", "-1", "1e3", "x"])
def test_names_without_an_attempt_number_are_ignored(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    claim(store, "k")
    (tmp_path / "checkpoints" / "k" / "attempts" / f"{name}.json").write_text("{}")
    assert claim(store, "k").attempt == 2


def test_message_advises_to_end_the_flow_and_never_process_1() -> None:
    assert fencing._how_to_end(ProcessId(1, 0.0)) == ""
    # A stage's process, its reaper, and in place of the flow this process.
    command = ["sh", "-c", "sleep 60 & echo $!; wait", "rlhf_core.run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reaper:
        assert reaper.stdout is not None
        stage = int(reaper.stdout.readline())
        try:
            assert fencing._how_to_end(ProcessId(stage, 0.0)) == f" (kill {os.getpid()})"
        finally:
            os.kill(stage, signal.SIGKILL)


def test_a_file_that_changes_after_it_was_verified_is_verified_again(tmp_path: Path) -> None:
    artifacts, ref = publish(Store(tmp_path / "store"), tmp_path)
    folder = artifacts.fetch(ref)
    assert artifacts.fetch(ref) == folder
    (folder / "x.json").write_text("2")
    with pytest.raises(CorruptArtifact, match=r"x\.json does not have the sha256"):
        artifacts.fetch(ref)


def test_oversized_object_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch()
    os.truncate(tmp_path / "x.json", 65 * 2**20)
    with pytest.raises(StoreError, match=r"has 65\.0 MiB, more than the 64\.0 MiB allowed"):
        Store(tmp_path).read_bytes("x.json")


@pytest.mark.parametrize(
    "error", [UnicodeError("no label"), RecursionError("deep"), OverflowError("big"), OSError(5, "I/O")]
)
def test_check_of_the_store_names_the_field(error: Exception, tmp_path: Path) -> None:
    class Broken(LocalFiles):
        @override
        def put_bytes(self, key: str, data: bytes) -> None:
            raise error

    with pytest.raises(ConfigError, match=rf"store\.url='x' cannot be used: {type(error).__name__}"):
        check_backend(Broken(tmp_path), "x")
