"""Artifacts: the immutable outputs of finished stages, `{store}/artifacts/{kind}/{key}/` (layout: `bundles`)."""

from __future__ import annotations

import json
import logging
import math
import shutil
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.errors import CorruptArtifact, InputError, RLHFError
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, Manifest
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.store import Store
from rlhf_core.storage.versions import versions
from rlhf_core.types import ArtifactRef, StageName

log = logging.getLogger(__name__)

_RUNS_CODE = {
    ".py", ".pyc", ".pyd", ".so", ".sh", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt",
}  # fmt: skip
"""Files that are programs or that loading may turn into one."""


class ArtifactStore:
    """Finds, publishes and fetches artifacts. `cache`: local folder for copies of what a remote store holds."""

    def __init__(self, store: Store, cache: Path) -> None:
        self._store = store
        self._cache = cache
        self._verified: dict[tuple[str, str, str], Path] = {}

    def find(self, kind: StageName, key: str) -> ArtifactRef | None:
        """The artifact of a stage key; None if there is none.

        A manifest that cannot be read, or whose files are missing or of another size, is set aside and said loudly:
        the artifact does not exist then and will be made again.
        """
        prefix = _prefix(kind, key)
        try:
            manifest = self._read(kind, key)
            if manifest is None:
                return None
            if wrong := bundles.wrong_sizes(self._store, manifest):
                raise CorruptArtifact(f"The artifact {kind}/{key} is damaged: {wrong}.")
            return self._ref(manifest)
        except CorruptArtifact as error:
            kept = bundles.quarantine(self._store, prefix, error.message)
            log.error("%s It is set aside (%s) and will be made again.", error.message, kept)
            return None

    def publish(
        self,
        kind: StageName,
        key: str,
        folder: Path,
        *,
        parents: Mapping[StageName, ArtifactRef] | Mapping[str, ArtifactRef],
        metrics: Mapping[str, float],
        config: Mapping[str, Any],
        facts: Mapping[str, str] | None = None,
        mlflow_run_id: str | None = None,
        fence: Fence | None = None,
    ) -> ArtifactRef:
        """Make the local `folder` the artifact of `key`; consumes it. If the artifact exists already, that one stays.

        Raises InputError for files that may run code, Superseded if a later attempt holds the key, RLHFError if the
        store fails (then nothing is visible and `folder` is still there).
        """
        files = bundles.hash_folder(folder)
        _refuse_programs(kind, files)
        may_commit = fence.check if fence is not None else lambda: None
        may_commit()
        if (ref := self.find(kind, key)) is None:
            body = {
                "kind": kind,
                "key": key,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "parents": {name: {"key": ref.key, "digest": ref.digest} for name, ref in sorted(parents.items())},
                "metrics": _finite(metrics),
                "facts": dict(facts or {}),
                "config": json.loads(json.dumps(config, default=str, allow_nan=False)),
                "versions": versions(),
                "mlflow_run_id": mlflow_run_id,
            }
            name = f"{fence.attempt:06d}" if fence is not None else uuid.uuid4().hex[:12]
            ref = self._commit(kind, key, folder, files, name, body, may_commit)
            if ref is not None and fence is not None:
                bundles.remove(self._store, _prefix(kind, key), keep=name)
        ref = ref or self._existing(kind, key)
        if ref.digest != bundles.digest_of(files):
            log.warning("The artifact %s/%s exists already with other content; the existing one is kept.", kind, key)
        shutil.rmtree(folder)
        return ref

    def fetch(self, ref: ArtifactRef) -> Path:
        """A local folder with the artifact's files, every one checked against its sha256 (once per process). Read only.

        Raises CorruptArtifact, naming the file; the artifact is then set aside, so that the next run makes it again.
        """
        identity = (ref.kind, ref.key, ref.digest)
        if (known := self._verified.get(identity)) is not None and known.exists():
            return known
        prefix = _prefix(ref.kind, ref.key)
        try:
            manifest = self._read(ref.kind, ref.key)
            if manifest is not None and manifest.digest == ref.digest:
                folder = bundles.fetch(self._store, manifest, self._cache)
                self._verified[identity] = folder
                return folder
        except CorruptArtifact as error:
            kept = bundles.quarantine(self._store, prefix, error.message)
            raise CorruptArtifact(
                f"{error.message} The artifact {ref.kind}/{ref.key} is set aside ({kept}); the same command makes it again."
            ) from error
        found = "is gone" if manifest is None else "is not the one this run started with"
        raise CorruptArtifact(f"The artifact {ref.kind}/{ref.key} {found}; the same command makes it again.")

    def _commit(
        self,
        kind: StageName,
        key: str,
        folder: Path,
        files: tuple[FileEntry, ...],
        name: str,
        body: Mapping[str, Any],
        may_commit: Callable[[], None],
    ) -> ArtifactRef | None:
        manifest = bundles.commit(
            self._store, _prefix(kind, key), folder, files, folder=name, body=body, may_commit=may_commit
        )
        return None if manifest is None else self._ref(manifest)

    def _existing(self, kind: StageName, key: str) -> ArtifactRef:
        manifest = self._read(kind, key)
        if manifest is None:
            raise RLHFError(f"The manifest of {kind}/{key} appeared and vanished again; the same command tries again.")
        return self._ref(manifest)

    def _read(self, kind: str, key: str) -> Manifest | None:
        manifest = bundles.read(self._store, _prefix(kind, key))
        if manifest is not None and (manifest.body.get("kind"), manifest.body.get("key")) != (kind, key):
            raise CorruptArtifact(f"The manifest of {kind}/{key} is that of another artifact.")
        return manifest

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        body = manifest.body
        return ArtifactRef(
            kind=body["kind"],
            key=body["key"],
            digest=manifest.digest,
            uri=self._store.uri(manifest.data),
            metrics=body["metrics"],
            mlflow_run_id=body["mlflow_run_id"],
            facts=body["facts"],
        )


def _prefix(kind: str, key: str) -> str:
    return f"artifacts/{kind}/{key}"


def _refuse_programs(kind: str, files: tuple[FileEntry, ...]) -> None:
    for entry in files:
        if PurePosixPath(entry.path).suffix.lower() in _RUNS_CODE:
            raise InputError(
                f"{kind} left {entry.path}, a kind of file that may run code when loaded; artifacts hold data only: "
                "write models as safetensors and numbers as JSON or Parquet."
            )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        log.warning("Left out of the manifest, because not finite: %s", ", ".join(bad))
    return {name: float(value) for name, value in metrics.items() if name not in bad}
