"""`rlhf blame` without PPO's record: the items of a regression set that a policy lost, and the rows of a
training step.

The rows of a step are a function of the seed and the step (`rows_of_step` in `rlhf_core.stages.training`).
Their losses are not recorded, and the weights of the step are gone: checkpoints of a finished stage are
deleted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from rlhf_core.data.dataset import load_prompts, open_sft
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.errors import InputError
from rlhf_core.ops.blame import shares_of
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.record.reader import read_rollouts
from rlhf_core.run.summary import policy_of
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.training import rows_of_step, training_pairs

TrainedStage = Literal["sft", "reward", "judge", "dpo"]
_OPPONENT = "sft"


@dataclass(frozen=True)
class LostItem:
    """An item of a regression set on which the policy is worse than the SFT model."""

    share: float
    """Share of the losses of all items."""
    prompt: str
    scores: tuple[float, float]
    """Of the SFT model and of the policy."""
    responses: tuple[str, str]
    """Of both."""


def lost_items(run: FinishedRun, name: str) -> tuple[list[LostItem], int]:
    """Return the items of a regression set that the policy lost against the SFT model, largest shares first,
    and the number of all items.

    Raises InputError if the evaluation has no record, or no such set.
    """
    folder = run.recorded("evaluate")
    columns = ["model", "prompt_set", "prompt_id", "response_ids", "score"]
    answers = read_rollouts(folder, columns).to_pylist()
    policy = policy_of(run.summary)
    by_model = {
        model: {
            row["prompt_id"]: row for row in answers if (row["prompt_set"], row["model"]) == (name, model)
        }
        for model in (_OPPONENT, policy)
    }
    if not all(by_model.values()):
        sets = sorted(path.name for path in (folder / "regression").glob("*"))
        raise InputError(
            f"--regression: must be a set of evaluate.regression of {run.name}; got {name}; it has"
            f" {', '.join(sets) or 'none'}"
        )
    artifacts, ref = run.artifact("data")
    decode = load_decoder(artifacts.fetch(ref, weights=False)).response
    texts = {each.prompt_id: each.prompt for each in load_prompts(folder / "regression" / name, "eval")}
    pairs = [(by_model[_OPPONENT][prompt], row) for prompt, row in by_model[policy].items()]
    losses = np.array([before["score"] - after["score"] for before, after in pairs]).clip(0)
    items = []
    for share, (before, after) in zip(shares_of(losses, 0.0).tolist(), pairs, strict=True):
        if share > 0:
            responses = decode(before["response_ids"]), decode(after["response_ids"])
            scores = before["score"], after["score"]
            items.append(LostItem(share, texts[after["prompt_id"]], scores, responses))
    return sorted(items, key=lambda item: -item.share), len(pairs)


@dataclass(frozen=True)
class TrainedRow:
    """A row of a batch."""

    index: int
    """Number of the row in the training data of the stage."""
    source: str
    texts: Sequence[str]
    """The conversation; or prompt, chosen and rejected response."""


def trained_rows(run: FinishedRun, stage: TrainedStage, step: int) -> list[TrainedRow]:
    """Return the rows of the batch of a step, from 1. Of an ensemble, it is that of its first model.

    Raises InputError if the stage did not make this step.
    """
    config = run.config(stage)
    sections: dict[str, Any] = {"sft": config.sft, "dpo": config.dpo, "judge": config.reward.of_judge}
    settings = sections.get(stage, config.reward)
    artifacts, ref = run.artifact("data")
    data = artifacts.fetch(ref, weights=False)
    decode = load_decoder(data)
    with TemporaryDirectory(prefix="rlhf-blame-") as folder:
        work = Path(folder)
        rows: Any
        if stage == "sft":
            rows = open_sft(data, "train", work)
        else:
            rows = training_pairs(config, data, stage, work)
        last = math.ceil(len(rows) / settings.batch_size) * settings.epochs
        if not 1 <= step <= last:
            raise InputError(f"--step: must be a step of {stage}, 1 to {last}; got {step}")
        found = []
        seed = derive_seed(config.run.seed, stage)
        for index in rows_of_step(len(rows), settings.batch_size, seed, step - 1):
            row = rows[index]
            if stage == "sft":
                texts = [decode(row.input_ids)]
            else:
                texts = [row.prompt, decode.response(row.chosen_ids), decode.response(row.rejected_ids)]
            found.append(TrainedRow(index, row.source, texts))
    return found
