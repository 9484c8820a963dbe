"""Fixtures of the tests of executors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.executors.ray_job import ADDRESS
from rlhf_core.executors.spec import StageSpec
from rlhf_core.storage.artifacts import ArtifactCopy
from rlhf_core.storage.store import Store, open_store
from tests.support.followed_jobs import KEY
from tests.support.scripted_kubernetes import ScriptedKubernetes
from tests.support.scripted_ray_jobs import ScriptedRayJobs


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of these tests is a folder. Other tests of the process may have set a server for buckets."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedKubernetes]:
    """A scripted API server that KUBECONFIG names."""
    server = ScriptedKubernetes()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRayJobs]:
    """A scripted job server of a Ray cluster, which needs no token."""
    server = ScriptedRayJobs()
    monkeypatch.setenv(ADDRESS, server.address)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


@pytest.fixture
def spec(tmp_path: Path) -> StageSpec:
    run = {"home": str(tmp_path / "home"), "executor": "kuberay"}
    copy = ArtifactCopy("ppo", "a" * 16, "b" * 12, "policy", "s3://bucket/models")
    return StageSpec(
        "data", KEY, PipelineConfig.model_validate({"run": run}), base_models={"model.path": copy}
    )


@pytest.fixture
def store(spec: StageSpec) -> Store:
    return open_store(spec.config)
