"""References to what earlier runs made, in place of paths: resolved before stage keys are computed.

    models          champion:NAME                           the champion of a registered model
                    registry://NAME/VERSION                 another version, by its number or alias
                    artifact://STAGE/KEY/FOLDER             a model folder in an artifact of the store
    sources         registry://NAME/VERSION/STAGE/FILE      a file of the run that made a version
                    artifact://STAGE/KEY/FILE               a file in an artifact of the store

Models are `model.path` and `reward.judge.path`.

A reference becomes the local path of a verified copy, or for a source in a bucket its s3:// address. A job on
other hosts fetches a model in a bucket itself (`rlhf_core.cluster.base_model`). Stage keys contain digests of
contents and no paths, so they change with the champion, and are the same otherwise.

`champion:NAME` can be another version when an interrupted run is started again. Its stages would then have
other keys, and nothing would be reused. A file below `run.home` therefore keeps the numbers of the versions
until the run has finished. Its name is a digest of the configuration before references were resolved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import BASE_STAGES, MODEL_PATH, base_of, is_reference, with_base_paths
from rlhf_core.config.data import SETS
from rlhf_core.config.keys import pipeline_key, registry_address
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, CorruptArtifact, GateFailed, InputError, NonFiniteError, StageHeld
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.storage.artifacts import ArtifactStore, open_artifacts
from rlhf_core.system.files import read_json, write_json
from rlhf_core.system.home import Home
from rlhf_core.tracking.champions import BASE, CHAMPION, REFERENCE, WEIGHTS
from rlhf_core.types import ArtifactRef

if TYPE_CHECKING:
    from rlhf_core.run.registered_policies import RegisteredPolicy
    from rlhf_core.tracking.mlflow_client import ModelVersion

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_KEY = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[\w.-]{1,100}")
_FORMS_OF_MODELS = "champion:NAME, registry://NAME/VERSION or artifact://STAGE/KEY/FOLDER"
_FORMS_OF_SOURCES = "artifact://STAGE/KEY/FILE or registry://NAME/VERSION/STAGE/FILE"

Command = Literal["run", "rounds"]
"""What is continued: a run of the pipeline, or several rounds of it."""


@dataclass(frozen=True)
class Reference:
    """A reference and what it stands for now."""

    field: str
    """Field of the configuration, such as `data.sft.1.path`."""
    text: str
    """The reference as written in the configuration."""
    path: str
    """Local path or s3:// address."""
    origin: str
    """What it stands for: `demo-policy version 3`, `artifact sample/0123456789abcdef`."""
    pinned: str
    """The reference with the number of the version, which no later champion changes."""


@dataclass(frozen=True)
class Resolved:
    """A configuration without references."""

    config: PipelineConfig
    references: tuple[Reference, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """Overrides of the original configuration that have the same effect."""
        return [f"{reference.field}={json.dumps(reference.path)}" for reference in self.references]

    @property
    def pins(self) -> list[str]:
        """Overrides of the original configuration that name versions by their numbers."""
        moved = [each for each in self.references if each.pinned != each.text]
        return [f"{each.field}={json.dumps(each.pinned)}" for each in moved]

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the MLflow run: each reference and what it stood for, and that of the base model with the
        number of its version.
        """
        tags = {}
        for reference in self.references:
            tags[f"{REFERENCE}{reference.field}"] = f"{reference.text} = {reference.origin}"
            if reference.field == MODEL_PATH:
                tags[BASE] = reference.pinned
        return tags


@dataclass(frozen=True)
class KeptVersions:
    """References with the numbers of their versions, and the file that keeps them."""

    file: Path = Path()
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """References by field; only those that can stand for another version later."""

    @contextmanager
    def until_finished(self) -> Iterator[None]:
        """Keep the versions while the body runs, and after it if it fails.

        They are not kept after an error that the same configuration would end with again.
        """
        if not self.pinned:
            yield
            return
        # Before the body, so that a kill leaves it for the next start.
        write_json(self.file, dict(self.pinned))
        try:
            yield
        except StageHeld:
            raise  # the process that makes the stage may belong to the same run
        except (GateFailed, NonFiniteError, InputError):
            self.file.unlink(missing_ok=True)
            raise
        self.file.unlink(missing_ok=True)


def references_of(config: PipelineConfig) -> dict[str, str]:
    """Return the references of a configuration by their fields."""
    return {field: text for field, text in _addresses(config) if is_reference(text)}


def resolve(config: PipelineConfig, *, kept: Mapping[str, str] | None = None) -> Resolved:
    """Return `config` with paths in place of references.

    Args:
        config: The configuration.
        kept: References by their fields that are resolved in place of those of the configuration.

    Raises:
        ConfigError: Every reference that is malformed, leads nowhere, or leads to damaged files.
        InfrastructureError: MLflow does not answer.
        StoreUnavailable: The store does not answer.
    """
    texts = references_of(config)
    if not texts:
        return Resolved(config)
    references = _find_each(texts, kept or {}, _Resolver(config).reference)
    # A kept reference has the number of the version. Messages and tags show what the configuration says.
    references = {field: replace(found, text=texts[field]) for field, found in references.items()}
    for field, reference in references.items():
        log.info("%s: %s is %s", field, reference.text, reference.origin)
    paths = {field: reference.path for field, reference in references.items()}
    return Resolved(_with_paths(config, paths), tuple(references.values()))


def reference_marks(config: PipelineConfig, kept: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a mark of what each reference stands for, by its field, without reading the files.

    A mark has the version, and the digest of its weights or of the artifact. Arguments and errors as for
    `resolve`.
    """
    return _find_each(references_of(config), kept or {}, _Resolver(config).mark)


def resolve_kept(config: PipelineConfig, command: Command = "run") -> tuple[Resolved, KeptVersions]:
    """Resolve the references of a configuration, as in its unfinished run if there is one.

    Raises the errors of `resolve`. A kept version that cannot be used any more is a warning.
    """
    if not references_of(config):
        return resolve(config), KeptVersions()
    kept = kept_versions(config, command)
    resolved = resolve(config, kept=kept)
    pinned = {each.field: each.pinned for each in resolved.references if each.pinned != each.text}
    if pinned and kept == pinned:
        log.info(
            "the references are those of an unfinished run; remove %s to resolve them again",
            _file(config, command),
        )
    return resolved, KeptVersions(_file(config, command), pinned)


def kept_versions(config: PipelineConfig, command: Command = "run") -> dict[str, str]:
    """Return the references of an unfinished run by their fields; empty if there is none."""
    if not references_of(config):
        return {}
    content = read_json(_file(config, command)) or {}
    return {name: text for name, text in content.items() if isinstance(text, str)}


def _file(config: PipelineConfig, command: Command) -> Path:
    # Without digests of sources: the references are not resolved yet.
    identity = [command, pipeline_key(config, {}), references_of(config), registry_address(config)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Home.of(config.run.home).kept_versions(digest[:16])


def _find_each(
    texts: Mapping[str, str], kept: Mapping[str, str], find: Callable[[str, str], _T]
) -> dict[str, _T]:
    """Return what `find(field, reference)` returns for each field. Raises ConfigError with all problems."""
    found: dict[str, _T] = {}
    problems = []
    for field, text in texts.items():
        try:
            if field in kept:
                try:
                    found[field] = find(field, kept[field])
                    continue
                # Not the errors of a store or MLflow that does not answer: it can answer
                # later, and the run must not go on with another version meanwhile.
                except (InputError, CorruptArtifact) as error:
                    log.warning("%s: %s cannot be used any more: %s", field, kept[field], error.message)
            found[field] = find(field, text)
        except InputError as error:
            problems.append(f"{field}: {shown(text, limit=200)}: {error.message}")
        except CorruptArtifact as error:
            problems.append(
                f"{field}: {shown(text, limit=200)}: its files are damaged ({error.message}); run the"
                " configuration that made it again, or choose another one"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _addresses(config: PipelineConfig) -> Iterator[tuple[str, str]]:
    """Yield the address of each model and source with its field."""
    for stage in BASE_STAGES:
        if (base := base_of(config, stage)) is not None:
            yield base.field, base.path
    for name, index, source in config.data.sources():
        yield f"data.{name}.{index}.path", source.path
    for index, item in enumerate(config.evaluate.regression):
        yield f"evaluate.regression.{index}.path", item.path


def _with_paths(config: PipelineConfig, paths: dict[str, str]) -> PipelineConfig:
    def replaced(field: str, sources: tuple[Any, ...]) -> tuple[Any, ...]:
        found = []
        for index, source in enumerate(sources):
            path = paths.get(f"{field}.{index}.path", source.path)
            found.append(source.model_copy(update={"path": path}))
        return tuple(found)

    sets: dict[str, Any] = {name: replaced(f"data.{name}", getattr(config.data, name)) for name in SETS}
    regression = replaced("evaluate.regression", config.evaluate.regression)
    return with_base_paths(config, paths).model_copy(
        update={
            "data": config.data.model_copy(update=sets),
            "evaluate": config.evaluate.model_copy(update={"regression": regression}),
        }
    )


class _Resolver:
    """Resolves the references of one configuration. InputErrors do not name the field."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        bases = [base_of(config, stage) for stage in BASE_STAGES]
        self._bases = {base.field: base for base in bases if base is not None}

    def reference(self, field: str, text: str) -> Reference:
        """Return what the reference of a field stands for."""
        if field in self._bases:
            return self._model(field, text)
        return self._source(field, text)

    def mark(self, field: str, text: str) -> str:
        """Return the mark of a reference, see `reference_marks`."""
        if text.startswith("artifact://"):
            forms = _FORMS_OF_MODELS if field in self._bases else _FORMS_OF_SOURCES
            ref, path = self._artifact(open_artifacts(self._config), text, forms)
            return f"{ref.kind}/{ref.key} {ref.digest} {path}"
        if field in self._bases:
            name, wanted = _policy(text)
            version, _ = self._find_artifacts(name, wanted)
            return f"{name} {version.version} {version.tags.get(WEIGHTS)}"
        name, version, _, ref, path = self._file_of_version(text)
        return f"{name} {version.version} {ref.digest} {path}"

    def _model(self, field: str, text: str) -> Reference:
        """Return the model folder that `text` refers to."""
        base = self._bases[field]
        if base.revision is not None:
            raise InputError(
                f"{base.revision_field} is a commit of a hub model; leave it out with a reference"
            )
        if text.startswith("artifact://"):
            store = open_artifacts(self._config)
            ref, folder = self._artifact(store, text, _FORMS_OF_MODELS)
            path = store.address(ref, folder, local=True)
            origin, pinned = f"artifact {ref.kind}/{ref.key}", text
        else:
            name, version = _policy(text)
            policy = self._load_policy(name, version)
            if policy.files.adapter is not None:
                raise InputError(
                    f"version {policy.version.version} of {name} is an adapter on its SFT model, and merged"
                    " weights would be another policy than the one that was evaluated; train it in float32,"
                    " or start from its base model"
                )
            path = str(policy.files.model)
            origin = f"{name} version {policy.version.version}"
            pinned = f"registry://{name}/{policy.version.version}"
        return Reference(field, text, path, origin, pinned)

    def _source(self, field: str, text: str) -> Reference:
        """Return the data file that `text` refers to."""
        if text.startswith("artifact://"):
            store = open_artifacts(self._config)
            ref, file = self._artifact(store, text, _FORMS_OF_SOURCES)
            return Reference(field, text, store.address(ref, file), f"artifact {ref.kind}/{ref.key}", text)
        name, version, store, ref, file = self._file_of_version(text)
        origin = f"{name} version {version.version}, artifact {ref.kind}/{ref.key}"
        pinned = f"registry://{name}/{version.version}/{ref.kind}/{file}"
        return Reference(field, text, store.address(ref, file), origin, pinned)

    def _file_of_version(self, text: str) -> tuple[str, ModelVersion, ArtifactStore, ArtifactRef, str]:
        """Return name, version, store, artifact and file of `registry://NAME/VERSION/STAGE/FILE`."""
        parts = text.removeprefix("registry://").split("/", 3)
        # Not `registry://`: `champion:NAME`, which is a reference to a model.
        if not text.startswith("registry://") or len(parts) < 4:
            raise InputError(f"a source must be {_FORMS_OF_SOURCES}; correct it")
        name, wanted, stage, file = parts
        _check_parts(name, wanted)
        stage_name = _stage(stage)
        _check_file(file)
        version, store = self._find_artifacts(name, wanted)
        found = store.find_registered(stage_name, version.tags)
        if found is None:
            raise InputError(
                f"version {version.version} of {name} has no artifact of stage {stage} in its store; choose"
                " another stage or version"
            )
        return name, version, store, found, file

    def _load_policy(self, name: str, version: str) -> RegisteredPolicy:
        from rlhf_core.run.registered_policies import (  # they import the evaluation
            load_registered,
            registry_of,
        )

        with _advice(version):
            mlflow, store = registry_of(self._config), self._config.store
            return load_registered(mlflow, f"{name}@{version}", self._config.run.home, store.endpoint)

    def _find_artifacts(self, name: str, version: str) -> tuple[ModelVersion, ArtifactStore]:
        from rlhf_core.run.registered_policies import find_artifacts, registry_of

        with _advice(version):
            mlflow, store = registry_of(self._config), self._config.store
            return find_artifacts(mlflow, f"{name}@{version}", self._config.run.home, store.endpoint)

    def _artifact(self, store: ArtifactStore, text: str, forms: str) -> tuple[ArtifactRef, str]:
        """Return the artifact of `artifact://STAGE/KEY/FILE`, and FILE."""
        parts = text.removeprefix("artifact://").split("/", 2)
        if len(parts) < 3:
            raise InputError(f"must be {forms}; correct it")
        stage, key, file = _stage(parts[0]), parts[1], parts[2]
        if _KEY.fullmatch(key) is None:
            raise InputError(
                f"the key must be 16 hex digits, as in `stages.{stage}.key` of summary.json; got {shown(key)}"
            )
        _check_file(file)
        ref = store.find(stage, key)
        if ref is None:
            raise InputError(
                f"{self._config.store_url} has no artifact {stage}/{key}; run its configuration again, or"
                " correct store.url"
            )
        return ref, file


@contextmanager
def _advice(version: str) -> Iterator[None]:
    """Add the command that makes a champion to an error about one."""
    try:
        yield
    except InputError as error:
        if version != CHAMPION:
            raise
        raise InputError(f"{error.message} (`rlhf promote` makes a version champion)") from error


def _policy(text: str) -> tuple[str, str]:
    """Return name and version of `champion:NAME` or `registry://NAME/VERSION`."""
    if text.startswith("champion:"):
        name, version = text.removeprefix("champion:"), CHAMPION
    else:
        name, _, version = text.removeprefix("registry://").partition("/")
    if "/" in version or not name or not version:
        raise InputError(f"a model must be {_FORMS_OF_MODELS}; correct it")
    _check_parts(name, version)
    return name, version


def _check_parts(name: str, version: str) -> None:
    for part in (name, version):
        if _NAME.fullmatch(part) is None:
            raise InputError(
                "names and versions must have 1 to 100 letters, digits, `.`, `_` and `-`; got"
                f" {shown(part)}; correct it"
            )


def _stage(name: str) -> StageName:
    if name not in STAGES:
        raise InputError(f"the stage must be one of {', '.join(STAGES)}; got {shown(name)}; correct it")
    return name


def _check_file(path: str) -> None:
    # The path is joined to the folder of the artifact, which `..` would leave.
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise InputError(
            f"the file must be a path inside the artifact without empty parts, `.` and `..`; got"
            f" {shown(path)}; correct it"
        )
