"""The weights of a stage's output that other hosts put into the store: the driver only commits them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_core.errors import StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry
from rlhf_core.storage.store import Store

log = logging.getLogger(__name__)


class StoredOutput:
    """The files of an output that are in the store before there is an artifact with them.

    Args:
        folder: Folder of the output, at the same path on all hosts.
        store: A bucket. A store in a folder may be on the driver's host only.
        key: Folder of the store for the files of the artifact (`artifacts.attempt_folder`).
    """

    def __init__(self, folder: Path, store: Store, key: str) -> None:
        self._folder = folder
        self._store = store
        self._key = key
        self._files: dict[Path, FileEntry] = {}
        self._has_begun = False

    def includes(self, folder: Path) -> bool:
        """Return whether a folder is the output, or a part of it."""
        return folder.is_relative_to(self._folder)

    def key_of(self, folder: Path) -> str:
        """Return the folder of the store for `folder`, which the output includes."""
        return "/".join((self._key, *folder.relative_to(self._folder).parts))

    def begin(self) -> None:
        """Record that an upload begins. If it fails, the store may have some of its files."""
        self._has_begun = True

    def add(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Record files of `folder` that are at `key_of(folder)`. Their folders are created on this host."""
        for entry in files:
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            self._files[folder / entry.path] = entry

    @property
    def digests(self) -> Mapping[Path, str]:
        """sha256 of each file, by the path that it has on the host that wrote it."""
        return {path: entry.sha256 for path, entry in self._files.items()}

    @property
    def files(self) -> list[FileEntry]:
        """All files, by their paths in the output."""
        return self.files_in(self._folder)

    def files_in(self, folder: Path) -> list[FileEntry]:
        """Return the files below a folder, by their paths in it."""
        return [
            replace(entry, path=path.relative_to(folder).as_posix())
            for path, entry in self._files.items()
            if path.is_relative_to(folder)
        ]

    def fetch(self, folder: Path, present: Mapping[str, str]) -> None:
        """Copy the files below `folder` to this host, except those whose sha256 is in `present`, by path."""
        bundles.fetch_files(self._store, self.key_of(folder), self.lacking(folder, present), folder)

    def lacking(self, folder: Path, present: Mapping[str, str]) -> list[FileEntry]:
        """Return the files below `folder` that are not `present`, see `fetch`."""
        return [entry for entry in self.files_in(folder) if present.get(entry.path) != entry.sha256]

    def delete(self) -> None:
        """Delete from the store what uploads have put there: there will be no artifact with it."""
        if not self._has_begun:
            return
        try:
            self._store.delete_prefix(self._key)
        except StoreError as error:
            log.warning("Files of a stage that failed stay at %s: %s", self._key, error.message)
