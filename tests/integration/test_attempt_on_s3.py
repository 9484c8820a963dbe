"""One attempt at one stage of a cluster, with an S3 server as its store.

- it commits the weights that another host has put into the store, and has no copy of them
- if the stage or a later step before the commit fails, they are deleted from the store
- at a stop they stay, and the next attempt that commits deletes them
- a job fetches the weights of its base model only for a stage that reads them on this host
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.base_model import copied_base_models
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import with_base_paths
from rlhf_core.data.sources import model_digest
from rlhf_core.errors import GateFailed, InputError
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import open_store
from rlhf_core.types import ArtifactRef, StageContext, StageResult
from tests.support.attempts import attempt_with
from tests.support.other_host import Elsewhere
from tests.support.scripted_cluster import ScriptedCluster, node

KEY = "0" * 16
FOLDER = f"artifacts/sft/{KEY}"
WEIGHTS = "model/model.safetensors"


class Attempt:
    """At the stage `sft`, whose rank 0 is on another host than the driver."""

    def __init__(self, folder: Path, url: str) -> None:
        tree = {
            "run": {"home": str(folder / "home")},
            "store": {"url": url},
            "tracking": {"system_metrics": False},
        }
        self._folder = folder
        self.config = PipelineConfig.model_validate(tree)
        self.store = open_store(self.config)

    def __call__(self, end: Callable[[StageContext], None] = lambda context: None) -> ArtifactRef:
        """Run an attempt. `end` is called after the model is gathered."""

        def stage(_config: PipelineConfig, context: StageContext) -> StageResult:
            self._train(context)
            end(context)
            return StageResult({})

        return attempt_with(stage, StageSpec("sft", KEY, self.config))

    def _train(self, context: StageContext) -> None:
        assert isinstance(context.nodes, ClusterNodes) and context.monitor is not None
        work, model = context.output.parent, context.output / "model"
        agent = Elsewhere(self._folder / "other-host", self.config, work, self.store)
        cluster = ScriptedCluster([node("1", "one"), node("2", "two")], actors={"2": agent})
        output = context.nodes.output
        nodes = ClusterNodes(self.config, work, [], output, context.monitor, cluster=cluster)
        nodes.join({"2": {"": {0}}})
        agent.there(model).mkdir(parents=True)
        (agent.there(model) / "model.safetensors").write_text("weights")
        (agent.there(model) / "config.json").write_text("{}")
        nodes.gather(model)
        nodes.leave()
        assert [path.name for path in model.iterdir()] == ["config.json"], "the driver has no copy"
        assert list(context.stored_in(model)) == ["model.safetensors"]
        assert [key for key in self.store.list("artifacts") if key.endswith(WEIGHTS)]


@pytest.fixture
def attempt(
    s3_server: Any, tmp_path: Path, new_home: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> Attempt:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{new_home(tmp_path / 'tracker')}/mlflow.db")
    return Attempt(tmp_path, f"{s3_server.url}/{tmp_path.name}")


def test_stopped_attempt_keeps_weights_until_the_next_one_commits(attempt: Attempt, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        attempt(lambda context: context.stop.exit())
    assert attempt.store.list("artifacts") == [
        f"{FOLDER}/000001/{name}" for name in ("model/config.json", WEIGHTS)
    ]
    ref = attempt()
    assert sorted(attempt.store.list("artifacts")) == [
        f"{FOLDER}/000002/{name}" for name in ("model/config.json", WEIGHTS)
    ] + [f"{FOLDER}/manifest.json"]
    folder = ArtifactStore(attempt.store, tmp_path / "cache").fetch(ref)
    assert (folder / WEIGHTS).read_text() == "weights"
    assert (folder / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("stage", "has_ray", "has_weights"),
    [("data", True, True), ("sft", True, False), ("sft", False, True), ("evaluate", False, False)],
)
def test_a_job_fetches_what_its_stage_reads_of_a_base_model(
    stage: StageName,
    has_ray: bool,
    has_weights: bool,
    attempt: Attempt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_ray:
        monkeypatch.delenv("RAY_ADDRESS")
    model = tmp_path / "out" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("w" * 1000)
    flow = ArtifactStore(attempt.store, tmp_path / "flow" / "cache")
    path = flow.address(flow.publish("ppo", "a" * 16, tmp_path / "out", Provenance()), "model", local=True)
    config = with_base_paths(attempt.config, {"model.path": path})
    spec = StageSpec(
        stage,
        KEY,
        config,
        sources={"model": model_digest(path, None)},
        base_models=copied_base_models(config),
    )
    shutil.rmtree(tmp_path / "flow")
    found: list[Path] = []

    def function(own: PipelineConfig, context: StageContext) -> StageResult:
        found.append(Path(str(own.model.path)))
        (context.output / "numbers.json").write_text("{}")
        return StageResult({})

    spec.write(tmp_path / "spec.json")
    attempt_with(function, StageSpec.read(tmp_path / "spec.json"))
    [own] = found
    assert own.relative_to(tmp_path / "home" / "cache") == Path(path).relative_to(tmp_path / "flow" / "cache")
    assert (own / "config.json").exists() and (own / "model.safetensors").exists() == has_weights


def _fail(_context: StageContext) -> None:
    raise GateFailed("the model is not good enough")


def _leave_a_program(context: StageContext) -> None:
    (context.output / "run.py").write_text("")


def test_failed_attempt_deletes_weights(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GateFailed):
        attempt(_fail)
    assert attempt.store.list("artifacts") == []
    with pytest.raises(InputError, match=r"left run\.py"):
        attempt(_leave_a_program)
    assert attempt.store.list("artifacts") == []
    monkeypatch.setenv("RLHF_FAIL", "stage.made:1:raise")
    with pytest.raises(OSError, match=r"stage\.made"):
        attempt()
    assert attempt.store.list("artifacts") == []
