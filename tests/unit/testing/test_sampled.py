"""The seed of the day.

- the same seed gives the same share of a sweep, in order, and each case has its days
- with the seed `all`, a sweep and a property have all their cases
- a test that samples has the mark by which `make test-slow` finds it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sampled import SEED, examples, share

CASES = "abcdefghij"


def test_each_case_has_its_days(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for day in range(1, 31):
        monkeypatch.setenv(SEED, f"2026-11-{day:02}")
        found = share(CASES, 4)
        assert found == share(CASES, 4) == sorted(found)
        assert len(found) == 3
        seen.update(found)
    assert seen == set(CASES)


def test_a_sweep_of_one_case_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "2026-11-30")
    assert share("a", 9) == ["a"]


@pytest.mark.parametrize(("seed", "count"), [("2026-11-30", 5), ("all", 20)])
def test_a_property_has_its_share_of_examples(seed: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, seed)
    tried: list[int] = []

    @examples(20, 4)
    @given(st.integers())
    def attempt(number: int) -> None:
        tried.append(number)

    attempt()
    assert len(tried) == count


def test_with_the_seed_all_a_sweep_has_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "all")
    assert share(CASES, 4) == list(CASES)


def test_the_fixture_gives_the_mark(request: pytest.FixtureRequest, sampled: Callable[..., Any]) -> None:
    assert request.node.get_closest_marker("sampled") is not None
    assert sampled is share
