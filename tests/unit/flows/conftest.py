"""Fixtures of the tests of flows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prefect_api import BLOCK, PrefectApi, prefect_api


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefectApi]:
    """Prefect's API with a notification block, in a flow run with the name `demo-seed0-a1`."""
    monkeypatch.setenv("RLHF_NOTIFY", BLOCK)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", "demo-seed0-a1")
    with prefect_api() as server:
        yield server
