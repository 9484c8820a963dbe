"""Fencing: only one attempt at a time may commit for a stage key.

Attempts are numbered by objects that are created only if absent, in `{store}/checkpoints/{stage
key}/attempts/%06d.json`. Only the attempt with the highest number commits checkpoints and artifacts, so a
process that was believed dead cannot overwrite its successor.

An attempt has a lease: while it runs, it rewrites `attempts/%06d.beat` in intervals (`LeaseTimes`), and at
its end it writes there that it has ended (`renewed`). `acquire` claims a key as soon as no other attempt
holds it:

    holder on this machine      it is alive as long as its process; after a minute an error names it
    holder on another machine   it is alive as long as that object changes; it is superseded after three
                                intervals without a change

Only changes are observed, with the clock of the observer, so the clocks of machines need not agree.

`rlhf prune` claims a key as well before it deletes what was stored for it, but does not wait for a holder
(`observe`, `claim_next`). Claims are never deleted: a number that is used twice would be the name of two
folders of files.

One request separates the last check of the attempts from the manifest. An attempt that is superseded in
between can still add a complete bundle that no other attempt has committed. It cannot change an existing one,
because manifests are created only if absent, and it belongs to the same stage key.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlhf_core.errors import StageHeld, StoreError, Superseded
from rlhf_core.storage.bundles import in_parallel
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId, RecordedProcess, here
from rlhf_core.system.waiting import SYSTEM_CLOCK, Clock
from rlhf_core.types import checkpoint_prefix

log = logging.getLogger(__name__)

PRUNE = "prune"
"""Stands for the stage in the claims of `rlhf prune`."""
_ENDED = b"ended"
_MAX_CLAIMS = 1000
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised when a record is read that `acquire` has not written."""


@dataclass(frozen=True)
class LeaseTimes:
    """Intervals and waits of leases, in seconds."""

    wait: float = 60.0
    """Longest wait for a holder on this machine. A stage whose flow was killed may take 20 s to stop, and its
    reaper a little longer.
    """
    renewal: float = 10.0
    """Interval in which the lease of an attempt is renewed."""
    missed_renewals: int = 3
    """Intervals without a renewal after which an attempt on another machine counts as dead."""
    local_poll: float = 0.5
    """Interval in which a holder on this machine is observed."""
    remote_poll: float = 2.0
    """Interval in which a holder on another machine is observed."""
    release: float = 5.0
    """Longest wait for a renewal under way, before the lease is released."""

    @property
    def takeover(self) -> float:
        """Time without a renewal after which an attempt on another machine counts as dead."""
        return self.missed_renewals * self.renewal


@dataclass(frozen=True)
class Fence:
    """The right of an attempt to commit for a stage key, until a later attempt claims the key."""

    store: Store
    stage_key: str
    attempt: int
    """1, 2, ..."""

    def check(self) -> None:
        """Raise Superseded if a later attempt has claimed the stage key.

        It looks for the next claim, and relies on claims never being deleted one by one.
        """
        # By its key, because a listing may lack it.
        if self.store.exists(_key(self.stage_key, self.attempt + 1)):
            latest = _latest(self.store, self.stage_key)
            holder = _read_holder(self.store, self.stage_key, latest)
            raise Superseded(
                f"Attempt {self.attempt} at stage {self.stage_key} must not commit: attempt {latest} "
                f"({'an unknown process' if holder is None else holder.describe()}) has taken over."
            )


def acquire(
    store: Store,
    stage_key: str,
    name: str,
    times: LeaseTimes = LeaseTimes(),
    clock: Clock = SYSTEM_CLOCK,
    *,
    inputs: Collection[str] = (),
) -> Fence:
    """Claim the key of a stage when no other attempt holds it.

    Raises StageHeld if a process of this machine holds it for longer than `times.wait`. A holder on another
    machine is waited for as long as it renews its lease.

    Args:
        store: The store with the attempts.
        stage_key: The key.
        name: Name of the stage.
        times: Intervals of the leases, the same for all attempts at this key.
        clock: Clock of the waits.
        inputs: The artifacts that the stage reads, as `stage/key`.
    """
    waited = False
    holder: _Holder | None = None
    for _ in range(_MAX_CLAIMS):
        while True:
            attempt = _latest(store, stage_key)
            # The same holder is kept, with the time for which it was observed.
            if holder is None or holder.attempt != attempt:
                holder = _read_holder(store, stage_key, attempt)
            # None: no attempt has claimed the key yet, or its record cannot be read.
            if holder is None or not holder.is_alive(store, stage_key, times, clock):
                break
            if holder.is_here and holder.seconds > times.wait:
                raise StageHeld(
                    f"stage {name} of this configuration is being made by {holder.describe()}; wait until it"
                    f" is done, or end its run and type the command again"
                )
            if not waited:
                limit = f" for up to {times.wait:g} s" if holder.is_here else ""
                log.warning("stage %s is held by %s; waiting for it%s", name, holder.describe(), limit)
                waited = True
            clock.sleep(times.local_poll if holder.is_here else times.remote_poll)
        # Exactly the next number: of several processes that wait for the same holder, one gets it.
        if _create(store, stage_key, attempt + 1, name, inputs):
            return Fence(store, stage_key, attempt + 1)
    raise StoreError(
        f"Stage {stage_key} could not be claimed after {_MAX_CLAIMS} tries: too many processes race for it."
    )


@contextlib.contextmanager
def renewed(fence: Fence, times: LeaseTimes = LeaseTimes()) -> Iterator[None]:
    """Renew the lease of an attempt in this context, and release it at the end.

    A renewal that fails is logged: if no other succeeds, an attempt on another machine takes over.
    """
    ended = threading.Event()
    lease = _lease_key(fence.stage_key, fence.attempt)

    def renew() -> None:
        renewals = 0
        # No renewal at the start: an observer counts from its first observation.
        while not ended.wait(times.renewal):
            renewals += 1
            try:
                fence.store.put_bytes(lease, str(renewals).encode())
            except StoreError as error:
                log.warning("The lease of stage %s is not renewed: %s", fence.stage_key, error.message)

    # A daemon: a request that hangs must not keep a finished stage alive.
    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(times.release)
        # A renewal that arrives after the end would replace it, and observers would wait until the lease runs
        # out.
        if not thread.is_alive():  # else the store does not answer
            with contextlib.suppress(StoreError):
                fence.store.put_bytes(lease, _ENDED)


@dataclass
class _Holder:
    """The attempt that has claimed a key, as another process observes it."""

    attempt: int
    process: ProcessId
    host: str
    is_here: bool
    """Whether it runs on this machine, so that its process can be looked up."""
    since: str
    seconds: float = 0.0
    """Since the first observation, or on another machine since the last change of its lease."""
    lease: bytes | None = None
    """Content of its lease at the last observation."""
    _observed: float | None = None
    """Time of the last observation."""

    def is_alive(self, store: Store, stage_key: str, times: LeaseTimes, clock: Clock) -> bool:
        """Observe the attempt once more, and return whether it still holds the key."""
        if self.is_here:
            self._pass_time(clock.monotonic(), math.inf)
            # This process would wait for itself until the time is over.
            return self.process.pid != os.getpid() and self.process.alive()
        lease = store.read_bytes(_lease_key(stage_key, self.attempt))
        if lease == _ENDED:
            return False
        # A longer time since the last observation counts as two intervals: this process was suspended, or the
        # store did not answer, and the holder may have had the same trouble.
        self._pass_time(clock.monotonic(), 2 * times.remote_poll)
        if lease != self.lease:
            self.lease, self.seconds = lease, 0.0
        return self.seconds < times.takeover

    def _pass_time(self, now: float, most: float) -> None:
        if self._observed is not None:
            self.seconds += min(now - self._observed, most)
        self._observed = now

    def describe(self) -> str:
        """Return a phrase such as `process 4711 of this machine, running since 3 Nov 10:21`."""
        where = "this machine" if self.is_here else f"host {self.host}"
        return f"process {self.process.pid} of {where}, running since {self.since}"


@dataclass(frozen=True)
class Claim:
    """The last attempt at a stage key, as it was observed."""

    attempt: int
    """Its number; 0 if there was none."""
    held: bool
    """Whether it still holds the key."""
    begun: float
    """When the last stage began, in seconds since 1970 by the clock of its host. Infinite if not known."""
    inputs: frozenset[str]
    """The artifacts that it reads, as `stage/key`."""


def observe(
    store: Store,
    stage_keys: Collection[str],
    times: LeaseTimes = LeaseTimes(),
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, Claim]:
    """Return the last claim of each key, without claiming any.

    If an attempt on another machine has not ended, its lease is observed for `times.takeover` seconds, of all
    keys at the same time. Claims of `rlhf prune` count as attempts without inputs, but `begun` is
    about the last stage, if there was one.
    """
    keys = sorted(stage_keys)
    latest = dict(zip(keys, in_parallel(lambda key: _latest(store, key), keys), strict=True))
    holders = in_parallel(lambda key: _read_holder(store, key, latest[key]), keys)
    held: set[str] = set()
    elsewhere: dict[str, _Holder] = {}
    for key, holder in zip(keys, holders, strict=True):
        if holder is None or not holder.is_alive(store, key, times, clock):
            continue
        if holder.is_here:
            held.add(key)
        else:
            elsewhere[key] = holder
    if elsewhere:
        # Once for all keys: each holder has the time of three renewals.
        clock.sleep(times.takeover)
    for key, holder in elsewhere.items():
        before = holder.lease
        if holder.is_alive(store, key, times, clock) and holder.lease != before:
            held.add(key)
    claims = in_parallel(lambda key: _claim(store, key, latest[key], key in held), keys)
    return dict(zip(keys, claims, strict=True))


def _claim(store: Store, stage_key: str, latest: int, held: bool) -> Claim:
    """Return the claim with the number `latest`, with the start of the last stage."""
    newest = record = _read_record(store, stage_key, latest)
    attempt = latest
    while record.get("stage") == PRUNE and attempt > 1:
        attempt -= 1
        record = _read_record(store, stage_key, attempt)
    # A claim that cannot be read counts as just begun, so that `rlhf prune` keeps what the stage has left.
    begun, inputs = math.inf, frozenset[str]()
    with contextlib.suppress(*_UNREADABLE):
        begun = datetime.fromisoformat(record["time"]).timestamp()
    with contextlib.suppress(*_UNREADABLE):
        inputs = frozenset(map(str, newest["inputs"]))
    return Claim(latest, held, begun, inputs)


def claim_next(store: Store, stage_key: str, observed: Claim) -> Fence | None:
    """Claim a key for `rlhf prune`; return None if another attempt has claimed it since `observed`."""
    attempt = observed.attempt + 1
    if not _create(store, stage_key, attempt, PRUNE):
        return None
    return Fence(store, stage_key, attempt)


def _create(
    store: Store, stage_key: str, attempt: int, stage: str = "", inputs: Collection[str] = ()
) -> bool:
    """Claim the number `attempt`; False if another process has it."""
    own = RecordedProcess.own()
    content = {
        "stage": stage,
        "inputs": sorted(inputs),
        "host": own.host,
        "machine": own.machine,
        "pid": own.pid,
        "started": own.started,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # Two claims must never be equal: a store without conditional puts compares them to see which one won.
        "token": uuid.uuid4().hex,
    }
    return store.put_if_absent(_key(stage_key, attempt), json.dumps(content).encode())


def _folder(stage_key: str) -> str:
    return f"{checkpoint_prefix(stage_key)}/attempts"


def _key(stage_key: str, attempt: int) -> str:
    return f"{_folder(stage_key)}/{attempt:06d}.json"


def _latest(store: Store, stage_key: str) -> int:
    names = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in store.list(_folder(stage_key)))
    # Not `isdigit`, which also accepts characters that `int` does not, such as a superscript 2.
    number = max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=0)
    # A listing may lack the last ones.
    while store.exists(_key(stage_key, number + 1)):
        number += 1
    return number


def _lease_key(stage_key: str, attempt: int) -> str:
    return f"{_folder(stage_key)}/{attempt:06d}.beat"


def _read_holder(store: Store, stage_key: str, attempt: int) -> _Holder | None:
    """Return who claimed the number `attempt`; None if its record cannot be read."""
    try:
        content = _read_record(store, stage_key, attempt)
        host = str(content.get("host", ""))
        return _Holder(
            attempt,
            ProcessId(int(content["pid"]), float(content["started"])),
            host,
            is_here=(host, content.get("machine")) == here(),
            since=f"{datetime.fromisoformat(content['time']).astimezone():%d %b %H:%M}",
        )
    except _UNREADABLE:
        return None


def _read_record(store: Store, stage_key: str, attempt: int) -> dict[str, Any]:
    """Return the record of a claim; empty if it cannot be read."""
    with contextlib.suppress(*_UNREADABLE):
        content = json.loads(store.read_bytes(_key(stage_key, attempt)) or b"{}")
        if isinstance(content, dict):
            return content
    return {}
