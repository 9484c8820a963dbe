"""Folders, pipes, devices and foreign records at the paths of objects of a local store.

What is no file is an error. Nothing hangs, and nothing outside of the store is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

from rlhf_core.errors import ConfigError, CorruptArtifact, StoreError
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.backend import LocalFiles
from rlhf_core.storage.fencing import LeaseTimes, acquire
from rlhf_core.storage.store import Store, check_backend
from rlhf_core.system.processes import here
from rlhf_core.types import ArtifactRef
from tests.support.claims import claim

STRANGE: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def publish(store: Store, folder: Path) -> tuple[ArtifactStore, ArtifactRef]:
    artifacts = ArtifactStore(store, folder / "cache")
    (folder / "out").mkdir()
    (folder / "out" / "x.json").write_text("1")
    return artifacts, artifacts.publish("data", "k", folder / "out", Provenance())


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_file_at_the_path_of_an_object_is_an_error(what: str, tmp_path: Path) -> None:
    artifacts, _ = publish(Store(tmp_path / "store"), tmp_path)
    manifest = tmp_path / "store" / "artifacts" / "data" / "k" / "manifest.json"
    manifest.unlink()
    STRANGE[what](manifest)
    with pytest.raises(StoreError, match=rf"could not read .*manifest\.json is {what}"):
        artifacts.find("data", "k")


RECORDS: dict[str, str] = {
    "a pid below 0": '{"pid": -1, "started": 1.0, HERE, "time": "2026-01-01"}',
    "a pid of 0": '{"pid": 0, "started": 1.0, HERE, "time": "2026-01-01"}',
    "a pid above all": '{"pid": 100000000000000000000, "started": 1.0, HERE, "time": "2026-01-01"}',
    "a pid that is infinite": '{"pid": Infinity, "started": 1.0, HERE, "time": "2026-01-01"}',
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
    host, machine = here()
    text = RECORDS[record].replace("HERE", f'"host": "{host}", "machine": "{machine}"')
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
