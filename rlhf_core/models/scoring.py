"""Log-probabilities, values and scores of whole lists of sequences, without gradients, and the score that the
members of an ensemble of reward models have together.

A list is cut into micro-batches first (`models.batching`); results come back in the order of the list, as CPU
tensors.

    model/                   member 0 of an ensemble, as without one
    model/ensemble.json      number of members, and how they are combined
    model/member-1/ ...      the others; each folder is a reward model of its own

Axes: `M` members, `S` sequences, `T` response tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from rlhf_core.config.training import MEMBERS, EnsembleConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.batching import TokenBatch, TokenSequence, collate, plan_ranks
from rlhf_core.models.policy import Policy
from rlhf_core.models.score import ScoreModel, ScoreStatistics
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import PromptAndResponse

_FILE = "ensemble.json"

Scores = NDArray[np.float64]


# -- the folder of an ensemble --


def member_folder(folder: Path, member: int) -> Path:
    """Return the folder of one member, of which the first is 0, inside that of the ensemble."""
    return folder / f"member-{member}" if member else folder


def load_ensemble(folder: Path) -> EnsembleConfig | None:
    """Return how the reward models in `folder` are combined; None if there is only one.

    Raises ModelError for a file that cannot be used.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        ensemble = EnsembleConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise ModelError(
            f"{path}: {field}: {first['msg']}; use the folder as the stage reward made it"
        ) from None
    # Pydantic does not check a `Range`, and `config.messages` does so for configurations only.
    if not MEMBERS.low <= ensemble.members <= MEMBERS.high:
        raise ModelError(
            f"{path}: members: must be {MEMBERS.low} to {MEMBERS.high}, got {ensemble.members}; use the"
            " folder as the stage reward made it"
        )
    return ensemble


def save_ensemble(folder: Path, ensemble: EnsembleConfig) -> None:
    """Write what `load_ensemble` reads."""
    (folder / _FILE).write_text(ensemble.model_dump_json(indent=2) + "\n")


def member_folders(folder: Path) -> list[Path]:
    """Return the folders of all members; `folder` alone if it has one reward model."""
    ensemble = load_ensemble(folder)
    members = 1 if ensemble is None else ensemble.members
    return [member_folder(folder, member) for member in range(members)]


# -- the scores of an ensemble --


def combined(ensemble: EnsembleConfig | None, by_member: Sequence[Sequence[float]]) -> list[float]:
    """Return the (S,) scores of the ensemble, which are not normalised again.

    "Reward Model Ensembles Help Mitigate Overoptimization" (Coste et al. 2023, arXiv 2310.02743), with the
    scores r_1 .. r_k of k members:

        mean           (1/k) sum_i r_i
        worst_case     min_i r_i
        uncertainty    (1/k) sum_i r_i - penalty * (1/k) sum_i (r_i - mean)^2

    The r_i are normalised, each by the statistics of its own member, so that no member counts more because of
    its scale.

    Args:
        ensemble: How the members are combined; None if there is only one, whose scores are returned.
        by_member: (M, S) normalised scores. A sequence to which a member gives NaN has the score NaN.
    """
    if ensemble is None:
        return list(by_member[0])
    rows = _rows(by_member)
    if ensemble.combine == "worst_case":
        # np.minimum returns NaN if a member gives NaN. np.fmin would drop it.
        scores_S = reduce(np.minimum, rows)
    elif ensemble.combine == "mean":
        scores_S = _mean(rows)
    else:
        scores_S = _mean(rows) - ensemble.penalty * _variance(rows)
    combined_scores: list[float] = scores_S.tolist()
    return combined_scores


def deviations(by_member: Sequence[Sequence[float]]) -> list[float]:
    """Return (S,) the population standard deviation of each sequence's scores over the members."""
    found: list[float] = np.sqrt(_variance(_rows(by_member))).tolist()
    return found


def _rows(by_member: Sequence[Sequence[float]]) -> list[Scores]:
    return [np.array(scores, dtype=np.float64) for scores in by_member]


def _mean(rows: Sequence[Scores]) -> Scores:
    # Added one after the other: the order of numpy's sum depends on the shape, which is that of the batch.
    return reduce(np.add, rows) / len(rows)


def _variance(rows: Sequence[Scores]) -> Scores:
    mean_S = _mean(rows)
    with np.errstate(invalid="ignore"):  # NaN, where a score is infinite
        return _mean([np.square(row - mean_S) for row in rows])


# -- passes over sequences --


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
    # Copied before it is split: each copy to the host waits for the GPU.
    for i, values in zip(micro_batch, batch.split(values_N.cpu()), strict=False):
        results[i] = values
