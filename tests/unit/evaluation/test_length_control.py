"""The length-controlled win rate.

- it is the maximum of the likelihood, as found by a search on a grid
- a judge that only prefers the longer response gives one half, whatever the raw win rate is
- without differences of length it is the raw win rate, up to the two additional ties
- it is finite if one model wins everything, and its interval contains the mean and becomes narrower
- exchanging the models gives 1 minus the rate
- it says so if one model's responses are nearly always longer, because the data then do not identify it
- values of one group count as one in its interval
"""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.evaluation.statistics import length_controlled


def test_it_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(5.0, 10.0, 60)
    y = (rng.random(60) < 1 / (1 + np.exp(-(0.4 + 0.1 * d)))).astype(float)
    x = np.tanh(np.concatenate([d, [d.std(), -d.std()]]) / d.std())
    z = np.concatenate([y, [0.5, 0.5]])
    grid = np.linspace(-4, 4, 401)
    a, b = (axis[..., None] for axis in np.meshgrid(grid, grid, indexing="ij"))
    logits = a + b * x
    likelihood = (z * logits - np.logaddexp(0, logits)).sum(-1)
    best = grid[np.unravel_index(likelihood.argmax(), likelihood.shape)[0]]
    found = length_controlled(y.tolist(), d.tolist(), 0.95).mean
    assert found == pytest.approx(1 / (1 + np.exp(-best)), abs=0.006)


def test_a_judge_of_length_gives_one_half() -> None:
    differences = [float(d) for d in range(-10, 31) if d != 0]
    preferences = [float(d > 0) for d in differences]
    assert sum(preferences) / len(preferences) == 0.75
    found = length_controlled(preferences, differences, 0.95)
    assert found.low < 0.5 < found.high and found.mean == pytest.approx(0.5, abs=0.15)


def test_equal_lengths_give_the_raw_win_rate() -> None:
    preferences = [1.0] * 60 + [0.5] * 20 + [0.0] * 20
    found = length_controlled(preferences, [0.0] * 100, 0.95)
    assert found.mean == pytest.approx((70 + 1) / 102, abs=1e-6)


def test_it_is_finite_if_everything_is_won() -> None:
    few, many = (length_controlled([1.0] * n, [3.0, -1.0] * (n // 2), 0.95) for n in (4, 100))
    assert few.low < few.mean < few.high < 1.0
    assert few.mean < many.mean < 1.0 and many.high - many.low < few.high - few.low


def test_exchanged_models_give_the_complement() -> None:
    preferences, differences = [1.0, 0.0, 0.5, 1.0, 1.0], [4.0, -2.0, 0.0, 9.0, -3.0]
    ours = length_controlled(preferences, differences, 0.9)
    theirs = length_controlled([1 - p for p in preferences], [-d for d in differences], 0.9)
    assert ours.mean == pytest.approx(1 - theirs.mean) and ours.low == pytest.approx(1 - theirs.high)


@pytest.mark.parametrize(("shift", "identified"), [(0.0, True), (1.9, True), (2.1, False), (-5.0, False)])
def test_it_says_if_the_data_do_not_identify_it(shift: float, identified: bool) -> None:
    """The mean difference is `shift` standard deviations."""
    rng = np.random.default_rng(1)
    d = rng.normal(size=400)
    d = (d - d.mean()) / d.std() + shift
    preferences = (rng.random(400) < 1 / (1 + np.exp(-d))).astype(float).tolist()
    found = length_controlled(preferences, d.tolist(), 0.95)
    assert found.identified is identified
    assert found.to_json().get("identified", 1.0) == float(identified)
    assert set(found.to_json()) - {"identified"} == {"mean", "low", "high"}


def test_values_of_one_group_count_as_one() -> None:
    rng = np.random.default_rng(2)
    d, y = rng.normal(size=50).tolist(), (rng.random(50) < 0.6).astype(float).tolist()
    alone = length_controlled(y, d, 0.95)
    assert length_controlled(y, d, 0.95, [str(index) for index in range(50)]) == alone
    groups = [str(index // 8) for index in range(400)]
    wins, differences = np.repeat(y, 8).tolist(), np.repeat(d, 8).tolist()
    grouped = length_controlled(wins, differences, 0.95, groups)
    assert grouped.high - grouped.low == pytest.approx(alone.high - alone.low, rel=0.06)
    apart = length_controlled(wins, differences, 0.95)
    assert grouped.high - grouped.low > 2.5 * (apart.high - apart.low)
