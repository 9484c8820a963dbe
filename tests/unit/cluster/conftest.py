"""The agent of another host, for the tests of hosts that share nothing but the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.storage.store import Store
from tests.support.other_host import Elsewhere


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """The agent of another host, whose files are below `two`."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path / "home")}})
    agent = Elsewhere(tmp_path / "two", config, tmp_path / "attempts" / "1", Store(tmp_path / "store"))
    yield agent
    agent.close()
