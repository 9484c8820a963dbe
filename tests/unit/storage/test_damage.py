"""Corruption is always detected in a local store.

- every mutation of every file of an artifact and of a checkpoint, including forged manifests, is detected and
  logged, and the file is never used
- every changed bit of a manifest is detected
- one incomplete response of a store does not discard an artifact
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store
from tests.support import corruption


@pytest.mark.parametrize(
    ("make", "expected"),
    [(corruption.artifact, corruption.ARTIFACT_CASES), (corruption.checkpoint, corruption.CHECKPOINT_CASES)],
)
def test_every_mutation_of_every_file_is_detected_and_logged(
    make: Callable[[Store, Path], corruption.Bundle],
    expected: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    summary_lines: list[str],
) -> None:
    bundle = make(Store(tmp_path / "store"), tmp_path)
    caplog.set_level(logging.WARNING)
    counted, missed = corruption.undetected(bundle, tmp_path / "open", caplog.records)
    assert missed == []
    assert counted.total() == expected
    summary_lines.append(f"{make.__name__} on a folder: {expected} mutations, {len(missed)} not detected")


def test_every_changed_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    bundle = corruption.artifact(store, tmp_path)
    raw = store.read_bytes(bundle.manifest) or b""
    for offset in range(len(raw)):
        changed = bytearray(raw)
        changed[offset] ^= 1 << (offset % 8)
        with pytest.raises(CorruptArtifact):
            bundles.parse(bundle.prefix, bytes(changed), "manifest.json")
    assert len(raw) > 1000


def test_one_incomplete_read_of_a_manifest_discards_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    bundle = corruption.artifact(store, tmp_path)
    plain = Store.read_bytes

    def cut_once(self: Store, key: str) -> bytes | None:
        monkeypatch.setattr(Store, "read_bytes", plain)
        return (plain(self, key) or b"")[:100]

    monkeypatch.setattr(Store, "read_bytes", cut_once)
    assert ArtifactStore(store, tmp_path / "cache").find("ppo", "k") is not None
    assert bundle.open(tmp_path / "open") == "used"
