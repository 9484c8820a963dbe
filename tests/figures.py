"""The commits that figures in the documentation were measured with, the oldest first.

    python -m tests.figures              all of them
    python -m tests.figures --before 2026-11-25

A figure is followed by `(commit HASH)`, or its paragraph or table names the commit. Measure the
oldest figures again before a release.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_MENTION = re.compile(r"\bcommits? ((?:[0-9a-f]{7,40}(?:, | and )?)+)", re.IGNORECASE)


class Figure(NamedTuple):
    """One mention of a commit."""

    date: str
    """Day of the commit, or an empty text if the repository does not have it."""
    commit: str
    place: str
    """`page:line`"""


def mentions(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (commit, `page:line`) of all mentions in README.md and docs."""
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            for found in _MENTION.finditer(line):
                for commit in re.findall("[0-9a-f]{7,40}", found[1]):
                    yield commit, f"{page.relative_to(root)}:{number}"


def figures(root: Path) -> list[Figure]:
    """Return all mentions, the oldest commit first and unknown commits before it."""
    found = list(mentions(root))
    dates = {commit: _date(root, commit) for commit in {commit for commit, _ in found}}
    return sorted(Figure(dates[commit], commit, place) for commit, place in found)


def _date(root: Path, commit: str) -> str:
    command = ["git", "show", "--no-patch", "--format=%cs", f"{commit}^{{commit}}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return 1 if a commit is unknown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="9999", help="only figures of commits before this day")
    before = parser.parse_args(arguments).before
    found = [figure for figure in figures(ROOT) if figure.date < before]
    for figure in found:
        print(f"{figure.date or 'unknown':10}  {figure.commit:12}  {figure.place}")
    return int(any(not figure.date for figure in found))


if __name__ == "__main__":
    raise SystemExit(main())
