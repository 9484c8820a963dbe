"""The benchmark of bfloat16 ends with its table and the difference of the log-probabilities."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks import bfloat16


@pytest.mark.usefixtures("tiny_model")
def test_bfloat16_ends_with_its_table_and_the_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bfloat16, "SHAPES", bfloat16.SHAPES[-1:])
    monkeypatch.setattr(bfloat16, "ROUNDS", 1)
    bfloat16.main([])
    shown = capsys.readouterr().out
    rows = " ".join(shown.split())
    for title in ("32 x 256 by 688, GFLOP/s", "forward, s", "forward and backward, s"):
        assert re.search(rf"│ {title} │ [\d.]+ │ [\d.]+ │ [\d.]+ │", rows), title
    average, largest = re.findall(r"0\.\d{4}", shown.splitlines()[-1])
    assert shown.splitlines()[-1].startswith("log-probabilities differ by")
    assert 0 < float(average) < float(largest) < 0.1
