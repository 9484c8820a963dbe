"""`python -m tests.figures`.

- figures are listed by the date of their commit, the oldest first, with page and line
- a commit that the repository does not have is shown as unknown, and is an error
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import figures


def commit(root: Path, date: str) -> str:
    """Make an empty commit of a day and return its abbreviated hash."""
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(
        ["git", *who, "commit", "-q", "--allow-empty", "-m", date],
        cwd=root,
        env=os.environ | dates,
        check=True,
    )
    found = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    return tmp_path


def test_figures_are_listed_by_the_date_of_their_commit(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older = commit(root, "2026-11-20T12:00:00Z"), commit(root, "2026-11-02T12:00:00Z")
    (root / "README.md").write_text(f"A run takes 3 s (commit {newer}).\n")
    (root / "docs/speed.md").write_text(f"# Speed\n\nCommits {newer} and {older}: 5 s.\n")
    assert figures.figures(root) == [
        ("2026-11-02", older, "docs/speed.md:3"),
        ("2026-11-20", newer, "README.md:1"),
        ("2026-11-20", newer, "docs/speed.md:3"),
    ]
    assert figures.main(["--before", "2026-11-10"]) == 0
    assert capsys.readouterr().out.split() == ["2026-11-02", older, "docs/speed.md:3"]


def test_a_commit_that_does_not_exist_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(root, "2026-11-20T12:00:00Z")
    (root / "README.md").write_text("A run takes 3 s (commit 0123456789).\n")
    assert figures.main([]) == 1
    assert capsys.readouterr().out.split() == ["unknown", "0123456789", "README.md:1"]
