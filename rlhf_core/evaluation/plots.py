"""The plots of the report, from the metrics of the PPO steps.

Only matplotlib's object interface is used, because pyplot has global state and selects a display.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.calibration import Calibration

INK, GRID = "#24303f", "#e4e8ee"
# A thing has the same colour in all figures and, as a model, in report.css.
SFT, POLICY = "#8792a2", "#2f6fde"
SCORE, JUDGE, TRUE, KL = "#3a9d6e", "#a259c4", "#d9982b", "#c2453d"
_OTHERS = ("#4aa3b8", "#7a5c3e", "#b0418f", "#5b6bb5")
"""Colours of reward sources, except the true reward."""
MEASURE_LABELS = {
    "gold": "gold reward (true reward)",
    "judge_model": "score of the second reward model (normalised)",
    "reward_model": "reward-model score (normalised)",
    "rules": "weighted sum of rule rewards",
}
_EVALUATED = {
    "eval/score": ("score (maximised)", SCORE),
    "eval/judge": ("score of the judge", JUDGE),
    "eval/gold": ("gold reward (true reward)", TRUE),
}
_DPI = 130
GOLD = "rewards/gold/mean"
"""True reward by step, if the rewards include a source of type gold (with weight 0, as a monitor)."""


Column = npt.NDArray[np.float64]


class StepMetrics:
    """Metrics of the PPO steps, ordered by step.

    After a crash, steps are repeated and written again. Of these rows the later one counts.
    """

    def __init__(self, rows: list[dict[str, float]]) -> None:
        by_step = {int(row["step"]): row for row in rows}
        self._rows = [by_step[step] for step in sorted(by_step)]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Column:
        """Return the values (steps,), with NaN for steps without this metric."""
        return np.array([float(row.get(name, math.nan)) for row in self._rows], dtype=np.float64)

    def has(self, name: str) -> bool:
        """Return whether any step has a finite value of `name`."""
        return bool(np.isfinite(self.column(name)).any())

    def names(self, prefix: str) -> list[str]:
        """Return the sorted metric names that start with `prefix`."""
        return sorted({name for row in self._rows for name in row if name.startswith(prefix)})


def read_step_metrics(path: Path) -> StepMetrics:
    """Read `metrics.jsonl` of a PPO artifact. A missing file has no steps.

    Raises:
        CorruptArtifact: A line is not a JSON object with `step`.
    """
    rows: list[dict[str, float]] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            int(row["step"])  # raises if it is missing or no number
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(
                f"{path.name}:{number}: each line must be a JSON object with `step`; got {line[:60]!r}; run"
                " the ppo stage again"
            ) from error
        rows.append({name: float(value) for name, value in row.items() if isinstance(value, int | float)})
    return StepMetrics(rows)


def training_curves(history: StepMetrics) -> Any:
    """Plot score and KL by PPO step, one panel each. Needs at least one step."""
    figure, (top, bottom) = _figure(9.4, 5.6, rows=2)
    step = history.column("step")
    _line(top, step, history.column("objective/scores"), SCORE, "score")
    if history.has("objective/rlhf_reward"):
        _line(top, step, history.column("objective/rlhf_reward"), INK, "score minus KL penalty")
    top.legend(loc="lower right", frameon=False)
    _label(top, "Reward during training", "", "mean score per response")
    _line(bottom, step, history.column("objective/kl"), KL, "KL")
    _label(bottom, "Distance from the SFT model", "step", "KL (nats per response)")
    return figure


def reward_means(history: StepMetrics) -> list[str]:
    """Return the names of the metrics with the mean of each reward source."""
    return [name for name in history.names("rewards/") if name.endswith("/mean")]


def reward_sources(history: StepMetrics) -> Any:
    """Plot the raw value of each reward source by step."""
    figure, (axes,) = _figure(9.4, 3.6)
    others = cycle(_OTHERS)
    for name in reward_means(history):
        color = TRUE if name == GOLD else next(others)
        _line(axes, history.column("step"), history.column(name), color, name.split("/")[1])
    axes.legend(loc="best", frameon=False)
    _label(axes, "Reward sources during training", "step", "mean raw value")
    return figure


def reliability(calibration: Calibration) -> Any:
    """Plot the accuracy against the predicted probability. A calibrated model is on the diagonal."""
    figure, (axes,) = _figure(5.4, 4.6)
    axes.plot([0.5, 1.0], [0.5, 1.0], color=SFT, linewidth=1.2, linestyle=(0, (4, 2)), label="calibrated")
    sizes = 20 + 240 * np.asarray(calibration.count) / max(calibration.count)
    axes.plot(calibration.confidence, calibration.accuracy, color=SCORE, linewidth=1.2, alpha=0.5)
    axes.scatter(
        calibration.confidence,
        calibration.accuracy,
        s=sizes,
        color=SCORE,
        label="held-out pairs (area: how many)",
    )
    axes.legend(loc="upper left", frameon=False)
    _label(
        axes,
        f"Reliability, expected calibration error {calibration.error:.3f}",
        "predicted probability of the preferred response",
        "share of pairs where the annotators agree",
    )
    return figure


def reward_distribution(
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]], policy: str = "PPO"
) -> Any:
    """Plot histograms of the scores of both models on the same prompts.

    Args:
        scores: (SFT (n,), policy (n,)) for each measure.
        policy: What trained the policy, `PPO` or `DPO`.
    """
    figure, panels = _figure(9.4, 3.6, columns=len(scores))
    for axes, (measure, (sft, trained)) in zip(panels, scores.items(), strict=True):
        bins = _bins(np.asarray(sft, dtype=float), np.asarray(trained, dtype=float))
        for values, color, name in ((sft, SFT, "SFT"), (trained, POLICY, policy)):
            axes.hist(values, bins=bins, color=color, alpha=0.6, label=name, edgecolor="white", linewidth=0.5)
            axes.axvline(float(np.mean(values)), color=color, linewidth=1.8, linestyle=(0, (4, 2)))
        axes.legend(loc="upper left", frameon=False)
        _label(
            axes,
            measure.replace("_", " ").capitalize() + f" before and after {policy}",
            MEASURE_LABELS.get(measure, measure),
            f"responses (of {len(sft)})",
        )
        axes.yaxis.get_major_locator().set_params(integer=True)
    return figure


def reward_against_kl(history: StepMetrics) -> Any:
    """Plot the score, and the true reward if it is known by step, against the square root of the KL (Gao et
    al. 2022), with one point per step.
    """
    figure, (axes,) = _figure(9.4, 4.2)
    distance = np.sqrt(np.clip(history.column("objective/kl"), 0.0, None))
    measures = (("objective/scores", SCORE, "score (maximised)"), (GOLD, TRUE, "gold reward (true reward)"))
    for name, color, label in measures:
        if history.has(name):
            values = history.column(name)
            axes.plot(distance, values, "o-", color=color, markersize=4, linewidth=0.6, label=label)
    axes.legend(loc="best", frameon=False)
    _label(axes, "Reward against KL", "square root of KL to the SFT model", "mean per response")
    return figure


def evaluation_curves(
    evaluations: Mapping[int, Mapping[str, float]], *, best: int | None, max_kl: float
) -> Any:
    """Plot the evaluations during PPO: scores by step, and scores against the square root of the KL (Gao et
    al. 2022).

    Args:
        evaluations: Metrics by version.
        best: The best version, if there is one.
        max_kl: Highest KL of a best version, in nats per response; infinity: no limit.
    """
    figure, (left, right) = _figure(9.4, 4.0, columns=2)
    versions = sorted(evaluations)
    kl = np.array([evaluations[version].get("eval/kl", math.nan) for version in versions])
    distance = np.sqrt(np.clip(kl, 0.0, None))
    for name, (label, color) in _EVALUATED.items():
        values = [evaluations[version].get(name, math.nan) for version in versions]
        if not np.isfinite(values).any():
            continue
        left.plot(versions, values, "o-", color=color, markersize=4, label=label)
        right.plot(distance, values, "o-", color=color, markersize=4, label=label)
        if best is not None:
            place = versions.index(best)
            right.plot(distance[place], values[place], "D", color=color, markersize=9, fillstyle="none")
    if best is not None:
        left.axvline(best, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="best")
    if math.isfinite(max_kl):
        right.axvline(math.sqrt(max_kl), color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="largest KL")
    left.legend(loc="best", frameon=False)
    _label(left, "Held-out prompts during training", "step", "mean per response")
    _label(right, "Frontier", "square root of KL to the SFT model", "mean per response")
    return figure


def to_png(figure: Any) -> bytes:
    """Return the PNG. It has no date or version, so that the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _figure(width: float, height: float, *, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    matplotlib.rcdefaults()  # the user's file can start programs (LaTeX), and gives other bytes
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=rows > 1, squeeze=False).ravel().tolist()
    for axes in panels:
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=9, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(SFT)
    return figure, panels


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(x, color=INK, fontsize=9.5)
    axes.set_ylabel(y, color=INK, fontsize=9.5)


def _line(axes: Any, step: Column, values: Column, color: str, name: str) -> None:
    """Plot the values in a light colour and their running mean over a twentieth of the steps."""
    window = max(1, len(values) // 20)
    if window > 1:
        axes.plot(step, values, color=color, alpha=0.3, linewidth=1.0)
        name = f"{name} (mean of {window} steps)"
    marker = "o" if len(values) < 3 else None
    axes.plot(step, _running_mean(values, window), color=color, linewidth=2.0, label=name, marker=marker)


def _running_mean(values: Column, window: int) -> Column:
    """Return the trailing mean over `window` steps. NaN values are left out."""
    if window == 1:
        return values
    sums = np.cumsum(np.nan_to_num(values))
    counts = np.cumsum(np.isfinite(values)).astype(np.float64)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Column = sums / counts
    return means


def _bins(sft: Column, trained: Column) -> Column:
    low, high = float(min(sft.min(), trained.min())), float(max(sft.max(), trained.max()))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    edges: Column = np.linspace(low, high, 25)
    return edges
