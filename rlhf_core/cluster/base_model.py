"""The base model of a stage on each host that has processes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import BASE_STAGES, BaseModelAddress, base_of, with_base_paths
from rlhf_core.config.redact import shown
from rlhf_core.data.hub import fetch_model
from rlhf_core.data.sources import model_digest
from rlhf_core.errors import DataError
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.storage.artifacts import ArtifactAddress, ArtifactCopy, ArtifactStore, parse_artifact_copy
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef


@dataclass(frozen=True)
class BaseModel:
    """A base model as the driver knows it."""

    stage: StageName
    """The stage that starts from it."""
    digest: str
    """Digest of its files, or id and commit of a hub model, as in the key of the stage."""
    origin: ArtifactAddress | None = None
    """The artifact in a bucket that its folder is a copy of; None for other folders."""

    @classmethod
    def of(cls, config: PipelineConfig, stage: StageName, sources: Mapping[str, str]) -> BaseModel | None:
        """Return the base model of a stage; None if it has none.

        Args:
            config: The whole configuration.
            stage: The stage.
            sources: Digests of the external inputs of the stage.
        """
        base = base_of(config, stage)
        if base is None or base.digest_name not in sources:
            return None
        copy = parse_artifact_copy(base.path)
        return cls(stage, sources[base.digest_name], None if copy is None else copy.address)

    def fetch(self, config: PipelineConfig, artifacts: ArtifactStore) -> None:
        """Fetch a hub model, or a copy of an artifact, to this host.

        Raises CorruptArtifact for a damaged artifact, and StoreError if its store fails.

        Args:
            config: The whole configuration.
            artifacts: Those of the store of the run.
        """
        base = self.address(config)
        if base.is_hub:
            fetch_model(base.path, base.revision)
        elif self.origin is not None:
            theirs, ref = _find_artifact(self.origin, config, artifacts)
            # The path of the copy contains the digest: without this artifact, there is no such folder.
            if ref is not None:
                theirs.fetch(ref)

    def digest_here(self, config: PipelineConfig) -> str:
        """Return the `digest` of the files on this host. Raises ModelError if there is no such folder."""
        base = self.address(config)
        return self.digest if base.is_hub else model_digest(base.path, base.revision, config.run.home)

    def address(self, config: PipelineConfig) -> BaseModelAddress:
        """Return where it is."""
        base = base_of(config, self.stage)
        assert base is not None
        return base


def copied_base_models(config: PipelineConfig) -> dict[str, ArtifactCopy]:
    """Return the base models that are copies of artifacts in a bucket on this host, by their fields."""
    copies = {}
    for stage in BASE_STAGES:
        base = base_of(config, stage)
        if base is None:
            continue
        copy = parse_artifact_copy(base.path)
        if copy is not None and copy.store is not None:
            copies[base.field] = copy
    return copies


def with_own_copies(
    config: PipelineConfig,
    copies: Mapping[str, ArtifactCopy],
    artifacts: ArtifactStore,
    whole: Collection[str],
) -> PipelineConfig:
    """Fetch base models to this host, and return `config` with their folders here.

    Raises DataError for an artifact that is gone or was made again, CorruptArtifact for a damaged one, and
    StoreError if its store fails.

    Args:
        config: The whole configuration, with folders on the host of the flow.
        copies: What these folders are copies of, by the fields of the base models.
        artifacts: Those of the store of the run.
        whole: Fields of the models whose weights are needed here. Of the others, see `ArtifactStore.fetch`.
    """
    paths = {}
    for field, copy in copies.items():
        address = copy.address
        assert address is not None
        theirs, ref = _find_artifact(address, config, artifacts)
        # The name of a copy has only the first digits (`Manifest.copy_name`).
        if ref is None or not ref.digest.startswith(copy.digest):
            raise DataError(
                f"{field}: the artifact {copy.stage}/{copy.key} in {shown(address.store, limit=200)} is gone,"
                " or another one than when the run began; start the run again"
            )
        paths[field] = str(theirs.fetch(ref, weights=field in whole) / copy.folder)
    return with_base_paths(config, paths)


def _find_artifact(
    origin: ArtifactAddress, config: PipelineConfig, artifacts: ArtifactStore
) -> tuple[ArtifactStore, ArtifactRef | None]:
    if origin.store != artifacts.store.url:
        artifacts = origin.open_store(Home.of(config.run.home), s3_endpoint(config.store.endpoint))
    # A loop, because the stage in an address is any text: one that is no stage has no artifact.
    for stage in STAGES:
        if stage == origin.stage:
            return artifacts, artifacts.find(stage, origin.key)
    return artifacts, None
