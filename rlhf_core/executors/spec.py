"""The input of a stage's child process, as a JSON file, and the outcome of a stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.pipeline import LAST_STAGE, StageName
from rlhf_core.storage.artifacts import ArtifactCopy
from rlhf_core.system.files import write_json
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef


def config_from_json(tree: Mapping[str, Any]) -> PipelineConfig:
    """Return the configuration that was written as JSON, validated."""
    # In JSON mode, the strict sections accept a list for a tuple. For Python objects they do not.
    return PipelineConfig.model_validate_json(json.dumps(tree))


@dataclass(frozen=True)
class StageSpec:
    """One attempt at one stage."""

    stage: StageName
    key: str
    """Stage key: where the artifact and the checkpoints go."""
    config: PipelineConfig
    inputs: Mapping[StageName, ArtifactRef] = field(default_factory=dict)
    """The artifacts that the stage reads."""
    parent_run_id: str | None = None
    """MLflow run of the whole pipeline; None when tracking could not be reached."""
    pipeline_key: str = ""
    """Key of the whole pipeline, for lineage."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests of the external inputs of the stage, in `key` or in the key of an input."""
    until: StageName = LAST_STAGE
    """The last stage of the run."""
    base_models: Mapping[str, ArtifactCopy] = field(default_factory=dict)
    """Base models that the hosts of a job fetch from a bucket, by their fields (`model.path`). Empty for a
    stage on the host of the flow, which has them.
    """

    @property
    def home(self) -> Home:
        """Local folder for scratch files and logs."""
        return Home.of(self.config.run.home)

    @property
    def work(self) -> Path:
        """Scratch folders of the attempts."""
        return self.home.work(self.stage, self.key)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict. `from_json` is the inverse."""
        return {
            "stage": self.stage,
            "key": self.key,
            "config": self.config.model_dump(mode="json", by_alias=True),
            "inputs": {name: ref.to_json() for name, ref in self.inputs.items()},
            "parent_run_id": self.parent_run_id,
            "pipeline_key": self.pipeline_key,
            "sources": dict(self.sources),
            "until": self.until,
            "base_models": {name: copy._asdict() for name, copy in self.base_models.items()},
        }

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        write_json(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> StageSpec:
        """Return the spec in `path`, validated like any configuration."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> StageSpec:
        """Return the spec that `to_json` has written, validated like any configuration."""
        config = config_from_json(payload["config"])
        inputs = {name: ArtifactRef(**ref) for name, ref in payload["inputs"].items()}
        return cls(
            payload["stage"],
            payload["key"],
            config,
            inputs,
            payload["parent_run_id"],
            payload["pipeline_key"],
            payload["sources"],
            payload.get("until", LAST_STAGE),  # specs of earlier releases have none
            {name: ArtifactCopy(**copy) for name, copy in payload.get("base_models", {}).items()},
        )


@dataclass(frozen=True)
class StageRecord:
    """The outcome of one stage in one execution of the pipeline."""

    ref: ArtifactRef
    seconds: float
    """Since this execution first came to the stage; failed attempts count."""
    reused: bool
    continued: bool = False
    """The stage continued from a checkpoint of an earlier attempt."""

    @property
    def how(self) -> str:
        """`reused`, `continued` or `ran`."""
        if self.reused:
            return "reused"
        return "continued" if self.continued else "ran"
