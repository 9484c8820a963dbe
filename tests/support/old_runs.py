"""A store with the artifacts of several runs, and a registry with the versions that they made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.pipeline import StageName
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.inventory import ArtifactName
from rlhf_core.storage.store import Store
from rlhf_core.tracking.champion_log import Move
from rlhf_core.tracking.champions import WEIGHTS
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.support.champions import make_champion
from tests.support.claims import claim

MODEL = "policy"
INPUTS: Mapping[StageName, Sequence[StageName]] = {
    "data": (),
    "sft": ("data",),
    "reward": ("data", "sft"),
    "ppo": ("data", "sft", "reward"),
    "evaluate": ("data", "sft", "reward", "ppo"),
    "register": ("data", "sft", "reward", "ppo", "evaluate"),
}
WITH_WEIGHTS: tuple[StageName, ...] = ("sft", "reward", "ppo")


def key_of(run: str, stage: str) -> str:
    """Return a stage key."""
    return hashlib.sha256(f"{run} {stage}".encode()).hexdigest()[:16]


class OldRuns:
    """Runs whose artifacts are in a store.

    Args:
        store: The store.
        work: Folder for files that are not in the store.
        mlflow: The registry; None if nothing is registered.
    """

    def __init__(self, store: Store, work: Path, mlflow: Mlflow | None = None) -> None:
        self.store = store
        self.artifacts = ArtifactStore(store, work / "cache")
        self._work = work
        self._mlflow = mlflow

    def publish(
        self,
        run: str,
        stage: StageName,
        parents: Mapping[StageName, ArtifactRef] | None = None,
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> ArtifactRef:
        """Publish one artifact, as an attempt at its key does."""
        folder = self._work / "out"
        folder.mkdir(parents=True)
        self.fill(run, stage, folder)
        key = key_of(run, stage)
        provenance = Provenance(parents=parents or {}, config=config or {}, attributes=attributes or {})
        return self.artifacts.publish(stage, key, folder, provenance, claim(self.store, key))

    def fill(self, run: str, stage: StageName, folder: Path) -> None:
        """Write the files of an artifact."""
        (folder / "notes.json").write_text(f'"{run} {stage}"')
        if stage in WITH_WEIGHTS:
            (folder / "policy").mkdir()
            for name in ("a", "b"):
                (folder / "policy" / f"{name}.safetensors").write_bytes(f"{run} {stage}".encode() * 100)

    def run(
        self, name: str, *, base: str | None = None, shared: Mapping[StageName, ArtifactRef] | None = None
    ) -> dict[StageName, ArtifactRef]:
        """Publish the artifacts of a run.

        Args:
            name: Decides the keys and contents.
            base: `model.path` of its configuration.
            shared: Artifacts of other runs that it reuses.
        """
        made: dict[StageName, ArtifactRef] = dict(shared or {})
        for stage, inputs in INPUTS.items():
            if stage not in made:
                attributes = {"model": MODEL, "weights_sha256": name} if stage == "register" else {}
                parents = {each: made[each] for each in inputs}
                made[stage] = self.publish(name, stage, parents, {"model": {"path": base}}, attributes)
        return made

    def register(self, name: str, made: Mapping[StageName, ArtifactRef], model: str = MODEL) -> str:
        """Make a version of a run, as the stage `register` does, and return its number."""
        assert self._mlflow is not None
        self._mlflow.ensure_model(model, "")
        tags = {WEIGHTS: name}
        for stage, ref in made.items():
            if stage != "register":
                tags |= {f"rlhf.{stage}.key": ref.key, f"rlhf.{stage}.digest": ref.digest}
        source = f"{made['ppo'].uri}/policy"
        version = self._mlflow.create_version(model, source=source, run_id=None, tags=tags, description="")
        self._mlflow.set_alias(model, "candidate", version.version)
        return version.version

    def crown(self, version: str, model: str = MODEL) -> None:
        """Make a version champion."""
        assert self._mlflow is not None
        champion = self._mlflow.by_alias(model, "champion")
        previous = champion.version if champion else None
        make_champion(self._mlflow, model, Move(1e9 + int(version), "crowned", version, previous, "it won"))

    def present(self) -> set[ArtifactName]:
        """Return the names of the artifacts that can be fetched. Raises CorruptArtifact for a damaged one."""
        found = set()
        for path in self.store.list("artifacts"):
            _, stage, key, *rest = path.split("/")
            if rest == ["manifest.json"]:
                name = next(each for each in INPUTS if each == stage)
                ref = self.artifacts.find(name, key)
                assert ref is not None, f"{path} is damaged"
                self.artifacts.fetch(ref)
                found.add(ArtifactName(stage, key))
        return found


def names(made: Mapping[StageName, ArtifactRef], *stages: StageName) -> set[ArtifactName]:
    """Return the names of the artifacts of a run, or of some of its stages."""
    return {ArtifactName(stage, ref.key) for stage, ref in made.items() if not stages or stage in stages}
