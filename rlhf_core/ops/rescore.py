"""`rlhf rescore`: what another reward would have said about the responses that PPO has recorded, or about the
answers to held-out prompts of the evaluation.

    record, data artifact -> tokens and text of a step -> reward model, `RewardComposer` -> file of the step
                                                                                               |
    annotation of the artifact, comparison with the run's reward <--- all steps ------+

A step is scored as one batch, as in PPO. A killed command has the files of its steps, and continues after
them. They are deleted when the annotation is written.

In the comparison, `old` is the reward of the run and `new` the other one. Rank correlations are Spearman's.
Responses that lack one of the two values are left out.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import load_rewards
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import without_secret_values
from rlhf_core.config.rewards import AnyReward, ExternalReward, LanguageModelReward, ModelReward, PythonReward
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.tokenizer import load_decoder, load_tokenizer
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import STAGE_OF_KIND, FinishedRun
from rlhf_core.ops.inspect.queries import share_below
from rlhf_core.ops.serve import locate
from rlhf_core.ops.tables import Table
from rlhf_core.record.annotations import annotate, check_name
from rlhf_core.record.reader import read_rollouts
from rlhf_core.record.schema import REWARD
from rlhf_core.rewards.check import function_file
from rlhf_core.rewards.compose import RewardComposer, reward_input
from rlhf_core.rewards.scorer import ItemError, Scorer
from rlhf_core.storage.bundles import hash_file
from rlhf_core.system.files import json_sha256, replacing
from rlhf_core.types import Numbers, PromptExample, RewardInput

WRITER = "rescore"
RescoredKind = Literal["ppo", "evaluation"]
_SHOWN_CHARACTERS = 200
_DISAGREEMENTS = 5
_ROWS = 16
"""Largest number of rows of the table of steps on the terminal."""
_ERRORS = 2.0

Track = Callable[[Sequence[int]], Iterable[int]]
"""Returns the steps one after another, and shows how far they are."""
Frame = Any
"""A `pandas.DataFrame`, for which there are no types here."""


@dataclass(frozen=True)
class Rescored:
    """Another reward of recorded responses."""

    address: str
    """The annotation."""
    failed: int
    """Responses without a value."""
    impure: tuple[str, ...]
    """Sources whose values can differ if they are asked again."""
    comparison: Comparison


def rescore(
    run: FinishedRun,
    file: str,
    *,
    kind: RescoredKind = "ppo",
    name: str | None = None,
    steps: Collection[int] | None = None,
    limit: int | None = None,
    against: str | None = None,
    model: str | None = None,
    track: Track = iter,
) -> Rescored:
    """Score the recorded responses of a run with other rewards, write an annotation, and compare.

    Args:
        run: The run.
        file: YAML file with `rewards`, or Python file with a function `score`.
        kind: What is scored: the responses of PPO, or the answers to held-out prompts.
        name: Name of the annotation; None: that of the file.
        steps: Steps to score; None: all.
        limit: Prompts of each step, the first ones; None: all.
        against: Column of the record with the run's reward; None: `total`, or `score` of the evaluation.
        model: Reward model of `type: model`: address of an artifact, or folder. None: that of the run.
        track: Shows the progress.

    Raises:
        InputError: Something that was given cannot be used, or the run has no record.
        RewardError: A source failed, and its `on_error` does not mask it.
    """
    rewards, name = load_rewards(file), check_name(name or Path(file).stem)
    if not any(source.weight for source in rewards):
        raise InputError(f"{file}: all sources have the weight 0; leave it out")
    stage = STAGE_OF_KIND[kind]
    against = against or ("total" if kind == "ppo" else "score")
    artifacts, ref = run.artifact(stage)
    folder = run.recorded(stage)
    if steps is not None:  # of any length
        steps = [
            step for step in pc.unique(read_rollouts(folder, ["step"])["step"]).to_pylist() if step in steps
        ]
    old = _answers(folder, kind, ["step", "index", "group", "prompt_id", against], steps)
    if not pa.types.is_floating(old.schema.field(against).type):
        raise InputError(f"--against: must be a column of rewards, such as total; got {against}; correct it")
    present = pc.unique(old["step"]).to_pylist()
    if not present:
        raise InputError(f"{folder} has none of these steps; leave --steps out for all")
    # The parts of a killed command are taken only by one that would make the same.
    identity = [ref.digest, [result_settings(source) for source in rewards], _contents(rewards), model, limit]
    parts = run.file.parent / "rescore" / f"{name}-{json_sha256(identity)[:12]}"
    with ExitStack() as opened:
        step_scorer = StepScorer(run, kind, rewards, model, opened)
        for step in track([step for step in present if not _part(parts, step).is_file()]):
            with replacing(_part(parts, step)) as temporary:
                pq.write_table(step_scorer.score(step, limit), temporary, compression="zstd")
        # From `present`, because an earlier call may have had other steps.
        rows = pa.concat_tables([pq.read_table(_part(parts, step)) for step in present])
        address = annotate(artifacts, ref, name, rows.drop_columns(["length"]), WRITER)
        comparison = compare(old, rows, against, step_scorer.prompts, step_scorer.texts)
    shutil.rmtree(parts)
    return Rescored(
        address,
        pc.sum(pc.is_nan(rows["score"])).as_py(),
        tuple(each.used_name for each in rewards if isinstance(each, ExternalReward) and not each.pure),
        comparison,
    )


def _answers(folder: Path, kind: str, columns: Sequence[str], steps: Collection[int] | None) -> pa.Table:
    """Return columns of the responses of PPO, or of the answers to held-out prompts with their `model`."""
    if kind != "ppo":
        rows = read_rollouts(folder, list({*columns, "model", "prompt_set"}))
        return rows.filter(pc.equal(rows["prompt_set"], "held-out")).drop_columns(["prompt_set"])
    return read_rollouts(folder, list(set(columns)), steps)


class StepScorer:
    """Scores the responses of one step after another.

    Args:
        run: The run.
        kind: What is scored.
        rewards: The sources.
        model: See `rescore`.
        opened: Closes the sources.
    """

    def __init__(
        self,
        run: FinishedRun,
        kind: RescoredKind,
        rewards: tuple[AnyReward, ...],
        model: str | None,
        opened: ExitStack,
    ) -> None:
        stage = STAGE_OF_KIND[kind]
        config = run.config(stage)
        data = run.data()
        self._kind: RescoredKind = kind
        self._folder = run.recorded(stage)
        self._decode = load_decoder(data).response
        self.prompts = {
            prompt.prompt_id: prompt for prompt in load_prompts(data, "train" if kind == "ppo" else "eval")
        }
        self._score_clip = config.ppo.score_clip
        self._model: Scorer | None = None
        self._by_text = False
        if any(isinstance(source, ModelReward) for source in rewards):
            self._load_model(run, config, model, data)
        self._composer = opened.enter_context(
            RewardComposer(rewards, score_clip=self._score_clip, replies=run.home.judge)
        )

    def score(self, step: int, limit: int | None) -> pa.Table:
        """Return the columns of the annotation, and `length`: tokens of the response."""
        columns = ["kind", "step", "index", "group", "prompt_id", "response_ids", "finished"]
        rows = _answers(self._folder, self._kind, columns, [step])
        if limit is not None:
            rows = rows.filter(pc.less(rows["group"], limit))
        samples = self._samples(rows)
        model_scores = None if self._model is None else self._model_scores(self._model, samples)
        batch = self._composer.score(samples, model_scores)
        return pa.table(
            {
                **{name: rows[name] for name in ("kind", "step", "index")},
                "score": pa.array(batch.total, pa.float64()),
                **{f"{REWARD}{name}": pa.array(values) for name, values in batch.by_source.items()},
                "length": pc.list_value_length(rows["response_ids"]),
            }
        )

    def texts(self, places: Sequence[tuple[int, int]]) -> list[str]:
        """Return the beginning of the responses at these (step, index)."""
        columns = ["step", "index", "prompt_id", "response_ids", "finished"]
        rows = _answers(self._folder, self._kind, columns, {step for step, _ in places})
        numbers = list(zip(rows["step"].to_pylist(), rows["index"].to_pylist(), strict=True))
        samples = self._samples(rows.take(list(map(numbers.index, places))))
        texts = without_secret_values([sample.response for sample in samples])
        return [text[:_SHOWN_CHARACTERS] for text in texts]

    def _samples(self, rows: pa.Table) -> list[RewardInput]:
        samples = []
        for row in rows.to_pylist():
            prompt = self.prompts[row["prompt_id"]]
            response = Numbers.of(row["response_ids"])
            samples.append(reward_input(prompt, response, row["finished"], self._decode(response)))
        return samples

    def _load_model(self, run: FinishedRun, config: PipelineConfig, model: str | None, data: Path) -> None:
        folder, template = locate(model or run.artifact("reward")[1].uri, run.home, run.endpoint)
        self._model = Scorer(
            folder,
            template=template,
            dtype=config.reward.deepspeed.dtype,
            attention="eager" if config.model.attention == "eager" else "sdpa",
            device=resolve_device("auto"),
            micro_batch_tokens=config.ppo.micro_batch_tokens,
        )
        # A model with another tokenizer reads the text.
        own, policy = load_tokenizer(str(folder)), load_tokenizer(str(data / "tokenizer"))
        self._by_text = own.get_vocab() != policy.get_vocab()

    def _model_scores(self, model: Scorer, samples: Sequence[RewardInput]) -> list[float]:
        pairs, rows = [], []
        for row, sample in enumerate(samples):
            item: dict[str, Any] = {
                "prompt_ids": list(sample.prompt_ids),
                "response_ids": list(sample.response_ids),
            }
            if self._by_text:
                item = {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished}
            try:
                pairs.append(model.encode(item))
            except ItemError:  # such as a response that is too long for this model: it has no value
                continue
            rows.append(row)
        scores = np.full(len(samples), np.nan)
        scores[rows] = model.scores(pairs)
        return scores.tolist()


def _part(parts: Path, step: int) -> Path:
    return parts / f"{step:08d}.parquet"


def _contents(rewards: Sequence[AnyReward]) -> list[str]:
    """Return the sha256 of the Python files and rubrics of the sources."""
    files = [function_file(source) for source in rewards if isinstance(source, PythonReward)]
    rubrics = [source.rubric for source in rewards if isinstance(source, LanguageModelReward)]
    return [hash_file(Path(file)) for file in (*files, *rubrics) if file is not None and Path(file).is_file()]


@dataclass(frozen=True)
class Comparison:
    """Two rewards of the same responses, as plain data; see `docs/rescore.md`."""

    against: str
    """Column of the record that is `old`."""
    count: int
    """Responses that have both values."""
    overall: float
    """Rank correlation over all responses; NaN if a reward is constant."""
    within_prompts: float
    """Mean of the rank correlations over the responses to one prompt in one step; NaN without any. Where one
    reward is the same for all of them, there is none.
    """
    prompts: int
    """Number of these correlations."""
    steps: Sequence[Mapping[str, Any]]
    """`step`, `count`, means `old` and `new`, standard error `new_error`, `correlation`."""
    parts: Sequence[Mapping[str, Any]]
    """The same by model, by quarter of the length and by source of the prompt: `by`, `name`."""
    best_step: int
    """Step with the highest mean of `new`."""
    parted: int | None
    """Step at which they part (`parting_step`); None if they do not."""
    disagreements: Sequence[Mapping[str, Any]]
    """`step`, `index`, `old`, `new`, share of responses that each ranks lower (`old_rank`, `new_rank`;
    `share_below`), and the beginning of the text. First what only `old` ranks high.
    """


def compare(
    old: pa.Table,
    new: pa.Table,
    against: str,
    prompts: Mapping[str, PromptExample],
    texts: Callable[[Sequence[tuple[int, int]]], list[str]],
) -> Comparison:
    """Compare two rewards of the same responses.

    Args:
        old: Columns `step`, `index`, `group`, `prompt_id` and `against` of the record, and `model` if it has
            several.
        new: Columns `step`, `index`, `score` and `length`.
        against: The reward of the run.
        prompts: By their `prompt_id`.
        texts: Returns the texts of the responses at (step, index).
    """
    scores = new.select(["step", "index", "score", "length"]).to_pandas()
    frame = old.to_pandas().merge(scores, on=["step", "index"], suffixes=("_of_run", ""))
    frame = frame.rename(
        columns={f"{against}_of_run" if against == "score" else against: "old", "score": "new"}
    )
    frame = frame.astype({"old": "float64"}).dropna(subset=["old", "new"])
    within = _within_prompts(frame)
    steps = [{"step": int(step), **_row(part)} for step, part in frame.groupby("step")]
    best = max(steps, key=lambda row: row["new"], default={"step": 0})
    return Comparison(
        against=against,
        count=len(frame),
        overall=_correlation(frame),
        within_prompts=float(np.mean(within)) if len(within) else math.nan,
        prompts=len(within),
        steps=steps,
        parts=_parts(frame, prompts),
        best_step=int(best["step"]),
        parted=parting_step(steps),
        disagreements=_disagreements(frame, texts),
    )


def parting_step(steps: Sequence[Mapping[str, float]]) -> int | None:
    """Return the first step after the best one of `new` from which on, to the end, the mean of `new` is lower
    than at the best one by more than two standard errors of the difference, and that of `old` is higher.

    None if there is none, or if the last step is not of this kind.
    """
    if not steps:
        return None
    number = max(range(len(steps)), key=lambda i: steps[i]["new"])
    best, parted = steps[number], None
    for row in reversed(steps[number + 1 :]):
        error = math.hypot(best["new_error"], row["new_error"])
        if not (best["new"] - row["new"] > _ERRORS * error and row["old"] > best["old"]):
            break
        parted = int(row["step"])
    return parted


def _row(frame: Frame) -> dict[str, float]:
    # Responses to one prompt are not independent.
    by_prompt = frame.groupby(["step", "group"])["new"].mean()
    return {
        "count": len(frame),
        "old": float(frame["old"].mean()),
        "new": float(frame["new"].mean()),
        "new_error": float(by_prompt.std(ddof=1) / math.sqrt(len(by_prompt))) if len(by_prompt) > 1 else 0.0,
        "correlation": _correlation(frame),
    }


def _correlation(frame: Frame) -> float:
    return float(frame[["old", "new"]].corr(method="spearman").iloc[0, 1])


def _within_prompts(frame: Frame) -> Sequence[float]:
    """Return the rank correlation of each prompt in a step in which both rewards differ."""
    by_group = frame.groupby(["step", "group"])[["old", "new"]].corr(method="spearman")
    # Of each group there are two rows, `old` and `new`. It is NaN where a reward is constant.
    correlations: list[float] = by_group["new"].iloc[::2].dropna().tolist()
    return correlations


def _parts(frame: Frame, prompts: Mapping[str, PromptExample]) -> list[dict[str, Any]]:
    rows = []
    if "model" in frame:
        for model, part in frame.groupby("model"):
            rows.append({"by": "model", "name": model, **_row(part)})
    # By their order, so that equal lengths do not leave a quarter empty.
    quarter = (frame["length"].rank(method="first") - 1) * 4 // max(1, len(frame))
    for _, part in frame.groupby(quarter):
        tokens = f"{part['length'].min()} to {part['length'].max()} tokens"
        rows.append({"by": "length", "name": tokens, **_row(part)})
    sources = frame["prompt_id"].map(lambda prompt_id: prompts[prompt_id].source or "unnamed")
    if sources.nunique() > 1:
        for source, part in frame.groupby(sources):
            rows.append({"by": "source", "name": source, **_row(part)})
    return rows


def _disagreements(
    frame: Frame, texts: Callable[[Sequence[tuple[int, int]]], list[str]]
) -> list[dict[str, Any]]:
    with duckdb.connect() as database:
        database.register("frame", frame)
        ranks = f"{share_below('old')} AS old_rank, {share_below('new')} AS new_rank"
        frame = database.execute(f'SELECT *, {ranks} FROM frame ORDER BY step, "index"').df()
    frame["gap"] = frame["old_rank"] - frame["new_rank"]
    rows = []
    for sign in (1, -1):
        by_gap = frame.assign(gap=sign * frame["gap"]).sort_values("gap", ascending=False, kind="stable")
        # One response to a prompt: late responses to one prompt are often the same.
        chosen = by_gap[by_gap["gap"] > 0].drop_duplicates("prompt_id").head(_DISAGREEMENTS)
        rows += chosen[["step", "index", "old", "new", "old_rank", "new_rank"]].to_dict("records")
    shown = texts([(row["step"], row["index"]) for row in rows]) if rows else []
    return [{**row, "text": text} for row, text in zip(rows, shown, strict=True)]


# -- the terminal and the page --


def tables(comparison: Comparison) -> dict[str, Table]:
    """Return what `rlhf rescore` shows below its verdict."""

    def row(each: Mapping[str, Any]) -> list[str]:
        new = f"{_number(each['new'])} ± {each['new_error']:.3f}"
        return [str(each["count"]), _number(each["old"]), new, _number(each["correlation"])]

    columns = ["responses", comparison.against, "new", "rank correlation"]
    every = max(1, math.ceil(len(comparison.steps) / _ROWS))
    steps = []
    for number, each in enumerate(comparison.steps, start=1):
        is_named = each["step"] in (comparison.best_step, comparison.parted)
        if number % every == 0 or number in (1, len(comparison.steps)) or is_named:
            steps.append([str(each["step"]), *row(each)])
    pairs = []
    for each in comparison.disagreements:
        ranks = f"{each['old_rank']:.0%} / {each['new_rank']:.0%}"
        values = [str(each["step"]), str(each["index"]), _number(each["old"]), _number(each["new"])]
        pairs.append([*values, ranks, each["text"]])
    found: dict[str, Table] = {
        "Steps": (["step", *columns], steps if len(steps) > 1 else [], ""),
        "Groups": (["by", "", *columns], [[p["by"], p["name"], *row(p)] for p in comparison.parts], ""),
        "The largest disagreements": (
            ["step", "index", comparison.against, "new", "higher than", "response"], pairs, ""
        ),
    }  # fmt: skip
    return {title: table for title, table in found.items() if table[1]}


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def verdict(comparison: Comparison) -> str:
    """Return in words how the two rank, and where they part. The first line is the most important one."""
    against = comparison.against
    if not comparison.count:
        return f"no response has both {against} and the new reward"
    if math.isnan(comparison.overall):
        return (
            f"nothing to rank: {against} or the new reward is the same for all {comparison.count} responses"
        )
    lines = [f"rank correlation: {comparison.overall:.3f} over {comparison.count} responses"]
    if comparison.prompts:
        lines[0] += (
            f", {comparison.within_prompts:.3f} within {comparison.prompts} groups of responses to a prompt"
        )
    if len(comparison.steps) < 2:
        return lines[0]
    by_step = {row["step"]: row for row in comparison.steps}
    best, last = by_step[comparison.best_step], comparison.steps[-1]
    lines.append(f"the new reward is highest at step {comparison.best_step}, with {best['new']:.3f}")
    if comparison.parted is None:
        lines.append(f"they do not part: the new reward does not fall while {against} rises")
    else:
        lines.append(
            f"they part at step {comparison.parted}: from there on the new reward is lower by more than two"
            f" standard errors, and {last['new']:.3f} at the end, while {against} rises from"
            f" {best['old']:.3f} to {last['old']:.3f}"
        )
    return "\n".join(lines)
