"""A share of the cases of a sweep, drawn by the seed of the day. `make test-slow` runs all cases.

The seed is the date. It is shown at the end of a run. `RLHF_TEST_SEED` sets it; `all` stands for all cases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import hypothesis
import pytest

SEED = "RLHF_TEST_SEED"

Case = TypeVar("Case")


def seed() -> str:
    """Return the seed. The processes of a run have it from their environment, also after midnight."""
    return os.environ.setdefault(SEED, f"{datetime.now(UTC):%Y-%m-%d}")


def share(cases: Sequence[Case], one_in: int) -> list[Case]:
    """Return one of `one_in` cases and at least one, in their order. Tests call the fixture `sampled`."""
    if seed() == "all":
        return list(cases)
    kept = random.Random(seed()).sample(range(len(cases)), -(-len(cases) // one_in))
    return [cases[index] for index in sorted(kept)]


def examples(count: int, one_in: int, **settings: Any) -> Callable[[Callable[..., None]], Any]:
    """Give a property one of `one_in` of its `count` examples, and the mark `sampled`."""
    settings = {"deadline": None, "database": None, **settings}
    if seed() != "all":
        # The same ones each day: the cases of a sweep are known to pass, and new examples are not.
        count, settings["derandomize"] = count // one_in, True

    def decorate(test: Callable[..., None]) -> Any:
        return pytest.mark.sampled(hypothesis.settings(max_examples=count, **settings)(test))

    return decorate
