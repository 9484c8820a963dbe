"""Artifacts: the immutable outputs of finished stages, `{store}/artifacts/{kind}/{key}/` (layout: `bundles`)."""

from __future__ import annotations

import json
import logging
import math
import shutil
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.errors import CorruptArtifact, InputError, StoreError
from rlhf_core.pipeline import StageName
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, Manifest
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store
from rlhf_core.storage.versions import versions
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

_RUNS_CODE = {
    ".py", ".pyc", ".pyd", ".so", ".sh", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt",
}  # fmt: skip
"""Suffixes of files that are programs or that loading may turn into one: neither stored nor read."""


class ArtifactStore:
    """Finds, publishes and fetches artifacts. `cache`: local folder for copies of what a remote store holds.
    `outbox`: where an artifact waits until a remote store has taken it.
    """

    def __init__(self, store: Store, cache: Path, outbox: Outbox | None = None) -> None:
        self._store = store
        self._cache = cache
        self._outbox = outbox
        self._verified: dict[tuple[str, str, str], tuple[Path, _Stamp]] = {}

    def find(self, kind: StageName, key: str) -> ArtifactRef | None:
        """The artifact of a stage key; None if there is none.

        A manifest that cannot be read, or whose files are missing or of another size, is set aside and said
        loudly: the artifact does not exist then and will be made again.
        """
        prefix = _prefix(kind, key)
        manifest = None
        try:
            manifest = self._read(kind, key)
            if manifest is None:
                if self._store.list(prefix):
                    log.warning(
                        "%s has files but no manifest: nothing of it is used.", self._store.uri(prefix)
                    )
                return None
            if wrong := bundles.wrong_files(self._store, manifest):
                raise CorruptArtifact(f"The artifact {kind}/{key} is damaged: {wrong}.")
            return self._ref(manifest)
        except CorruptArtifact as error:
            kept = bundles.quarantine(self._store, prefix, error.message, manifest)
            log.error("%s It is set aside (%s) and will be made again.", error.message, kept)
            return None

    def set_aside(self, ref: ArtifactRef, reason: str) -> None:
        """Have the artifact made again: what it says is not true any more. Its files stay."""
        kept = bundles.quarantine(self._store, _prefix(ref.kind, ref.key), reason)
        log.warning("%s The artifact is set aside (%s) and will be made again.", reason, kept)

    def publish(
        self,
        kind: StageName,
        key: str,
        folder: Path,
        *,
        parents: Mapping[StageName, ArtifactRef] | Mapping[str, ArtifactRef],
        metrics: Mapping[str, float],
        config: Mapping[str, Any],
        attributes: Mapping[str, str] | None = None,
        mlflow_run_id: str | None = None,
        fence: Fence | None = None,
    ) -> ArtifactRef:
        """Make the local `folder` the artifact of `key`; consumes it. If the artifact exists already, that
        one stays.

        Raises InputError for files that may run code, Superseded if a later attempt holds the key, StoreError
        if the store fails: nothing is visible then, and the artifact waits in the outbox if there is one.
        """
        files = bundles.hash_folder(folder)
        if program := _program(files):
            raise InputError(
                f"{kind} left {program}, a kind of file that may run code when loaded; artifacts hold data"
                " only: write models as safetensors and numbers as JSON or Parquet."
            )
        body = {
            "kind": kind,
            "key": key,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parents": {
                name: {"key": ref.key, "digest": ref.digest} for name, ref in sorted(parents.items())
            },
            "metrics": _finite(metrics),
            "facts": dict(attributes or {}),
            "config": json.loads(json.dumps(config, default=str, allow_nan=False)),
            "versions": versions(),
            "mlflow_run_id": mlflow_run_id,
        }
        name = f"{fence.attempt:06d}" if fence is not None else uuid.uuid4().hex[:12]
        prefix = _prefix(kind, key)
        if self._outbox is not None:
            # First of all things: whatever the store says from here on, the artifact is safe.
            self._outbox.add(prefix, folder, files, folder=name, body=body)
            ref = self._sent(kind, key, self._outbox.deliver(prefix, lambda: _check(fence)), fence)
        else:
            _check(fence)
            manifest = bundles.commit(
                self._store, prefix, folder, files, folder=name, body=body, may_commit=lambda: _check(fence)
            )
            ref = self._sent(kind, key, manifest, fence)
        if ref.digest != bundles.digest_of(files):
            log.warning(
                "The artifact %s/%s exists already with other content; the existing one is kept.", kind, key
            )
        shutil.rmtree(folder)
        return ref

    def fetch(self, ref: ArtifactRef) -> Path:
        """Return a read-only local folder with the artifact's files.

        Every file is checked against its sha256. The check is repeated only if a file has changed. Raises
        CorruptArtifact with the name of the file. The artifact is then moved aside, so that the next run
        creates it again.
        """
        identity = (ref.kind, ref.key, ref.digest)
        if (known := self._verified.get(identity)) is not None and known[1] == _stamp(known[0]):
            return known[0]
        prefix = _prefix(ref.kind, ref.key)
        manifest = None
        try:
            manifest = self._read(ref.kind, ref.key)
            if manifest is not None and manifest.digest == ref.digest:
                folder = bundles.fetch(self._store, manifest, self._cache)
                self._verified[identity] = folder, _stamp(folder)
                return folder
        except CorruptArtifact as error:
            kept = bundles.quarantine(self._store, prefix, error.message, manifest)
            raise CorruptArtifact(
                f"{error.message} The artifact {ref.kind}/{ref.key} is set aside ({kept}); the same command"
                " makes it again."
            ) from error
        found = "is gone" if manifest is None else "is not the one this run started with"
        raise CorruptArtifact(f"The artifact {ref.kind}/{ref.key} {found}; the same command makes it again.")

    def config(self, ref: ArtifactRef) -> Mapping[str, Any]:
        """The whole configuration of the run that made it. Raises CorruptArtifact if it is gone."""
        manifest = self._read(ref.kind, ref.key)
        if manifest is None:
            raise CorruptArtifact(
                f"The artifact {ref.kind}/{ref.key} is gone; the same command makes it again."
            )
        return dict(manifest.body["config"])

    def deliver(self, kind: StageName, key: str, fence: Fence) -> ArtifactRef | None:
        """The artifact of `key` if an earlier attempt finished it and could not upload it: it is uploaded
        now.
        """
        prefix = _prefix(kind, key)
        if self._outbox is None or not self._outbox.waiting(prefix):
            return None
        log.info("uploading the artifact %s/%s, which an earlier attempt made", kind, key)
        manifest = self._outbox.deliver(prefix, fence.check)
        return self.find(kind, key) if manifest is None else self._sent(kind, key, manifest, fence)

    def _sent(self, kind: StageName, key: str, manifest: Manifest | None, fence: Fence | None) -> ArtifactRef:
        """The reference of what was committed, or (None) of what was there already. What dead attempts left
        beside it goes.
        """
        if manifest is None:
            return self._existing(kind, key)
        if fence is not None:
            try:
                bundles.remove(self._store, _prefix(kind, key), keep=manifest.folder)
            except StoreError as error:
                log.warning("Leftovers beside the artifact %s/%s stay: %s", kind, key, error.message)
        return self._ref(manifest)

    def _existing(self, kind: StageName, key: str) -> ArtifactRef:
        manifest = self._read(kind, key)
        if manifest is None:
            raise StoreError(
                f"The manifest of {kind}/{key} appeared and vanished again; the same command tries again."
            )
        return self._ref(manifest)

    def _read(self, kind: str, key: str) -> Manifest | None:
        manifest = bundles.read(self._store, _prefix(kind, key))
        if manifest is not None and (manifest.body.get("kind"), manifest.body.get("key")) != (kind, key):
            raise CorruptArtifact(f"The manifest of {kind}/{key} is that of another artifact.")
        if manifest is not None and (program := _program(manifest.files)):
            raise CorruptArtifact(
                f"The artifact {kind}/{key} holds {program}, a kind of file that may run code when loaded."
            )
        return manifest

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        body = manifest.body
        try:
            return ArtifactRef(
                kind=body["kind"],
                key=body["key"],
                digest=manifest.digest,
                uri=self._store.uri(manifest.data),
                metrics=body["metrics"],
                mlflow_run_id=body["mlflow_run_id"],
                attributes=body["facts"],
            )
        except KeyError as error:
            raise CorruptArtifact(f"The manifest of {manifest.prefix} has no entry {error}.") from error


_Stamp = tuple[tuple[str, int, int, int], ...]


def _stamp(folder: Path) -> _Stamp:
    """Return path, inode, size and change time of every file. An accidental change always modifies these
    values.
    """
    found = [(path.relative_to(folder).as_posix(), path.lstat()) for path in sorted(folder.rglob("*"))]
    return tuple((name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in found)


def _prefix(kind: str, key: str) -> str:
    return f"artifacts/{kind}/{key}"


def _check(fence: Fence | None) -> None:
    if fence is not None:
        fence.check()


def _program(files: tuple[FileEntry, ...]) -> str | None:
    """The first file that is a program, or that loading may turn into one."""
    return next(
        (entry.path for entry in files if PurePosixPath(entry.path).suffix.lower() in _RUNS_CODE), None
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        log.warning("Left out of the manifest, because not finite: %s", ", ".join(bad))
    return {name: float(value) for name, value in metrics.items() if name not in bad}
