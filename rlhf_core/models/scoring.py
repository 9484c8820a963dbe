"""Log-probabilities and scores of whole lists of sequences, in token-budgeted forward passes, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_core.models.batching import TokenSequence, collate, micro_batches
from rlhf_core.models.policy import Policy
from rlhf_core.models.score import ScoreModel

Pair = tuple[Sequence[int], Sequence[int]]
"""(prompt ids, response ids)."""


@torch.no_grad()
def sequence_logprobs(
    model: Policy, sequences: Sequence[Pair], *, temperature: float, micro_batch_tokens: int, pad_id: int
) -> list[torch.Tensor]:
    """log p of each response token: for each sequence a float32 CPU tensor (T,)."""
    results: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    device = next(model.parameters()).device
    for group in micro_batches([len(p) + len(r) for p, r in sequences], micro_batch_tokens):
        batch = collate([TokenSequence.of(*sequences[i]) for i in group], pad_id=pad_id).to(device)
        logprobs_N = model(batch, temperature).logprobs_N.cpu()
        for i, values in zip(group, batch.split(logprobs_N), strict=True):
            results[i] = values
    return results


@torch.no_grad()
def sequence_scores(
    model: ScoreModel, sequences: Sequence[Pair], *, micro_batch_tokens: int, pad_id: int
) -> list[float]:
    """Normalised score of each sequence, read at its last token."""
    results = [0.0] * len(sequences)
    device = next(model.parameters()).device
    for group in micro_batches([len(p) + len(r) for p, r in sequences], micro_batch_tokens):
        batch = collate([TokenSequence.of(*sequences[i]) for i in group], pad_id=pad_id).to(device)
        scores_S = model.statistics.normalize(model(batch, "last")).cpu()
        for i, score in zip(group, scores_S.tolist(), strict=True):
            results[i] = score
    return results
