"""Files of one attempt that its hosts exchange through the store, and which files of a checkpoint each writes
and reads.

output of the stage     {folder of the attempt below the artifact's key}/..., where the artifact has them
other folders           {folder of the attempt}-shared/...; the commit of the artifact deletes them
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_core.errors import StoreError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, is_weights
from rlhf_core.storage.store import Store
from rlhf_core.system.files import json_sha256

log = logging.getLogger(__name__)


class StoredOutput:
    """The files of an output that are in the store before there is an artifact with them.

    Args:
        folder: Folder of the output, at the same path on all hosts.
        store: A store that all hosts reach.
        key: Folder of the store for the files of the artifact (`artifacts.attempt_folder`).
    """

    def __init__(self, folder: Path, store: Store, key: str) -> None:
        self._folder = folder
        self._store = store
        self._key = key
        self._shared_key = f"{key}-shared"
        self._weights: dict[Path, FileEntry] = {}
        self._has_begun = False

    def key_of(self, folder: Path) -> str:
        """Return the folder of the store for the files of `folder`."""
        if not folder.is_relative_to(self._folder):
            # A digest, because a path can be longer than a key and can have characters that a store refuses.
            return f"{self._shared_key}/{json_sha256(str(folder))[:16]}"
        return "/".join((self._key, *folder.relative_to(self._folder).parts))

    def begin(self) -> None:
        """Record that an upload begins. If it fails, the store may have some of its files."""
        self._has_begun = True

    def receive(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Take files of the output that another host has put at `key_of(folder)`.

        Weights stay in the store. The others are copied to this host, because stages add to them.
        """
        small = [entry for entry in files if not is_weights(entry.path)]
        bundles.fetch_files(self._store, self.key_of(folder), small, folder)
        for entry in files:
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            if is_weights(entry.path):
                self._weights[folder / entry.path] = entry

    @property
    def digests(self) -> Mapping[Path, str]:
        """sha256 of the weights in the store, by the path that they have on the host that wrote them."""
        return {path: entry.sha256 for path, entry in self._weights.items()}

    @property
    def files(self) -> list[FileEntry]:
        """The weights in the store, by their paths in the output."""
        return self._weights_in(self._folder)

    def _weights_in(self, folder: Path) -> list[FileEntry]:
        found = []
        for path, entry in self._weights.items():
            if path.is_relative_to(folder):
                found.append(replace(entry, path=path.relative_to(folder).as_posix()))
        return found

    def files_of(self, folder: Path, here: Mapping[str, str]) -> list[FileEntry]:
        """Return the files of `folder` that its readers need.

        Args:
            folder: A folder of the run.
            here: sha256 of its files on this host, by their paths in it.
        """
        own = [FileEntry(path, (folder / path).stat().st_size, sha256) for path, sha256 in here.items()]
        return list(bundles.merged(own, self._weights_in(folder)))

    def send(self, folder: Path, files: Sequence[FileEntry]) -> None:
        """Put files of `folder` into the store, except weights that another host has put there."""
        own = [entry for entry in files if folder / entry.path not in self._weights]
        if own:
            self.begin()
            bundles.upload(self._store, folder, own, self.key_of(folder))

    def fetch(self, folder: Path, present: Mapping[str, str]) -> None:
        """Copy the weights of `folder` to this host, except those whose sha256 is in `present`, by path."""
        lacking = [each for each in self._weights_in(folder) if present.get(each.path) != each.sha256]
        bundles.fetch_files(self._store, self.key_of(folder), lacking, folder)

    def delete(self) -> None:
        """Delete from the store what uploads have put there: there will be no artifact with it."""
        if not self._has_begun:
            return
        try:
            for key in (self._key, self._shared_key):
                self._store.delete_prefix(key)
        except StoreError as error:
            log.warning("Files of a stage that failed stay at %s: %s", self._key, error.message)


_SHARD = re.compile(r"(zero_pp_rank_|-rank)(\d+)")
"""The rank in the names of files that DeepSpeed and `WeightCopy` write."""


def written_bytes(
    size: int, unsharded: int | None, ranks: Mapping[str, Mapping[str, Collection[int]]], node_id: str
) -> int:
    """Return how many bytes of a checkpoint the ranks of a node write at most.

    A node without ranks has none but small files.

    Args:
        size: Bytes of the whole checkpoint.
        unsharded: Those that only ranks 0 write; None if all ranks 0 may write all of it.
        ranks: See `ClusterNodes.join`.
        node_id: The node.
    """
    here = ranks.get(node_id, {})
    has_first = any(0 in of_folder for of_folder in here.values())
    if has_first and unsharded is None:
        return size
    parts = [0.0]
    for folder, of_folder in here.items():
        total = sum(len(of_node.get(folder, ())) for of_node in ranks.values())
        parts.append(len(of_folder) / max(1, total))
    common = unsharded or 0
    # The models of PPO differ in size. The largest part of one is counted for all.
    return common * has_first + int((size - common) * max(parts))


def needed_files(
    paths: Sequence[str], ranks: Mapping[str, Mapping[str, Collection[int]]], node_id: str
) -> frozenset[str]:
    """Return the files of a checkpoint that the ranks of a node read.

    A file of one rank is read by that rank only, if as many ranks continue as have saved. All other files are
    read by all.

    Args:
        paths: All files of the checkpoint.
        ranks: See `ClusterNodes.join`.
        node_id: The node.
    """
    shards: defaultdict[str, set[int]] = defaultdict(set)
    for path in paths:
        shard = _SHARD.search(path)
        if shard is not None:
            shards[_SHARD.sub("", path)].add(int(shard[2]))
    needed = set()
    for path in paths:
        folder = path.split("/")[0]
        # PPO has a folder for each role. Other stages have their files at the top.
        if not any(folder in of_node for of_node in ranks.values()):
            folder = ""
        present = {rank for of_node in ranks.values() for rank in of_node.get(folder, ())}
        here = ranks.get(node_id, {}).get(folder, ())
        shard = _SHARD.search(path)
        if shard is None:
            needed.add(path)
            continue
        # The sets differ if another number of ranks saved (all files are converted), or if one saved for all.
        saved_by_these_ranks = shards[_SHARD.sub("", path)] == present
        if not saved_by_these_ranks or int(shard[2]) in here:
            needed.add(path)
    return frozenset(needed)
