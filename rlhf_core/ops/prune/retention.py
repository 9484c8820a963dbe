"""Which artifacts, checkpoints and files of a store are needed: the decision of `rlhf prune`, without any
access to store or registry.

An artifact is deleted if all of this holds:

- it has weights, and its stage is one of this release, but not `data`;
- it is older than the given age;
- no version needs it that is or was champion or has an alias (`retained`), and the registry knows
  the versions of all registrations that it led to;
- no attempt holds its key, and no run, job or unfinished stage reads it;
- no artifact that is kept for one of these reasons descends from it.

Checkpoints, and files without a manifest, are deleted if no attempt holds their key and the last one began,
and saved, longer ago than the age and than `UNFINISHED_SECONDS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlhf_core.storage.fencing import Claim
from rlhf_core.storage.inventory import (
    ArtifactName,
    Inventory,
    Leftover,
    StoredArtifact,
    Unfinished,
)

UNFINISHED_SECONDS = 7 * 86_400.0
"""For this time, what a stage has begun and not finished is kept in any case, with what it reads. The default
of `run.stage_timeout` ends stages and jobs before.
"""


class Reason(Enum):
    """Why something is kept. If there are several reasons, the first one counts."""

    VERSION = "a version that is or was champion, or has an alias, needs it"
    OTHER_REGISTRY = "it was registered, and this MLflow does not have the version"
    IN_USE = "a run, a job or an unfinished stage has made or reads it"
    HELD = "a stage is being made"
    YOUNG = "it is young"
    UNKNOWN_AGE = "its age is not known"
    UNKNOWN_STAGE = "this release has no such stage"
    UNKNOWN_INPUTS = "a stage of an earlier release is being made, whose inputs are not known"
    ANCESTOR = "an artifact that is kept descends from it"
    DATA = "it has data, which matches need"
    NO_WEIGHTS = "it has no weights"
    DAMAGED = "it is damaged, and kept for people"


Subject = StoredArtifact | Leftover | Unfinished


@dataclass(frozen=True)
class Known:
    """Everything that the decision depends on."""

    inventory: Inventory
    claims: Mapping[str, Claim]
    """Claims of stage keys: of all without an artifact, of those with checkpoints and with leftovers, and, to
    find their holders, of artifacts that may be deleted.
    """
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
    running_since: float = math.inf
    """Start of the first run that has not ended. What was made since then may be of that run."""


@dataclass(frozen=True)
class Decision:
    """What to delete, and what is kept."""

    deleted: tuple[Subject, ...]
    """Artifacts first, each before those that it descends from. What an interruption leaves then still has
    all that it descends from.
    """
    kept: tuple[tuple[Subject, Reason], ...]


def decide(known: Known) -> Decision:
    """Return what to delete."""
    artifacts = {artifact.name: artifact for artifact in known.inventory.artifacts}
    roots = {name: reason for name, artifact in artifacts.items() if (reason := _root(artifact, known))}
    reading = frozenset(_in_use(known, artifacts))
    # What they descend from is kept also if they themselves are no artifacts of this store.
    sources = {*roots, *reading, *known.needed}
    ancestors = _closure(sources, artifacts)
    unknown = any(claim.held and claim.inputs is None for claim in known.claims.values())
    deleted: list[Any] = []
    kept: list[tuple[Subject, Reason]] = []
    for name, artifact in artifacts.items():
        reason = roots.get(name)
        if reason is None and name in reading:
            reason = Reason.IN_USE
        elif reason is None and name in ancestors:
            reason = Reason.ANCESTOR
        reason = reason or _kind(artifact) or (Reason.UNKNOWN_INPUTS if unknown else None)
        _put(artifact, reason, deleted, kept)
    # Lineage has no circles, so an artifact has more ancestors than each of them.
    deleted.sort(key=lambda each: -len(_closure([each.name], artifacts)))
    for leftover in known.inventory.leftovers:
        damaged = Reason.DAMAGED if leftover.is_damaged else None
        _put(leftover, damaged or _unfinished(leftover.name.key, 0.0, known), deleted, kept)
    for checkpoints in known.inventory.checkpoints:
        _put(checkpoints, _unfinished(checkpoints.key, checkpoints.saved, known), deleted, kept)
    return Decision(tuple(deleted), tuple(kept))


def _put(
    subject: Subject, reason: Reason | None, deleted: list[Any], kept: list[tuple[Subject, Reason]]
) -> None:
    if reason is None:
        deleted.append(subject)
    else:
        kept.append((subject, reason))


def _root(artifact: StoredArtifact, known: Known) -> Reason | None:
    """Return why an artifact is kept together with all that it descends from; None if it need not be."""
    claim = known.claims.get(artifact.name.key)
    if artifact.name in known.needed:
        return Reason.VERSION
    if artifact.registered is not None and artifact.registered not in known.registered:
        return Reason.OTHER_REGISTRY
    if claim is not None and claim.held:
        return Reason.HELD
    if artifact.stage is None:
        return Reason.UNKNOWN_STAGE
    if artifact.created is None:
        return Reason.UNKNOWN_AGE
    if artifact.created > known.now - known.age:
        return Reason.YOUNG
    # `created` has no fraction of a second.
    return Reason.IN_USE if artifact.created > known.running_since - 1.0 else None


def _kind(artifact: StoredArtifact) -> Reason | None:
    """Return why artifacts of this kind are kept, without what they descend from."""
    if artifact.stage == "data":
        return Reason.DATA
    return None if artifact.has_weights else Reason.NO_WEIGHTS


def _in_use(known: Known, artifacts: Collection[ArtifactName]) -> Iterator[ArtifactName]:
    """Yield what runs, jobs and unfinished stages read."""
    yield from known.in_use
    finished = {name.key for name in artifacts}
    for key, claim in known.claims.items():
        is_recent = claim.begun is None or claim.begun > known.now - _least(known)
        if claim.held or (key not in finished and is_recent):
            yield from map(ArtifactName.parse, claim.inputs or ())


def _unfinished(key: str, saved: float | None, known: Known) -> Reason | None:
    """Return why the checkpoints or files of an unfinished stage are kept."""
    claim = known.claims.get(key)
    if claim is not None and claim.held:
        return Reason.HELD
    if claim is None or claim.begun is None or saved is None:
        return Reason.UNKNOWN_AGE
    return Reason.YOUNG if max(claim.begun, saved) > known.now - _least(known) else None


def _least(known: Known) -> float:
    return max(known.age, UNFINISHED_SECONDS)


def _closure(
    names: Collection[ArtifactName], artifacts: Mapping[ArtifactName, StoredArtifact]
) -> set[ArtifactName]:
    """Return these artifacts and all that they descend from."""
    found: set[ArtifactName] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += artifacts[name].descends_from if name in artifacts else ()
    return found
