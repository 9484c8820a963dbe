"""Damage is always noticed, in a folder.

Locks: every file of an artifact and of a checkpoint x every mutation, forged manifests included, is noticed
and said, and never used; one bit changed anywhere in a manifest is noticed; one bad answer of a store
condemns nothing.
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
from tests import damage


@pytest.mark.parametrize(
    ("make", "expected"),
    [(damage.artifact, damage.ARTIFACT_CASES), (damage.checkpoint, damage.CHECKPOINT_CASES)],
)
def test_every_mutation_of_every_file_is_noticed_and_said(
    make: Callable[[Store, Path], damage.Bundle],
    expected: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    summary_lines: list[str],
) -> None:
    bundle = make(Store(tmp_path / "store"), tmp_path)
    caplog.set_level(logging.WARNING)
    counted, missed = damage.unnoticed(bundle, tmp_path / "look", caplog.records)
    assert missed == []
    assert counted.total() == expected
    summary_lines.append(f"{make.__name__} on a folder: {expected} mutations, {len(missed)} not noticed")


def test_one_bit_changed_anywhere_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    bundle = damage.artifact(store, tmp_path)
    raw = store.read_bytes(bundle.manifest) or b""
    for offset in range(len(raw)):
        changed = bytearray(raw)
        changed[offset] ^= 1 << (offset % 8)
        with pytest.raises(CorruptArtifact):
            bundles.parse(bundle.prefix, bytes(changed), "manifest.json")
    assert len(raw) > 1000


def test_one_bad_answer_for_a_manifest_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    bundle = damage.artifact(store, tmp_path)
    plain = Store.read_bytes

    def cut_once(self: Store, key: str) -> bytes | None:
        monkeypatch.setattr(Store, "read_bytes", plain)
        return (plain(self, key) or b"")[:100]

    monkeypatch.setattr(Store, "read_bytes", cut_once)
    assert ArtifactStore(store, tmp_path / "cache").find("ppo", "k") is not None
    assert bundle.look(tmp_path / "look") == "used"
