"""One attempt at a time holds a stage key.

Attempts are numbered by create-only objects, `{store}/checkpoints/{stage key}/attempts/%06d.json`. A checkpoint or an
artifact is committed only by the highest attempt, so a run wrongly thought dead cannot overwrite its successor.

Between the last look at the attempts and the manifest lies one request: who is overtaken just there may still add a
whole bundle that nobody else has committed. It changes nothing that is there, because manifests are created only once,
and it was made for the same stage key: the same configuration, inputs and code.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from rlhf_core.errors import StoreError, Superseded
from rlhf_core.storage.store import Store

_TRIES = 1000


@dataclass(frozen=True)
class Fence:
    """The right of one attempt to commit for a stage key, until a later attempt claims it."""

    store: Store
    stage_key: str
    attempt: int
    """1, 2, ..."""

    def check(self) -> None:
        """Raises Superseded if a later attempt has claimed the stage key."""
        latest = _latest(self.store, self.stage_key)
        if latest > self.attempt:
            raise Superseded(
                f"Attempt {self.attempt} at stage {self.stage_key} must not commit: attempt {latest} "
                f"({_holder(self.store, self.stage_key, latest)}) has taken over."
            )


def claim(store: Store, stage_key: str) -> Fence:
    """Become the newest attempt at `stage_key`; all earlier ones can no longer commit."""
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        # Two claims must never look alike: that is how a store tells which of them won.
        "token": uuid.uuid4().hex,
    }
    attempt = _latest(store, stage_key)
    for _ in range(_TRIES):
        attempt += 1
        if store.put_if_absent(_key(stage_key, attempt), json.dumps(content).encode()):
            return Fence(store, stage_key, attempt)
    raise StoreError(f"Stage {stage_key} could not be claimed after {_TRIES} tries: too many processes race for it.")


def _folder(stage_key: str) -> str:
    return f"checkpoints/{stage_key}/attempts"


def _key(stage_key: str, attempt: int) -> str:
    return f"{_folder(stage_key)}/{attempt:06d}.json"


def _latest(store: Store, stage_key: str) -> int:
    names = (key.rsplit("/", 1)[-1].removesuffix(".json") for key in store.list(_folder(stage_key)))
    return max((int(name) for name in names if name.isdigit()), default=0)


def _holder(store: Store, stage_key: str, attempt: int) -> str:
    try:
        content = json.loads(store.read_bytes(_key(stage_key, attempt)) or b"{}")
        return f"process {content['pid']} on {content['host']}, since {content['time']}"
    except (ValueError, KeyError, TypeError):
        return "by an unknown process"
