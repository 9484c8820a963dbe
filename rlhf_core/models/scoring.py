"""Log-probabilities, values and scores of whole lists of sequences, without gradients.

A list is cut into micro-batches first (`models.packing`); results come back in the order of the list, as CPU
tensors.

Axes: `T` response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_core.models.batching import TokenBatch, TokenSequence, collate
from rlhf_core.models.packing import plan_ranks
from rlhf_core.models.policy import Policy
from rlhf_core.models.score import ScoreModel, ScoreStatistics
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import PromptAndResponse


class Batches:
    """The forward passes of one list of sequences. `micro_batches`: places in the list; an empty one is a
    dummy pass for ranks that must take part in a collective.
    """

    def __init__(
        self,
        sequences: Sequence[PromptAndResponse],
        micro_batches: Sequence[Sequence[int]],
        *,
        pad_id: int,
        device: torch.device | str,
        pack: bool,
    ) -> None:
        self._sequences = sequences
        self._micro_batches = micro_batches
        self._pad_id, self._device, self._pack = pad_id, device, pack

    def __iter__(self) -> Iterator[tuple[Sequence[int], TokenBatch]]:
        for number, micro_batch in enumerate(self._micro_batches, start=1):
            heartbeat(f"pass {number} of {len(self._micro_batches)}")
            chosen = [TokenSequence.of(*self._sequences[i]) for i in micro_batch]
            yield micro_batch, collate(chosen, pad_id=self._pad_id, pack=self._pack).to(self._device)

    def __len__(self) -> int:
        return len(self._sequences)


@torch.no_grad()
def sequence_logprobs(
    model: Any, batches: Batches, temperature: float, with_entropy: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """(log p, entropy) of each response token: for each sequence a float32 tensor (T,). `model`: a `Policy`,
    wrapped by a training engine or not.
    """
    logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batches)
    entropy: list[torch.Tensor] = list(logprobs)
    for micro_batch, batch in batches:
        output = model(batch, temperature, with_entropy)
        _place(logprobs, micro_batch, batch, output.logprobs_N)
        if with_entropy:
            _place(entropy, micro_batch, batch, output.entropy_N)
    return logprobs, entropy if with_entropy else None


@torch.no_grad()
def sequence_values(model: Any, batches: Batches) -> list[torch.Tensor]:
    """The value before each response token: for each sequence a float32 tensor (T,).

    `model`: a `ScoreModel`.
    """
    values: list[torch.Tensor] = [torch.empty(0)] * len(batches)
    for micro_batch, batch in batches:
        _place(values, micro_batch, batch, model(batch, "tokens"))
    return values


@torch.no_grad()
def sequence_scores(model: Any, statistics: ScoreStatistics, batches: Batches) -> list[float]:
    """Score of each sequence, read at its last token and normalised. `model`: a `ScoreModel`."""
    scores = [0.0] * len(batches)
    for micro_batch, batch in batches:
        for i, score in zip(micro_batch, statistics.normalize(model(batch, "last")).tolist(), strict=False):
            scores[i] = score
    return scores


def whole_list(
    model: Policy | ScoreModel, sequences: Sequence[PromptAndResponse], micro_batch_tokens: int, pad_id: int
) -> Batches:
    """Create micro-batches for a single process, on the device of `model` and in the layout that the model
    supports.
    """
    lengths = [len(p) + len(r) for p, r in sequences]
    (micro_batches,) = plan_ranks(lengths, 1, micro_batch_tokens, pack=model.packs)
    return Batches(
        sequences, micro_batches, pad_id=pad_id, device=next(model.parameters()).device, pack=model.packs
    )


def _place(
    results: list[torch.Tensor], micro_batch: Sequence[int], batch: TokenBatch, values_N: torch.Tensor
) -> None:
    # A dummy pass has an empty micro-batch and one empty part.
    for i, values in zip(micro_batch, batch.split(values_N.cpu()), strict=False):
        results[i] = values
