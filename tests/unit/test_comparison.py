"""The arithmetic limit of `tests.benchmarks.comparison`: operations by hand, and their share."""

from __future__ import annotations

import pytest

from tests.benchmarks.comparison import BARE, parts_table
from tests.benchmarks.ppo_iteration import operations


def test_operations_of_an_iteration_are_those_computed_by_hand() -> None:
    """Millions of weights: 3.162 in the layers and 0.524 in the head; 8192 tokens, 4096 of them sampled."""
    layers, head = 3.162112, 0.524288
    forward = 2 * (layers * 8192 + head * 4096)
    found = {part: count / 1e6 for part, count in operations().items()}
    assert found == pytest.approx(
        {
            "rollout": 2 * (layers * (8192 - 64) + head * 4096),
            "scoring": 2 * forward + 2 * layers * 8192,
            "training": 3 * (forward + 2 * layers * 8192),
        }
    )


def test_the_share_is_the_limit_divided_by_the_cpu_seconds() -> None:
    rate = 1e11
    parts = {part: {"cpu_seconds": 4 * count / rate} for part, count in operations().items()}
    twice = {part: {"cpu_seconds": 2 * count / rate} for part, count in operations().items()}
    table = parts_table([{"float32": {"parts": parts}, BARE: {"parts": twice}}], rate)
    assert list(table.columns[3].cells) == ["0.25"] * 3
    assert list(table.columns[5].cells) == ["0.50"] * 3
