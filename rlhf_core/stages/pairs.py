"""What the stages that train on preference pairs have in common: which pairs, and how they share ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.training import DPOConfig, RewardConfig
from rlhf_core.data.card import sources_of_models
from rlhf_core.data.dataset import load_pairs
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import DataError
from rlhf_core.evaluation.statistics import group_of, win_rate
from rlhf_core.models.packing import plan_ranks
from rlhf_core.pipeline import StageName
from rlhf_core.seeds import derive_seed
from rlhf_core.types import PairExample


def training_pairs(config: PipelineConfig, data: Path, stage: StageName) -> list[PairExample]:
    """Return the pairs that train the model of `stage`, `reward`, `judge` or `dpo`.

    With `reward.judge`, the pairs of the judge are disjoint from those of the other stages: all pairs of a
    group train the same models, for every seed. Only the other stages have the pairs that a model has
    labelled (`labelled_by` of their source). The held-out pairs are the same for all. Raises DataError if
    nothing is left.
    """
    pairs = load_pairs(data, "train")
    judge = config.reward.judge
    if judge is None:
        return pairs
    labelled = sources_of_models(data)
    of_judge = [pair.source not in labelled and _is_of_judge(pair, judge.fraction) for pair in pairs]
    chosen = [pair for pair, own in zip(pairs, of_judge, strict=True) if own == (stage == "judge")]
    if not chosen and stage == "judge" and all(pair.source in labelled for pair in pairs):
        raise DataError(
            "reward.judge needs pairs that no model has labelled, but all sources have `labelled_by`; add"
            " pairs of people, or leave reward.judge out"
        )
    if not chosen:
        raise DataError(
            f"reward.judge.fraction={judge.fraction:g} leaves none of the {len(pairs)} pairs for the stage"
            f" {stage}; add pairs, or leave reward.judge out"
        )
    return chosen


def _is_of_judge(pair: PairExample, fraction: float) -> bool:
    # A seed has 63 bits, so the quotient is uniform in [0, 1].
    return derive_seed(0, "judge", pair.group) / 2.0**63 < fraction


def micro_batches(
    rank: Rank, pairs: Sequence[PairExample], config: RewardConfig | DPOConfig
) -> list[list[int]]:
    """Return the micro-batches of `rank`, as indices of `pairs`. Both responses of a pair are in the same
    one.
    """
    # Padded: two rows for each pair, both as wide as the longer of the two sequences.
    lengths = [2 * (len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids))) for p in pairs]
    if config.packs:
        lengths = [pair_tokens(pair) for pair in pairs]
    return plan_ranks(lengths, rank.world_size, config.micro_batch_tokens, pack=config.packs)[rank.rank]


def pair_tokens(pair: PairExample) -> int:
    """Return the tokens of both sequences of a pair."""
    return 2 * len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids)


def is_correct(gap_B: torch.Tensor) -> torch.Tensor:
    """Return 1 where the chosen response has the higher score, one half where both have the same."""
    return torch.heaviside(gap_B, torch.full_like(gap_B, 0.5))


def accuracy_interval(gap_P: torch.Tensor, pairs: Sequence[PairExample]) -> dict[str, float]:
    """Return the bounds `accuracy_low` and `accuracy_high` (95 %, Wilson, over groups of prompts) of the
    share of pairs whose chosen response has the higher score.

    `gap_P` are the scores of the chosen responses minus those of the rejected ones. Without pairs, both are
    NaN.
    """
    if not pairs:
        return {"accuracy_low": math.nan, "accuracy_high": math.nan}
    correct = is_correct(gap_P).tolist()
    found = win_rate(correct, confidence=0.95, groups=[group_of(pair) for pair in pairs])
    return {"accuracy_low": found.low, "accuracy_high": found.high}


def table_row(pair: PairExample) -> dict[str, Any]:
    """Return a pair as a row of the table of a skipped batch."""
    sides = {"prompt_ids": pair.prompt_ids, "chosen_ids": pair.chosen_ids, "rejected_ids": pair.rejected_ids}
    about = {"prompt": pair.prompt, "source": pair.source, "margin": pair.margin}
    return {**about, **{name: str(list(ids)) for name, ids in sides.items()}}
