"""The base model of a stage on each host that has processes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_core.config import PipelineConfig
from rlhf_core.config.base_models import BaseModelAddress, base_of
from rlhf_core.data.hub import fetch_model
from rlhf_core.data.sources import model_digest
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.storage.artifacts import ArtifactAddress, ArtifactStore, parse_artifact_copy
from rlhf_core.storage.s3 import s3_endpoint
from rlhf_core.storage.store import Store
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
        digest = None if base is None else sources.get(base.digest_name)
        if base is None or digest is None:
            return None
        copy = parse_artifact_copy(base.path)
        made_by, key, store = copy or ("", "", None)
        return cls(stage, digest, None if store is None else ArtifactAddress(store, made_by, key))

    def fetch(self, config: PipelineConfig, store: Store) -> None:
        """Fetch a hub model, or a copy of an artifact, to this host.

        Raises CorruptArtifact for a damaged artifact, and StoreError if its store fails.

        Args:
            config: The whole configuration.
            store: That of the run.
        """
        base = self.address(config)
        if base.is_hub:
            fetch_model(base.path, base.revision)
        elif self.origin is not None:
            artifacts, ref = _find_artifact(self.origin, config, store)
            # The path of the copy contains the digest: without this artifact, there is no such folder.
            if ref is not None:
                artifacts.fetch(ref)

    def copies(self, config: PipelineConfig, store: Store) -> dict[str, int]:
        """Return the bytes of the copy that a host makes (`ArtifactStore.copies`); empty without `origin`.

        Raises StoreError if the store of the artifact fails.

        Args:
            config: The whole configuration.
            store: That of the run.
        """
        if self.origin is None:
            return {}
        artifacts, ref = _find_artifact(self.origin, config, store)
        return {} if ref is None else artifacts.copies([ref])

    def digest_here(self, config: PipelineConfig) -> str:
        """Return the `digest` of the files on this host. Raises ModelError if there is no such folder."""
        base = self.address(config)
        return self.digest if base.is_hub else model_digest(base.path, base.revision)

    def address(self, config: PipelineConfig) -> BaseModelAddress:
        """Return where it is."""
        base = base_of(config, self.stage)
        assert base is not None
        return base


def _find_artifact(
    origin: ArtifactAddress, config: PipelineConfig, store: Store
) -> tuple[ArtifactStore, ArtifactRef | None]:
    home = Home.of(config.run.home)
    if origin.store == store.url:
        artifacts = ArtifactStore(store, home.cache)
    else:
        artifacts = origin.open_store(home, s3_endpoint(config.store.endpoint))
    stage = next((name for name in STAGES if name == origin.stage), None)
    return artifacts, None if stage is None else artifacts.find(stage, origin.key)
