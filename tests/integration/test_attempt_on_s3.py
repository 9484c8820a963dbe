"""One attempt at one stage of a cluster, with an S3 server as its store.

- it commits the weights that another host has put into the store, and has no copy of them
- if the stage fails, they are deleted from the store
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import GateFailed
from rlhf_core.run.attempt import execute
from rlhf_core.run.events import Events
from rlhf_core.run.spec import StageSpec
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import open_store
from rlhf_core.types import StageContext, StageResult

KEY = "0" * 16
WEIGHTS = "model/model.safetensors"


def test_attempt_commits_weights_of_another_host_and_deletes_those_of_a_failure(
    s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    tree = {
        "run": {"home": str(tmp_path / "home")},
        "store": {"url": f"{s3_server.url}/attempt"},
        "tracking": {"system_metrics": False},
    }
    config = PipelineConfig.model_validate(tree)
    store = open_store(config)
    there = tmp_path / "other-host" / "model"
    there.mkdir(parents=True)
    (there / "model.safetensors").write_text("weights")

    def train(context: StageContext) -> None:
        """Do what `ClusterNodes.gather` does for the weights of another host."""
        assert isinstance(context.nodes, ClusterNodes) and context.nodes.output is not None
        output, folder = context.nodes.output, context.output / "model"
        files = bundles.hash_folder(there)
        bundles.upload(store, there, files, output.key_of(folder))
        output.add(folder, files)
        assert context.stored_in(folder) == {"model.safetensors": files[0].sha256}
        (folder / "config.json").write_text("{}")

    def failing(_config: PipelineConfig, context: StageContext) -> StageResult:
        train(context)
        assert store.list("artifacts") == [f"artifacts/sft/{KEY}/000001/{WEIGHTS}"]
        raise GateFailed("the model is not good enough")

    def stage(_config: PipelineConfig, context: StageContext) -> StageResult:
        train(context)
        return StageResult({})

    spec = StageSpec("sft", KEY, config)
    with pytest.raises(GateFailed):
        execute(spec, Events(None), function=failing)
    assert store.list("artifacts") == []
    ref = execute(spec, Events(None), function=stage)
    folder = ArtifactStore(store, tmp_path / "cache").fetch(ref)
    assert (folder / WEIGHTS).read_text() == "weights"
    assert (folder / "model" / "config.json").exists()
