"""Bundles that are to be uploaded to a bucket. They are on the local disk first: a kill or an outage loses
none.

    add -> {folder}/{prefix}/... with its manifest -> upload -> the store, manifest last -> removed here

A bundle that a killed or failed attempt could not upload stays here, and the same command uploads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import CorruptArtifact, StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import MANIFEST, Manifest
from rlhf_core.storage.store import Store

log = logging.getLogger(__name__)


class Outbox:
    """Pending uploads to `store` in the local `folder`; both have the same layout."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._pending = Store(folder)

    @classmethod
    def of(cls, store: Store, folder: Path) -> Outbox | None:
        """Return the outbox in `folder`, or None for a local store, which needs none."""
        return None if store.is_local else cls(store, folder)

    def add(self, bundle: Manifest, source: Path) -> None:
        """Write a bundle to the disk, replacing a pending one with this prefix.

        The arguments are as in `bundles.commit`.
        """
        # `commit` keeps a bundle that is there already.
        self.discard(bundle.prefix)
        # The fence is asked at the upload. That would be a request to the store, which may not answer, and
        # what was trained is to be on the disk before.
        bundles.commit(self._pending, bundle, source, may_commit=lambda: None)

    def pending(self, root: str) -> list[str]:
        """Return the sorted prefixes of the pending bundles below `root`."""
        prefixes = []
        for key in self._pending.list(root):
            prefix, _, name = key.rpartition("/")
            if name == MANIFEST:
                prefixes.append(prefix)
        return prefixes

    def manifest(self, prefix: str) -> Manifest | None:
        """Return the manifest of the pending bundle; None if none is pending or it is damaged."""
        try:
            return bundles.read(self._pending, prefix)
        except CorruptArtifact:
            return None

    def upload(self, prefix: str, may_commit: Callable[[], None]) -> Manifest | None:
        """Upload the bundle `prefix`; return None if none is pending or the store has another one there.

        Raises StoreError if the store fails. The bundle then stays pending, and the message names its folder.

        Args:
            prefix: Key of the bundle.
            may_commit: See `bundles.commit`.
        """
        found = self._present(prefix)
        if found is None:
            return None
        manifest, source = found
        try:
            may_commit()  # also before the upload, which would be useless for a superseded attempt
            committed = bundles.commit(self._store, manifest, source, may_commit=may_commit)
        except CorruptArtifact as error:
            # The files on the disk are not those of the manifest: no other try can upload them.
            self._mark(prefix, error)
            return None
        except StoreError as error:
            raise StoreError(
                f"{error.message} It is kept in {source}; the same command uploads it from there."
            ) from error
        # Also if the store has another bundle there: this one cannot be committed any more.
        self.discard(prefix)
        return committed

    def _present(self, prefix: str) -> tuple[Manifest, Path] | None:
        """Return the pending bundle with the folder of its files, whose content is verified while it is
        uploaded; None if there is none.

        One that lacks files is marked as damaged.
        """
        try:
            manifest = bundles.read(self._pending, prefix)
            if manifest is None:
                return None
            # The outbox is a local store, from which nothing is copied to the cache.
            return manifest, bundles.fetch(self._pending, manifest, Path(), needed=lambda path: False)
        except CorruptArtifact as error:
            self._mark(prefix, error)
            return None

    def _mark(self, prefix: str, error: CorruptArtifact) -> None:
        record = bundles.mark_damaged(self._pending, prefix, error.message)
        log.error("%s It cannot be uploaded and is marked as damaged: %s", error.message, record)

    def age(self, prefix: str) -> float:
        """Return the seconds since the pending bundle was added; 0 if another process has removed it."""
        path = self._pending.local_path(f"{prefix}/{MANIFEST}")
        assert path is not None
        try:
            return time.time() - path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def discard_all(self, root: str) -> None:
        """Delete the pending bundles at or below the folder `root`."""
        for prefix in self.pending(root):
            self.discard(prefix)

    def discard(self, prefix: str) -> None:
        """Delete the pending bundle at `prefix`."""
        bundles.remove(self._pending, prefix)
