"""The command of the tables, and the count of what they tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bad_input.bad_inputs import Command, settled


@pytest.fixture(scope="session")
def counted(summary_counts: Counter[str]) -> Iterator[list[str]]:
    """The messages of all inputs that were refused as they should be."""
    messages: list[str] = []
    yield messages
    summary_counts["bad inputs, each with exit code 2 and its one message in under 5 s"] += len(messages)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], counted: list[str]
) -> Iterator[Command]:
    with settled(monkeypatch, tmp_path):
        yield Command(tmp_path, monkeypatch, capsys, counted)
