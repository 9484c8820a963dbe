"""What the ranks of one host write and read of a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

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
