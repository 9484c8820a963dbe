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
from typing_extensions import override

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


class CutsTheFirstRead(Store):
    """A store that answers its first read with the first 100 bytes of the object."""

    reads = 0

    @override
    def read_bytes(self, key: str) -> bytes | None:
        self.reads += 1
        found = super().read_bytes(key) or b""
        return found[:100] if self.reads == 1 else found


def test_one_incomplete_read_of_a_manifest_discards_nothing(tmp_path: Path) -> None:
    bundle = corruption.artifact(Store(tmp_path / "store"), tmp_path)
    store = CutsTheFirstRead(tmp_path / "store")
    assert ArtifactStore(store, tmp_path / "cache").find("ppo", "k") is not None
    assert store.reads == 2
    assert bundle.open(tmp_path / "open") == "used"
