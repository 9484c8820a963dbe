"""The responses of one rank: from the objects of a call to rows, and between the ranks of a group to those
that train on them.

    experience of this rank --+                                +-- samples of this rank
    experience of others   ---+-- all-to-all within the group --+-- samples of others

A response is scored by one rank, and each of its uses in the update may be on another one, because
minibatches are drawn from the whole batch. The controller sends indices only.

Axes: `P` prompt tokens, `T` response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.ppo.training.batch import (
    FloatArray,
    Indices,
    IntArray,
    Places,
    RolloutColumns,
    RowColumns,
    SentShare,
    offsets_of,
)
from rlhf_core.ppo.training.experience import ModelRows, ResponseSums, Whitening, make_rows
from rlhf_core.ppo.training.loss_step import TrainSample


@dataclass(frozen=True)
class RankBatch:
    """The responses of a batch on the rank that computes with them."""

    share: SentShare
    chunks: Sequence[RolloutColumns]

    def tokens(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return prompt and response of each place of the share."""
        prompts = [self.chunks[number].prompt(row) for number, row in self.share.places]
        responses = [self.chunks[number].response(row) for number, row in self.share.places]
        return prompts, responses

    def rollout_logprobs(self) -> list[FloatArray]:
        """Return the log-probabilities of each response by the engine."""
        return [self.chunks[number].rollout_logprobs(row) for number, row in self.share.places]


@dataclass(frozen=True)
class ExperienceInputs:
    """Where the inputs of `ModelWorker.make_experience` are among its objects, and what the controller knows
    of the responses. One entry per response of the rank.
    """

    batch: int
    """`RolloutBatch.number`; the rank has its responses."""
    policy: Places
    """`logprobs` and `entropy`."""
    reference: Places
    """`logprobs`."""
    critic: Places | None
    """`values`; None without a critic."""
    scores: FloatArray
    """Scores with penalties; NaN for a response that is masked."""
    advantages: FloatArray | None
    """Advantages of whole responses; None if the algorithm has no groups."""
    kl_coef: float
    keep_advantages: bool = False
    """Whether the controller reads the advantages of the tokens."""


@dataclass(frozen=True)
class CriticInputs:
    """Where the inputs of `ModelWorker.update_critic` are among its objects, for each response."""

    batch: int
    """`RolloutBatch.number`; the rank has its responses."""
    values: Places
    returns: Places


@dataclass(frozen=True)
class Exchange:
    """What one rank sends to the ranks of its group and gets from them before an update."""

    send_rows: Indices
    """Rows of this rank to send, those for rank 0 first."""
    send_counts: Indices
    """(ranks,) how many of them are for each rank."""
    receive_counts: Indices
    """(ranks,) how many rows come from each rank."""
    prompt_lengths: IntArray
    """P of the rows that arrive, those from rank 0 first."""
    lengths: IntArray
    """T of these rows."""
    order: Indices
    """Position of each sample among the rows that arrive."""


@dataclass(frozen=True)
class RankExperience:
    """The experience of a policy rank's responses."""

    prompts: list[IntArray]
    responses: list[IntArray]
    columns: RowColumns
    """See `experience.make_rows`."""


def experience_of_rank(
    batch: RankBatch, inputs: ExperienceInputs, objects: Sequence[RowColumns], ppo: PPOConfig
) -> tuple[RankExperience, ResponseSums]:
    """Return the experience of the responses of `batch`, and the sums of each."""
    prompts, responses = batch.tokens()
    rows = ModelRows(
        responses,
        batch.rollout_logprobs(),
        _column(inputs.policy, objects, "logprobs"),
        _column(inputs.policy, objects, "entropy"),
        _column(inputs.reference, objects, "logprobs"),
        None if inputs.critic is None else _column(inputs.critic, objects, "values"),
    )
    columns, sums = make_rows(rows, inputs.scores, inputs.advantages, ppo, inputs.kl_coef)
    return RankExperience(prompts, responses, columns), sums


def policy_samples(
    experience: RankExperience, whitening: Whitening | None, exchange: Exchange, rank: Rank
) -> list[TrainSample]:
    """Return the samples that this policy rank trains on. This is a collective operation."""
    columns = experience.columns
    rows = []
    for row, (prompt, response) in enumerate(zip(experience.prompts, experience.responses, strict=True)):
        advantages = columns.row("advantages", row)
        # Only here, because the mean needs the sums of all ranks, and the returns are not whitened.
        if whitening is not None:
            advantages = whitening.apply(advantages)
        names = ("old_logprobs", "ref_logprobs", "weights")
        rows.append((prompt, response, [advantages, *(columns.row(name, row) for name in names)]))
    samples = []
    for prompt, response, (advantages, old, ref, weights) in exchanged(rows, exchange, rank, 4):
        samples.append(
            TrainSample(
                tuple(prompt.tolist()),
                tuple(response.tolist()),
                old_logprobs=old,
                advantages=advantages,
                ref_logprobs=ref,
                weights=weights,
            )
        )
    return samples


def critic_samples(
    batch: RankBatch, inputs: CriticInputs, objects: Sequence[RowColumns], exchange: Exchange, rank: Rank
) -> list[TrainSample]:
    """Return the samples that this critic rank trains on. This is a collective operation.

    Args:
        batch: The responses of this rank.
        inputs: Where old values and returns are among `objects`.
        objects: Columns of experience from the policy ranks.
        exchange: Which rank trains on which response.
        rank: This rank.
    """
    prompts, responses = batch.tokens()
    values = _column(inputs.values, objects, "values")
    returns = _column(inputs.returns, objects, "returns")
    columns = map(list, zip(values, returns, strict=True))
    rows = list(zip(prompts, responses, columns, strict=True))
    samples = []
    for prompt, response, (old, target) in exchanged(rows, exchange, rank, 2):
        sample = TrainSample(tuple(prompt.tolist()), tuple(response.tolist()), old_values=old, returns=target)
        samples.append(sample)
    return samples


def _column(places: Places, objects: Sequence[RowColumns], name: str) -> list[FloatArray]:
    return [objects[number].row(name, row) for number, row in places]


_Row = tuple[IntArray, IntArray, list[FloatArray]]
"""Prompt, response, and columns of a response."""


def exchanged(rows: Sequence[_Row], exchange: Exchange, rank: Rank, columns: int) -> list[_Row]:
    """Send rows to the ranks of the group that train on them, and return those of this rank, in order.

    Args:
        rows: Rows of this rank.
        exchange: What to send and what arrives.
        rank: This rank.
        columns: Number of float columns of a row.
    """
    # All rows are here already. Packing them would only copy them.
    if rank.world_size == 1:
        return [rows[row] for row in exchange.send_rows[exchange.order].tolist()]
    rows_of_rank = np.split(exchange.send_rows, np.cumsum(exchange.send_counts)[:-1])
    sent = [_packed([rows[row] for row in part.tolist()]) for part in rows_of_rank]
    # In elements of 4 bytes: the prompt, the response, and the columns, each as long as the response.
    row_sizes = exchange.prompt_lengths + exchange.lengths.astype(np.int64) * (1 + columns)
    ends = offsets_of(row_sizes)[np.cumsum(exchange.receive_counts)]
    arrived = _all_to_all(sent, np.diff(ends, prepend=0).tolist(), rank)
    unpacked = _unpacked(arrived, exchange.prompt_lengths, exchange.lengths, columns)
    return [unpacked[position] for position in exchange.order.tolist()]


def _packed(rows: Sequence[_Row]) -> IntArray:
    """Return rows as one array; floats keep their bits."""
    # One type for all of them, because one collective sends them as one tensor.
    # For a rank that gets no rows: `np.concatenate` needs an array.
    arrays = [np.zeros(0, np.int32)]
    for prompt, response, columns in rows:
        arrays += [prompt, response, *(np.ascontiguousarray(column).view(np.int32) for column in columns)]
    return np.concatenate(arrays)


def _unpacked(part: IntArray, prompts: IntArray, lengths: IntArray, columns: int) -> list[_Row]:
    rows = []
    start = 0
    for prompt_length, length in zip(prompts.tolist(), lengths.tolist(), strict=True):
        ends = start + prompt_length + length * np.arange(columns + 2)
        pieces = [part[begin:end] for begin, end in zip([start, *ends[:-1]], ends, strict=True)]
        floats = [piece.view(np.float32) for piece in pieces[2:]]
        rows.append((pieces[0], pieces[1], floats))
        start = int(ends[-1])
    return rows


def _all_to_all(sent: Sequence[IntArray], sizes: list[int], rank: Rank) -> IntArray:
    """Return what all ranks have sent to this one. `sizes` are the elements that arrive from each."""
    # On the device of the rank, because NCCL exchanges no tensors of the host.
    outgoing = torch.from_numpy(np.concatenate(sent)).to(rank.torch_device)
    incoming = torch.empty(sum(sizes), dtype=torch.int32, device=rank.torch_device)
    dist.all_to_all_single(incoming, outgoing, sizes, [len(part) for part in sent])
    arrived: IntArray = incoming.cpu().numpy()
    return arrived
