"""Fixtures of the tests of executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tenacity

from rlhf_core.run.executors import follow, kuberay
from tests.support.scripted_kubernetes import ScriptedKubernetes


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedKubernetes]:
    """A scripted API server that KUBECONFIG names; waits between requests are short."""
    server = ScriptedKubernetes()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kuberay, "backoff", lambda *_, **__: tenacity.wait_none())
    yield server
    server.close()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll without waiting."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(follow, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(follow, "_LOG_SECONDS", 0.02)
    monkeypatch.setattr(follow, "_STOP_SECONDS", 0.1)
