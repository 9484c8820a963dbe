"""An ensemble of reward models: its folder, and the score that its members have together.

"Reward Model Ensembles Help Mitigate Overoptimization" (Coste et al. 2023, arXiv 2310.02743), with the
scores r_1 .. r_k of k members:

mean           (1/k) sum_i r_i
worst_case     min_i r_i
uncertainty    (1/k) sum_i r_i - penalty * (1/k) sum_i (r_i - mean)^2

The r_i are normalised, each by the statistics of its own member, so that no member counts more because of
its scale. The combined score is not normalised again.

    model/                   member 0, as without ensemble
    model/ensemble.json      number of members, and how they are combined
    model/member-1/ ...      the others; each folder is a reward model of its own

Axes: `M` members, `S` sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rlhf_core.config.training import MEMBERS, EnsembleConfig
from rlhf_core.errors import ModelError

_FILE = "ensemble.json"

Scores = NDArray[np.float64]


# -- folder --


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


# -- scores --


def combined(ensemble: EnsembleConfig | None, by_member: Sequence[Sequence[float]]) -> list[float]:
    """Return the (S,) scores of the ensemble.

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
