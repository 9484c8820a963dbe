"""The plots of the report, from the metrics of the PPO steps.

Only matplotlib's object interface is used, because pyplot has global state and selects a display.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.statistics import Calibration

INK, GRID, _PAPER = "#24303f", "#e4e8ee", "#ffffff"
# A thing has the same colour in all figures and on the page of the report.
SFT, PPO, DPO = "#8792a2", "#2f6fde", "#c2701d"
SCORE, JUDGE, TRUE, KL = "#3a9d6e", "#a259c4", "#d9982b", "#c2453d"
# Not those above: a source must not look like the score or the KL.
_OTHERS = ("#4aa3b8", "#7a5c3e", "#b0418f", "#5b6bb5")
"""Colours of reward sources, except the true reward."""
VARIABLES = {
    INK: "ink",
    GRID: "line",
    _PAPER: "paper",
    SFT: "sft",
    PPO: "ppo",
    DPO: "dpo",
    SCORE: "score",
    JUDGE: "judge",
    TRUE: "true",
    KL: "kl",
    **{color: f"source-{number}" for number, color in enumerate(_OTHERS, 1)},
}
"""Name of the variable in report.css that replaces a colour: a dark page has other ones."""
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
_POINTS = 72
"""Units of an SVG image per inch."""
_MOST_READINGS = 200
"""Readings of a panel. With more, they would be narrower than a pointer can choose."""
_MOST_POINTS = 2000
"""Points of a line in an SVG image, where each marker is an element."""
GOLD = "rewards/gold/mean"
"""True reward by step, if the rewards include a source of type gold (with weight 0, as a monitor)."""


Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """The values of a panel at one place of its x axis."""

    place: str
    """For example `step 12`."""
    values: tuple[tuple[str, str], ...]
    """Names and values, at least one."""
    x: float
    """In units of the image, as all lengths."""
    left: float
    width: float
    """The part of the panel that is nearest to this reading."""

    @property
    def characters(self) -> int:
        """Of the longest line."""
        return max(len(self.place), *(len(f"{name}  {value}") for name, value in self.values))


@dataclass(frozen=True)
class Panel:
    """A panel of an image, with its readings from left to right."""

    top: float
    height: float
    centre: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class Image:
    """A figure as the content of an SVG element."""

    width: float
    height: float
    svg: str
    panels: tuple[Panel, ...]


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
        every = set().union(*self._rows)
        return sorted(name for name in every if name.startswith(prefix))


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
    _legend(top, "lower right")
    _label(top, "Reward during training", "", "mean score per response")
    _line(bottom, step, history.column("objective/kl"), KL, "KL")
    _read_lines(top, [f"step {number:g}" for number in step])
    _read_lines(bottom, [f"step {number:g}" for number in step])
    _label(bottom, "Distance from the reference", "step", "KL (nats per response)")
    return figure


def compared_curves(histories: Mapping[str, StepMetrics], metrics: Mapping[str, str]) -> Any:
    """Plot metrics of the PPO steps of several runs, one panel each.

    Args:
        histories: Metrics by the name of the run, with at least one step.
        metrics: Metric of each panel by its title.
    """
    figure, panels = _figure(9.4, 2.4 * len(metrics), rows=len(metrics))
    for axes, (title, metric) in zip(panels, metrics.items(), strict=True):
        for (name, history), color in zip(histories.items(), cycle((PPO, DPO, SCORE, JUDGE))):
            _line(axes, history.column("step"), history.column(metric), color, name)
        _label(axes, title, "", "mean per response")
    longest = max(histories.values(), key=len)
    _legend(panels[0], "best")
    panels[-1].set_xlabel("step", color=INK, fontsize=9.5)
    # The readings of a panel have the places of its first line.
    if all(len(history) == len(longest) for history in histories.values()):
        for axes in panels:
            _read_lines(axes, [f"step {number:g}" for number in longest.column("step")])
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
    _legend(axes, "best")
    _label(axes, "Reward sources during training", "step", "mean raw value")
    _read_lines(axes, [f"step {number:g}" for number in history.column("step")])
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
    scores: Mapping[str, tuple[Sequence[float], Sequence[float]]], policy: str = "PPO", color: str = PPO
) -> Any:
    """Plot histograms of the scores of both models on the same prompts.

    Args:
        scores: (SFT (n,), policy (n,)) for each measure.
        policy: What trained the policy, `PPO` or `DPO`.
        color: Its colour.
    """
    figure, panels = _figure(9.4, 3.6, columns=len(scores))
    for axes, (measure, (sft, trained)) in zip(panels, scores.items(), strict=True):
        bins = _bins(np.asarray(sft, dtype=float), np.asarray(trained, dtype=float))
        counts = {}
        for values, shade, name in ((sft, SFT, "SFT"), (trained, color, policy)):
            counts[name], _, _ = axes.hist(
                values, bins=bins, color=shade, alpha=0.6, label=name, edgecolor="white", linewidth=0.5
            )
            axes.axvline(float(np.mean(values)), color=shade, linewidth=1.8, linestyle=(0, (4, 2)))
        places = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(bins)]
        _read(axes, ((bins[:-1] + bins[1:]) / 2).tolist(), places, counts)
        _legend(axes, "upper left")
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
    # The KL is an estimate from samples, and close to 0 it can be negative.
    distance = np.sqrt(np.clip(history.column("objective/kl"), 0.0, None))
    measures = (("objective/scores", SCORE, "score (maximised)"), (GOLD, TRUE, "gold reward (true reward)"))
    for name, color, label in measures:
        if history.has(name):
            values = history.column(name)
            axes.plot(distance, values, "o-", color=color, markersize=4, linewidth=0.6, label=label)
    _read_lines(axes, _steps_with_kl(history.column("step"), history.column("objective/kl")))
    _legend(axes, "best")
    _label(axes, "Reward against KL", "square root of KL to the reference", "mean per response")
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
    _read_lines(left, [f"step {version}" for version in versions])
    _read_lines(right, _steps_with_kl(versions, kl))
    if best is not None:
        left.axvline(best, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="best")
    if math.isfinite(max_kl):
        right.axvline(math.sqrt(max_kl), color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="largest KL")
    _legend(left, "best")
    _label(left, "Held-out prompts during training", "step", "mean per response")
    _label(right, "Frontier", "square root of KL to the reference", "mean per response")
    return figure


def to_png(figure: Any) -> bytes:
    """Return the PNG. It has no date or version, so that the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


# No library for charts: its script would add megabytes to each report, and the page allows no scripts
# (decision 18).
def to_image(figure: Any) -> Image:
    """Return the figure with the colours of the report's page, and with its readings.

    The same figure gives the same image. It has no text of its own font, and no address except those of its
    own markers. Long lines are thinned in `figure` too: save it as a PNG before.
    """
    for axes in figure.axes:
        for line in axes.lines:
            line.set_data(*map(_thinned, line.get_data(orig=False)))
    for artist in figure.findobj():
        artist.set_clip_on(False)  # a clip has an address, and nothing is drawn outside of the axes
    buffer = io.StringIO()
    # Text stays text, in the font of the page. Without a salt, matplotlib makes ids with a random UUID.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(buffer, format="svg")
    # Before it is a style for `*`, which would change every SVG of the page.
    _, _, content = buffer.getvalue().partition("</defs>")
    # Only the addresses of markers are used, and those of two figures would be the same.
    content = re.sub(r' id="(?!m[0-9a-f]{10}")[^"]*"', "", content)
    content = re.sub(r"font-family: [^;]*; ?", "", content.removesuffix("\n").removesuffix("</svg>"))
    for color, name in VARIABLES.items():
        content = content.replace(color, f"var(--{name})")
    width, height = figure.get_size_inches() * _POINTS
    panels = [_panel(axes, width, height) for axes in figure.axes if getattr(axes, "readings", ())]
    return Image(float(width), float(height), content, tuple(panels))


def _thinned(values: Any) -> Any:
    """Return at most `_MOST_POINTS` of the values (n,), with the first and the last one."""
    return values[np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int)]


def _panel(axes: Any, width: float, height: float) -> Panel:
    """Return the panel of these axes, in an image of this size."""
    box = axes.get_position()
    left, right = axes.get_xlim()
    # By x, because a KL can fall from one step to the next.
    found = sorted(axes.readings)
    found = found[:: math.ceil(len(found) / _MOST_READINGS)]
    at = [width * (box.x0 + box.width * (x - left) / (right - left)) for x, _, _ in found]
    borders = [width * box.x0, *((a + b) / 2 for a, b in pairwise(at)), width * box.x1]
    readings = []
    for (_, place, values), x, (start, end) in zip(found, at, pairwise(borders), strict=True):
        readings.append(Reading(place, values, x, start, end - start))
    return Panel(height * (1 - box.y1), height * box.height, width * (box.x0 + box.x1) / 2, tuple(readings))


def _read(axes: Any, x: Sequence[float], places: Sequence[str], columns: Mapping[str, Any]) -> None:
    """Set what `to_image` shows of the axes: values (n,) by name at the places (n,), whose coordinates are
    `x` (n,). Values that are not finite, and places without values, are left out.
    """
    axes.readings = []
    for i, place in enumerate(places):
        values = [(name, f"{column[i]:.4g}") for name, column in columns.items() if math.isfinite(column[i])]
        if values and math.isfinite(x[i]):
            axes.readings.append((float(x[i]), place, tuple(values)))


def _read_lines(axes: Any, places: Sequence[str]) -> None:
    """Set the values of all labelled lines of the axes at these places."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    columns = {line.get_label(): line.get_ydata() for line in lines}
    if lines:
        _read(axes, lines[0].get_xdata(), places, columns)


def _steps_with_kl(steps: Iterable[float], kl: Iterable[float]) -> list[str]:
    return [f"step {step:g}, KL {value:.3g}" for step, value in zip(steps, kl, strict=True)]


def _legend(axes: Any, place: str) -> None:
    # Given, because matplotlib warns if it finds none.
    axes.legend(*axes.get_legend_handles_labels(), loc=place, frameon=False, labelcolor=INK)


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
    # A line through one or two points does not show how few they are.
    marker = "o" if len(values) < 3 else None
    axes.plot(step, _running_mean(values, window), color=color, linewidth=2.0, label=name, marker=marker)


def _running_mean(values: Column, window: int) -> Column:
    """Return the trailing mean over `window` steps. NaN values are left out."""
    if window == 1:
        return values
    # Sums and counts, because a convolution would spread each NaN over its window.
    sums = np.cumsum(np.nan_to_num(values))
    counts = np.cumsum(np.isfinite(values)).astype(np.float64)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Column = sums / counts
    return means


def _bins(sft: Column, trained: Column) -> Column:
    low, high = float(min(sft.min(), trained.min())), float(max(sft.max(), trained.max()))
    # Equal values would give bins without width.
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    edges: Column = np.linspace(low, high, 25)
    return edges
