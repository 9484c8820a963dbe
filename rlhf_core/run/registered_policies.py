"""Registered policies by name: `NAME`, `NAME@champion`, `NAME@candidate`, `NAME@3`.

`rlhf serve` and `rlhf publish` read the files of a policy from its store. Every file is checked against the
manifest of its artifact, and the artifact and the weights against the digests in the tags of the version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import given_tracking_uri
from rlhf_core.errors import CorruptArtifact, InputError, StoreError
from rlhf_core.evaluation.policy_files import CONFIGURED_BY, PolicyFiles, files_made_with, policy_stage
from rlhf_core.pipeline import PolicyStage, StageName
from rlhf_core.storage.artifacts import ArtifactStore, parse_artifact_address
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.system.home import Home
from rlhf_core.tracking.champions import BASE, CHAMPION, WEIGHTS, find_version, usable_version
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, check_exists, open_registry
from rlhf_core.tracking.tracker import open_tracking
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model."""

    name: str
    version: ModelVersion
    artifacts: ArtifactStore
    config: Mapping[str, Any]
    """Configuration of the run that made it."""
    base: RegisteredVersion | None = field(default=None, kw_only=True)
    """The version that its base model is. None if that is none, or cannot be found any more."""

    @property
    def base_reference(self) -> str | None:
        """What the configuration named in place of a base model, with the number of a version."""
        return self.version.tags.get(BASE)

    @property
    def trained_by(self) -> PolicyStage:
        """The stage that trained the policy."""
        return policy_stage(self.version.tags)

    def stage(self, stage: StageName) -> Path | None:
        """Return the verified artifact of a stage that belongs to the version; None if it has none."""
        if f"rlhf.{stage}.key" not in self.version.tags:
            return None
        return _fetch(self.artifacts, stage, self.version)

    def metrics(self, stage: StageName) -> Mapping[str, float]:
        """Return the metrics of a stage that belongs to the version; empty if it has none, or if its artifact
        is gone.
        """
        ref = self.artifacts.find_registered(stage, self.version.tags)
        return {} if ref is None else ref.metrics


@dataclass(frozen=True)
class RegisteredPolicy(RegisteredVersion):
    """A version of a registered model and its verified files."""

    folder: Path
    """Folder of the artifact of `trained_by`."""
    files: PolicyFiles
    """The files that were evaluated."""

    @property
    def weights(self) -> str:
        """Digest of the weights."""
        return self.version.tags[WEIGHTS]


def registry_of(config: PipelineConfig, field: str = "run.home") -> Mlflow:
    """Return the registry of a configuration.

    Raises InputError, which names `field`, if the database of MLflow does not exist.
    """
    mlflow = open_tracking(config).mlflow
    check_exists(mlflow, field, given=given_tracking_uri(config) is not None)
    return mlflow


def open_policy(address: str, home: str, endpoint: str | None = None) -> RegisteredPolicy:
    """Find a registered policy in the registry of `open_registry`; see `load_registered`."""
    return load_registered(open_registry(home), address, home, endpoint)


def find_artifacts(
    mlflow: Mlflow, address: str, home: str, endpoint: str | None = None
) -> tuple[ModelVersion, ArtifactStore]:
    """Return a version of a registered model, and the store with its artifacts.

    Args:
        mlflow: The registry.
        address: `NAME` for the champion, or `NAME@` and an alias or the number of a version.
        home: Folder for copies of artifacts from a bucket.
        endpoint: URL of an S3-compatible server.

    Raises:
        InputError: There is no such version, it was revoked, or this pipeline did not register it.
    """
    name, _, wanted = address.partition("@")
    version = usable_version(mlflow, name, wanted or CHAMPION)
    return version, _store_of(version, name, home, endpoint)


def _store_of(version: ModelVersion, name: str, home: str, endpoint: str | None) -> ArtifactStore:
    source = parse_artifact_address(version.source)
    if source is None or source.stage != policy_stage(version.tags):
        raise InputError(
            f"version {version.version} of {name} was not registered by this pipeline: its source is"
            f" {version.source}; choose another one"
        )
    return source.open_store(Home.of(home), endpoint)


def load_registered(mlflow: Mlflow, address: str, home: str, endpoint: str | None = None) -> RegisteredPolicy:
    """Find a registered policy and verify its files. Arguments as for `find_artifacts`.

    Raises:
        InputError: There is no such version, it was revoked, or its artifacts are not in the store.
        CorruptArtifact: Its files are not those that were registered.
    """
    name = address.partition("@")[0]
    version, artifacts = find_artifacts(mlflow, address, home, endpoint)
    stage = policy_stage(version.tags)
    folder = _fetch(artifacts, stage, version)
    weights = weights_sha256(folder / "policy")
    # The store proves that the files are those of the artifact, the tag that these were registered.
    if weights != version.tags.get(WEIGHTS):
        raise CorruptArtifact(
            f"the weights of version {version.version} of {name} have the sha256 {weights}, but"
            f" {version.tags.get(WEIGHTS)} is registered; choose another version"
        )
    config = artifacts.config(_find(artifacts, CONFIGURED_BY[stage], version))
    files = files_made_with(config, stage, folder, partial(_fetch, artifacts, "sft", version))
    base = _base_version(mlflow, version, home, endpoint, {(name, version.version)})
    return RegisteredPolicy(name, version, artifacts, config, folder, files, base=base)


def _base_version(
    mlflow: Mlflow, version: ModelVersion, home: str, endpoint: str | None, seen: set[tuple[str, str]]
) -> RegisteredVersion | None:
    """Return the version that is the base model of another one, with those before it.

    Args:
        mlflow: The registry.
        version: The other version.
        home: Folder for copies of artifacts from a bucket.
        endpoint: URL of an S3-compatible server.
        seen: Names and numbers of the versions after it. Tags can be edited.
    """
    reference = version.tags.get(BASE, "")
    name, _, number = reference.removeprefix("registry://").partition("/")
    if not reference.startswith("registry://") or (name, number) in seen:
        return None
    try:
        found = find_version(mlflow, name, number)
        artifacts = _store_of(found, name, home, endpoint)
        ref = artifacts.find_registered(CONFIGURED_BY[policy_stage(found.tags)], found.tags)
        if ref is None:
            return None
        config = artifacts.config(ref)
    except (InputError, CorruptArtifact, StoreError) as error:
        log.warning("the base model %s cannot be found any more: %s", reference, error.message)
        return None
    earlier = _base_version(mlflow, found, home, endpoint, {*seen, (name, number)})
    return RegisteredVersion(name, found, artifacts, config, base=earlier)


def _fetch(artifacts: ArtifactStore, stage: StageName, version: ModelVersion) -> Path:
    return artifacts.fetch(_find(artifacts, stage, version))


def _find(artifacts: ArtifactStore, stage: StageName, version: ModelVersion) -> ArtifactRef:
    ref = artifacts.find_registered(stage, version.tags)
    if ref is None:
        raise InputError(
            f"the {stage} artifact of version {version.version} is not in its store any more, or is damaged:"
            f" {artifacts.store.url}; choose another version, or run its configuration again. If the store"
            " moved, make a link at its old place"
        )
    return ref
