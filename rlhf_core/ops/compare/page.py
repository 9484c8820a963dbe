"""A comparison on the terminal and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import ChoiceLoader, PackageLoader

from rlhf_core.config.redact import printable
from rlhf_core.evaluation.plots import compared_curves, to_image
from rlhf_core.evaluation.report import Plot, environment
from rlhf_core.ops.compare.compare import Comparison, counted, signed

if TYPE_CHECKING:
    from rich.console import Console

_Table = tuple[list[str], list[list[str]], str]
"""Headings, rows and a sentence below."""


def tables(found: Comparison) -> dict[str, _Table]:
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
    shown: dict[str, _Table] = {
        "Runs": (["", "run"], [list(each) for each in zip(letters, found.runs, strict=True)], ""),
        "What differs": (["kind", "what", *letters], differing, ""),
        "Results": (["measure", *letters, *(f"{other} - A" for other in letters[1:])], results, note),
        "PPO": (["step", *columns], curves, found.parted),
    }
    return {title: table for title, table in shown.items() if table[1]}


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "-" if value is None else str(value)
    return text if len(text) <= 50 else f"{text[:12]}..."


def show(found: Comparison, console: Console) -> None:
    """Print the verdict, what differs, the results and the curves."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def say(line: str) -> None:
        console.print(Text(printable(line)), soft_wrap=True)

    say(found.verdict)
    for title, (headings, rows, note) in tables(found).items():
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
        if note:
            say(note)
    if found.mlflow:
        say(f"MLflow: {found.mlflow}")


def render(found: Comparison) -> str:
    """Return the comparison as one HTML document without scripts."""
    packages = ("rlhf_core.ops.compare", "rlhf_core.evaluation")
    loader = ChoiceLoader([PackageLoader(package, package_path="") for package in packages])
    plots = []
    if found.curves:
        image = to_image(compared_curves(found.histories, found.metrics))
        plots.append(Plot("Steps of PPO", found.parted, image))
    page = environment().overlay(loader=loader).get_template("compare.html.j2")
    return page.render(found=found, tables=tables(found), plots=plots).strip() + "\n"
