"""A comparison on the terminal and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.config.redact import printable
from rlhf_core.evaluation.plots import compared_curves, to_image
from rlhf_core.evaluation.report import Plot
from rlhf_core.ops import tables as shown
from rlhf_core.ops.compare.compare import Comparison, counted, signed

if TYPE_CHECKING:
    from rich.console import Console


def tables(found: Comparison) -> dict[str, shown.Table]:
    """Return what is shown, in words, by the title of the table. A run has a letter."""
    letters = [chr(ord("A") + number) for number in range(len(found.runs))]
    differing = []
    for kind, rows in found.differing.items():
        differing += [[kind, row.what, *map(_in_words, row.values)] for row in rows]
    results = []
    for row in found.results:
        minus = ["-" if each is None else f"{signed(each)} on {counted(each)}" for each in row.differences]
        results.append([row.what, *map(_in_words, row.values), *minus])
    curves = []
    for step, values in found.curves:
        cells = [each for of_runs in values.values() for each in of_runs]
        curves.append([str(step), *("-" if each is None else f"{each:.3g}" for each in cells)])
    note = (
        f"Differences are paired by prompt. They are of those of the {found.held_out} held-out prompts of A"
        " that both runs answered and whose scores both have kept. Where they have mostly other prompts, the"
        " difference is that of two independent means. All intervals are over prompts: one seed of each says"
        " nothing about the noise of training."
    )
    columns = [f"{name} {letter}" for name in found.metrics for letter in letters]
    found_tables: dict[str, shown.Table] = {
        "Runs": (["", "run"], [list(each) for each in zip(letters, found.runs, strict=True)], ""),
        "What differs": (["kind", "what", *letters], differing, ""),
        "Results": (["measure", *letters, *(f"{other} - A" for other in letters[1:])], results, note),
        "PPO": (["step", *columns], curves, found.parted),
    }
    return {title: table for title, table in found_tables.items() if table[1]}


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "-" if value is None else str(value)
    return text if len(text) <= 50 else f"{text[:12]}..."


def show(found: Comparison, console: Console) -> None:
    """Print the verdict, what differs, the results and the curves."""
    shown.show(found.verdict, tables(found), console)
    if found.mlflow:
        console.print(f"MLflow: {printable(found.mlflow)}", soft_wrap=True, markup=False)


def render(found: Comparison) -> str:
    """Return the comparison as one HTML document without scripts."""
    plots = {}
    if found.curves:
        image = to_image(compared_curves(found.histories, found.metrics))
        plots["PPO"] = Plot("Steps of PPO", found.parted, image)
    return shown.render(
        "comparison", found.runs, found.verdict, tables(found), plots=plots, link=found.mlflow
    )
