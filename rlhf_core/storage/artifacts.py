"""Artifacts: the immutable outputs of finished stages, `{store}/artifacts/{kind}/{key}/` (see `bundles`)."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import CorruptArtifact, InputError, StoreError
from rlhf_core.pipeline import StageName
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import FileEntry, Manifest, is_record, is_weights
from rlhf_core.storage.fencing import Fence
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store, open_store
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import exists, write_atomic
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef, artifact_prefix

log = logging.getLogger(__name__)

_CODE_SUFFIXES = {
    ".py", ".pyc", ".pyd", ".so", ".sh", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt",
}  # fmt: skip
"""Suffixes of programs, and of files that loading can turn into one. They are neither stored nor read."""


@dataclass(frozen=True)
class Provenance:
    """Origin and results of an artifact, for its manifest."""

    parents: Mapping[StageName, ArtifactRef] = field(default_factory=dict)
    """The artifacts that the stage read."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Headline metrics; values that are not finite are left out."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Text about the output, such as a digest."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The complete configuration of the run."""
    decided_by: Mapping[str, Any] = field(default_factory=dict)
    """What the key is made from (`rlhf_core.config.keys.key_content`)."""
    mlflow_run_id: str | None = None


@dataclass(frozen=True, eq=False)
class Origin:
    """What the manifest of an artifact says of its origin."""

    ref: ArtifactRef
    created: str
    """ISO 8601, UTC."""
    config: Mapping[str, Any]
    """The complete configuration of the run."""
    decided_by: Mapping[str, Any]
    """What the key is made from; empty in artifacts of earlier releases."""
    parents: Mapping[str, str]
    """Digest of each artifact that the stage read."""
    versions: Mapping[str, str]
    """Versions of packages, and digests of the code."""


class ParentEntry(BaseModel):
    """An artifact that a stage read, in the manifest of its output."""

    key: str
    digest: str


class ArtifactBody(BaseModel):
    """The entries that every manifest of an artifact has, as `publish` writes them."""

    kind: str
    key: str
    parents: dict[str, ParentEntry]
    metrics: dict[str, float]
    facts: dict[str, str]
    config: dict[str, Any]
    mlflow_run_id: str | None


class ArtifactStore:
    """Finds, publishes and fetches artifacts."""

    def __init__(
        self, store: Store, cache: Path, outbox: Outbox | None = None, *, read_only: bool = False
    ) -> None:
        """Nothing is read or written yet.

        Args:
            store: The store.
            cache: Local folder for copies from a remote store.
            outbox: Keeps artifacts until the store has them.
            read_only: Whether damaged artifacts are only reported. A process that makes artifacts marks them,
                so that they are made again.
        """
        self.store = store
        """The store."""
        self.cache = cache
        """Local folder for copies from a remote store."""
        self._read_only = read_only
        self._outbox = outbox
        self._verified: dict[tuple[str, str, str, bool, bool], tuple[Path, _Stamp]] = {}

    def find(self, kind: StageName, key: str) -> ArtifactRef | None:
        """Return the artifact of a stage key; None if there is none.

        Also None if the manifest cannot be read, or files are missing or have another size. An error is then
        logged, and the artifact is marked as damaged, so that the stage makes it again.
        """
        manifest = None
        try:
            manifest = self._read(kind, key)
            if manifest is None:
                return None
            # Names and sizes only, in one listing. `fetch` verifies the content before anything reads it.
            bundles.check_files(self.store, manifest)
            return self._ref(manifest)
        except CorruptArtifact as error:
            log.error("%s", self._report_damage(artifact_prefix(kind, key), error, manifest))
            return None

    def _report_damage(self, prefix: str, error: CorruptArtifact, manifest: Manifest | None) -> str:
        """Mark an artifact as damaged, unless this store is only read. Return a message with what to do."""
        if self._read_only:
            address = self.store.uri(f"{prefix}/{bundles.MANIFEST}")
            return (
                f"{error.message} Restore the file. If you cannot, delete {address} and run the configuration"
                " of the artifact, which then makes it again."
            )
        record = bundles.mark_damaged(self.store, prefix, error.message, manifest)
        return (
            f"{error.message} The artifact is marked as damaged ({record}); a run of its configuration makes"
            " it again."
        )

    def find_registered(self, kind: StageName, tags: Mapping[str, str]) -> ArtifactRef | None:
        """Return the artifact of a stage that belongs to a registered version; None if this store lacks it.

        `tags` are those of the version, `rlhf.{stage}.key` and `rlhf.{stage}.digest`.
        """
        if (key := tags.get(f"rlhf.{kind}.key")) is None:
            return None
        return self._find_exactly(kind, key, tags.get(f"rlhf.{kind}.digest"))

    def _find_exactly(self, kind: StageName, key: str, digest: str | None) -> ArtifactRef | None:
        # A stage that was made again can have other bits under the same key.
        ref = self.find(kind, key)
        if ref is None or ref.digest != digest:
            return None
        return ref

    def find_file(self, kind: StageName, name: str) -> ArtifactRef | None:
        """Return an artifact of a stage that has a file with this name; None if there is none."""
        root = f"artifacts/{kind}"
        for path in self.store.list(root):
            if path.endswith(f"/{name}"):
                ref = self.find(kind, path.removeprefix(f"{root}/").partition("/")[0])
                # Files of damaged artifacts, and of killed attempts, stay next to those of the artifact.
                if ref is not None and self.store.uri(path) == f"{ref.uri}/{name}":
                    return ref
        return None

    def invalidate(self, ref: ArtifactRef, reason: str) -> None:
        """Have the artifact made again, because its content is not true any more. Its files stay."""
        record = bundles.mark_damaged(self.store, artifact_prefix(ref.kind, ref.key), reason)
        log.warning("%s The artifact is invalid (%s) and will be made again.", reason, record)

    def publish(
        self,
        kind: StageName,
        key: str,
        folder: Path,
        provenance: Provenance,
        fence: Fence | None = None,
        stored: Sequence[FileEntry] = (),
    ) -> ArtifactRef:
        """Make the local `folder` the artifact of `key` and delete the folder. An existing artifact is kept.

        Raises InputError for files that may run code, Superseded if a later attempt holds the key, and
        StoreError if the store fails. After a StoreError nothing is visible, and the artifact stays in the
        outbox if there is one, and nothing is `stored`.

        Args:
            kind: The stage.
            key: The stage key.
            folder: Local folder with the files.
            provenance: Origin and results.
            fence: The right to commit; None only for a sole writer.
            stored: Further files of the artifact, which are at `attempt_folder` already. Files of `folder`
                with the same names are copies of them.
        """
        names = {entry.path for entry in stored}
        # Copies of what is in the store are neither hashed nor uploaded again.
        files = bundles.hash_folder(folder, skip=names.__contains__)
        complete = bundles.merged(files, stored)
        if program := _find_program(complete):
            raise InputError(
                f"{kind} left {program}, a kind of file that may run code when loaded; artifacts hold data"
                " only: write models as safetensors and numbers as JSON or Parquet."
            )
        parents = sorted(provenance.parents.items())
        body = {
            "kind": kind,
            "key": key,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parents": {name: {"key": ref.key, "digest": ref.digest} for name, ref in parents},
            "metrics": _finite(provenance.metrics),
            # Existing manifests have the attributes under this name.
            "facts": dict(provenance.attributes),
            # Other values, such as paths, become text: the checksum of the manifest accepts JSON only.
            "config": json.loads(json.dumps(provenance.config, default=str, allow_nan=False)),
            "decided_by": dict(provenance.decided_by),
            "versions": versions(),
            "mlflow_run_id": provenance.mlflow_run_id,
        }
        # A number that is never given twice names the folder. Without a fence there are no numbers, so it is
        # random.
        name = _name(fence) if fence is not None else uuid.uuid4().hex[:12]
        bundle = Manifest(artifact_prefix(kind, key), name, files, body)

        def may_commit() -> None:
            if fence is not None:
                fence.check()

        # Not with files that other hosts have put into the store: what commits first deletes all others, and
        # the rest in the outbox could never be an artifact.
        if self._outbox is not None and not stored:
            # Before the first request to the store, so that the artifact is not lost if the request fails.
            self._outbox.add(bundle, folder)
            manifest = self._outbox.upload(bundle.prefix, may_commit)
        else:
            may_commit()
            manifest = bundles.commit(
                self.store, bundle, folder, may_commit=may_commit, files_elsewhere=stored
            )
        ref = self._committed(kind, key, manifest, fence)
        if ref.digest != bundles.digest_of(complete):
            log.warning(
                "The artifact %s/%s exists already with other content; the existing one is kept.", kind, key
            )
        shutil.rmtree(folder)
        return ref

    def fetch(self, ref: ArtifactRef, *, weights: bool = True, record: bool = False) -> Path:
        """Return a read-only local folder with the artifact's files.

        Every file is checked against its sha256. The check is repeated only if a file has changed. Raises
        CorruptArtifact with the name of the file. The artifact is then marked as damaged, so that the next
        run makes it again.

        Args:
            ref: The artifact.
            weights: Whether the files with weights are needed (`is_weights`). Without, the folder may lack
                them.
            record: Whether the record is needed (`is_record`). Without, the folder may lack it.
        """
        identity = (ref.kind, ref.key, ref.digest, weights, record)
        if identity in self._verified:
            folder, stamp = self._verified[identity]
            if stamp == _stamp(folder):
                return folder
        prefix = artifact_prefix(ref.kind, ref.key)
        manifest = None
        try:
            manifest = self._read(ref.kind, ref.key)
            if manifest is not None and manifest.digest == ref.digest:
                folder = bundles.fetch(
                    self.store,
                    manifest,
                    self.cache,
                    lambda path: (weights or not is_weights(path)) and (record or not is_record(path)),
                )
                if not self.is_local:
                    # The path of a copy has stage, key and digest, but no store. The hosts of a job fetch a
                    # base model from there.
                    write_atomic(store_file(folder), self.store.url)
                self._verified[identity] = folder, _stamp(folder)
                return folder
        except CorruptArtifact as error:
            raise CorruptArtifact(self._report_damage(prefix, error, manifest)) from error
        problem = "is not the one this run started with"
        if manifest is None:
            problem = "is gone"
        raise CorruptArtifact(
            f"The artifact {ref.kind}/{ref.key} {problem}; a run of its configuration makes it again."
        )

    @property
    def is_local(self) -> bool:
        """Whether the artifacts are on this machine's disks."""
        return self.store.is_local

    def address(self, ref: ArtifactRef, path: str, *, local: bool = False) -> str:
        """Return the address of a file or folder of an artifact: a verified local path, or in a bucket its
        s3:// address.

        Raises InputError if the artifact does not have it, and CorruptArtifact if it is damaged or gone.

        Args:
            ref: The artifact.
            path: Relative to the artifact's folder.
            local: Download the artifact if it is in a bucket.
        """
        manifest = self._read(ref.kind, ref.key)
        names: list[str] = []
        if manifest is not None:
            names = [entry.path for entry in manifest.files]
        if not any(name == path or name.startswith(f"{path}/") for name in names):
            raise InputError(
                f"the artifact {ref.kind}/{ref.key} has no {path[:200]!r}; it has"
                f" {', '.join(names[:20]) or 'no files'}; name one of them"
            )
        if local or self.is_local:
            # With a slash, so that the folder `record` itself is one.
            return str(self.fetch(ref, record=is_record(f"{path}/")) / path)
        return f"{ref.uri}/{path}"

    def config(self, ref: ArtifactRef) -> Mapping[str, Any]:
        """Return the configuration of the run that made it. Raises CorruptArtifact if it is gone."""
        config: Mapping[str, Any] = self._present(ref).body["config"]
        # A checksum does not say who wrote a manifest. Without these sections, `rlhf serve` and `rlhf review`
        # would end with a KeyError.
        for section in ("data", "model", "ppo", "run"):
            if not isinstance(config.get(section), Mapping):
                raise CorruptArtifact(
                    f"The manifest of {ref.kind}/{ref.key} has no section `{section}` in its entry config:"
                    " `rlhf` has not written it; use another artifact."
                )
        return config

    def origin(self, ref: ArtifactRef) -> Origin:
        """Return the origin of an artifact. Raises CorruptArtifact if it is gone."""
        return self._origin(self._present(ref))

    def origins(self, kind: StageName) -> list[Origin]:
        """Return the origin of every artifact of a stage whose manifest can be read."""

        def read(key: str) -> Manifest | None:
            try:
                return self._read(kind, key)
            except CorruptArtifact:
                return None

        found = bundles.in_parallel(read, self.store.folders(f"artifacts/{kind}"))
        return [self._origin(manifest) for manifest in found if manifest is not None]

    def _origin(self, manifest: Manifest) -> Origin:
        body = manifest.body
        parents = {name: entry["digest"] for name, entry in body["parents"].items()}
        return Origin(
            self._ref(manifest),
            str(body.get("created", "")),
            body["config"],
            body.get("decided_by", {}),
            parents,
            body.get("versions", {}),
        )

    def parent(self, ref: ArtifactRef, kind: StageName) -> ArtifactRef | None:
        """Return the artifact of the stage `kind` that an artifact was made from; None if it was made from
        none, or if this store lacks it.
        """
        manifest = self._read(ref.kind, ref.key)
        if manifest is None or (made_from := manifest.body["parents"].get(kind)) is None:
            return None
        return self._find_exactly(kind, made_from["key"], made_from["digest"])

    def upload_pending(self, kind: StageName, key: str, fence: Fence) -> ArtifactRef | None:
        """Upload the artifact of `key` if an earlier attempt made it and could not upload it; else return
        None.
        """
        prefix = artifact_prefix(kind, key)
        if self._outbox is None or not self._outbox.pending(prefix):
            return None
        log.info("uploading the artifact %s/%s, which an earlier attempt made", kind, key)
        manifest = self._outbox.upload(prefix, fence.check)
        # None: the store has another artifact, or the pending one was damaged and there may be none. Then the
        # stage makes it again.
        if manifest is None:
            return self.find(kind, key)
        return self._committed(kind, key, manifest, fence)

    def _committed(
        self, kind: StageName, key: str, manifest: Manifest | None, fence: Fence | None
    ) -> ArtifactRef:
        """Return the reference of the committed artifact, or (None) of the one that was there already.

        Files that dead attempts left next to it are deleted.
        """
        if manifest is None:
            manifest = self._read(kind, key)
            if manifest is None:
                raise StoreError(
                    f"The manifest of {kind}/{key} appeared and vanished again; the same command tries again."
                )
        elif fence is not None:
            try:
                # The artifact is committed. A store that fails here must not fail the stage.
                bundles.remove(self.store, artifact_prefix(kind, key), keep=manifest.folder)
            except StoreError as error:
                log.warning("Leftovers next to the artifact %s/%s stay: %s", kind, key, error.message)
        return self._ref(manifest)

    def _present(self, ref: ArtifactRef) -> Manifest:
        manifest = self._read(ref.kind, ref.key)
        if manifest is None:
            raise CorruptArtifact(
                f"The artifact {ref.kind}/{ref.key} is gone; a run of its configuration makes it again."
            )
        return manifest

    def _read(self, kind: str, key: str) -> Manifest | None:
        manifest = bundles.read(self.store, artifact_prefix(kind, key))
        if manifest is None:
            return None
        # A manifest that was copied from another key has an intact checksum.
        if (manifest.body.get("kind"), manifest.body.get("key")) != (kind, key):
            raise CorruptArtifact(f"The manifest of {kind}/{key} is that of another artifact.")
        bundles.check_body(manifest, ArtifactBody)
        # Also when reading, because files can get into a store without `publish`.
        if program := _find_program(manifest.files):
            raise CorruptArtifact(
                f"The artifact {kind}/{key} holds {program}, a kind of file that may run code when loaded."
            )
        return manifest

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        body = manifest.body
        return ArtifactRef(
            kind=body["kind"],
            key=body["key"],
            digest=manifest.digest,
            uri=self.store.uri(manifest.data),
            metrics=body["metrics"],
            mlflow_run_id=body["mlflow_run_id"],
            attributes=body["facts"],
        )


def attempt_folder(kind: StageName, key: str, fence: Fence) -> str:
    """Return the folder of the store for the files of the artifact that the holder of `fence` publishes."""
    return f"{artifact_prefix(kind, key)}/{_name(fence)}"


def _name(fence: Fence) -> str:
    return f"{fence.attempt:06d}"


def open_artifacts(config: PipelineConfig) -> ArtifactStore:
    """Return the artifacts of the store of a configuration, for reading. Nothing is read yet."""
    return ArtifactStore(open_store(config), Home.of(config.run.home).cache, read_only=True)


_Stamp = tuple[tuple[str, int, int, int], ...]


def _stamp(folder: Path) -> _Stamp:
    """Return path, inode, size and change time of every file. Any accidental change modifies one of them."""
    stamp = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        # The time of change: that of modification can be set back, as `cp -p` and `touch` do.
        stamp.append((name, status.st_ino, status.st_size, status.st_ctime_ns))
    return tuple(stamp)


# `tracking.registry` writes a local path as `local-store://` if MLflow is a server.
_ADDRESS = re.compile(r"(?:local-store://)?(.+)/artifacts/([a-z]+)/([0-9a-f]{16})(?:/.*)?")
# Of `bundles.fetch`.
_COPY = re.compile(r"(.+/artifacts-([a-z]+)-([0-9a-f]{16})-([0-9a-f]{12}))(?:/(.*))?")


def store_file(copy: Path) -> Path:
    """Return the file next to a copy from a bucket that has the URL of its store."""
    return copy.with_name(f"{copy.name}.store")


def annotations_copy(copy: Path) -> Path:
    """Return the folder next to a copy from a bucket for copies of its annotations."""
    return copy.with_name(f"{copy.name}.annotations")


class ArtifactAddress(NamedTuple):
    """The parts of an address `{store}/artifacts/{stage}/{key}`, or of a folder inside the artifact."""

    store: str
    stage: str
    key: str

    def open_store(self, home: Home, endpoint: str | None) -> ArtifactStore:
        """Return the artifacts of the store, for reading. Nothing is read yet.

        Args:
            home: Has the cache for artifacts from a bucket.
            endpoint: URL of an S3-compatible server, see `s3_endpoint`.
        """
        return ArtifactStore(Store(self.store, endpoint), home.cache, read_only=True)


def parse_artifact_address(address: str) -> ArtifactAddress | None:
    """Return the parts of the address of an artifact, or None for other addresses."""
    found = _ADDRESS.fullmatch(address)
    return None if found is None else ArtifactAddress(*found.groups())


class ArtifactCopy(NamedTuple):
    """The artifact in a bucket that a local folder is a copy of."""

    stage: str
    key: str
    digest: str
    """The first 12 digits of its digest."""
    folder: str
    """The folder inside the artifact; empty for the whole artifact."""
    store: str | None
    """URL of its store; None if it is not known on this host."""

    @property
    def address(self) -> ArtifactAddress | None:
        """Where the artifact is; None if its store is not known."""
        return None if self.store is None else ArtifactAddress(self.store, self.stage, self.key)


def parse_artifact_copy(path: str) -> ArtifactCopy | None:
    """Return the artifact that a local folder is a copy of, or None for other paths."""
    found = _COPY.fullmatch(path)
    if found is None:
        return None
    copy, stage, key, digest, folder = found.groups()
    file = store_file(Path(copy))
    store = file.read_text(encoding="utf-8") if exists(file) else None
    return ArtifactCopy(stage, key, digest, folder or "", store)


def _find_program(files: tuple[FileEntry, ...]) -> str | None:
    """Return the first file that is a program, or that loading can turn into one."""
    for entry in files:
        if PurePosixPath(entry.path).suffix.lower() in _CODE_SUFFIXES:
            return entry.path
    return None


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    # JSON has no NaN, so `json_sha256` refuses it. One metric must not cost the artifact.
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    if bad:
        log.warning("Metrics that are not finite are left out of the manifest: %s", ", ".join(bad))
    return {name: float(value) for name, value in metrics.items() if name not in bad}
