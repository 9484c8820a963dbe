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
from datetime import datetime

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.executors.job_files import JobFiles
from rlhf_core.ops.prune.removal import remove, remove_copy, stale_copies
from rlhf_core.ops.prune.retained import retained
from rlhf_core.ops.prune.retention import (
    UNFINISHED_SECONDS,
    CachedCopy,
    Item,
    Known,
    Pending,
    Reason,
    decide,
)
from rlhf_core.run.registered_policies import registry_of
from rlhf_core.run.state import process_of, read_state
from rlhf_core.storage.fencing import observe
from rlhf_core.storage.inventory import (
    ARTIFACTS,
    ArtifactName,
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
class Plan:
    """What will be deleted, and what is kept."""

    known: Known
    deleted: tuple[Item, ...]
    """What will be deleted, in this order."""
    kept: tuple[Item, ...]

    def count_kept(self) -> dict[Reason, tuple[int, int]]:
        """Return number and bytes of what is kept, by reason."""
        counts = {}
        for reason in Reason:
            sizes = [item.size for item in self.kept if item.reason is reason]
            if sizes:
                counts[reason] = (len(sizes), sum(sizes))
        return counts


def parse_age(text: str) -> float:
    """Return the seconds of an age such as `90d` or `90`. Raises InputError."""
    found = _DAYS.fullmatch(text.strip())
    if found is None:
        raise InputError(f"--older-than must be a number of days, such as 90d; got {text[:50]!r}; correct it")
    return float(found[1]) * DAY


class Pruning:
    """One execution of the command."""

    def __init__(
        self,
        store: Store,
        mlflow: Mlflow,
        home: Home,
        age: float,
        *,
        clock: Clock = SYSTEM_CLOCK,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: The store.
            mlflow: The registry.
            home: `run.home`, for its cache, its outbox and the state of its runs.
            age: Seconds for which everything is kept.
            clock: Clock of waits.
            now: Returns the seconds since 1970.
        """
        self._store = store
        self._mlflow = mlflow
        self._home = home
        self._age = age
        self._outbox = Outbox.of(store, home.outbox)
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
        known = self._known()
        items = decide(known)
        deleted = [item for item in items if item.reason is None]
        kept = [item for item in items if item.reason is not None]
        # Together with the checkpoints of a key, those in the outbox are deleted.
        done = {item.subject.key for item in deleted if isinstance(item.subject, Unfinished)}
        deleted += self._pending(known, done)
        if not self._store.is_local:
            present = [item.subject for item in kept if isinstance(item.subject, StoredArtifact)]
            for copy in stale_copies(self._store, self._home.cache, present):
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
        known = plan.known
        allowed = {item.subject for item in plan.deleted}
        for item in plan.deleted:
            subject = item.subject
            if self._clock.monotonic() - self._refreshed_at > _FRESH_SECONDS:
                known = self._refreshed(known)
                allowed = {each.subject for each in decide(known) if each.reason is None}
            if isinstance(subject, Pending):
                deleted = self._discard(subject.prefix)
            elif isinstance(subject, CachedCopy):
                deleted = remove_copy(self._store, subject)
            else:
                key = subject.key if isinstance(subject, Unfinished) else subject.name.key
                deleted = subject in allowed and remove(self._store, subject, known.claims[key], self._home)
            yield item, deleted

    def _known(self) -> Known:
        inventory = read_inventory(self._store)
        if not inventory.artifacts and not inventory.keys:
            raise InputError(
                f"store.url: {self._store.url} has neither artifacts nor checkpoints; name the store of the"
                " runs"
            )
        keys = {
            *inventory.keys,
            *(artifact.name.key for artifact in inventory.artifacts),
            *(leftover.name.key for leftover in inventory.leftovers),
            *self._keys_of_outbox().values(),
        }
        # After the artifacts: what has become one in the meantime was begun less than a week ago.
        claims = observe(self._store, keys, clock=self._clock)
        known = self._refreshed(Known(inventory, claims, (), (), (), self._now(), self._age))
        # What a version, run or stage needs, and no listing has.
        inputs = [ArtifactName.parse(text) for claim in claims.values() for text in claim.inputs or ()]
        inventory = add_unlisted(self._store, inventory, [*known.needed, *known.in_use, *inputs])
        unlisted = {artifact.name.key for artifact in inventory.artifacts} - keys
        claims |= observe(self._store, unlisted, clock=self._clock)
        return replace(known, inventory=inventory, claims=claims)

    def _refreshed(self, known: Known) -> Known:
        """Return `known` with what the registry, the runs of this home and the jobs need now."""
        runs = list(self._of_runs())
        of_runs = [name for _, names in runs for name in names]
        in_use = frozenset([*of_runs, *self._of_jobs()])
        started = min((start for start, _ in runs), default=math.inf)
        needed, registered = retained(self._mlflow)
        self._refreshed_at = self._clock.monotonic()
        return replace(known, needed=needed, registered=registered, in_use=in_use, running_since=started)

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
                yield self._now() - (seconds_since_boot() - process.started), names
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

    def _keys_of_outbox(self) -> dict[str, str]:
        """Return the stage key of each bundle in the outbox, by its prefix."""
        if self._outbox is None:
            return {}
        keys = {prefix: prefix.split("/")[2] for prefix in self._outbox.pending(ARTIFACTS)}
        return keys | {prefix: prefix.split("/")[1] for prefix in self._outbox.pending(CHECKPOINTS)}

    def _pending(self, known: Known, done: Collection[str]) -> Iterator[Item]:
        """Yield what no run has uploaded for longer than the age, of keys that nobody holds and that are not
        in `done`.
        """
        for prefix, key in self._keys_of_outbox().items():
            assert self._outbox is not None
            manifest, age = self._outbox.manifest(prefix), self._outbox.age(prefix)
            is_free = key not in done and key in known.claims and not known.claims[key].held
            if manifest is not None and is_free and age > known.unfinished_age:
                pending = Pending(prefix, sum(entry.size for entry in manifest.files))
                yield Item(pending, f"outbox: {prefix}", "it was not uploaded", known.now - age)

    def _discard(self, prefix: str) -> bool:
        # Younger if a run has added another one in the meantime.
        if self._outbox is None or self._outbox.age(prefix) <= max(self._age, UNFINISHED_SECONDS):
            return False
        self._outbox.discard(prefix)
        return True
