"""Places where tests make something break. No-ops unless RLHF_FAIL names them.

    RLHF_FAIL="ppo.after_rollout:3:kill"        the third time this process comes by: SIGKILL itself
    RLHF_FAIL="weight_sync.send:1:alter,..."    several, by commas

Actions: `kill`, `term` and `raise` act here; any other word is returned for the caller to act on.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_seen: Counter[str] = Counter()


def failpoint(name: str) -> str | None:
    """The action to take here and now, or None."""
    wanted = os.environ.get("RLHF_FAIL")
    if not wanted:
        return None
    _seen[name] += 1
    for entry in wanted.split(","):
        point, nth, action = entry.split(":")
        if point == name and int(nth) == _seen[name]:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if action == "raise":
                raise OSError(f"failpoint {name} asked for an error")
            return action
    return None
