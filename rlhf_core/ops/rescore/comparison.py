"""How two rewards rank the same responses. `old` is the reward of the run, `new` the other one.

Rank correlations are Spearman's. Responses that lack one of the two values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from rlhf_core.ops.ranks import share_below
from rlhf_core.ops.tables import Table
from rlhf_core.types import PromptExample

Frame = Any
"""A `pandas.DataFrame`, for which there are no types here."""

_DISAGREEMENTS = 5
_ROWS = 16
"""Largest number of rows of the table of steps on the terminal."""
_ERRORS = 2.0


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
    old, new = frame["old"].rank(), frame["new"].rank()
    if old.nunique() < 2 or new.nunique() < 2:
        return math.nan
    return float(np.corrcoef(old, new)[0, 1])


def _within_prompts(frame: Frame) -> Sequence[float]:
    """Return the rank correlation of each prompt in a step in which both rewards differ."""
    keys = ["step", "group"]
    ranks = frame[keys].copy()
    for name in ("old", "new"):
        rank = frame.groupby(keys)[name].rank()
        ranks[name] = rank - rank.groupby([frame[key] for key in keys]).transform("mean")
    products = (
        ranks.assign(both=ranks["old"] * ranks["new"], old=ranks["old"] ** 2, new=ranks["new"] ** 2)
        .groupby(keys)[["both", "old", "new"]]
        .sum()
    )
    spread = np.sqrt(products["old"] * products["new"])
    correlations: list[float] = (products["both"][spread > 0] / spread[spread > 0]).tolist()
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
