"""The search of `rlhf plan` for faster settings, which takes most of the time of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.ops.plan import plan as plans


@pytest.fixture(scope="session", autouse=True)
def searched_once() -> Iterator[None]:
    """Plans of the same settings share the search."""
    found: dict[Any, Any] = {}
    search = plans.fastest_settings

    def search_once(config: PipelineConfig, *others: Any) -> Any:
        key = (config.model_dump_json(), *others)
        if key not in found:
            found[key] = search(config, *others)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "fastest_settings", search_once)
        yield


@pytest.fixture
def nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search, for tests of what is said about the given settings."""
    monkeypatch.setattr(plans, "fastest_settings", lambda *_: {})
