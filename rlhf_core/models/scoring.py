"""Log-probabilities, values and scores of whole lists of sequences, without gradients.

A list is cut into micro-batches first (`models.batching`); results come back in the order of the list, as CPU
tensors.

Axes: `T` response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_core.models.batching import TokenBatch, TokenSequence, collate, plan_ranks
from rlhf_core.models.policy import Policy
from rlhf_core.models.score import ScoreModel, ScoreStatistics
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import PromptAndResponse


class Batches:
    """The forward passes over one list of sequences.

    Args:
        sequences: Prompts and responses.
        micro_batches: Indices of `sequences` for each pass. An empty micro-batch is a pass without results,
            for a rank that must take part in a collective operation.
        pad_id: Padding token.
        device: Device of the batches.
        pack: Whether a row has several sequences.
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
    """Return (log p, entropy) of each response token, as a float32 tensor (T,) for each sequence.

    `model` is a `Policy`, or a training engine around one. The entropy is None without `with_entropy`.
    """
    logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batches)
    entropy: list[torch.Tensor] = list(logprobs)
    for micro_batch, batch in batches:
        output = model(batch, temperature, with_entropy)
        _store(logprobs, micro_batch, batch, output.logprobs_N)
        if with_entropy:
            _store(entropy, micro_batch, batch, output.entropy_N)
    return logprobs, entropy if with_entropy else None


@torch.no_grad()
def sequence_values(model: Any, batches: Batches) -> list[torch.Tensor]:
    """Return the value before each response token, as a float32 tensor (T,) for each sequence.

    `model` is a `ScoreModel`, or a training engine around one.
    """
    values: list[torch.Tensor] = [torch.empty(0)] * len(batches)
    for micro_batch, batch in batches:
        _store(values, micro_batch, batch, model(batch, "tokens"))
    return values


@torch.no_grad()
def sequence_scores(model: Any, statistics: ScoreStatistics, batches: Batches) -> list[float]:
    """Return the normalised score of each sequence, which is read at its last token.

    `model` is a `ScoreModel`, or a training engine around one.
    """
    scores = [0.0] * len(batches)
    for micro_batch, batch in batches:
        normalized = statistics.normalize(model(batch, "last")).tolist()
        # Not strict: an empty micro-batch has one score, of its dummy token.
        for i, score in zip(micro_batch, normalized, strict=False):
            scores[i] = score
    return scores


def single_process_batches(
    model: Policy | ScoreModel, sequences: Sequence[PromptAndResponse], micro_batch_tokens: int, pad_id: int
) -> Batches:
    """Return micro-batches for one process, on the device of `model`, packed if the model supports it."""
    lengths = [len(p) + len(r) for p, r in sequences]
    (micro_batches,) = plan_ranks(lengths, 1, micro_batch_tokens, pack=model.packs)
    return Batches(
        sequences, micro_batches, pad_id=pad_id, device=next(model.parameters()).device, pack=model.packs
    )


def _store(
    results: list[torch.Tensor], micro_batch: Sequence[int], batch: TokenBatch, values_N: torch.Tensor
) -> None:
    # A dummy pass has an empty micro-batch and one empty part.
    for i, values in zip(micro_batch, batch.split(values_N.cpu()), strict=False):
        results[i] = values
