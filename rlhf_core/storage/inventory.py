"""What a store has, for `rlhf prune`: artifacts with their lineage, files without a manifest, and what stages
left that have not finished.

One object is read, or one folder listed, for each artifact, and one folder for each stage key that was ever
claimed. Of a manifest only what is needed is kept in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage import bundles
from rlhf_core.storage.artifacts import parse_artifact_address, parse_artifact_copy
from rlhf_core.storage.bundles import DAMAGED, MANIFEST, Manifest, in_parallel, is_weights
from rlhf_core.storage.store import Store
from rlhf_core.types import CHECKPOINTS, annotations_folder, artifact_prefix, checkpoint_prefix

ARTIFACTS = "artifacts"
# `config.keys.key_of` makes keys of this form, and `artifacts._ADDRESS` knows it, too.
_STAGE, _KEY = re.compile("[a-z]+"), re.compile("[0-9a-f]{16}")
"""Names of folders that can be those of a stage and of a key. Others are not of this project."""
_STEP = re.compile(r"step-(\d{8,})/")
_NOT_THERE = (ValueError, KeyError, TypeError, AttributeError)
"""Exceptions raised when an entry of a manifest is read that is missing or of another kind."""


class ArtifactName(NamedTuple):
    """Stage and key of an artifact."""

    stage: str
    key: str

    def __str__(self) -> str:
        return f"{self.stage}/{self.key}"

    @classmethod
    def parse(cls, text: str) -> ArtifactName:
        """Return the name that `str` has written."""
        stage, _, key = text.partition("/")
        return cls(stage, key)


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact of the store."""

    name: ArtifactName
    folders: tuple[str, ...]
    """Names of the folder with its files, and of that with its annotations, which may be missing."""
    digest: str
    """`Manifest.digest`."""
    size: int
    """Bytes of its files."""
    created: float
    """Seconds since 1970; infinite if its manifest does not say it."""
    has_weights: bool
    descends_from: frozenset[ArtifactName]
    """The artifacts that its stage read, and those that the configuration of its run names."""
    registered: tuple[str, str] | None = None
    """Name of the model, and digest of the weights, that its stage has registered."""

    @property
    def key(self) -> str:
        """Key of its stage."""
        return self.name.key

    @property
    def copy_name(self) -> str:
        """Name of the folder of a local copy, as `Manifest.copy_name`."""
        return f"{artifact_prefix(*self.name).replace('/', '-')}-{self.digest[:12]}"


@dataclass(frozen=True)
class Leftover:
    """The files below the folder of an artifact that has no manifest, or none that can be read."""

    name: ArtifactName
    size: int
    """Bytes of all files."""
    folders: tuple[str, ...]
    """Names of its folders."""
    is_damaged: bool
    """Whether an artifact was found damaged. Its files are kept."""

    @property
    def key(self) -> str:
        """Key of its stage."""
        return self.name.key


@dataclass(frozen=True)
class Unfinished:
    """The checkpoints of a stage key."""

    key: str
    size: int
    """Bytes of all checkpoints."""
    steps: tuple[int, ...]
    """Steps with a file, ascending."""
    saved: float
    """When the last one was saved, in seconds since 1970; infinite if that is not known."""


@dataclass(frozen=True)
class Inventory:
    """What a store has."""

    artifacts: tuple[StoredArtifact, ...]
    leftovers: tuple[Leftover, ...]
    checkpoints: tuple[Unfinished, ...]
    """Of the keys that have any."""
    keys: frozenset[str]
    """All stage keys that were ever claimed."""


def read_inventory(store: Store) -> Inventory:
    """Read what a store has. Nothing is changed, also if something is damaged."""
    names = []
    # Folders of other programs are passed over: what is not listed here is never deleted.
    for stage in sorted(filter(_STAGE.fullmatch, store.folders(ARTIFACTS))):
        for key in sorted(filter(_KEY.fullmatch, store.folders(f"{ARTIFACTS}/{stage}"))):
            names.append(ArtifactName(stage, key))
    keys = sorted(filter(_KEY.fullmatch, store.folders(CHECKPOINTS)))
    found = in_parallel(lambda name: read_artifact(store, name) or _leftover(store, name), names)
    unfinished = in_parallel(lambda key: _unfinished(store, key), keys)
    return Inventory(
        tuple(each for each in found if isinstance(each, StoredArtifact)),
        tuple(each for each in found if isinstance(each, Leftover)),
        tuple(each for each in unfinished if each is not None),
        frozenset(keys),
    )


def add_unlisted(store: Store, inventory: Inventory, names: Collection[ArtifactName]) -> Inventory:
    """Return `inventory` with the artifacts that `names` or other artifacts name and that its listing lacks.

    What they descend from would otherwise look as if nothing needed it.
    """
    artifacts = {artifact.name: artifact for artifact in inventory.artifacts}
    # Each name is asked for once: damaged stores can have artifacts that name each other.
    asked = set(artifacts)
    named = [*names, *(name for artifact in inventory.artifacts for name in artifact.descends_from)]
    while True:
        unknown = {*named} - asked
        waiting = [name for name in unknown if _STAGE.fullmatch(name.stage) and _KEY.fullmatch(name.key)]
        if not waiting:
            break
        asked.update(waiting)
        found = [each for each in in_parallel(lambda name: read_artifact(store, name), waiting) if each]
        artifacts.update({each.name: each for each in found})
        named = [name for each in found for name in each.descends_from]
    leftovers = tuple(each for each in inventory.leftovers if each.name not in artifacts)
    return replace(inventory, artifacts=tuple(artifacts.values()), leftovers=leftovers)


def read_artifact(store: Store, name: ArtifactName) -> StoredArtifact | None:
    """Return the artifact with this name; None if it has no manifest, or none that can be read."""
    try:
        manifest = bundles.read(store, artifact_prefix(*name))
        if manifest is None or [manifest.body.get(entry) for entry in ("kind", "key")] != list(name):
            return None
        parents = [ArtifactName(stage, each["key"]) for stage, each in manifest.body["parents"].items()]
    except (CorruptArtifact, *_NOT_THERE):
        return None
    return StoredArtifact(
        name,
        (manifest.folder, annotations_folder(manifest.digest)),
        manifest.digest,
        sum(entry.size for entry in manifest.files),
        _created(manifest),
        any(is_weights(entry.path) for entry in manifest.files),
        frozenset([*parents, *artifacts_named(manifest.body.get("config"))]) - {name},
        _registered(manifest),
    )


def artifacts_named(content: Any) -> Iterator[ArtifactName]:
    """Yield the artifacts whose addresses, or paths of local copies, are in plain data such as a
    configuration.
    """
    if isinstance(content, str):
        found = parse_artifact_address(content) or parse_artifact_copy(content)
        if found is not None:
            yield ArtifactName(found.stage, found.key)
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from artifacts_named(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from artifacts_named(value)


def _created(manifest: Manifest) -> float:
    try:
        return datetime.fromisoformat(manifest.body["created"]).timestamp()
    except _NOT_THERE:
        # Younger than every limit, so that `rlhf prune` keeps it.
        return math.inf


def _registered(manifest: Manifest) -> tuple[str, str] | None:
    try:
        facts = manifest.body["facts"]
        return str(facts["model"]), str(facts["weights_sha256"])
    except _NOT_THERE:
        return None


def _leftover(store: Store, name: ArtifactName) -> Leftover | None:
    prefix = artifact_prefix(*name)
    sizes = store.sizes(prefix)
    if not sizes:
        return None
    paths = [key.removeprefix(f"{prefix}/") for key in sizes]
    # A manifest that cannot be read is marked as damaged by its next reader.
    is_damaged = any(path == MANIFEST or path.startswith(DAMAGED) for path in paths)
    folders = {path.split("/")[0] for path in paths if "/" in path}
    return Leftover(name, sum(sizes.values()), tuple(sorted(folders)), is_damaged)


def _unfinished(store: Store, key: str) -> Unfinished | None:
    """Return the checkpoints of a stage key; None if there are none."""
    prefix = checkpoint_prefix(key)
    sizes = {}
    for path, size in store.sizes(prefix).items():
        # Claims stay for ever, and are nothing that a stage has left.
        if not path.startswith(f"{prefix}/attempts/"):
            sizes[path.removeprefix(f"{prefix}/")] = size
    steps = sorted({int(match[1]) for match in map(_STEP.match, sizes) if match})
    if not steps:
        return None
    saved = 0.0  # without a committed checkpoint, the time of the attempt counts
    for step in reversed(steps):
        try:
            # By its key, because the listing may lack it.
            manifest = bundles.read(store, f"{prefix}/step-{step:08d}")
        except CorruptArtifact:
            saved = math.inf
            break
        if manifest is not None:
            saved = _created(manifest)
            break
    return Unfinished(key, sum(sizes.values()), tuple(steps), saved)
