"""Deletes what a store has, for `rlhf prune`. After a kill, no artifact has a manifest and lacks files.

    claim the stage key -> read the manifest again -> delete the manifest -> delete its files one by one

- While the key is claimed, no other attempt makes the stage, and a superseded one cannot commit. The claim
  has the number after the last one that was observed, so if any attempt has begun since then, nothing is
  deleted.
- Only the folder that the manifest names is deleted. Attempts have folders of their own, with numbers that
  are used once.
- A kill in between leaves files without a manifest, as that of an upload does (`remove_leftover`).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.errors import Superseded
from rlhf_core.storage.artifacts import parse_artifact_copy, store_file
from rlhf_core.storage.bundles import MANIFEST
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Claim, Fence, claim_next, renewed
from rlhf_core.storage.inventory import ArtifactName, Leftover, StoredArtifact, read_artifact
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.files import TEMPORARY
from rlhf_core.system.home import Home
from rlhf_core.types import artifact_prefix


def remove_artifact(store: Store, artifact: StoredArtifact, claim: Claim) -> bool:
    """Delete an artifact. Return False if it is another one now, or if its key was claimed by another attempt
    since `claim` was observed; then nothing is deleted.
    """
    fence = claim_next(store, artifact.name.key, claim)
    if fence is None:
        return False
    prefix = artifact_prefix(*artifact.name)
    with renewed(fence):
        now = read_artifact(store, artifact.name)
        if now is None or (now.folder, now.digest) != (artifact.folder, artifact.digest):
            return False
        try:
            fence.check()
        except Superseded:
            return False
        store.delete([f"{prefix}/{MANIFEST}"])
        with suppress(Superseded):  # what is left has no manifest
            _remove_folder(store, f"{prefix}/{artifact.folder}", fence)
            _remove_empty(store, prefix)
    return True


def remove_leftover(store: Store, leftover: Leftover, claim: Claim) -> bool:
    """Delete the folders of an artifact that has no manifest. Return False if it has one now, or if its key
    was claimed by another attempt since `claim` was observed.

    To be called only if the last attempt began so long ago that it cannot go on: it could commit a manifest
    between the claim of this process and its own next look at the claims.
    """
    fence = claim_next(store, leftover.name.key, claim)
    if fence is None:
        return False
    prefix = artifact_prefix(*leftover.name)
    with renewed(fence):
        if store.exists(f"{prefix}/{MANIFEST}"):
            return False
        with suppress(Superseded):
            for folder in leftover.folders:
                _remove_folder(store, f"{prefix}/{folder}", fence)
            _remove_empty(store, prefix)
            return True
    return False


def remove_checkpoints(store: Store, key: str, claim: Claim, home: Home) -> bool:
    """Delete the checkpoints of a stage key, also those in the outbox of this machine. Damaged ones stay.

    Return False if the key was claimed by another attempt since `claim` was observed.
    """
    fence = claim_next(store, key, claim)
    if fence is None:
        return False
    with renewed(fence):
        outbox = Outbox.of(store, home.outbox)
        try:
            fence.check()
        except Superseded:
            return False
        CheckpointStore(store, key, home.cache, StoreConfig(), fence, outbox=outbox).clear()
    return True


def _remove_folder(store: Store, folder: str, fence: Fence) -> None:
    """Delete files one by one. Raises Superseded if another attempt claims the key: an attempt can upload
    files from its outbox to a folder that had them before.
    """
    for key in store.list(folder):
        fence.check()
        store.delete([key])
    local = store.local_path(folder)
    if local is not None and local.exists():
        fence.check()
        store.delete_prefix(folder)  # empty folders, and unfinished writes


def _remove_empty(store: Store, prefix: str) -> None:
    local = store.local_path(prefix)
    if local is not None:
        with suppress(OSError):  # it is not empty
            local.rmdir()


@dataclass(frozen=True)
class CachedCopy:
    """A local copy of an artifact of a bucket."""

    name: ArtifactName
    folder: Path
    size: int
    """Bytes."""


def stale_copies(store: Store, cache: Path, artifacts: Collection[StoredArtifact]) -> Iterator[CachedCopy]:
    """Yield the copies of artifacts that the store does not have any more.

    A copy without the file that names its store is left out.

    Args:
        store: The store. None of a local one is copied.
        cache: Folder of the copies.
        artifacts: What the store has, or will still have.
    """
    present = {artifact.copy_name for artifact in artifacts}
    for folder in sorted(cache.glob("artifacts-*")):
        copy = parse_artifact_copy(str(folder))
        if copy is not None and copy.store == store.url and folder.name not in present and folder.is_dir():
            yield CachedCopy(ArtifactName(copy.stage, copy.key), folder, _bytes_below(folder))


def remove_copy(store: Store, copy: CachedCopy) -> bool:
    """Delete a copy. Return False if the store has its artifact."""
    artifact = read_artifact(store, copy.name)
    if artifact is not None and artifact.copy_name == copy.folder.name:
        return False
    # Renamed first: another process must not find a part of it.
    deleted = copy.folder.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # another process has deleted it
        copy.folder.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)
    store_file(copy.folder).unlink(missing_ok=True)
    return True


def _bytes_below(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size
