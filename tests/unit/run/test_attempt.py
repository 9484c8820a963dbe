"""One attempt at one stage, with a real store and a stage of a few lines.

- an attempt that was overtaken commits neither a checkpoint nor an artifact
- an artifact that another run has made since the flow looked for it is reused
- the claim of an attempt names the artifacts that its stage reads, which `rlhf prune` keeps
- on a cluster, the stage knows the later stages of its run, for which the handshake compares the memory of
  the GPUs
- the MLflow run names the artifact, and the command that reads its record if it has one
- the section `store` decides which checkpoints are kept, and whether a stage may go on from what other code
  wrote or start from the beginning where all are damaged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, CorruptArtifact, RLHFError, Superseded
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.storage.fencing import observe
from rlhf_core.storage.store import Store
from rlhf_core.tracking.tracker import open_tracking
from rlhf_core.types import ArtifactRef, StageContext, StageResult
from tests.support.attempts import attempt_with
from tests.support.claims import claim
from tests.support.corruption import set_versions

KEY = "0" * 16
JUDGE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
"""The config.json of a judge's base model."""


@pytest.fixture(autouse=True)
def tracked(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")


class Attempt:
    """At a stage, which is what `body` does."""

    def __init__(
        self, home: Path, stage: StageName = "sft", reward: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        self.stage = stage
        sections = {
            "run": {"home": str(home)},
            "reward": reward or {},
            "store": settings,
            "tracking": {"system_metrics": False},
        }
        self.config = PipelineConfig.model_validate(sections)
        self.store = Store(self.config.store_url)

    def __call__(self, body: Callable[[StageContext], object], until: StageName = "register") -> ArtifactRef:
        def stage(_config: PipelineConfig, context: StageContext) -> StageResult:
            body(context)
            (context.output / "numbers.json").write_text("{}")
            return StageResult({})

        return attempt_with(stage, StageSpec(self.stage, KEY, self.config, until=until))

    def saved(self) -> list[str]:
        """Checkpoints of which there is any file."""
        return sorted({key.split("/")[2] for key in self.store.list(f"checkpoints/{KEY}") if "/step-" in key})


def save(context: StageContext, step: int) -> None:
    folder = context.scratch / "state"
    folder.mkdir()
    (folder / "loop.json").write_text(str(step))
    context.checkpoints.save(step, folder)


@pytest.mark.parametrize("saves", [True, False])
def test_superseded_attempt_commits_nothing(tmp_path: Path, saves: bool) -> None:
    attempt = Attempt(tmp_path)

    def overtaken(context: StageContext) -> None:
        claim(attempt.store, KEY)
        if saves:
            save(context, 1)

    with pytest.raises(Superseded):
        attempt(overtaken)
    assert attempt.saved() == []
    assert attempt.store.list("artifacts") == []


def test_artifact_that_exists_by_now_is_reused(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    made = attempt(lambda _context: None)
    assert attempt(lambda _context: pytest.fail("the stage ran again")) == made


@pytest.mark.parametrize(
    ("name", "records", "is_named"), [("ppo", True, True), ("ppo", False, False), ("sample", True, False)]
)
def test_the_tracker_names_the_command_that_shows_the_record_of_ppo(
    tmp_path: Path, name: StageName, records: bool, is_named: bool
) -> None:
    def stage(_config: PipelineConfig, context: StageContext) -> StageResult:
        (context.output / ("record" if records else "other")).mkdir()
        (context.output / "numbers.json").write_text("{}")
        return StageResult({})

    attempt = Attempt(tmp_path / "a home")
    key = f"{records:d}{is_named:d}" * 8  # MLflow's server is that of all tests
    ref = attempt_with(stage, StageSpec(name, key, attempt.config, pipeline_key="1" * 64))
    assert ref.mlflow_run_id is not None
    tags = open_tracking(attempt.config).mlflow.tags(ref.mlflow_run_id)
    assert tags["rlhf.artifact"] == ref.uri
    command = f"rlhf inspect rlhf-seed0-11111111 --home '{tmp_path}/a home'"
    assert tags.get("rlhf.record") == (command if is_named else None)


def test_the_claim_names_what_the_stage_reads(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    data = attempt(lambda _context: None)
    base = str(tmp_path / "store" / "artifacts" / "ppo" / ("1" * 16) / "000001" / "policy")
    config = attempt.config.model_copy(
        update={"model": attempt.config.model.model_copy(update={"path": base})}
    )
    key = "2" * 16
    spec = StageSpec("sft", key, config, {"data": data})
    attempt_with(lambda _config, _context: StageResult({}), spec)
    claim = observe(attempt.store, [key])[key]
    assert claim.inputs == frozenset({f"data/{data.key}", f"ppo/{'1' * 16}"})


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, keep_checkpoints=3)
    kept = []

    def body(context: StageContext) -> None:
        for step in range(1, 8):
            save(context, step)
        kept.extend(attempt.saved())

    attempt(body)
    assert kept == [f"step-0000000{step}" for step in (5, 6, 7)]


def test_a_stage_on_a_cluster_knows_the_later_stages_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    attempt = Attempt(tmp_path)
    found: list[StageName] = []

    def body(context: StageContext) -> None:
        assert isinstance(context.nodes, ClusterNodes)
        found.extend(context.nodes.stages)

    attempt(body, until="reward")
    assert found == ["sft", "reward"]


def _damaged(attempt: Attempt) -> None:
    attempt.store.put_bytes(f"checkpoints/{KEY}/step-00000001/manifest.json", b"")


def _of_other_code(attempt: Attempt) -> None:
    set_versions(attempt.store, KEY, 1, torch="99.0")


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    ("setting", "change", "error"),
    [("allow_fresh_start", _damaged, CorruptArtifact), ("allow_other_code", _of_other_code, ConfigError)],
)
def test_unusable_checkpoint_stops_the_stage_unless_allowed(
    tmp_path: Path,
    setting: str,
    change: Any,
    error: type[RLHFError],
    allowed: bool,
) -> None:
    both: dict[str, Any] = {"allow_fresh_start": not allowed, "allow_other_code": not allowed}
    attempt = Attempt(tmp_path, **(both | {setting: allowed}))

    def body(context: StageContext) -> None:
        save(context, 1)
        change(attempt)
        context.checkpoints.latest()

    if allowed:
        attempt(body)
    else:
        with pytest.raises(error, match=rf"store\.{setting}"):
            attempt(body)
