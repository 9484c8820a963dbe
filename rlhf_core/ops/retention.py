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

Of the kinds that `--also` names with an age, and only of these, what is older is deleted, too, unless a run
that is kept has it. A run is kept if it has not finished, if people have voted on its answers, if it is
younger, or if its policy is kept:

    data           artifacts of `data`
    evaluations    all other artifacts without weights
    mlflow         runs in MLflow, with their artifacts
    runs, logs     folders of runs in `run.home`
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

from rlhf_core.storage.fencing import Claim
from rlhf_core.storage.inventory import ArtifactName, Inventory, Leftover, StoredArtifact, Unfinished

KINDS = ("data", "evaluations", "mlflow", "runs", "logs")
"""What `--also` can name."""
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
    NOT_ASKED = "--also does not name it"
    UNFINISHED = "its run has not finished"
    VOTES = "people have voted on its answers"
    RUN = "a run that is kept has it"
    OTHER_STORE = "its run is of another store"


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
class Trace:
    """What a run has left outside the store."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Name of the run, or of the folder or file."""
    where: tuple[str, ...]
    """The path, or the ids of its runs in MLflow, that of the pipeline first."""
    size: int
    """Bytes. Those of a database are an estimate."""
    updated: float
    """Seconds since 1970."""
    artifacts: tuple[ArtifactName, ...] = ()
    """What the run has made or reused, in the order of the stages."""
    own: Reason | None = None
    """Why it is kept in any case."""


@dataclass(frozen=True)
class Item:
    """Something that `rlhf prune` deletes or keeps."""

    subject: StoredArtifact | Leftover | Unfinished | Pending | CachedCopy | Trace
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
    also: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each of `KINDS` is kept; for ever if it is missing."""
    traces: Sequence[Trace] = ()
    running_since: float = math.inf
    """Start of the first run that has not ended. What was made since then may be of that run."""

    @property
    def unfinished_age(self) -> float:
        """Seconds for which unfinished work is kept."""
        return max(self.age, UNFINISHED_SECONDS)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The stages whose artifacts have weights."""
        found = [artifact for artifact in self.inventory.artifacts if artifact.has_weights]
        return frozenset(artifact.name.stage for artifact in found) - {"data"}

    @cached_property
    def runs_with(self) -> Mapping[ArtifactName, Sequence[Trace]]:
        """What runs have left, by the artifacts that they have made or reused."""
        found: dict[ArtifactName, list[Trace]] = {}
        for trace in self.traces:
            for name in trace.artifacts:
                found.setdefault(name, []).append(trace)
        return found


def decide(known: Known) -> list[Item]:
    """Return the content of the store with the reason for which each item is kept.

    Artifacts are first, each before those that it descends from. What an interrupted deletion leaves then
    still has all that it descends from.
    """
    artifacts = {artifact.name: artifact for artifact in known.inventory.artifacts}
    needed = _needed(known, artifacts)
    items = []
    for artifact in _descendants_first(artifacts):
        reason = needed.get(artifact.name) or _reason_of_kind(artifact, known, needed)
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
    for trace in known.traces:
        reason = Reason.NOT_ASKED
        if trace.kind in known.also:
            reason = _reason_of_run(trace, known.also[trace.kind], known, needed)
        items.append(
            Item(trace, f"{trace.kind} {trace.name}", "no run that is kept has it", trace.updated, reason)
        )
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
    # The command may read another MLflow than the one that has the champion (decision 6).
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
        # An interrupted stage is continued from its checkpoint, and reads the same artifacts again.
        is_recent = claim.begun > known.now - known.unfinished_age
        if claim.held or (key not in finished and is_recent):
            yield from map(ArtifactName.parse, claim.inputs)


def _reason_of_kind(
    artifact: StoredArtifact, known: Known, needed: Mapping[ArtifactName, Reason]
) -> Reason | None:
    """Return why artifacts of this kind are kept, without what they descend from."""
    if artifact.name.stage == "data":
        age, reason = known.also.get("data"), Reason.DATA
    elif artifact.has_weights:
        return None
    else:
        age, reason = known.also.get("evaluations"), Reason.NO_WEIGHTS
    if age is None:
        return reason
    if artifact.created > known.now - age:
        return Reason.YOUNG
    runs = known.runs_with.get(artifact.name, ())
    is_kept = any(_reason_of_run(run, age, known, needed) is not None for run in runs)
    return Reason.RUN if is_kept else None


def _reason_of_run(
    run: Trace, age: float, known: Known, needed: Mapping[ArtifactName, Reason]
) -> Reason | None:
    """Return why what a run has left is kept."""
    if run.own is not None:
        return run.own
    if run.updated > known.now - age:
        return Reason.YOUNG
    # The last one is its policy, which may be deleted. The others are often those of other runs, too.
    trained = [name for name in run.artifacts if name.stage in known.trained]
    if trained and trained[-1] in needed:
        return Reason.RUN
    # Each stage that was ever made in a store has claimed its key there.
    if not all(name.key in known.inventory.keys for name in run.artifacts):
        return Reason.OTHER_STORE
    return None


def _descendants_first(artifacts: Mapping[ArtifactName, StoredArtifact]) -> list[StoredArtifact]:
    # Sorted, because the order of a set of texts differs between processes: two plans must list the same.
    graph = {name: sorted(artifacts[name].descends_from) for name in artifacts}
    ancestors_first = filter(artifacts.__contains__, TopologicalSorter(graph).static_order())
    # Reversed, so that an interrupted deletion leaves no artifact without what it was made of.
    return [artifacts[name] for name in ancestors_first][::-1]


def _last_use(key: str, saved: float, known: Known) -> float:
    """Return when the last attempt at a key began or saved, whichever is later; infinite if not known."""
    claim = known.claims.get(key)
    # Infinite counts as young: what is not known is kept.
    return math.inf if claim is None else max(claim.begun, saved)


def _unfinished(key: str, since: float, known: Known) -> Reason | None:
    """Return why the checkpoints or files of an unfinished stage are kept."""
    claim = known.claims.get(key)
    if claim is not None and claim.held:
        return Reason.HELD
    if since > known.now - known.unfinished_age:
        return Reason.YOUNG
    return None
