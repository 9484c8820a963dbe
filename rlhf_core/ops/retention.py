"""Which artifacts, checkpoints and files of a store are needed: the decision of `rlhf prune`, without any
access to store or registry.

An artifact is deleted if all of this holds:

- it has weights, and its stage is not `data`;
- it is older than the given age;
- no version needs it that is or was champion or has an alias (`prune.retained`), and the registry knows
  the versions of all registrations that it led to;
- no attempt holds its key, and no run, job or unfinished stage reads it;
- no artifact that is kept for one of these reasons descends from it.

Checkpoints, and files without a manifest, are deleted if no attempt holds their key and the last one began,
and saved, longer ago than the age and than `UNFINISHED_SECONDS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from graphlib import TopologicalSorter
from pathlib import Path

from rlhf_core.storage.fencing import Claim
from rlhf_core.storage.inventory import ArtifactName, Inventory, Leftover, StoredArtifact, Unfinished

UNFINISHED_SECONDS = 7 * 86_400.0
"""For this time, what a stage has begun and not finished is kept in any case, with what it reads. The default
of `run.stage_timeout` ends stages and jobs before.
"""


class Reason(Enum):
    """Why something is kept. If there are several reasons, the first one counts."""

    VERSION = "a version that is or was champion, or has an alias, needs it"
    OTHER_REGISTRY = "it was registered, and this MLflow does not have the version"
    IN_USE = "a run, a job or an unfinished stage has produced it or reads it"
    HELD = "its stage is running"
    YOUNG = "it is not old enough, or its age is unknown"
    ANCESTOR = "an artifact that is kept descends from it"
    DATA = "it is a data artifact; matches need it"
    NO_WEIGHTS = "it has no weights"
    DAMAGED = "it is damaged; delete it by hand"


@dataclass(frozen=True)
class Pending:
    """An artifact or a checkpoint in the outbox, which was not uploaded."""

    prefix: str
    key: str
    """Key of its stage."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class CachedCopy:
    """A local copy of an artifact of a bucket."""

    name: ArtifactName
    folder: Path
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Item:
    """Something that `rlhf prune` deletes or keeps."""

    subject: StoredArtifact | Leftover | Unfinished | Pending | CachedCopy
    label: str
    """What it is, for the user."""
    unused: str
    """Why it is not needed, if there is no reason to keep it."""
    since: float | None = None
    """When it was created or last used, in seconds since 1970. None if that is not known."""
    reason: Reason | None = None
    """Why it is kept; None if it is to be deleted."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.subject.size


@dataclass(frozen=True)
class Known:
    """Everything that the decision depends on."""

    inventory: Inventory
    claims: Mapping[str, Claim]
    """Claims of all stage keys."""
    needed: Collection[ArtifactName]
    """The artifacts of versions that are kept."""
    registered: Collection[tuple[str, str]]
    """Name of the model and digest of the weights of each version in the registry."""
    in_use: Collection[ArtifactName]
    """The artifacts of runs and jobs that have not ended."""
    now: float
    """Seconds since 1970."""
    age: float
    """Seconds for which everything is kept."""
    versions: Mapping[ArtifactName, Sequence[str]] = field(default_factory=dict)
    """Names of the versions that need an artifact of `needed`."""
    running_since: float = math.inf
    """Start of the first run that has not ended. What was made since then may be of that run."""

    @property
    def unfinished_age(self) -> float:
        """Seconds for which unfinished work is kept."""
        return max(self.age, UNFINISHED_SECONDS)


def decide(known: Known) -> list[Item]:
    """Return the content of the store with the reason for which each item is kept.

    Artifacts are first, each before those that it descends from. What an interrupted deletion leaves then
    still has all that it descends from.
    """
    artifacts = {artifact.name: artifact for artifact in known.inventory.artifacts}
    needed = _needed(known, artifacts)
    items = []
    for artifact in _descendants_first(artifacts):
        reason = needed.get(artifact.name) or _reason_of_kind(artifact)
        items.append(Item(artifact, str(artifact.name), "no version needs it", artifact.created, reason))
    for leftover in known.inventory.leftovers:
        since = _last_use(leftover.key, 0.0, known)
        reason = Reason.DAMAGED if leftover.is_damaged else _unfinished(leftover.key, since, known)
        items.append(Item(leftover, f"files of {leftover.name}", "it has no manifest", since, reason))
    for checkpoints in known.inventory.checkpoints:
        key = checkpoints.key
        since = _last_use(key, checkpoints.saved, known)
        reason = _unfinished(key, since, known)
        items.append(Item(checkpoints, f"checkpoints of {key}", "the stage was not continued", since, reason))
    return items


def _needed(known: Known, artifacts: Mapping[ArtifactName, StoredArtifact]) -> Mapping[ArtifactName, Reason]:
    """Return what is kept for a reason of its own, and all that it descends from.

    Also what is named and is no artifact of this store keeps its other artifacts.
    """
    needed: dict[ArtifactName, Reason] = dict.fromkeys(known.needed, Reason.VERSION)
    for name, artifact in artifacts.items():
        own = _own_reason(artifact, known)
        if own is not None:
            needed.setdefault(name, own)
    for name in _read(known, artifacts):
        needed.setdefault(name, Reason.IN_USE)
    waiting = [name for name in needed if name in artifacts]
    while waiting:
        for name in artifacts[waiting.pop()].descends_from - needed.keys():
            needed[name] = Reason.ANCESTOR
            if name in artifacts:
                waiting.append(name)
    return needed


def _own_reason(artifact: StoredArtifact, known: Known) -> Reason | None:
    """Return why an artifact is kept together with all that it descends from; None if it need not be."""
    claim = known.claims.get(artifact.name.key)
    if artifact.registered is not None and artifact.registered not in known.registered:
        return Reason.OTHER_REGISTRY
    if claim is not None and claim.held:
        return Reason.HELD
    if artifact.created > known.now - known.age:
        return Reason.YOUNG
    # `created` has no fraction of a second.
    if artifact.created > known.running_since - 1.0:
        return Reason.IN_USE
    return None


def _read(known: Known, artifacts: Collection[ArtifactName]) -> Iterator[ArtifactName]:
    """Yield what runs, jobs and unfinished stages read."""
    yield from known.in_use
    finished = {name.key for name in artifacts}
    for key, claim in known.claims.items():
        is_recent = claim.begun > known.now - known.unfinished_age
        if claim.held or (key not in finished and is_recent):
            yield from map(ArtifactName.parse, claim.inputs)


def _reason_of_kind(artifact: StoredArtifact) -> Reason | None:
    """Return why artifacts of this kind are kept, without what they descend from."""
    if artifact.name.stage == "data":
        return Reason.DATA
    if not artifact.has_weights:
        return Reason.NO_WEIGHTS
    return None


def _descendants_first(artifacts: Mapping[ArtifactName, StoredArtifact]) -> list[StoredArtifact]:
    graph = {name: sorted(artifacts[name].descends_from) for name in artifacts}
    ancestors_first = filter(artifacts.__contains__, TopologicalSorter(graph).static_order())
    # Reversed, so that an interrupted deletion leaves no artifact without what it was made of.
    return [artifacts[name] for name in ancestors_first][::-1]


def _last_use(key: str, saved: float, known: Known) -> float:
    """Return when the last attempt at a key began or saved, whichever is later; infinite if not known."""
    claim = known.claims.get(key)
    return math.inf if claim is None else max(claim.begun, saved)


def _unfinished(key: str, since: float, known: Known) -> Reason | None:
    """Return why the checkpoints or files of an unfinished stage are kept."""
    claim = known.claims.get(key)
    if claim is not None and claim.held:
        return Reason.HELD
    if since > known.now - known.unfinished_age:
        return Reason.YOUNG
    return None
