"""Every algorithm learns, on the real stack (slow set).

- over 3 seeds each raises a rule reward from 0.5 to at least 0.75 within 20 steps
- with a very large KL coefficient none moves
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.integration.learning import ALGORITHMS, reward_curve

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_raises_the_reward(algorithm: str, seed: int, tmp_path: Path) -> None:
    curve = reward_curve(algorithm, seed, tmp_path)
    assert curve[0] < 0.6
    assert mean(curve[-3:]) > 0.75, [round(value, 3) for value in curve]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_very_large_kl_coefficient_holds_it_where_it_is(algorithm: str, tmp_path: Path) -> None:
    curve = reward_curve(algorithm, 0, tmp_path, steps=12, kl_coef=100.0)
    assert abs(mean(curve[-3:]) - mean(curve[:3])) < 0.06, [round(value, 3) for value in curve]
