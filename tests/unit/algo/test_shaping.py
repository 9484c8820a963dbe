"""Locks: DAPO's soft penalty for long responses, at and between its corners."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.algo.shaping import overlong_penalty


def test_overlong_penalty_matches_hand_computed_numbers() -> None:
    # free up to 100 - 20 = 80; 85: 5/20 of 0.5 = 0.125; 90: 10/20 of 0.5 = 0.25; all of it at 100 and beyond
    lengths = torch.tensor([0, 79, 80, 85, 90, 100, 101, 500])
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.125, -0.25, -0.5, -0.5, -0.5]
    assert penalty.dtype == torch.float32


def test_overlong_penalty_is_monotonic() -> None:
    penalty = overlong_penalty(torch.arange(200, dtype=torch.float64), max_length=150, buffer=37, factor=2.0)
    assert torch.all(penalty.diff() <= 0)
    assert penalty.diff().abs().max().item() == pytest.approx(2.0 / 37, rel=1e-12)
    assert penalty.dtype == torch.float64


def test_without_a_buffer_the_penalty_is_a_step() -> None:
    assert overlong_penalty(torch.tensor([9, 10, 11]), 10, 0, 1.0).tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("buffer", [-1, 11])
def test_an_invalid_overlong_buffer_is_an_error(buffer: int) -> None:
    with pytest.raises(ValueError, match="buffer must be between 0 and max_length"):
        overlong_penalty(torch.tensor([1]), 10, buffer, 1.0)
