"""Drift between two data artifacts.

- the divergence has the values worked out by hand, and is near 0 for samples of the same distribution
- it is found where it is: lengths, sources, vocabulary, and in no other measure
- new rows are compared alone if there are enough of them; few among many old rows drift there only
- texts are compared, so another tokenizer alone is no drift
- the page has the limits and what changed, and texts of the data cannot become markup
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import DriftConfig, Measure
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError
from rlhf_core.ops.drift import Finding, drift_markdown, findings
from rlhf_core.ops.drift_measures import (
    MIN_NEW_ROWS,
    Change,
    DataStatistics,
    Drift,
    compare,
    compare_new_rows,
    divergence,
    from_json,
    statistics,
    statistics_of_new_rows,
    to_json,
)
from tests.support.data_artifact import TEXTS, data_artifact


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": 1, "b": 1}, {"a": 1, "b": 1}, 0.0),
        ({"a": 1}, {"b": 1}, 1.0),
        # A tenth of the new data is new: m = (0.95, 0.05), and
        # (log2(1 / 0.95) + 0.9 log2(0.9 / 0.95) + 0.1 log2(0.1 / 0.05)) / 2 = (0.0740 - 0.0702 + 0.1) / 2
        ({"a": 10}, {"a": 9, "b": 1}, 0.0519),
        # A half: m = (0.75, 0.25), (log2(4/3) + 0.5 log2(2/3) + 0.5) / 2 = (0.4150 - 0.2925 + 0.5) / 2
        ({"a": 2}, {"a": 1, "b": 1}, 0.3113),
    ],
)
def test_divergence_has_the_value_worked_out_by_hand(
    before: dict[str, int], after: dict[str, int], expected: float
) -> None:
    scale = 10**7  # so large that the correction for chance is nothing
    many = [Counter({name: count * scale for name, count in counts.items()}) for counts in (before, after)]
    assert divergence(*many) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("size", [300, 30_000])
def test_samples_of_the_same_distribution_have_no_divergence(size: int) -> None:
    # Word frequencies as in texts: the k-th most frequent word has the weight 1 / k.
    words = [f"word{k}" for k in range(1, 1001)]
    weights = [1 / k for k in range(1, 1001)]
    draw = random.Random(0)
    before, after = (Counter(draw.choices(words, weights, k=size)) for _ in range(2))
    drifts = compare(DataStatistics(vocabulary={"sft": before}), DataStatistics(vocabulary={"sft": after}))
    assert [drift.value < 0.02 for drift in drifts if drift.value is not None] == [True]


@pytest.mark.parametrize(
    ("changed", "drifted"),
    [
        ({}, set()),
        ({"texts": TEXTS[::2]}, set()),
        ({"texts": [f"{text} {text} {text}" for text in TEXTS]}, {"lengths"}),
        ({"source": "other"}, {"sources"}),
        ({"texts": [text.replace("fox sees", "лиса видит") for text in TEXTS]}, {"vocabulary"}),
        ({"texts": [text.replace("fox", "cow").replace("birds", "goats") for text in TEXTS]}, {"vocabulary"}),
    ],
)
def test_drift_is_found_where_it_is(changed: dict[str, Any], drifted: set[str], tmp_path: Path) -> None:
    before = statistics(data_artifact(tmp_path / "before", TEXTS))
    after = statistics(data_artifact(tmp_path / "after", **{"texts": TEXTS, **changed}))
    found = compare(before, after)
    assert {drift.measure for drift in found if drift.value is None or drift.value > 0.1} == drifted
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_new_rows_among_many_old_ones_are_compared_alone(tmp_path: Path) -> None:
    old = [f"{text} {number}" for number in range(20) for text in TEXTS]
    foreign = [f"Ein Hund bellt {number} mal." for number in range(MIN_NEW_ROWS)]
    champion = data_artifact(tmp_path / "champion", old)
    before = statistics(champion)

    def drift_of_new(name: str, texts: list[str]) -> dict[str, Drift]:
        found = compare_new_rows(
            before, statistics_of_new_rows(champion, data_artifact(tmp_path / name, texts))
        )
        return {drift.measure: drift for drift in found}

    # Another vocabulary of the tokenizer, so the same texts have other tokens.
    found = drift_of_new("grown", [*old, *foreign])
    tokenizers = [tmp_path / name / "tokenizer" / "tokenizer.json" for name in ("champion", "grown")]
    assert tokenizers[0].read_bytes() != tokenizers[1].read_bytes()
    new = statistics_of_new_rows(champion, tmp_path / "grown")
    assert new.rows == dict.fromkeys(("sft", "preference", "prompts"), MIN_NEW_ROWS)
    all_rows = compare(before, statistics(tmp_path / "grown"))
    assert all(drift.value is not None and drift.value < 0.1 for drift in all_rows)
    assert set(found) == {"lengths", "vocabulary"}
    assert found["vocabulary"].value is not None and found["vocabulary"].value > 0.5
    assert found["vocabulary"].new_rows == MIN_NEW_ROWS
    assert drift_of_new("few", [*old, *foreign[1:]]) == {}
    assert drift_of_new("replaced", foreign) == {}
    same_kind = drift_of_new("same kind", [*old, *(text.replace(".", "!") for text in old[::17])])
    assert all(drift.value is not None and drift.value < 0.05 for drift in same_kind.values())


def test_the_tokenizers_are_compared_once_for_any_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons = []

    class Content(bytes):
        def __eq__(self, other: object) -> bool:
            comparisons.append(other)
            return super().__eq__(other)

        __hash__ = bytes.__hash__

    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: Content(read_bytes(path)))
    folder = data_artifact(tmp_path, TEXTS)
    assert statistics_of_new_rows(folder, folder).rows == {}
    assert len(comparisons) == 1


def test_changes_are_named_with_their_shares() -> None:
    before = DataStatistics(sources={"sft": Counter(a=3, b=1)})
    after = DataStatistics(sources={"sft": Counter(a=1, c=3)})
    lengths, sources, _ = compare(before, after)
    assert lengths.value is None and "no set has rows" in lengths.note
    assert sources.changes[0] == Change("c", 0.0, 0.75)


LIMITS = DriftConfig.model_validate({"warn": {"sources": None}, "stop": {"lengths": 0.5, "vocabulary": 0.3}})


@pytest.mark.parametrize(
    ("measure", "value", "state"),
    [
        ("lengths", 0.5, "warn"),
        ("lengths", 0.51, "stop"),
        ("vocabulary", 0.1, "ok"),
        ("sources", 1.0, "ok"),
        ("agreement", None, "not measured"),
    ],
)
def test_a_value_above_a_limit_warns_or_stops(measure: Measure, value: float | None, state: str) -> None:
    [finding] = findings([Drift(measure, value, "sft", note="no model")], LIMITS)
    assert finding.state == state


def test_page_shows_limits_and_changes_without_markup_of_the_data() -> None:
    change = Change("<b>|лис", 0.0, 0.25)
    drift = Drift("vocabulary", 0.4, "sft", changes=(change,))
    found = [Finding(drift, 0.1, 0.3), Finding(Drift("agreement", None, note="no model"), 0.1, None)]
    page = drift_markdown(found, "fox-policy version 3")
    assert page.startswith("# Data drift: stop\n")
    assert "| vocabulary | 0.400 | sft | 0.1 | 0.3 | stop |" in page
    assert "| &lt;b&gt;\\|лис | 0.00% | 25.00% |" in page
    assert "agreement was not measured: no model." in page
    of_new = Finding(replace(drift, new_rows=500), 0.1, 0.3)
    assert "| vocabulary of new rows | 0.400 | sft | 0.1 | 0.3 | stop |" in drift_markdown([of_new], "fox")
    assert of_new.sentence == "vocabulary of new rows 0.4 (sft), above drift.stop.vocabulary=0.3"
    assert found[0].sentence == "vocabulary 0.4 (sft), above drift.stop.vocabulary=0.3"


@pytest.mark.parametrize(("low", "state"), [(0.31, "stop"), (0.3, "warn"), (0.1, "ok"), (-0.2, "ok")])
def test_a_value_with_an_interval_is_above_a_limit_if_its_lower_bound_is(low: float, state: str) -> None:
    found = Finding(Drift("agreement", 0.4, "9 pairs", low, 0.5), 0.1, 0.3)
    assert found.state == state and f"agreement 0.4 [{low:.3f}, 0.500] (9 pairs)" in found.sentence
    assert f"| agreement | 0.400 [{low:.3f}, 0.500] | 9 pairs | 0.1 | 0.3 | {state} |" in drift_markdown(
        [found], "fox-policy version 3"
    )


def test_a_warning_above_the_stop_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"drift\.warn\.lengths must be at most drift\.stop\.lengths \(0.2\)"
    ):
        config_from_tree({"drift": {"warn": {"lengths": 0.3}, "stop": {"lengths": 0.2}}}, "test")
    given = config_from_tree({"drift": {"stop": {"lengths": 0.2}}}, "test").drift
    assert given is not None and given.limits("lengths") == (0.1, 0.2)
