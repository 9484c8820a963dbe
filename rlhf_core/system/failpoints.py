"""Fault injection for tests. Failpoints do nothing unless these environment variables are set.

    RLHF_FAIL="ppo.after_rollout:3:kill"        SIGKILL at the third pass of this process
    RLHF_FAIL="weight_sync.send:1:alter,..."    several faults, separated by commas
    RLHF_FAIL_TRACE=/some/folder                every pass is written to `passes` there (seconds, process,
                                                point, start of the process), and each entry of RLHF_FAIL acts
                                                once in all processes

Actions: `kill`, `term`, `int`, `stop`, `raise`, `enospc` and `sleep` (ten minutes) act here; `alter` and
`drop` (a tensor on its way to the engines) and `nan` (a loss, a score, a value, a log-probability) are
returned, and the caller applies them. Any other word, and an action that the caller does not support, is an
error: a fault that is not injected would count as survived.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

_FAULT = re.compile(r"[\w.]+:\d+:\w+")
# `tests.chaos` measures a recovery by the processes that began after a kill. Other ranks and engines live on
# and pass the same point, and a pid can be used again.
_STARTED = time.time()
_seen: Counter[str] = Counter()


def is_well_formed(faults: str) -> bool:
    """Return whether the value of RLHF_FAIL has the form name:nth:action, several separated by commas."""
    return all(_FAULT.fullmatch(fault) for fault in faults.split(","))


def failpoint(name: str, *acts: str) -> str | None:
    """Return the action of this pass, or None. `acts` are the actions that the caller applies itself."""
    wanted, trace = os.environ.get("RLHF_FAIL", ""), os.environ.get("RLHF_FAIL_TRACE")
    # Failpoints are in the loops of training. Without a fault they cost two look-ups (decision 22).
    if not wanted and trace is None:
        return None
    _seen[name] += 1
    if trace is not None:
        _append(Path(trace, "passes"), f"{time.time():.6f} {os.getpid()} {name} {_STARTED:.6f}\n")
    for entry in filter(None, wanted.split(",")):
        point, nth, action = entry.split(":")
        # `_first` is last: it creates the file that keeps other processes from acting.
        if point == name and int(nth) == _seen[name] and (trace is None or _first(Path(trace, entry))):
            match action:
                case "kill" | "term" | "int" | "stop":
                    os.kill(os.getpid(), signal.Signals[f"SIG{action.upper()}"])
                case "raise":
                    raise OSError(f"failpoint {name} asked for an error")
                case "enospc":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                case "sleep":
                    time.sleep(600)
                case _ if action not in acts:
                    raise ValueError(f"RLHF_FAIL: no action {action!r} at {name}")
            return action
    return None


def _append(file: Path, line: str) -> None:
    # One write of an appending descriptor: lines of several processes do not mix.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _first(marker: Path) -> bool:
    try:
        with marker.open("x") as file:
            file.write(f"{time.time():.6f} {os.getpid()}")
    except FileExistsError:
        return False
    return True
