"""`rlhf prune`: deletes artifacts, checkpoints and files that nothing needs any more.

`retention` decides, `retained` says what versions need, and `removal` deletes. This module reads everything
that the decision depends on. It deletes nothing if the store or MLflow does not answer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.ops.prune.removal import (
    CachedCopy,
    remove_artifact,
    remove_checkpoints,
    remove_copy,
    remove_leftover,
    stale_copies,
)
from rlhf_core.ops.prune.retained import retained
from rlhf_core.ops.prune.retention import (
    UNFINISHED_SECONDS,
    Decision,
    Known,
    Reason,
    Subject,
    decide,
)
from rlhf_core.run.registered_policies import registry_of
from rlhf_core.run.state import process_of, read_state
from rlhf_core.storage.fencing import LEASE_TIMES, Claim, LeaseTimes, observe
from rlhf_core.storage.inventory import (
    ARTIFACTS,
    ArtifactName,
    Leftover,
    StoredArtifact,
    Unfinished,
    add_unlisted,
    artifacts_named,
    read_inventory,
)
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import Store, open_store
from rlhf_core.system.home import Home
from rlhf_core.system.waiting import SYSTEM_CLOCK, Clock, seconds_since_boot
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import CHECKPOINTS

DAY = 86_400.0
_CLOCK_SECONDS = 3600.0
"""Difference up to which the clocks of this machine and of the store agree."""
_FRESH_SECONDS = 5.0
"""Age after which the registry and the state of runs are read again before something is deleted."""
_DAYS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)d?")


@dataclass(frozen=True)
class Pending:
    """An artifact or a checkpoint in the outbox, which was not uploaded."""

    prefix: str
    size: int
    """Bytes."""
    age: float
    """Seconds."""


Deletable = Subject | Pending | CachedCopy


@dataclass(frozen=True)
class Plan:
    """What will be deleted, and what is kept."""

    known: Known
    decision: Decision
    pending: tuple[Pending, ...]
    copies: tuple[CachedCopy, ...]

    @property
    def deleted(self) -> tuple[Deletable, ...]:
        """What will be deleted, in this order."""
        return (*self.decision.deleted, *self.pending, *self.copies)

    @property
    def kept(self) -> dict[Reason, tuple[int, int]]:
        """Number and bytes of what is kept, by reason."""
        found: dict[Reason, tuple[int, int]] = {}
        for subject, reason in self.decision.kept:
            count, size = found.get(reason, (0, 0))
            found[reason] = (count + 1, size + subject.size)
        return {reason: found[reason] for reason in Reason if reason in found}

    def name(self, each: Deletable) -> str:
        """Return the name of something that will be deleted."""
        match each:
            case StoredArtifact():
                return str(each.name)
            case Leftover():
                return f"files of {each.name}"
            case Unfinished():
                return f"checkpoints of {each.key}"
            case Pending():
                return f"outbox: {each.prefix}"
            case CachedCopy():
                return f"copy of {each.name}"

    def why(self, each: Deletable) -> str:
        """Return why it will be deleted."""
        match each:
            case StoredArtifact():
                return "no version needs it"
            case Leftover():
                return "it has no manifest"
            case Unfinished():
                return "the stage was not continued"
            case Pending():
                return "it was not uploaded"
            case CachedCopy():
                return "the store does not have it"

    def age_days(self, each: Deletable) -> float | None:
        """Return its age in days; None for a copy."""
        match each:
            case StoredArtifact():
                since = each.created
            case Leftover():
                since = self.known.claims[each.name.key].begun
            case Unfinished():
                since = max(each.saved or 0.0, self.known.claims[each.key].begun or 0.0)
            case Pending():
                return each.age / DAY
            case CachedCopy():
                return None
        return None if since is None else (self.known.now - since) / DAY


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `90d` or `90`. Raises InputError."""
    found = _DAYS.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--older-than must be a number of days, such as 90d; got {text[:50]!r}; correct it")
    return float(found[1]) * DAY


def parse_date(text: str | None) -> date | None:
    """Return a date such as 2026-11-29; None for None. Raises InputError."""
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError as error:
        raise InputError(
            f"--today must be a date such as 2026-11-29; got {text!r:.50}; correct it"
        ) from error


class Pruning:
    """One execution of the command."""

    def __init__(
        self,
        store: Store,
        mlflow: Mlflow,
        home: Home,
        age: float,
        *,
        times: LeaseTimes = LEASE_TIMES,
        clock: Clock = SYSTEM_CLOCK,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: The store.
            mlflow: The registry.
            home: `run.home`, for its cache, its outbox and the state of its runs.
            age: Seconds for which everything is kept.
            times: Intervals of leases.
            clock: Clock of waits.
            now: Returns the seconds since 1970.
        """
        self._store = store
        self._mlflow = mlflow
        self._home = home
        self._age = age
        self._times = times
        self._clock = clock
        self._now = now
        self._refreshed_at = 0.0

    @classmethod
    def of(cls, config: PipelineConfig, age: float, field: str) -> Pruning:
        """Return that of a configuration. Raises InputError, which names `field`, if the database of MLflow
        does not exist.
        """
        return cls(open_store(config), registry_of(config, field), Home.of(config.run.home), age)

    def plan(self) -> Plan:
        """Return what to delete. Raises InputError if the store is empty, StoreError and InfrastructureError
        if the store or MLflow does not answer.
        """
        known = self._with_unlisted(self._known())
        if not known.inventory.artifacts and not known.inventory.keys:
            raise InputError(
                f"store.url: {self._store.url} has neither artifacts nor checkpoints; name the store of the"
                " runs"
            )
        # Only of what would be deleted, the holders are looked up.
        candidates = [each for each in decide(known).deleted if isinstance(each, StoredArtifact)]
        claims = self._observe({each.name.key for each in candidates} - known.claims.keys())
        known = replace(known, claims={**known.claims, **claims})
        decision = decide(known)
        kept = [each for each, _ in decision.kept if isinstance(each, StoredArtifact)]
        copies = () if self._store.is_local else stale_copies(self._store, self._home.cache, kept)
        # Together with the checkpoints of a key, those in the outbox are deleted.
        without = {each.key for each in decision.deleted if isinstance(each, Unfinished)}
        return Plan(known, decision, tuple(self._pending(known, without)), tuple(copies))

    def check_clock(self, plan: Plan, today: date | None = None) -> None:
        """Raise InputError if the clock of this machine may be wrong: the ages would be wrong, too.

        It must agree with the clock of the store, and no entry may be of the future. The clock of a local
        store may be the same one: its newest entry must be of the last day, or a person must give the date.

        Args:
            plan: What will be deleted.
            today: The date that a person has given.
        """
        here = datetime.fromtimestamp(self._now())
        if today is not None:
            if abs(here.date() - today) > timedelta(days=1):
                raise InputError(
                    f"--today: the clock of this machine says {here:%Y-%m-%d %H:%M}; got {today}; set it"
                )
            return
        difference = self._now() - self._store.time()
        if abs(difference) > _CLOCK_SECONDS:
            raise InputError(
                f"--delete: the clock of this machine says {here:%Y-%m-%d %H:%M}, {difference / 3600:+.1f}"
                f" hours from that of {self._store.url}; nothing was deleted; set the clock that is wrong"
            )
        inventory = plan.known.inventory
        times = [
            *(artifact.created for artifact in inventory.artifacts),
            *(checkpoints.saved for checkpoints in inventory.checkpoints),
            *(claim.begun for claim in plan.known.claims.values()),
        ]
        age = self._now() - max(time for time in [0.0, *times] if time is not None)
        limit = DAY if self._store.is_local else max(self._age, UNFINISHED_SECONDS)
        if not -_CLOCK_SECONDS <= age <= limit:
            raise InputError(
                f"--delete: the clock of this machine says {here:%Y-%m-%d %H:%M}, and the newest entry of"
                f" {self._store.url} is then {age / DAY:.1f} days old; nothing was deleted; set the clock, or"
                " add --today with the date if it is right"
            )

    def delete(self, plan: Plan) -> Iterator[tuple[Deletable, bool]]:
        """Delete what is planned, one after another. Yield each with whether it was deleted: not if it has
        changed in the meantime.
        """
        known, allowed = plan.known, set(plan.decision.deleted)
        for subject in plan.deleted:
            if self._clock.monotonic() - self._refreshed_at > _FRESH_SECONDS:
                known = self._refreshed(known)
                allowed &= set(decide(known).deleted)
            if isinstance(subject, Pending):
                yield subject, self._discard(subject)
            elif isinstance(subject, CachedCopy):
                yield subject, remove_copy(self._store, subject)
            else:
                yield subject, subject in allowed and self._remove(subject, plan.known)

    def _remove(self, subject: Subject, known: Known) -> bool:
        if isinstance(subject, StoredArtifact):
            return remove_artifact(self._store, subject, known.claims[subject.name.key])
        if isinstance(subject, Leftover):
            return remove_leftover(self._store, subject, known.claims[subject.name.key])
        return remove_checkpoints(self._store, subject.key, known.claims[subject.key], self._home)

    def _known(self) -> Known:
        inventory = read_inventory(self._store)
        finished = {artifact.name.key for artifact in inventory.artifacts}
        keys = {
            *(inventory.keys - finished),
            *(leftover.name.key for leftover in inventory.leftovers),
            *(checkpoints.key for checkpoints in inventory.checkpoints),
        }
        # After the artifacts: what has become one in the meantime was begun less than a week ago.
        claims = self._observe(keys)
        return self._refreshed(Known(inventory, claims, (), (), (), self._now(), self._age))

    def _with_unlisted(self, known: Known) -> Known:
        """Return `known` with the artifacts that a version, run or stage needs and that no listing has."""
        inputs = [ArtifactName.parse(text) for claim in known.claims.values() for text in claim.inputs or ()]
        named = [*known.needed, *known.in_use, *inputs]
        return replace(known, inventory=add_unlisted(self._store, known.inventory, named))

    def _refreshed(self, known: Known) -> Known:
        """Return `known` with what the registry, the runs of this home and the jobs need now."""
        runs = list(self._of_runs())
        of_runs = [name for _, names in runs for name in names]
        in_use = frozenset([*of_runs, *self._of_jobs()])
        started = min((start for start, _ in runs), default=math.inf)
        needed, registered = retained(self._mlflow)
        self._refreshed_at = self._clock.monotonic()
        return replace(known, needed=needed, registered=registered, in_use=in_use, running_since=started)

    def _observe(self, keys: set[str]) -> dict[str, Claim]:
        return observe(self._store, keys, self._times, self._clock)

    def _of_runs(self) -> Iterator[tuple[float, list[ArtifactName]]]:
        """Yield the start and the artifacts of each run of this home that has not ended. A run can need later
        what no stage reads now.
        """
        for file in self._home.run_states():
            state = read_state(file)
            if state is None or state["state"] != "running":
                continue
            process = process_of(state)
            alive = process.alive()
            names = [ArtifactName(stage, str(each.get("key"))) for stage, each in state["stages"].items()]
            if alive:
                running = seconds_since_boot() - process.started
                # Negative if an earlier release has recorded the seconds since 1970.
                yield self._now() - running if running >= 0 else process.started, names
            # It is on another host, or that host has gone. Its start is not known.
            elif alive is None and state["updated"] > self._now() - UNFINISHED_SECONDS:
                yield state["updated"] - UNFINISHED_SECONDS, names

    def _of_jobs(self) -> Iterator[ArtifactName]:
        """Yield the artifacts that jobs read, of which some may wait in a queue."""
        for key in self._store.folders("jobs"):
            job = JobFiles.newest(self._store, key)
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                content = json.loads(self._store.read_bytes(f"{job.folder}/spec.json") or b"") if job else {}
                if content["time"] > self._now() - max(self._age, UNFINISHED_SECONDS):
                    for stage, ref in content["spec"]["inputs"].items():
                        yield ArtifactName(stage, ref["key"])
                    yield from artifacts_named(content["spec"]["config"])

    def _pending(self, known: Known, without: Collection[str]) -> Iterator[Pending]:
        """Yield what no run has uploaded for longer than the age, of keys that nobody holds and that are not
        in `without`.
        """
        outbox = Outbox.of(self._store, self._home.outbox)
        if outbox is None:
            return
        prefixes = [*outbox.pending(ARTIFACTS), *outbox.pending(CHECKPOINTS)]
        keys = {
            prefix: prefix.split("/")[2 if prefix.startswith(f"{ARTIFACTS}/") else 1] for prefix in prefixes
        }
        claims = {**self._observe(set(keys.values()) - known.claims.keys()), **known.claims}
        for prefix, key in keys.items():
            manifest, age = outbox.manifest(prefix), outbox.age(prefix)
            is_free = key not in without and not claims[key].held
            if manifest is not None and is_free and age > max(self._age, UNFINISHED_SECONDS):
                yield Pending(prefix, sum(entry.size for entry in manifest.files), age)

    def _discard(self, pending: Pending) -> bool:
        outbox = Outbox.of(self._store, self._home.outbox)
        # Younger if a run has added another one in the meantime.
        if outbox is None or outbox.age(pending.prefix) < pending.age:
            return False
        outbox.discard(pending.prefix)
        return True
