"""Deletes what a store has, for `rlhf prune`. After a kill, no artifact has a manifest and lacks files.

    claim the stage key -> read the manifest again -> delete the manifest -> delete its files one by one

- While the key is claimed, no other attempt makes the stage, and a superseded one cannot commit. The claim
  has the number after the last one that was observed, so if any attempt has begun since then, nothing is
  deleted.
- Only the folder that the manifest names is deleted. Attempts have folders of their own, with numbers that
  are used once.
- A kill in between leaves files without a manifest, as that of an upload does. They are deleted only if the
  last attempt began so long ago that it cannot go on: it could commit a manifest between the claim of this
  process and its own next look at the claims.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_core.cluster.disk_space import bytes_below
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.errors import Superseded
from rlhf_core.ops.prune.retention import CachedCopy
from rlhf_core.storage.artifacts import parse_artifact_copy, store_file
from rlhf_core.storage.bundles import MANIFEST
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Claim, Fence, claim_next, renewed
from rlhf_core.storage.inventory import ArtifactName, Leftover, StoredArtifact, Unfinished, read_artifact
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.system.files import TEMPORARY
from rlhf_core.system.home import Home
from rlhf_core.types import artifact_prefix


def remove(store: Store, subject: StoredArtifact | Leftover | Unfinished, claim: Claim, home: Home) -> bool:
    """Delete an artifact, the folders of one without a manifest, or the checkpoints of a stage key.

    Return False if it has changed, or if its key was claimed by another attempt since `claim` was observed.
    """
    key = subject.key if isinstance(subject, Unfinished) else subject.name.key
    fence = claim_next(store, key, claim)
    if fence is None:
        return False
    with renewed(fence), suppress(Superseded):
        if isinstance(subject, Unfinished):
            fence.check()
            # Also those in the outbox of this machine. Damaged ones stay.
            outbox = Outbox.of(store, home.outbox)
            CheckpointStore(store, key, home.cache, StoreConfig(), fence, outbox=outbox).clear()
            return True
        if _is_unchanged(store, subject):
            return _remove_files(store, subject, fence)
    return False


def _is_unchanged(store: Store, subject: StoredArtifact | Leftover) -> bool:
    if isinstance(subject, Leftover):
        return not store.exists(f"{artifact_prefix(*subject.name)}/{MANIFEST}")
    now = read_artifact(store, subject.name)
    return now is not None and (now.folder, now.digest) == (subject.folder, subject.digest)


def _remove_files(store: Store, subject: StoredArtifact | Leftover, fence: Fence) -> bool:
    """Delete files one by one. Raises Superseded if another attempt claims the key first.

    An attempt can upload files from its outbox to a folder that had them before.
    """
    prefix = artifact_prefix(*subject.name)
    fence.check()
    store.delete([f"{prefix}/{MANIFEST}"])
    folders = subject.folders if isinstance(subject, Leftover) else (subject.folder,)
    with suppress(Superseded):  # what is left has no manifest
        for folder in folders:
            for key in store.list(f"{prefix}/{folder}"):
                fence.check()
                store.delete([key])
            if store.is_local:
                fence.check()
                store.delete_prefix(f"{prefix}/{folder}")  # empty folders, and unfinished writes
        local = store.local_path(prefix)
        if local is not None:
            with suppress(OSError):  # it is not empty
                local.rmdir()
    return True


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
            yield CachedCopy(ArtifactName(copy.stage, copy.key), folder, bytes_below(folder))


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
