"""Calibration and length bias of a reward model, against numbers worked out by hand.

- a model that is right as often as it says has no calibration error; an overconfident one has the difference
- length bias compares what the model prefers with what annotators chose
- accuracy is reported by source and by length, over all pairs
- a tie counts half in all of them
- the plot has a point for each bin, as large as the bin is full, and names the error
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.evaluation.plots import reliability
from rlhf_core.evaluation.statistics import accuracy_by, accuracy_by_length, calibration, length_bias


def _pairs(probability: float, right: int, wrong: int) -> list[tuple[float, float]]:
    gap = math.log(probability / (1 - probability))
    return [(gap, 0.0)] * right + [(-gap, 0.0)] * wrong


def test_a_calibrated_model_has_no_error() -> None:
    found = calibration(_pairs(0.8, 8, 2) + _pairs(0.6, 6, 4))
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.count == [10, 10]
    assert found.accuracy == pytest.approx(found.confidence)


def test_an_overconfident_model_has_the_difference() -> None:
    # 10 pairs at 0.9 of which 6 are right: 0.3; 30 at 0.7 of which 21 are right: 0. (10 * 0.3 + 30 * 0) / 40
    assert calibration(_pairs(0.9, 6, 4) + _pairs(0.7, 21, 9)).error == pytest.approx(0.075)


def test_length_bias_compares_the_model_with_the_annotators() -> None:
    scores = [(2.0, 1.0), (0.0, 1.0), (1.0, 3.0), (5.0, 4.0)]
    lengths = [(10, 5), (5, 10), (8, 8), (4, 9)]
    # Uneven pairs 0, 1, 3: the longer one wins in 0 and 1, was chosen in 0 only.
    found = length_bias(scores, lengths)
    assert found["longer_wins"] == pytest.approx(2 / 3)
    assert found["longer_chosen"] == pytest.approx(1 / 3)
    assert (found["accuracy_longer"], found["accuracy_shorter"]) == (1.0, 0.5)
    assert found["correlation"] == pytest.approx(np.corrcoef(np.ravel(scores), np.ravel(lengths))[0, 1])


def test_pairs_of_equal_length_say_nothing_about_length() -> None:
    assert length_bias([(1.0, 0.0)], [(3, 3)]) == {}


def test_accuracy_by_length_and_source_covers_all_pairs() -> None:
    scores = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    buckets = accuracy_by_length(scores, [(1, 2), (3, 1), (9, 1), (5, 5), (7, 1)])
    assert sum(bucket["pairs"] for bucket in buckets) == 5
    assert buckets[0] == {"from": 2.0, "to": 3.0, "pairs": 2.0, "accuracy": 0.5}
    assert accuracy_by(["a", "b", "a", "b", "b"], scores) == {"a": 1.0, "b": pytest.approx(1 / 3)}


def test_a_tie_counts_half_wherever_it_is_counted() -> None:
    scores, lengths = [(1.0, 1.0), (1.0, 1.0)], [(9, 4), (4, 9)]
    bias = length_bias(scores, lengths)
    assert [bias[name] for name in ("longer_wins", "accuracy_longer", "accuracy_shorter")] == [0.5] * 3
    assert [bucket["accuracy"] for bucket in accuracy_by_length(scores, lengths)] == [0.5, 0.5]
    assert accuracy_by(["a", "b"], scores) == {"a": 0.5, "b": 0.5}
    assert calibration(scores).accuracy == [0.5]


def test_the_reliability_plot_shows_each_bin_by_confidence_accuracy_and_size() -> None:
    (axes,) = reliability(calibration(_pairs(0.9, 6, 4) + _pairs(0.7, 21, 9))).axes
    (points,) = axes.collections
    bins = [[0.7, 0.7], [0.9, 0.6]]
    np.testing.assert_allclose(points.get_offsets(), bins)
    diagonal, curve = axes.lines
    np.testing.assert_allclose(curve.get_xydata(), bins)
    np.testing.assert_allclose(diagonal.get_xydata(), [[0.5, 0.5], [1.0, 1.0]])
    # 30 and 10 pairs: beyond the smallest area of 20, the second has a third of the first.
    large, small = points.get_sizes()
    assert small - 20 == pytest.approx((large - 20) / 3)
    assert axes.get_title(loc="left").endswith("calibration error 0.075")
