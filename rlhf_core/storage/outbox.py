"""Bundles on their way to a bucket: whole on the local disk first, so that neither a kill nor an outage loses
one.

    add -> {folder}/{prefix}/... with its manifest -> deliver -> the store, manifest last -> removed here

What a killed or failed attempt could not deliver waits here for the next one: the same command uploads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import CorruptArtifact, StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import MANIFEST, FileEntry, Manifest
from rlhf_core.storage.store import Store

log = logging.getLogger(__name__)


class Outbox:
    """What waits for `store` in the local `folder`; both have the same layout."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._waiting = Store(folder)

    @classmethod
    def of(cls, store: Store, folder: Path) -> Outbox | None:
        """Return the outbox in `folder`, or None for a local store, which needs none."""
        return None if store.is_local else cls(store, folder)

    def add(
        self, prefix: str, source: Path, files: Sequence[FileEntry], *, folder: str, body: Mapping[str, Any]
    ) -> None:
        """Keep `files` of `source` as the bundle `prefix` (see `bundles.commit`), in place of one that waits
        there; on disk before this returns.
        """
        self.discard(prefix)
        bundles.commit(
            self._waiting, prefix, source, files, folder=folder, body=body, may_commit=lambda: None
        )

    def waiting(self, root: str) -> list[str]:
        """Prefixes of the bundles below `root` that wait, sorted."""
        return [
            key.removesuffix(f"/{MANIFEST}")
            for key in self._waiting.list(root)
            if key.endswith(f"/{MANIFEST}")
        ]

    def deliver(self, prefix: str, may_commit: Callable[[], None]) -> Manifest | None:
        """Upload the bundle `prefix`; None if none waits or another one is in its place.

        Raises StoreError if the store fails: the bundle waits on then, and the message says where.
        """
        try:
            manifest = bundles.read(self._waiting, prefix)
            if manifest is None:
                return None
            source = bundles.fetch(self._waiting, manifest, Path())
        except CorruptArtifact as error:
            kept = bundles.quarantine(self._waiting, prefix, error.message)
            log.error("%s It cannot be uploaded and is set aside: %s", error.message, kept)
            return None
        try:
            may_commit()  # asked first as well: a superseded attempt shall not upload all of it in vain
            sent = bundles.commit(
                self._store, prefix, source, manifest.files, folder=manifest.folder, body=manifest.body, may_commit=may_commit
            )  # fmt: skip
        except StoreError as error:
            raise StoreError(
                f"{error.message} It is kept in {source}; the same command uploads it from there."
            ) from error
        self.discard(prefix)
        return sent

    def discard_all(self, root: str) -> None:
        """Forget what waits at or below the folder `root`."""
        for prefix in self.waiting(root):
            self.discard(prefix)

    def discard(self, prefix: str) -> None:
        """Forget what waits at `prefix`."""
        bundles.remove(self._waiting, prefix)
