"""Fencing: only one attempt at a time may commit for a stage key.

Attempts are numbered by objects that are created only if absent, in `{store}/checkpoints/{stage
key}/attempts/%06d.json`. Only the attempt with the highest number commits checkpoints and artifacts, so a
process that was believed dead cannot overwrite its successor.

On one machine, the second of two runs waits for the first and then fails (`await_holder`). Whether a holder
on another machine is alive is not known, so it is superseded.

One request separates the last check of the attempts from the manifest. An attempt that is superseded in
between can still add a complete bundle that no other attempt has committed. It cannot change an existing one,
because manifests are created only if absent, and it belongs to the same stage key.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from rlhf_core.errors import StageHeld, StoreError, Superseded
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId, is_alive

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""A stage whose flow was killed may take 20 s to stop, and its guard a little longer."""
_MAX_CLAIMS = 1000
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised when a record that was not written by `claim` is read."""


@dataclass(frozen=True)
class Fence:
    """The right of an attempt to commit for a stage key, until a later attempt claims the key."""

    store: Store
    stage_key: str
    attempt: int
    """1, 2, ..."""

    def check(self) -> None:
        """Raise Superseded if a later attempt has claimed the stage key."""
        latest = _latest(self.store, self.stage_key)
        if latest > self.attempt:
            raise Superseded(
                f"Attempt {self.attempt} at stage {self.stage_key} must not commit: attempt {latest} "
                f"({_holder(self.store, self.stage_key, latest)}) has taken over."
            )


def await_holder(store: Store, stage_key: str, name: str, seconds: float = WAIT_SECONDS) -> bool:
    """Wait while a process of this machine holds the key of stage `name`, and return whether one did.

    That process may have published the artifact. Raises StageHeld if it does not end within `seconds`.
    """
    deadline = time.monotonic() + seconds
    waited = False
    while True:
        holder = _living_holder(store, stage_key)
        if holder is None:
            return waited
        described = (
            f"process {holder.pid} of this machine, running since"
            f" {datetime.fromtimestamp(holder.started):%d %b %H:%M}"
        )
        if time.monotonic() > deadline:
            raise StageHeld(
                f"stage {name} of this configuration is being made by {described}; wait until it is done, or"
                f" end its run{_how_to_end(holder)} and type the command again"
            )
        if not waited:
            log.warning("stage %s is held by %s; waiting for it for up to %g s", name, described, seconds)
            waited = True
        time.sleep(0.5)


def claim(store: Store, stage_key: str) -> Fence:
    """Become the newest attempt at `stage_key`: earlier attempts can no longer commit."""
    own = ProcessId.of(os.getpid())
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": own.started if own is not None else 0.0,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # Two claims must never be equal: a store without conditional puts compares them to see which one won.
        "token": uuid.uuid4().hex,
    }
    attempt = _latest(store, stage_key)
    for _ in range(_MAX_CLAIMS):
        attempt += 1
        if store.put_if_absent(_key(stage_key, attempt), json.dumps(content).encode()):
            return Fence(store, stage_key, attempt)
    raise StoreError(
        f"Stage {stage_key} could not be claimed after {_MAX_CLAIMS} tries: too many processes race for it."
    )


def _folder(stage_key: str) -> str:
    return f"checkpoints/{stage_key}/attempts"


def _key(stage_key: str, attempt: int) -> str:
    return f"{_folder(stage_key)}/{attempt:06d}.json"


def _latest(store: Store, stage_key: str) -> int:
    names = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in store.list(_folder(stage_key)))
    return max((int(name) for name in names if re.fullmatch("[0-9]+", name)), default=0)


def _living_holder(store: Store, stage_key: str) -> ProcessId | None:
    attempt = _latest(store, stage_key)
    try:
        content = json.loads(store.read_bytes(_key(stage_key, attempt)) or b"{}")
        holder = ProcessId(int(content["pid"]), float(content["started"]))
    except _UNREADABLE:
        return None
    other = holder.pid != os.getpid()
    return holder if other and is_alive(holder.pid, holder.started, content.get("host", "")) else None


def _how_to_end(holder: ProcessId) -> str:
    """Return the command that ends the holder, or nothing if it would end the whole machine or container."""
    run = _run_of(holder)
    return f" (kill {run})" if run > 1 else ""


def _run_of(holder: ProcessId) -> int:
    """Return the process that started the stage and would restart it: stage, its guard, then the flow."""
    with contextlib.suppress(psutil.Error):
        guard = psutil.Process(holder.pid).parent()
        if guard is not None and "rlhf_core.run" in guard.cmdline() and (flow := guard.parent()) is not None:
            return int(flow.pid)
    return holder.pid


def _holder(store: Store, stage_key: str, attempt: int) -> str:
    try:
        content = json.loads(store.read_bytes(_key(stage_key, attempt)) or b"{}")
        return f"process {content['pid']} on {content['host']}, since {content['time']}"
    except _UNREADABLE:
        return "by an unknown process"
