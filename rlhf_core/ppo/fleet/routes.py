"""Distribution of the responses of a batch over ranks, by whole chunks, and the calls that follow from it.

    chunks -> ranks, heaviest first, each to the rank with the least work; micro-batches on each rank

All groups with the same number of ranks have the same distribution. Where a model needs what another one
returned, this is then one object for each rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_core.cluster.rpc import Pending, as_argument
from rlhf_core.models.packing import estimated_cost, plan_ranks
from rlhf_core.ppo.training.batch import (
    Indices,
    Places,
    RankShare,
    RolloutBatch,
    RolloutColumns,
    RowColumns,
    SentShare,
)


def route(batch: RolloutBatch, ranks: int, micro_batch_tokens: int, *, pack: bool) -> list[RankShare]:
    """Distribute a batch over ranks. Every rank has the same number of micro-batches, some may be empty."""
    lengths_B = (batch.prompt_lengths_B + batch.lengths_B).astype(np.int64)
    rank_of_chunk = _ranks_of_chunks(batch.places.objects, lengths_B, len(batch.chunks), ranks)
    rank_B = rank_of_chunk[batch.places.objects]
    order = np.argsort(rank_B, kind="stable")
    ends = np.cumsum(np.bincount(rank_B, minlength=ranks))
    shares = []
    for indices in np.split(order, ends[:-1]):
        lengths = lengths_B[indices].tolist()
        # For this rank alone, because a chunk is not divided. The numbers are made equal below.
        (micro_batches,) = plan_ranks(lengths, 1, micro_batch_tokens, pack=pack)
        chunks, positions = np.unique(batch.places.objects[indices], return_inverse=True)
        places = Places(positions, batch.places.rows[indices])
        shares.append(RankShare(indices, chunks, places, micro_batches))
    count = max(len(share.micro_batches) for share in shares)
    for share in shares:
        share.micro_batches.extend([] for _ in range(count - len(share.micro_batches)))
    return shares


def _ranks_of_chunks(objects_B: Indices, lengths_B: Indices, chunks: int, ranks: int) -> Indices:
    costs_B = [estimated_cost(length) for length in lengths_B.tolist()]
    costs = np.bincount(objects_B, weights=costs_B, minlength=chunks)
    chosen = np.zeros(chunks, np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for chunk in np.argsort(-costs, kind="stable").tolist():
        load, rank = loads[0]
        chosen[chunk] = rank
        heapq.heapreplace(loads, (load + costs[chunk], rank))
    return chosen


def places_of(shares: Sequence[RankShare]) -> Places:
    """Return for each response of a batch its rank, and its row in what this rank returns."""
    count = sum(len(share.indices) for share in shares)
    places = Places(np.zeros(count, np.int64), np.zeros(count, np.int64))
    for rank, share in enumerate(shares):
        places.objects[share.indices] = rank
        places.rows[share.indices] = np.arange(len(share.indices))
    return places


def reindex(micro_batches: Sequence[Sequence[int]], start: int = 0) -> list[list[int]]:
    """Return indices into the concatenation of the micro-batches, where the first element has
    index `start`.
    """
    indices = []
    for micro_batch in micro_batches:
        indices.append(list(range(start, start + len(micro_batch))))
        start += len(micro_batch)
    return indices


Sent = tuple[SentShare | int, list[RolloutColumns]]
"""Arguments of a call with a batch: the share of the rank and its chunks, or the number of a batch that the
rank has.
"""


class SentBatches:
    """Which actors have which batch. A rank keeps its share and its chunks until it gets those of another
    batch, so that they are sent once and not for each of its models.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[Sequence[Any], int]] = {}
        """Actors of each group, by its name, and the number of their batch."""

    def forget(self) -> None:
        """Send everything again: a call has failed."""
        self._sent.clear()

    def arguments(
        self, group: str, actors: Sequence[Any], batch: RolloutBatch, shares: Sequence[RankShare]
    ) -> list[Sent]:
        """Return the arguments of the next call for each rank of a group.

        Args:
            group: Name of the group.
            actors: Its present actors, which are others after a restart.
            batch: The batch.
            shares: Its distribution over these ranks.
        """
        if self._sent.get(group) == (actors, batch.number):
            return [(batch.number, []) for _ in shares]
        self._sent[group] = actors, batch.number
        return [
            (
                SentShare(batch.number, share.places, share.micro_batches),
                [as_argument(batch.chunks[chunk]) for chunk in share.chunks.tolist()],
            )
            for share in shares
        ]


@dataclass(frozen=True)
class ObjectArguments:
    """The objects that one call needs. Ray transfers each of them to the actor, without the controller."""

    pending: list[Pending[RowColumns]] = field(default_factory=list)

    def add_all_rows(self, pending: Pending[RowColumns], count: int) -> Places:
        """Add an object, and return the places of its `count` rows."""
        self.pending.append(pending)
        return Places(np.full(count, len(self.pending) - 1), np.arange(count))

    def add(self, objects: Sequence[Pending[RowColumns]], places: Places) -> Places:
        """Add those of `objects` that have these rows, and return the places in `pending`."""
        used, positions = np.unique(places.objects, return_inverse=True)
        start = len(self.pending)
        self.pending.extend(objects[number] for number in used.tolist())
        return Places(positions + start, places.rows)
