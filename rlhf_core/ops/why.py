"""`rlhf why CONFIG`: what a run would do with each stage, and because of what.

The decision is that of a run: the key of the stage, and whether the store has its artifact or a checkpoint.
The reasons are the differences between what the key is made from and what the key of an earlier artifact was
made from, which its manifest records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import flat, key_content, key_of, leaves, sources_in_key, stage_inputs, stages_made
from rlhf_core.config.load import load_config
from rlhf_core.data.sources import pinned
from rlhf_core.errors import GateFailed, checking
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, STAGES, StageName
from rlhf_core.run.external_inputs import external_digests
from rlhf_core.run.references import resolve
from rlhf_core.run.state import describe_changes
from rlhf_core.stages.gates import check_gate
from rlhf_core.storage.artifacts import Origin, open_artifacts
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import open_store
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef

Verdict = Literal["reused", "continues", "runs", "stops"]
_NAMES = {
    "schema": "the version of the stage",
    "seed": "run.seed",
    "device": "the device",
    "model": "the registered model",
    "tracking": "the tracking server",
}
"""Names of what is no field of a section."""
_ARTIFACT = "the artifact of"


@dataclass(frozen=True)
class Outlook:
    """What a run would do with a stage."""

    stage: StageName
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """The first ones decide."""
    compared: Origin | None = None
    """The artifact whose origin differs so; None if there is none to compare with."""


def forecast(config_path: str, overrides: Sequence[str] = ()) -> list[Outlook]:
    """Return what `rlhf run` would do with each stage of a configuration. Nothing is written or started.

    A stage whose input would run again is expected to run again. It is reused all the same if the input comes
    out with the same bits.

    Args:
        config_path: YAML file.
        overrides: Fields to override, each as `section.field=value`.

    Raises:
        InputError: The configuration is wrong, or an input of it cannot be read.
        StoreError: The store cannot be read.
    """
    with checking(config_path):
        config = pinned(resolve(load_config(config_path, overrides)).config)
        search = _Search(config, external_digests(config))
    return [search.outlook(stage) for stage in stages_made(config, FIRST_STAGE, LAST_STAGE)]


class _Search:
    """Compares the stages of a configuration with a store, in their order."""

    def __init__(self, config: PipelineConfig, sources: Mapping[str, str]) -> None:
        self._config = config
        self._sources = sources
        self._store = open_store(config)
        self._artifacts = open_artifacts(config)
        self._found: dict[StageName, ArtifactRef] = {}
        """The artifacts that are reused."""

    def outlook(self, stage: StageName) -> Outlook:
        """Return what a run would do with `stage`, after the stages that it reads."""
        config, inputs = self._config, stage_inputs(self._config, stage)
        made = [name for name in inputs if name not in self._found]
        digests: dict[str, str] = {name: self._found[name].digest for name in inputs if name in self._found}
        content = key_content(config, stage, digests, sources_in_key(config, stage, self._sources))
        key = None if made else key_of(content)
        if key is not None:
            ref = self._artifacts.find(stage, key)
            if ref is not None:
                self._found[stage] = ref
                return self._reused(stage, ref)
            if (checkpoint := self._checkpoint(stage, key)) is not None:
                return checkpoint
        origins = self._artifacts.origins(stage)
        # Its origin is listed, but `find` did not take it.
        if any(origin.ref.key == key for origin in origins):
            return Outlook(stage, "runs", ("its artifact is damaged",))
        reasons = []
        if made:
            reasons.append(f"{', '.join(made)} {'run' if len(made) > 1 else 'runs'}")
        differences = self._differences(content, origins, without=made)
        # The last run of this name is what a user has changed; without one, the most similar one.
        chosen = max(self._named(differences), key=_created, default=None)
        chosen = chosen or min(differences, key=lambda each: _distance(differences[each]), default=None)
        if chosen is not None:
            compared = chosen if differences[chosen] else None
            return Outlook(stage, "runs", (*reasons, *differences[chosen]), compared)
        if not origins:
            reasons.append("the store has no artifact of this stage")
        elif not reasons:
            reasons.append("its artifacts are of an earlier release, which did not record what decided them")
        return Outlook(stage, "runs", tuple(reasons))

    def _named(self, origins: Iterable[Origin]) -> list[Origin]:
        return [each for each in origins if each.config.get("run", {}).get("name") == self._config.run.name]

    def _reused(self, stage: StageName, ref: ArtifactRef) -> Outlook:
        try:
            check_gate(self._config, stage, ref.metrics)
        except GateFailed as error:
            return Outlook(stage, "stops", (error.message,))
        registers = STAGES[stage].registers
        return Outlook(stage, "reused", ("if MLflow still has the version",) if registers else ())

    def _checkpoint(self, stage: StageName, key: str) -> Outlook | None:
        home = Home.of(self._config.run.home)
        newest = CheckpointStore(self._store, key, home.cache, self._config.store).newest()
        if newest is None:
            return None
        step, other_code = newest
        if not other_code:
            return Outlook(stage, "continues", (f"from step {step}",))
        problem = f"other code made its checkpoint of step {step} ({other_code})"
        return Outlook(stage, "stops", (problem, "go back to that, or set store.allow_other_code=true"))

    def _differences(
        self, content: Mapping[str, Any], origins: Iterable[Origin], without: Sequence[StageName]
    ) -> dict[Origin, list[str]]:
        """Return the differences between `content`, from which the key of a stage follows, and the content of
        each artifact's key. The inputs `without` are not compared.
        """
        found = {}
        for origin in origins:
            if not origin.decided_by:
                continue  # an earlier version made it, which did not store the content
            then, now = self._named_fields(origin.decided_by), self._named_fields(content)
            for name in without:
                then.pop(_artifact_of(name), None)
            found[origin] = describe_changes(then, now)
        return found

    def _named_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a key is made from by names for people, with the files that sources are read from."""
        settings = flat(self._config)
        fields: dict[str, Any] = {}
        for entry, part in content.items():
            if entry == "config":
                for section, values in part.items():
                    fields.update(leaves(section, values))
            elif entry == "inputs":
                fields.update({_artifact_of(name): digest for name, digest in part.items()})
            elif entry == "sources":
                fields.update({_source(name, settings): digest for name, digest in part.items()})
            elif entry != "stage":
                fields[_NAMES[entry]] = part
        return fields


def _created(origin: Origin) -> str:
    return origin.created


def _artifact_of(stage: str) -> str:
    return f"{_ARTIFACT} {stage}"


def _distance(differences: Sequence[str]) -> tuple[int, int]:
    """Return how different an artifact is: first by its inputs, then by everything."""
    return sum(_ARTIFACT in each for each in differences), len(differences)


def _source(name: str, settings: Mapping[str, Any]) -> str:
    """Return the name of an external input, with the last part of the path that `settings` has for it."""
    field = re.sub(r"\[(\d+)\]", r".\1", name)
    paths = [settings.get(f"{field}{part}") for part in ("", ".path", ".file", ".rubric")]
    path = next(filter(None, paths), None)
    return name if path is None else f"{name} ({PurePath(str(path)).name})"
