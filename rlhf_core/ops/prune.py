"""`rlhf prune`: deletes artifacts, checkpoints and files that nothing needs any more.

`retention` decides. This module reads everything that the decision
depends on, and deletes. It deletes nothing if the store or MLflow does not answer. After a kill, no artifact
has a manifest and lacks files:

    claim the stage key -> read the manifest again -> delete the manifest -> delete its files one by one

- While the key is claimed, no other attempt makes the stage, and a superseded one cannot commit. The claim
  has the number after the last one that was observed, so if any attempt has begun since then, nothing is
  deleted.
- Only the folder that the manifest names is deleted. Attempts have folders of their own, with numbers that
  are used once.
- A kill in between leaves files without a manifest, as that of an upload does. They are deleted only if the
  last attempt began so long ago that it cannot go on: it could commit a manifest between the claim of this
  process and its own next look at the claims.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.errors import InputError, Superseded
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.ops.retention import (
    KINDS,
    UNFINISHED_SECONDS,
    CachedCopy,
    Item,
    Known,
    Pending,
    Reason,
    Trace,
    decide,
)
from rlhf_core.pipeline import STAGES
from rlhf_core.run.registered_policies import registry_of
from rlhf_core.run.state import process_of, read_state
from rlhf_core.storage.artifacts import (
    annotations_copy,
    parse_artifact_address,
    parse_artifact_copy,
    store_file,
)
from rlhf_core.storage.bundles import MANIFEST, bytes_below
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.fencing import Claim, Fence, claim_next, observe, renewed
from rlhf_core.storage.inventory import (
    ARTIFACTS,
    ArtifactName,
    Leftover,
    StoredArtifact,
    Unfinished,
    add_unlisted,
    artifacts_named,
    read_artifact,
    read_inventory,
)
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store, open_store
from rlhf_core.system.home import Home
from rlhf_core.system.waiting import SYSTEM_CLOCK, Clock, seconds_since_boot
from rlhf_core.tracking.champion_log import Move, read_log, without_logs
from rlhf_core.tracking.champions import WEIGHTS, registry_errors, revocation
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, PastRun, UnusableAnswer, sqlite_path
from rlhf_core.tracking.tracker import PARENT, PIPELINE_KEY, STAGE, STAGE_KEY
from rlhf_core.types import CHECKPOINTS, artifact_prefix

DAY = 86_400.0
_CLOCK_SECONDS = 3600.0
"""Difference up to which the clocks of this machine and of the store agree."""
_FRESH_SECONDS = 5.0
"""Age after which the registry and the state of runs are read again before something is deleted."""
_DAYS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)d?")
_KEY = re.compile(r"rlhf\.([a-z]+)\.key")
"""Tag of a version with the key of one of its artifacts."""


@dataclass(frozen=True)
class Plan:
    """What will be deleted, and what is kept."""

    known: Known
    deleted: tuple[Item, ...]
    """What will be deleted, in this order."""
    kept: tuple[Item, ...]

    def groups(self) -> dict[tuple[str, Reason | None], list[Item]]:
        """Return everything by kind, and by the reason for which it is kept; None: it will be deleted."""
        found: dict[tuple[str, Reason | None], list[Item]] = {}
        for item in [*self.deleted, *self.kept]:
            # Labels begin with the stage of an artifact, or with what else it is: `checkpoints of ...`.
            kind = item.label.partition("/")[0].partition(" ")[0].rstrip(":")
            found.setdefault((kind, item.reason), []).append(item)
        return found

    def versions(self, items: Iterable[Item]) -> list[str]:
        """Return the versions that need artifacts, by name and number."""
        names: set[Any] = {getattr(item.subject, "name", None) for item in items}
        versions = {version for name in names for version in self.known.versions.get(name, ())}
        return sorted(versions, key=_natural)


def _natural(version: str) -> tuple[str, int]:
    """Return what sorts versions by name and number."""
    name, _, number = version.rpartition(" ")
    # As a number, so that version 10 comes after version 9.
    return name, int(number)


def parse_age(text: str, option: str = "--older-than") -> float:
    """Return the seconds of an age such as `90d` or `90`. Raises InputError."""
    found = _DAYS.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{option} must be a number of days, such as 90d; got {text[:50]!r}; correct it")
    return float(found[1]) * DAY


def parse_kinds(texts: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each `KIND=DAYS`, by kind. Raises InputError."""
    found = {}
    for text in texts:
        kind, _, days = text.partition("=")
        if kind not in KINDS:
            raise InputError(f"--also {text[:50]}: name KIND=DAYS with one of {', '.join(KINDS)}")
        found[kind] = parse_age(days, f"--also {kind}")
    return found


class Pruning:
    """One execution of the command."""

    def __init__(
        self,
        store: Store,
        mlflow: Mlflow,
        home: Home,
        age: float,
        *,
        also: Mapping[str, float] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: The store.
            mlflow: The registry.
            home: `run.home`, for its cache, its outbox and the state of its runs.
            age: Seconds for which everything is kept.
            also: Seconds after which other kinds are deleted (`KINDS`). The others are not deleted.
            clock: Clock of waits.
            now: Returns the seconds since 1970.
        """
        self._store = store
        self._mlflow = mlflow
        self.home = home
        self._age = age
        self._also = also or {}
        self._outbox = Outbox.of(store, home.outbox)
        self._clock = clock
        self._now = now
        self._refreshed_at = 0.0

    @classmethod
    def of(cls, config: PipelineConfig, age: float, also: Mapping[str, float], field: str) -> Pruning:
        """Return that of a configuration. Raises InputError, which names `field`, if the database of MLflow
        does not exist.
        """
        home = Home.of(config.run.home)
        return cls(open_store(config), registry_of(config, field), home, age, also=also)

    def plan(self) -> Plan:
        """Return what to delete. Raises InputError if the store is empty, StoreError and InfrastructureError
        if the store or MLflow does not answer.
        """
        known = self._known()
        items = decide(known)
        deleted = [item for item in items if item.reason is None]
        kept = [item for item in items if item.reason is not None]
        deleted += self._pending(known)
        if not self._store.is_local:
            present = [item.subject for item in kept if isinstance(item.subject, StoredArtifact)]
            for copy in stale_copies(self._store, self.home.cache, present):
                deleted.append(Item(copy, f"copy of {copy.name}", "the store does not have it"))
        return Plan(known, tuple(deleted), tuple(kept))

    def check_clock(self) -> None:
        """Raise InputError if the clock of this machine differs from that of the store: the ages would be
        wrong.
        """
        here = datetime.fromtimestamp(self._now())
        difference = self._now() - self._store.time()
        if abs(difference) > _CLOCK_SECONDS:
            raise InputError(
                f"--delete: the clock of this machine says {here:%Y-%m-%d %H:%M}, {difference / 3600:+.1f}"
                f" hours from that of {self._store.url}; nothing was deleted; set the clock that is wrong"
            )

    def delete(self, plan: Plan) -> Iterator[tuple[Item, bool]]:
        """Delete what is planned, one after another. Yield each with whether it was deleted: not if it has
        changed in the meantime.
        """
        known, claims = plan.known, dict(plan.known.claims)
        allowed = {item.subject for item in plan.deleted}
        for item in plan.deleted:
            subject = item.subject
            # A deletion can take hours, in which a version can become champion.
            if self._clock.monotonic() - self._refreshed_at > _FRESH_SECONDS:
                known = self._refreshed(known)
                allowed = {each.subject for each in decide(known) if each.reason is None}
            if isinstance(subject, CachedCopy):
                deleted = remove_copy(self._store, subject)
            elif isinstance(subject, Trace):
                deleted = subject in allowed and self._remove_trace(subject)
            else:
                is_allowed = subject in allowed or isinstance(subject, Pending)
                claim = claims[subject.key]
                deleted = is_allowed and remove(self._store, subject, claim, self.home)
                if deleted:  # its own claim is the last one now
                    claims[subject.key] = replace(claim, attempt=claim.attempt + 1)
            yield item, deleted

    def _remove_trace(self, trace: Trace) -> bool:
        if trace.kind != "mlflow":
            return remove_from_home(self.home, trace)
        with registry_errors(self._mlflow, f"delete the run {trace.name}"):
            return remove_from_mlflow(self._mlflow, trace)

    def _known(self) -> Known:
        inventory = read_inventory(self._store)
        if not inventory.artifacts and not inventory.keys:
            raise InputError(
                f"store.url: {self._store.url} has neither artifacts nor checkpoints; name the store of the"
                " runs"
            )
        keys = {
            *inventory.keys,
            *(artifact.key for artifact in inventory.artifacts),
            *(leftover.key for leftover in inventory.leftovers),
            *self._keys_of_outbox().values(),
        }
        # After the artifacts: what has become one in the meantime was begun less than a week ago.
        claims = observe(self._store, keys, clock=self._clock)
        known = Known(inventory, claims, (), (), (), self._now(), self._age, also=self._also)
        with registry_errors(self._mlflow, "list its runs"):
            known = replace(known, traces=traces_of_mlflow(self._mlflow, self.home, self._also))
        known = self._refreshed(known)
        # What a version, run or stage needs, and no listing has.
        texts = chain.from_iterable(claim.inputs for claim in claims.values())
        inputs = list(map(ArtifactName.parse, texts))
        inventory = add_unlisted(self._store, inventory, [*known.needed, *known.in_use, *inputs])
        unlisted = {artifact.key for artifact in inventory.artifacts} - keys
        claims |= observe(self._store, unlisted, clock=self._clock)
        return replace(known, inventory=inventory, claims=claims)

    def _refreshed(self, known: Known) -> Known:
        """Return `known` with what the registry, the runs of this home and the jobs need now."""
        runs = list(self._of_runs())
        of_runs = chain.from_iterable(names for _, names in runs)
        in_use = frozenset([*of_runs, *self._of_jobs()])
        started = min((start for start, _ in runs), default=math.inf)
        versions, registered = retained(self._mlflow)
        # Those of MLflow are looked at again one by one, before they are deleted.
        traces = [trace for trace in known.traces if trace.kind == "mlflow"]
        self._refreshed_at = self._clock.monotonic()
        return replace(
            known,
            needed=versions.keys(),
            versions=versions,
            registered=registered,
            in_use=in_use,
            running_since=started,
            traces=[*traces, *traces_of_home(self.home)],
        )

    def _of_runs(self) -> Iterator[tuple[float, list[ArtifactName]]]:
        """Yield the start and the artifacts of each run of this home that has not ended, and infinity and the
        artifacts of each that is young. A run can need later what no stage reads now.
        """
        for file in self.home.run_states():
            state = read_state(file)
            if state is None:
                continue
            names = [ArtifactName(stage, str(each.get("key"))) for stage, each in state["stages"].items()]
            if state["updated"] > self._now() - self._age:
                yield math.inf, names
            if state["state"] != "running":
                continue
            process = process_of(state)
            alive = process.alive()
            if alive:
                # The start of a process is in seconds since the boot of this host.
                yield self._now() - (seconds_since_boot() - process.started), names
            # It is on another host, or that host has gone. Its start is not known.
            elif alive is None and state["updated"] > self._now() - UNFINISHED_SECONDS:
                yield state["updated"] - UNFINISHED_SECONDS, names

    def _of_jobs(self) -> Iterator[ArtifactName]:
        """Yield the artifacts that jobs read, of which some may wait in a queue."""
        for key in self._store.folders("jobs"):
            job = JobFiles.newest(self._store, key)
            # A job of another release, or one that is being written, names nothing that can be read.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                content = json.loads(self._store.read_bytes(f"{job.folder}/spec.json") or b"") if job else {}
                if content["time"] > self._now() - max(self._age, UNFINISHED_SECONDS):
                    for stage, ref in content["spec"]["inputs"].items():
                        yield ArtifactName(stage, ref["key"])
                    yield from artifacts_named(content["spec"]["config"])

    def _keys_of_outbox(self) -> dict[str, str]:
        """Return the stage key of each bundle in the outbox, by its prefix."""
        if self._outbox is None:
            return {}
        # A prefix is artifacts/STAGE/KEY or checkpoints/KEY/STEP.
        keys = {prefix: prefix.split("/")[2] for prefix in self._outbox.pending(ARTIFACTS)}
        return keys | {prefix: prefix.split("/")[1] for prefix in self._outbox.pending(CHECKPOINTS)}

    def _pending(self, known: Known) -> Iterator[Item]:
        """Yield what no run has uploaded for longer than the age, of keys that nobody holds."""
        for prefix, key in self._keys_of_outbox().items():
            assert self._outbox is not None
            manifest, age = self._outbox.manifest(prefix), self._outbox.age(prefix)
            is_free = key in known.claims and not known.claims[key].held
            if manifest is not None and is_free and age > known.unfinished_age:
                pending = Pending(prefix, key, sum(entry.size for entry in manifest.files))
                yield Item(pending, f"outbox: {prefix}", "it was not uploaded", known.now - age)


# -- what registered versions need --


class Retained(NamedTuple):
    """What the registry says about artifacts."""

    versions: Mapping[ArtifactName, Sequence[str]]
    """The artifacts of the versions that keep them, with the names of these versions."""
    registered: frozenset[tuple[str, str]]
    """Name of the model and digest of the weights of every version."""


def retained(mlflow: Mlflow) -> Retained:
    """Return what the registered versions need. Raises InfrastructureError if MLflow does not answer.

    The versions are those of all registered models of the tracker. A version keeps its artifacts if

    - it has an alias, such as `champion`, `candidate` (the newest one) or one that a person has set;
    - a move in the history of champions names it, and it is not revoked: `rlhf rollback` can choose it;
    - it was promoted by an earlier release without a history, and is not revoked;
    - another program registered it.

    Any other version that is not revoked can become champion by `rlhf promote`. Its artifacts are kept while
    they are young. An alias keeps them longer.
    """
    needed: dict[ArtifactName, list[str]] = {}
    registered: set[tuple[str, str]] = set()
    with registry_errors(mlflow, "list the versions of its models"):
        for name in without_logs(mlflow.all_model_names()):
            # The aliases and moves first, so that their versions exist when those are listed.
            aliased, moves = set(mlflow.aliases(name).values()), read_log(mlflow, name).moves
            versions = mlflow.versions(name)
            # The artifacts of a champion that the listing lacks would look as if nothing needed them.
            missing = aliased - {version.version for version in versions}
            if missing:
                raise UnusableAnswer(f"version {min(missing)} of {name} has an alias, and is not listed")
            for version in _kept(versions, moves, aliased):
                for artifact in dict.fromkeys(artifacts_of(version)):
                    needed.setdefault(artifact, []).append(f"{name} {version.version}")
            registered.update((name, version.tags.get(WEIGHTS, "")) for version in versions)
    return Retained(needed, frozenset(registered))


def artifacts_of(version: ModelVersion) -> Iterator[ArtifactName]:
    """Yield the artifacts that the tags of a version, and the address of its files, name."""
    for tag, key in version.tags.items():
        if found := _KEY.fullmatch(tag):
            yield ArtifactName(found[1], key)
    if address := parse_artifact_address(version.source):
        yield ArtifactName(address.stage, address.key)


def _kept(
    versions: Sequence[ModelVersion], moves: Sequence[Move], aliased: set[str]
) -> Iterator[ModelVersion]:
    in_history = {move.version for move in moves} | {move.previous for move in moves}
    for version in versions:
        is_foreign = not any(map(_KEY.fullmatch, version.tags))
        was_champion = version.version in in_history
        is_usable = revocation(version, versions, moves) is None
        if version.version in aliased or is_foreign or (was_champion and is_usable):
            yield version


# -- deletion --


def remove(
    store: Store, subject: StoredArtifact | Leftover | Unfinished | Pending, claim: Claim, home: Home
) -> bool:
    """Delete an artifact, the folders of one without a manifest, the checkpoints of a stage key, or a bundle
    of the outbox.

    Return False if it has changed, or if its key was claimed by another attempt since `claim` was observed.
    """
    # `put_if_absent` of the next number: two commands at the same time cannot both get it.
    fence = claim_next(store, subject.key, claim)
    if fence is None:
        return False
    outbox = Outbox.of(store, home.outbox)
    # Many files can take longer than a lease lasts, after which another attempt takes the key.
    with renewed(fence), suppress(Superseded):
        fence.check()
        if isinstance(subject, Pending):
            assert outbox is not None
            outbox.discard(subject.prefix)
            return True
        if isinstance(subject, Unfinished):
            # Also those in the outbox of this machine. Damaged ones stay.
            CheckpointStore(store, subject.key, home.cache, StoreConfig(), fence, outbox=outbox).clear()
            return True
        if _is_unchanged(store, subject):
            return _remove_files(store, subject, fence)
    return False


def _is_unchanged(store: Store, subject: StoredArtifact | Leftover) -> bool:
    if isinstance(subject, Leftover):
        return not store.exists(f"{artifact_prefix(*subject.name)}/{MANIFEST}")
    now = read_artifact(store, subject.name)
    return now is not None and (now.folders, now.digest) == (subject.folders, subject.digest)


def _remove_files(store: Store, subject: StoredArtifact | Leftover, fence: Fence) -> bool:
    """Delete files one by one. Raises Superseded if another attempt claims the key first.

    An attempt can upload files from its outbox to a folder that had them before.
    """
    prefix = artifact_prefix(*subject.name)
    fence.check()
    store.delete([f"{prefix}/{MANIFEST}"])
    with suppress(Superseded):  # what is left has no manifest
        for folder in subject.folders:
            for key in store.list(f"{prefix}/{folder}"):
                fence.check()
                store.delete([key])
            fence.check()
            # What a local store does not list: empty folders, and unfinished writes.
            store.delete_prefix(f"{prefix}/{folder}")
    return True


def stale_copies(store: Store, cache: Path, artifacts: Collection[StoredArtifact]) -> Iterator[CachedCopy]:
    """Yield the copies of artifacts that the store does not have any more.

    A copy without the file that names its store is left out.

    Args:
        store: The store. None of a local one is copied.
        cache: Folder of the copies.
        artifacts: What the store has, or will still have.
    """
    present = {artifact.copy_name for artifact in artifacts}
    for folder in sorted(cache.glob("artifacts-*")):
        copy = parse_artifact_copy(str(folder))
        if copy is not None and copy.store == store.url and folder.name not in present and folder.is_dir():
            yield CachedCopy(ArtifactName(copy.stage, copy.key), folder, bytes_below(folder))


def remove_copy(store: Store, copy: CachedCopy) -> bool:
    """Delete a copy. Return False if the store has its artifact."""
    artifact = read_artifact(store, copy.name)
    if artifact is not None and artifact.copy_name == copy.folder.name:
        return False
    shutil.rmtree(copy.folder, ignore_errors=True)
    shutil.rmtree(annotations_copy(copy.folder), ignore_errors=True)
    # Last: `stale_copies` passes over a copy without this file, so that nobody would find what a kill left.
    store_file(copy.folder).unlink(missing_ok=True)
    return True


# -- what runs have left outside the store: in `run.home` and in MLflow --


_JOBS = "jobs"
"""Folder in `logs` with the logs of jobs of all runs."""


def traces_of_home(home: Home) -> list[Trace]:
    """Return what runs have left in `run.home`."""
    runs, logs = sorted(home.runs.glob("*/")), sorted(home.logs.glob("*/"))
    # Before the folders of the runs, which say what the logs are of.
    found = [_of_folder("logs", folder, home) for folder in logs if folder.name != _JOBS]
    found += [_of_folder("runs", folder, home) for folder in runs]
    others = [*home.run_logs(_JOBS).glob("*"), *home.all_stacks.glob("*/")]
    found += [_of_folder("logs", path, home) for path in sorted(others)]
    return found


def traces_of_mlflow(mlflow: Mlflow, home: Home, also: Collection[str]) -> list[Trace]:
    """Return the runs of all pipelines in MLflow. If no kind of `also` depends on them, return one entry for
    all, whose size is 0 if they are not in `run.home`: MLflow reads a hundred runs in a second.
    """
    database = sqlite_path(mlflow.uri)
    size = database.stat().st_size if database is not None and database.exists() else 0
    # Artifacts, too: the home has only its own runs.
    if not {"mlflow", "data", "evaluations"}.intersection(also):
        size += bytes_below(home.mlflow_artifacts)
        return [Trace("mlflow", "of all runs", (), size, math.inf)]
    runs = mlflow.past_runs()
    members: dict[str, list[PastRun]] = {run.run_id: [run] for run in runs if PIPELINE_KEY in run.tags}
    for run in runs:
        if run.tags.get(PARENT) in members and STAGE_KEY in run.tags:
            members[run.tags[PARENT]].append(run)
    return [_of_pipeline(pipeline, size // len(runs), home) for pipeline in members.values()]


def remove_from_home(home: Home, trace: Trace) -> bool:
    """Delete what a run has left in `run.home`. Return False if it has changed."""
    path = Path(*trace.where)
    if not path.exists() or _of_folder(trace.kind, path, home) != trace:
        return False
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return True


def remove_from_mlflow(mlflow: Mlflow, trace: Trace) -> bool:
    """Delete the runs of a pipeline. Return False if the pipeline has run again."""
    pipeline = mlflow.past_run(trace.where[0])
    if pipeline is None or not pipeline.finished or pipeline.updated > trace.updated:
        return False
    # The pipeline last: it is what the next command finds after a kill.
    for run_id in reversed(trace.where):
        mlflow.delete_for_good(run_id)
    return True


def _of_folder(kind: str, path: Path, home: Home) -> Trace:
    run = home.run(path.name)
    own = _votes(run)
    state = read_state(run / "run.json")
    if state is None:  # it is of no run, or of one whose folder was deleted
        files = [path, *path.rglob("*")]
        updated = max(file.stat().st_mtime for file in files if file.exists())
        return Trace(kind, path.name, (str(path),), _size(path), updated, own=own)
    if state["state"] != "finished":
        own = Reason.UNFINISHED
    artifacts = _artifacts((stage, str(each.get("key"))) for stage, each in state["stages"].items())
    return Trace(kind, path.name, (str(path),), _size(path), state["updated"], artifacts, own)


def _votes(run: Path) -> Reason | None:
    return Reason.VOTES if (run / "review").exists() else None


def _size(path: Path) -> int:
    return bytes_below(path) if path.is_dir() else path.stat().st_size


def _of_pipeline(runs: list[PastRun], share: int, home: Home) -> Trace:
    """Return the runs of a pipeline and of its stages. `share` is the size of a run in the database."""
    # An estimate: SQLite does not say what one run takes, and the file does not shrink after a deletion.
    size = share * len(runs)
    size += sum(bytes_below(run.folder) for run in runs if run.folder is not None)
    artifacts = _artifacts((run.tags.get(STAGE, ""), run.tags[STAGE_KEY]) for run in runs[1:])
    own = _votes(home.run(runs[0].name)) if all(run.finished for run in runs) else Reason.UNFINISHED
    where = tuple(run.run_id for run in runs)
    updated = max(run.updated for run in runs)
    return Trace("mlflow", runs[0].name, where, size, updated, artifacts, own)


def _artifacts(keys: Iterable[tuple[str, str]]) -> tuple[ArtifactName, ...]:
    """Return names of artifacts in the order of the stages, from stages and their keys."""
    order: list[str] = list(STAGES)
    names = [ArtifactName(stage, key) for stage, key in keys if stage in order]
    return tuple(sorted(names, key=lambda name: order.index(name.stage)))
