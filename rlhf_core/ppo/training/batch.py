"""The data of a PPO step, from the engines to the ranks: columns of tokens, the responses of a step in the
controller, and the scores of models.

    engine  --chunks: RolloutColumns-->  ranks  --RowColumns-->  other ranks

Chunks are results of Ray tasks. The controller holds references to them, and fetches them
only where it needs tokens itself (`ppo.sampling.rollouts`). It owns them: a chunk is lost only if its node is
lost, not if the actor that made it is replaced. Each call names the rows that it needs by `Places`.

The controller holds a `RolloutBatch`: lengths, rewards, and references to the tokens. `route` distributes its
responses over ranks by whole chunks:

    chunks -> ranks, heaviest first, each to the rank with the least work; micro-batches on each rank

All groups with the same number of ranks have the same distribution. Where a model needs what another one
returned, this is then one object for each rank.

Axes: `B` responses, `P` tokens of a prompt, `T` tokens of a response.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.cluster.rpc import Pending, as_argument
from rlhf_core.models.batching import estimated_cost, plan_ranks
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, Rollout

# Elements of 4 bytes, both: `rank_rows` sends ids and floats as one tensor.
IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Offsets = NDArray[np.int64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class RolloutColumns:
    """The responses to some prompts. The rows of a prompt are consecutive."""

    samples: int
    """Rows of each prompt."""
    prompt_ids: IntArray
    """All P, each prompt once."""
    prompt_offsets: Offsets
    """(prompts + 1,) where each prompt begins and ends in `prompt_ids`."""
    response_ids: IntArray
    """All T."""
    logprobs: FloatArray
    """All T: log-probabilities by the engine, at the sampling temperature."""
    offsets: Offsets
    """(rows + 1,) where each response begins and ends."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def prompt(self, row: int) -> IntArray:
        """Return (P,) ids."""
        number = row // self.samples
        return self.prompt_ids[self.prompt_offsets[number] : self.prompt_offsets[number + 1]]

    def response(self, row: int) -> IntArray:
        """Return (T,) ids."""
        return self.response_ids[self.offsets[row] : self.offsets[row + 1]]

    def rollout_logprobs(self, row: int) -> FloatArray:
        """Return (T,) log-probabilities by the engine."""
        return self.logprobs[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class RolloutHeader:
    """The controller's data about the responses of an engine, one entry per row of its chunks."""

    lengths: IntArray
    """Tokens of each response."""
    finished: NDArray[np.bool_]
    versions: Indices
    """Policy version that sampled each response."""

    def rows(self, start: int, end: int) -> RolloutHeader:
        """Return the header of some rows."""
        return RolloutHeader(self.lengths[start:end], self.finished[start:end], self.versions[start:end])


@dataclass(frozen=True)
class RowColumns:
    """Numbers of each token of some responses."""

    offsets: Offsets
    """(rows + 1,)"""
    values: Mapping[str, FloatArray]
    """All T by the name of the number."""

    def row(self, name: str, row: int) -> FloatArray:
        """Return (T,) numbers of one response."""
        return self.values[name][self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Places:
    """Rows of the objects that are passed to the same call."""

    objects: Indices
    """(rows,) position of the object."""
    rows: Indices
    """(rows,) row in the object."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self.objects.tolist(), self.rows.tolist(), strict=True))

    def take(self, indices: Indices) -> Places:
        """Return the places of these rows."""
        return Places(self.objects[indices], self.rows[indices])


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> Offsets:
    """Return (n + 1,) where rows of these lengths begin and end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_columns(lengths: Sequence[int], **rows: Sequence[Any]) -> RowColumns:
    """Return columns from lists of rows. All lists have rows of the same lengths."""
    values = {name: joined(arrays) for name, arrays in rows.items()}
    return RowColumns(offsets_of(lengths), values)


def joined(arrays: Sequence[Any]) -> FloatArray:
    """Concatenate rows of float32."""
    # A rank can be without responses, and `np.concatenate` needs an array.
    return np.concatenate(arrays, dtype=np.float32) if len(arrays) else np.zeros(0, np.float32)


def columns_of(rollouts: Sequence[Rollout], samples: int) -> RolloutColumns:
    """Return the chunk of these rollouts. Each prompt has `samples` consecutive ones."""
    prompts = [rollout.prompt_ids for rollout in rollouts[::samples]]
    return RolloutColumns(
        samples,
        np.fromiter(chain.from_iterable(prompts), np.int32),
        offsets_of([len(prompt) for prompt in prompts]),
        np.concatenate([rollout.response_ids for rollout in rollouts], dtype=np.int32),
        joined([rollout.rollout_logprobs for rollout in rollouts]),
        offsets_of([len(rollout.response_ids) for rollout in rollouts]),
    )


def header_of(rollouts: Sequence[Rollout]) -> RolloutHeader:
    """Return the header of these rollouts."""
    return RolloutHeader(
        np.array([len(rollout.response_ids) for rollout in rollouts], np.int32),
        np.array([rollout.finished for rollout in rollouts], np.bool_),
        np.array([rollout.policy_version for rollout in rollouts], np.int64),
    )


@dataclass(frozen=True)
class RankShare:
    """The responses that one rank computes."""

    indices: Indices
    """Into the batch, ascending."""
    chunks: Indices
    """Chunks that have these responses, ascending."""
    places: Places
    """Places of these responses, in a list of only these chunks."""
    micro_batches: list[list[int]]
    """Indices into `indices`."""


@dataclass(frozen=True)
class SentShare:
    """What the controller sends to a rank of a batch, with the chunks. The rank keeps both for further calls
    with this batch.
    """

    batch: int
    """`RolloutBatch.number`."""
    places: Places
    """See `RankShare`."""
    micro_batches: list[list[int]]


_numbers = itertools.count()


@dataclass
class RolloutBatch:
    """The samples of a prompt are consecutive."""

    chunks: list[Pending[RolloutColumns]]
    """The tokens. A chunk may have rows that are not used, of groups that were replaced."""
    places: Places
    """(B,) chunk and row of each response."""
    lengths_B: IntArray
    """Tokens of each response."""
    finished_B: NDArray[np.bool_]
    """Whether the policy ended the response with EOS. Otherwise the length limit cut it."""
    prompts: list[PromptExample]
    """One per response."""
    rewards: RewardBatch | None = None
    """Already known if filtering needed them."""
    replaced: int = 0
    """Number of prompts that were replaced because all their samples had equal scores."""
    scores_before: float | None = None
    """Mean score with penalties of the first round, before any prompt was replaced.

    None without filtering.
    """
    version: int = 0
    """Policy version that sampled all responses."""
    seeds_B: Indices | None = None
    """Seed of the request of each response, the same for all samples of a prompt. None if they were not
    sampled for a step.
    """
    numbers_B: Indices | None = None
    """Index of each response's prompt among all prompts of the stage. None as for `seeds_B`."""
    filtered: list[RolloutBatch] = field(default_factory=list)
    """Responses that were replaced, in the order of their replacement. Their tokens are in `chunks`."""
    routes: dict[int, list[RankShare]] = field(default_factory=dict)
    """Distribution over ranks by their number, once it is computed (`route`)."""
    number: int = field(default_factory=_numbers.__next__)
    """No other batch of this process has it."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    def forget_distribution(self) -> None:
        """Distribute the batch over ranks again, and send it to them again. Its responses have changed."""
        self.routes.clear()
        self.number = next(_numbers)

    @property
    def prompt_lengths_B(self) -> IntArray:
        """Tokens of each prompt."""
        return np.fromiter((len(prompt.input_ids) for prompt in self.prompts), np.int32, len(self.prompts))

    @property
    def token_bytes(self) -> int:
        """Approximate size of the tokens: an id and a log-probability each."""
        return int(4 * self.prompt_lengths_B.sum() + 8 * self.lengths_B.sum())

    def first(self, count: int) -> RolloutBatch:
        """Return the batch of the first `count` responses."""
        return self.take(np.arange(min(count, len(self))))

    def take(self, rows: Indices) -> RolloutBatch:
        """Return the batch of these responses."""
        # Without the number and the routes of this batch: the ranks would take the rows of the whole batch.
        return RolloutBatch(
            self.chunks,
            self.places.take(rows),
            self.lengths_B[rows],
            self.finished_B[rows],
            [self.prompts[row] for row in rows.tolist()],
            None if self.rewards is None else self.rewards.take(rows.tolist()),
            version=self.version,
            seeds_B=None if self.seeds_B is None else self.seeds_B[rows],
            numbers_B=None if self.numbers_B is None else self.numbers_B[rows],
        )


@dataclass(frozen=True)
class ModelScores:
    """Scores of some responses, of one rank or of the whole batch."""

    values: list[float]
    """(B,) normalised scores; with an ensemble the combined ones."""
    deviations: list[float] = field(default_factory=list)
    """(B,) standard deviation over the members of an ensemble; empty without one."""


def in_batch_order(shares: Sequence[RankShare], of_ranks: Sequence[ModelScores]) -> ModelScores:
    """Return the scores of all ranks in the order of the batch."""
    count = sum(len(share.indices) for share in shares)
    values_B, deviations_B, is_ensemble = np.zeros(count), np.zeros(count), False
    for share, scores in zip(shares, of_ranks, strict=True):
        values_B[share.indices] = scores.values
        # A rank without responses has no deviations, also with an ensemble.
        if scores.deviations:
            is_ensemble = True
            deviations_B[share.indices] = scores.deviations
    return ModelScores(values_B.tolist(), deviations_B.tolist() if is_ensemble else [])


# -- distribution over ranks --


def route(batch: RolloutBatch, ranks: int, micro_batch_tokens: int, *, pack: bool) -> list[RankShare]:
    """Distribute a batch over ranks. Every rank has the same number of micro-batches, some may be empty."""
    lengths_B = (batch.prompt_lengths_B + batch.lengths_B).astype(np.int64)
    rank_of_chunk = _ranks_of_chunks(batch.places.objects, lengths_B, len(batch.chunks), ranks)
    rank_B = rank_of_chunk[batch.places.objects]
    # Stable, so that the responses of a rank keep the order of the batch (`RankShare.indices`).
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
    # With fewer forward passes than the others, a rank would leave them waiting in the collectives of ZeRO-3.
    count = max(len(share.micro_batches) for share in shares)
    for share in shares:
        share.micro_batches.extend([] for _ in range(count - len(share.micro_batches)))
    return shares


def _ranks_of_chunks(objects_B: Indices, lengths_B: Indices, chunks: int, ranks: int) -> Indices:
    costs_B = [estimated_cost(length) for length in lengths_B.tolist()]
    costs = np.bincount(objects_B, weights=costs_B, minlength=chunks)
    chosen = np.zeros(chunks, np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    # Stable, because another order of equal chunks would be another distribution, with other roundings.
    for chunk in np.argsort(-costs, kind="stable").tolist():
        # The heaviest chunk to the least loaded rank: at most 4/3 of the best possible maximum (Graham 1969).
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

    def arguments(
        self, group: str, actors: Sequence[Any], batch: RolloutBatch, shares: Sequence[RankShare]
    ) -> list[Sent]:
        """Return the arguments of the next call for each rank of a group.

        Args:
            group: Name of the group.
            actors: Its actors.
            batch: The batch.
            shares: Its distribution over these ranks.
        """
        # By the number and not by identity: a batch whose groups were replaced is the same object with other
        # rows.
        if self._sent.get(group) == (actors, batch.number):
            return [(batch.number, []) for _ in shares]
        self._sent[group] = actors, batch.number
        arguments: list[Sent] = []
        for share in shares:
            chunks = [as_argument(batch.chunks[chunk]) for chunk in share.chunks.tolist()]
            arguments.append((SentShare(batch.number, share.places, share.micro_batches), chunks))
        return arguments


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
