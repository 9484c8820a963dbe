"""Rollouts and the numbers of models as columns: one flat array for each kind of value, with one row per
response.

    engine  --chunks: RolloutColumns-->  ranks  --RowColumns-->  other ranks

Chunks are results of Ray tasks. The controller holds references to them and does not fetch them. It owns
them: a chunk is lost only if its node is lost, not if the actor that made it is replaced. Each call names the
rows that it needs by `Places`.

Axes: `P` tokens of a prompt, `T` tokens of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.types import Rollout, VersionSpans

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
    """Policy version that sampled the first token of each response."""
    spans: Mapping[int, VersionSpans] = field(default_factory=dict)
    """Spans of the rows that several policy versions sampled."""

    @property
    def all_versions(self) -> set[int]:
        """Every policy version that sampled a token."""
        return {*self.versions.tolist(), *(version for spans in self.spans.values() for _, version in spans)}

    def rows(self, start: int, end: int) -> RolloutHeader:
        """Return the header of some rows."""
        spans = {row - start: spans for row, spans in self.spans.items() if start <= row < end}
        return RolloutHeader(
            self.lengths[start:end], self.finished[start:end], self.versions[start:end], spans
        )


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
    return np.concatenate(arrays, dtype=np.float32) if len(arrays) else np.zeros(0, np.float32)


def columns_of(rollouts: Sequence[Rollout], samples: int) -> RolloutColumns:
    """Return the chunk of these rollouts. Each prompt has `samples` consecutive ones."""
    prompts = [rollout.prompt_ids for rollout in rollouts[::samples]]
    return RolloutColumns(
        samples,
        np.fromiter(chain.from_iterable(prompts), np.int32),
        offsets_of([len(prompt) for prompt in prompts]),
        np.fromiter(chain.from_iterable(rollout.response_ids for rollout in rollouts), np.int32),
        np.fromiter(chain.from_iterable(rollout.rollout_logprobs for rollout in rollouts), np.float32),
        offsets_of([len(rollout.response_ids) for rollout in rollouts]),
    )


def header_of(rollouts: Sequence[Rollout]) -> RolloutHeader:
    """Return the header of these rollouts."""
    return RolloutHeader(
        np.array([len(rollout.response_ids) for rollout in rollouts], np.int32),
        np.array([rollout.finished for rollout in rollouts], np.bool_),
        np.array([rollout.policy_version for rollout in rollouts], np.int64),
        {row: rollout.spans for row, rollout in enumerate(rollouts) if rollout.spans},
    )
