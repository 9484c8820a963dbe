"""The responses of a PPO step in the controller: lengths, rewards, and references to the tokens.

Axis: `B` responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhf_core.cluster.rpc import Pending
from rlhf_core.ppo.training.columns import Indices, IntArray, Places, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, VersionSpans


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
    from_cache: bool = False
    """Whether an earlier attempt sampled the batch."""
    version: int = 0
    """Policy version that sampled all responses; with `ppo.weight_sync.keep_requests` the oldest one."""
    versions_B: Indices | None = None
    """Policy version that sampled the first token of each response; None if the batch was read from files."""
    spans: Mapping[int, VersionSpans] = field(default_factory=dict)
    """Spans of the responses that several policy versions sampled."""
    routes: dict[int, list[RankShare]] = field(default_factory=dict)
    """Distribution over ranks by their number, once it is computed (`ppo.fleet.routes`)."""
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

    @property
    def has_one_version(self) -> bool:
        """Whether one policy version sampled all tokens."""
        return not self.spans and (self.versions_B is None or bool((self.versions_B == self.version).all()))

    def spans_of(self, row: int) -> VersionSpans:
        """Return first token and policy version of each part of a response."""
        first = self.version if self.versions_B is None else int(self.versions_B[row])
        return self.spans.get(row) or ((0, first),)

    def token_staleness(self, version: int) -> float:
        """Return the mean over all tokens of the number of versions that they are older than `version`."""
        behind = 0
        for row, length in enumerate(self.lengths_B.tolist()):
            spans = self.spans_of(row)
            ends = [*(start for start, _ in spans[1:]), length]
            for (start, sampled_by), end in zip(spans, ends, strict=True):
                behind += (version - sampled_by) * (end - start)
        return behind / int(self.lengths_B.sum())

    def first(self, count: int) -> RolloutBatch:
        """Return the batch of the first `count` responses."""
        rows = np.arange(min(count, len(self)))
        return RolloutBatch(
            self.chunks,
            self.places.take(rows),
            self.lengths_B[rows],
            self.finished_B[rows],
            self.prompts[:count],
        )
