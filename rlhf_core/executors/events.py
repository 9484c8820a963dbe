"""Messages of a stage's child process to the flow: JSON lines over an inherited pipe.

    {"event": "started", "attempt": 2, "mlflow_run_id": "..."}
    {"event": "reused"}                       another run has produced the artifact in the meantime
    {"event": "resumed", "step": 30}          continues from a checkpoint
    {"event": "checkpoint", "step": 40}       a checkpoint is committed, from which a retry would continue
    {"event": "progress", "task": "ppo", "done": 31, "total": 100, "unit": "steps", "metrics": {...}}
    {"event": "warning", "message": "...", "guard": "loops"}
                                              a warning or error of the log that is also shown to the user;
                                              `guard` if it comes from one of PPO's guards
    {"event": "result", "artifact": {...}}    the last line of a successful child
    {"event": "error", "type": "...", "message": "..."}
                                              the last line of a child that reported a failure

If the last line is missing, the reader must assume that the child died, regardless of its exit code.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import RLHFError, from_record, to_record
from rlhf_core.types import ArtifactRef

FD_VARIABLE = "RLHF_EVENTS_FD"
PARENT_VARIABLE = "RLHF_PARENT_PID"
STOP_VARIABLE = "RLHF_STOP_SECONDS"
SUSPEND_VARIABLE = "RLHF_SUSPEND_SECONDS"
WAIT_VARIABLE = "RLHF_WAIT_FD"
MIN_SECONDS = 0.2
"""Progress of one task is sent at most this often; first and last reports always are."""


class Events:
    """Writes events; without a pipe (a stage started by hand) it does nothing."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._sent: dict[str, float] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls) -> Events:
        """Return the events on the pipe that the flow passed in the environment.

        Neither the variable nor the descriptor is inherited by other processes: one that held the write end
        would keep the pipe open.
        """
        text = os.environ.pop(FD_VARIABLE, "")
        if not text.isdigit():
            return cls(None)
        fd = int(text)
        os.set_inheritable(fd, False)
        return cls(fd)

    def send(self, event: str, **fields: Any) -> None:
        """Write one event. If the flow does not exist any more, events are dropped."""
        if self._fd is None:
            return
        data = (json.dumps({"event": event, **fields}, default=str) + "\n").encode()
        # A write above PIPE_BUF (4096 bytes) can be divided, and lines of two threads would mix.
        with self._lock:
            try:
                # os.write may write a part only, for example if a signal interrupts it.
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                self._fd = None

    def error(self, error: BaseException) -> None:
        """Send the final event of a stage that failed."""
        self.send(**error_event(error))

    def progress(self, task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        """Report progress, see `rlhf_core.types.Progress`."""
        now = time.monotonic()
        if 0 < done < total and now - self._sent.get(task, 0.0) < MIN_SECONDS:
            return
        self._sent[task] = now
        self.send("progress", task=task, done=done, total=total, unit=unit, metrics=_finite(metrics))


class Warnings(logging.Handler):
    """Sends errors and warnings of the log as events.

    Messages that differ only in numbers are sent once, and at most `most` warnings are sent.
    """

    def __init__(self, events: Events, most: int = 20) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._left = most
        self._sent_kinds: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record.

        Records with a traceback are skipped, because the final error event contains them.
        """
        # CRITICAL: `_abort` of attempt.py sends the same error as the final event.
        if record.exc_info or record.levelno >= logging.CRITICAL:
            return
        try:
            message = printable(scrubbed(record.getMessage()))[:1000]
        except Exception:  # a wrong format string: logging reports it
            self.handleError(record)
            return
        text = re.sub(r"\d+", "#", message)
        guard = {"guard": record.guard} if hasattr(record, "guard") else {}
        is_limited = record.levelno < logging.ERROR and not guard
        if text in self._sent_kinds or (is_limited and not self._left):
            return
        self._sent_kinds.add(text)
        if is_limited:
            self._left -= 1
        last = "; further warnings are in the log" if is_limited and not self._left else ""
        self._events.send("warning", message=message + last, **guard)


def error_event(error: BaseException) -> dict[str, Any]:
    """Return the final event of a stage that failed, without secrets."""
    return {"event": "error", **{name: scrubbed(text) for name, text in to_record(error).items()}}


def outcome_of(event: Mapping[str, Any]) -> ArtifactRef | RLHFError | None:
    """Return the result or the error that the final event of a stage reports; None for other events."""
    if event["event"] == "result":
        return ArtifactRef(**event["artifact"])
    if event["event"] == "error":
        return from_record({"type": event["type"], "message": event["message"]})
    return None


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line, or None if the line is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values; JSON has no NaN and no infinity."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
