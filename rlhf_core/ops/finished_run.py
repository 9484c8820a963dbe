"""A finished run, found by its name: its summary, its artifacts and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.pipeline import StageName
from rlhf_core.run.state import read_state
from rlhf_core.storage.artifacts import ArtifactStore, parse_artifact_address
from rlhf_core.system.files import read_json
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef

Kind = Literal["ppo", "evaluation", "match", "sample"]
"""What has sampled recorded responses (column `kind` of the record)."""
STAGE_OF_KIND: Mapping[Kind, StageName] = {
    "ppo": "ppo",
    "evaluation": "evaluate",
    "match": "register",
    "sample": "sample",
}


@dataclass(frozen=True)
class FinishedRun:
    """A run with a `summary.json`."""

    name: str
    file: Path
    """Its `summary.json`."""
    summary: Mapping[str, Any]
    home: Home
    endpoint: str | None
    """URL of an S3-compatible server; None: AWS, or the store is a folder."""

    @property
    def stages(self) -> Mapping[str, Any]:
        """What the summary has of each stage."""
        stages: Mapping[str, Any] = self.summary["stages"]
        return stages

    def artifact(self, stage: StageName) -> tuple[ArtifactStore, ArtifactRef]:
        """Return the artifact of a stage, and its store.

        Raises InputError if the run has no such stage, or if its artifact is not in the store any more.
        """
        if stage not in self.stages:
            raise InputError(f"{self.file} has no stage {stage}; run it first")
        address = str(self.stages[stage].get("artifact"))
        found = parse_artifact_address(address)
        if found is None:
            raise InputError(f"{self.file} has no artifact of the stage {stage}; got {address}")
        places = [found]
        own = self.file.resolve().parents[2] / self.home.store.name  # the file is HOME/runs/NAME/summary.json
        # A bucket, or a folder with another name, is not part of the home, and is not copied with it.
        if "://" not in found.store and Path(found.store).name == own.name:
            # First the store of its home: the address is that of the original, if the home was copied.
            places.insert(0, found._replace(store=str(own)))
        for place in places:
            artifacts = place.open_store(self.home, self.endpoint)
            ref = artifacts.find(stage, found.key)
            if ref is not None:
                return artifacts, ref
        raise InputError(f"{address} is not in its store any more; run the configuration again")

    def data(self) -> Path:
        """Return the local folder of the data artifact. Raises InputError as `artifact`."""
        artifacts, ref = self.artifact("data")
        return artifacts.fetch(ref, weights=False)

    def config(self, stage: StageName) -> PipelineConfig:
        """Return the configuration with which a stage was made.

        Raises InputError as `artifact`, and if an earlier release made it.
        """
        artifacts, ref = self.artifact(stage)
        try:
            # Fields that this release has dropped must not make finished runs of earlier releases unreadable.
            return PipelineConfig.of_any_release(artifacts.config(ref))
        except ValidationError as error:
            raise InputError(f"{ref.uri} was made by an earlier release; run the pipeline again") from error

    def recorded(self, stage: StageName) -> Path:
        """Return the local folder of the artifact of a stage, with its record (`rlhf_core.record.reader`)."""
        artifacts, ref = self.artifact(stage)
        return artifacts.fetch(ref, weights=False, record=True)


def find_run(run: str, home: str, endpoint: str | None = None) -> FinishedRun:
    """Find a finished run.

    Args:
        run: Name of the run, or the path of its folder or of its `summary.json`.
        home: Folder of the runs.
        endpoint: URL of an S3-compatible server.

    Raises:
        InputError: There is no such run, or its summary has no stages.
    """
    place = Home.of(home)
    file = _summary(run, place)
    summary = read_json(file)
    if summary is None or not isinstance(summary.get("stages"), dict):
        raise InputError(f"{file} is not the summary of a run; name another one")
    return FinishedRun(str(summary.get("run", file.parent.name)), file, summary, place, endpoint)


def newest_run(home: str) -> str:
    """Return the path of the summary of the run that finished last. Raises InputError if there is none."""
    place = Home.of(home)
    files = sorted(place.summaries(), key=_finished_at)
    if not files:
        raise InputError(
            f"there is no finished run in {place.runs}; name one, or the path of its summary.json"
        )
    return str(files[-1])


def _summary(run: str, home: Home) -> Path:
    for path in (Path(run), Path(run) / "summary.json", home.run(run) / "summary.json"):
        if path.is_file():
            return path
    names = sorted(file.parent.name for file in home.summaries())
    raise InputError(
        f"there is no finished run {run} in {home.runs}; it has {', '.join(names[-10:]) or 'none'}; name one,"
        " or the path of its summary.json"
    )


def _finished_at(file: Path) -> float:
    # `run.json`, because a copy of the home has other times of its files.
    state = read_state(file.with_name("run.json"))
    return file.stat().st_mtime if state is None else float(state["updated"])
