"""What a command found about runs, as tables on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jinja2 import ChoiceLoader, PackageLoader

from rlhf_core.config.redact import printable
from rlhf_core.evaluation.report import Plot, environment

if TYPE_CHECKING:
    from rich.console import Console

Table = tuple[list[str], list[list[str]], str]
"""Headings, rows and a sentence below."""


def show(verdict: str, tables: Mapping[str, Table], console: Console) -> None:
    """Print the verdict, and the tables with their titles."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    def say(text: str) -> None:
        for line in text.splitlines():
            console.print(Text(printable(line)), soft_wrap=True)

    say(verdict)
    for title, (headings, rows, note) in tables.items():
        table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            # As `Text`: rich takes brackets in a plain string, such as those of a user's prompt, for markup.
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
        say(note)


def render(
    kind: str,
    runs: Sequence[str],
    verdict: str,
    tables: Mapping[str, Table],
    *,
    plots: Mapping[str, Plot] | None = None,
    link: str = "",
) -> str:
    """Return what was found as one HTML document without scripts.

    Args:
        kind: What it is, such as `comparison`.
        runs: Names of the runs.
        verdict: Its first line is the heading.
        tables: By their titles.
        plots: Figures above a table, by its title.
        link: An address elsewhere.
    """
    packages = ("rlhf_core.ops", "rlhf_core.evaluation")
    loader = ChoiceLoader([PackageLoader(package, package_path="") for package in packages])
    page = environment().overlay(loader=loader).get_template("tables.html.j2")
    heading, *further = verdict.splitlines()
    document = page.render(
        kind=kind,
        runs=runs,
        heading=heading,
        further=further,
        tables=tables,
        plots=plots or {},
        link=link,
    )
    return document.strip() + "\n"
