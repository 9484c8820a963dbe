"""`rlhf blame`: the responses behind a spike of a step of PPO, the rows of a step of another stage, or
the items of a regression set that the policy lost.

    share of a response = how far it is above the mean of the steps before, as a part of that of all such
                          responses of the step; below the mean if the mean of the step fell

Of PPO, only the record is read. Losses of single tokens are not recorded: `loss` is the size of the
advantages, which is that of the policy's loss and gradient before the first update of the step, and `value`
the squared error of the critic before its update. Both follow from the scores, values and log-probabilities,
as in training (`ppo.training.experience`).

The rows of a step of another stage are a function of the seed and the step (`rows_of_step` in
`rlhf_core.stages.training`). Their losses are not recorded, and the weights of the step are gone: checkpoints
of a finished stage are deleted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.redact import without_secret_values
from rlhf_core.data.dataset import load_prompts, open_sft
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.ops.first_difference import Recording
from rlhf_core.ppo.training.experience import ModelRows, make_rows, response_advantages, summarize
from rlhf_core.record.reader import read_rollouts
from rlhf_core.record.schema import REWARD
from rlhf_core.run.summary import policy_of
from rlhf_core.seeds import derive_seed
from rlhf_core.stages.training import rows_of_step, training_pairs

Quantity = Literal["reward", "kl", "loss", "value"]

BEFORE = 10
"""Steps before, whose mean a step is compared with."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class BlamedResponse:
    """A response and its share."""

    index: int
    share: float
    value: float
    score: float
    kl: float
    tokens: int
    source: str
    """Name of the data source of the prompt."""
    prompt: str
    response: str


@dataclass(frozen=True)
class Blame:
    """What is behind a step."""

    mean: float
    before: float | None
    """Mean of the steps before; None for the first recorded step, which is compared with 0."""
    responses: Sequence[BlamedResponse]
    """Largest shares first."""
    prompts: Mapping[str, float]
    """Share of each prompt, largest first, if prompts have several responses."""
    sources: Mapping[str, float]
    """Share of each data source, largest first."""
    rewards: Mapping[str, tuple[float, float | None]]
    """Mean of each reward source, before weights and normalisation, in the step and in the steps before."""
    cut: tuple[float, float | None]
    """Share of the responses that the length limit has cut, in the step and in the steps before."""


def blame(run: FinishedRun, step: int, of: Quantity = "reward") -> Blame:
    """Rank the responses of a step by their share in its `of`.

    Raises InputError if the step is not recorded, or not with the columns that are needed.
    """
    recording = Recording(run.recorded("ppo"), run.name)
    ppo = run.config("ppo").ppo
    rows, values = _of_step(recording, ppo, step, of)
    if not rows:
        raise InputError(f"--step: no response of step {step} of {run.name} has a score; choose another step")
    steps_before = [number for number in range(step - BEFORE, step) if number in recording.steps]
    earlier = [_of_step(recording, ppo, number, of) for number in steps_before]
    rows_before = list(chain.from_iterable(found for found, _ in earlier))
    before = float(np.concatenate([found for _, found in earlier]).mean()) if rows_before else None
    shares = shares_of(values, before or 0.0)
    data = run.data()
    prompts = {prompt.prompt_id: prompt for prompt in load_prompts(data, "train")}
    decode = load_decoder(data)
    responses = []
    for row, share, value in zip(rows, shares.tolist(), values.tolist(), strict=True):
        prompt, ids = prompts[row["prompt_id"]], row["response_ids"]
        asked, answered = without_secret_values([prompt.prompt, decode.response(ids)])
        numbers = (share, value, row["score"], row["kl"], len(ids))
        responses.append(BlamedResponse(row["index"], *numbers, prompt.source, asked, answered))
    responses.sort(key=lambda each: -each.share)
    of_prompts = _summed([(each.prompt, each.share) for each in responses])
    rewards = {}
    for column in rows[0]:
        if column.startswith(REWARD):
            earlier_mean = _mean(rows_before, column) if rows_before else None
            rewards[column.removeprefix(REWARD)] = (_mean(rows, column), earlier_mean)
    return Blame(
        float(values.mean()),
        before,
        responses,
        of_prompts if ppo.samples_per_prompt > 1 else {},
        _summed([(each.source, each.share) for each in responses]),
        rewards,
        (_cut(rows), _cut(rows_before) if rows_before else None),
    )


def shares_of(values: NDArray[np.float64], before: float) -> NDArray[np.float64]:
    """Return the share of each value in the change of their mean from `before`. The shares add up to 1.

    >>> shares_of(np.array([5.0, 1.0, 2.0]), 1.0).tolist()
    [0.8, 0.0, 0.2]
    """
    above = values - before
    # The mean fell: what is below it is behind the change.
    if above.sum() < 0:
        above = -above
    above = above.clip(0)
    return above / above.sum() if above.any() else above


def _of_step(
    recording: Recording, ppo: PPOConfig, step: int, of: Quantity
) -> tuple[Rows, NDArray[np.float64]]:
    """Return the responses with a score that belong to the batch of a step, and the `of` of each."""
    # A filtered group was replaced by another one, which has rows of its own. Advantages are whitened over
    # the batch, so its rows would change those of all others.
    rows = [row for row in recording.rollouts(step).to_pylist() if row["excluded"] != "filtered"]
    values = _values(recording, ppo, rows, step, of)
    # A response that a failed reward source masks has NaN for its score.
    scored = np.isfinite([row["score"] for row in rows])
    return [row for row, is_scored in zip(rows, scored, strict=True) if is_scored], values[scored]


def _cut(rows: Rows) -> float:
    return float(np.mean([not row["finished"] for row in rows]))


def _mean(rows: Rows, name: str) -> float:
    return float(np.nanmean([row[name] for row in rows]))


def _summed(shares: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the shares of each name, largest first."""
    found: dict[str, float] = defaultdict(float)
    for name, share in shares:
        found[name] += share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _values(recording: Recording, ppo: PPOConfig, rows: Rows, step: int, of: Quantity) -> NDArray[np.float64]:
    """Return the `of` of each response."""
    if of == "reward" or of == "kl":
        name = {"reward": "score", "kl": "kl"}[of]
        return np.array([row[name] for row in rows], np.float64)
    if of == "value" and not ppo.uses_critic:
        raise InputError(f"--of: this run has no critic; got {of}; use loss")
    advantages, errors = token_values(recording, ppo, rows, step)
    if of == "loss":
        return np.array([float(np.abs(row, dtype=np.float64).sum()) for row in advantages])
    return np.array([float((np.abs(row, dtype=np.float64) ** 2).sum()) for row in errors])


def token_values(
    recording: Recording, ppo: PPOConfig, rows: Rows, step: int
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
    """Return the advantages of the tokens of each response, and the errors of their values."""
    if rows[0].get("old_logprobs") is None:
        raise InputError(
            f"--of: loss and value need record.level=logprobs; {recording.name} has less; use reward or kl"
        )
    if ppo.advantages is not None:
        raise InputError(
            "--of: ppo.advantages is a user's function, whose values are not recorded; use reward or kl"
        )

    def column(name: str) -> list[Any]:
        return [np.array(row[name], np.float32) for row in rows]

    values = column("values") if ppo.uses_critic else None
    ids = [np.array(row["response_ids"], np.int32) for row in rows]
    old = column("old_logprobs")
    # Stands for the entropy, which is not recorded. It only enters metrics, and no advantage.
    zeros = list(map(np.zeros_like, old))
    scores_B = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
    of_groups = response_advantages(scores_B, ppo)
    # That of a step is logged with the step before.
    kl_coef = recording.metrics.get(step - 1, {}).get("objective/kl_coef", ppo.kl.coef)
    made, sums = make_rows(
        ModelRows(ids, column("rollout_logprobs"), old, zeros, column("ref_logprobs"), values),
        scores_B.numpy(),
        None if of_groups is None else of_groups.numpy(),
        ppo,
        kl_coef,
    )
    lengths_B = np.array(list(map(len, ids)), np.int32)
    finished_B = np.array([row["finished"] for row in rows])
    whitening = summarize(sums, scores_B, lengths_B, finished_B, ppo).whitening
    count = range(len(rows))
    advantages = [made.row("advantages", row) for row in count]
    if whitening is not None:
        advantages = list(map(whitening.apply, advantages))
    return advantages, [made.row("returns", row) - made.row("values", row) for row in count]


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
    responses: Sequence[str]
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
    decode = load_decoder(run.data()).response
    texts = {each.prompt_id: each.prompt for each in load_prompts(folder / "regression" / name, "eval")}
    pairs = [(by_model[_OPPONENT][prompt], row) for prompt, row in by_model[policy].items()]
    # Clipped here already: if the policy won more than it lost, `shares_of` would rank the items that it won.
    losses = np.array([before["score"] - after["score"] for before, after in pairs]).clip(0)
    items = []
    for share, (before, after) in zip(shares_of(losses, 0.0).tolist(), pairs, strict=True):
        if share > 0:
            responses = decode(before["response_ids"]), decode(after["response_ids"])
            prompt, *shown = without_secret_values([texts[after["prompt_id"]], *responses])
            items.append(LostItem(share, prompt, (before["score"], after["score"]), tuple(shown)))
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
    data = run.data()
    decode = load_decoder(data)
    with TemporaryDirectory(prefix="rlhf-blame-") as folder:
        work = Path(folder)
        rows: Any
        if stage == "sft":
            rows = open_sft(data, "train", work)
        else:
            rows = training_pairs(config, data, stage, work)
        last = math.ceil(len(rows) / settings.batch_size) * settings.epochs
        _, ref = run.artifact(stage)
        best, early_stop = ref.metrics.get("best_step"), settings.early_stop
        # The patience begins with the best evaluation (`stages.training.EarlyStopping`).
        if best is not None and early_stop.patience is not None:
            last = min(last, int(best) + early_stop.patience * early_stop.every)
        if not 1 <= step <= last:
            raise InputError(f"--step: must be a step that {stage} made, 1 to {last}; got {step}")
        found = []
        # Must be the seed that the stage gives to `train_epochs`. `_Inputs.seed` of the stage `reward` has
        # the same one for the first member.
        seed = derive_seed(config.run.seed, stage)
        for index in rows_of_step(len(rows), settings.batch_size, seed, step - 1):
            row = rows[index]
            if stage == "sft":
                texts = [decode(row.input_ids)]
            else:
                texts = [row.prompt, decode.response(row.chosen_ids), decode.response(row.rejected_ids)]
            found.append(TrainedRow(index, row.source, without_secret_values(texts)))
    return found
