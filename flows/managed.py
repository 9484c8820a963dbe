"""A server process of `rlhf up`: its command, health check and restarts."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.system.launch import launch
from rlhf_core.system.processes import ProcessId, free_port, listens

log = logging.getLogger(__name__)

SILENT_SECONDS = 90.0
"""Time without an answer after which a server is killed. A busy server answers within a few seconds."""
_KILL_SECONDS = 10.0
ANSWER_SECONDS = 10.0
_BACKOFF = (0.0, 2.0, 10.0, 30.0)
_SETTLED_SECONDS = 120.0


@dataclass
class Server:
    """A child process of the supervisor."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log_file: Path
    answers: Callable[[], bool] = lambda: True
    """Health check, called in every iteration of the supervisor."""
    port: int | None = None
    """The port on which the server listens, or None."""
    owns_group: bool = True
    """Whether all processes of its process group belong to the server. This is not the case for the worker's
    flow runs.
    """
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    """Number of consecutive restarts. The count starts again when the server stays up for some time."""
    started: float = 0.0
    next_start: float = field(default=0.0)
    silent: float = 0.0
    """Seconds without an answer. Time in which the supervisor itself was suspended is not counted."""
    looked: float = 0.0

    def look_after(self) -> None:
        """Kill the server if it runs but has not answered for `SILENT_SECONDS`."""
        if self.process is None or self.process.poll() is not None:
            return
        answered, now = self.answers(), time.monotonic()
        self.silent = 0.0 if answered else self.silent + min(now - self.looked, 2 * ANSWER_SECONDS)
        self.looked = now
        if self.silent > SILENT_SECONDS:
            log.warning(
                "%s has not answered for %.0f s and is killed; see %s", self.name, self.silent, self.log_file
            )
            if self.owns_group:  # MLflow's command starts the server as a child, which would keep the port
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait(timeout=_KILL_SECONDS)

    def keep_running(self) -> None:
        """Start the server if it is not running. The delay grows with each consecutive restart, up to 30
        seconds.
        """
        if self.process is not None and self.process.poll() is None:
            return
        now = time.monotonic()
        if self.process is not None:
            log.warning(
                "%s ended with exit code %s; see %s", self.name, self.process.returncode, self.log_file
            )
            self.process = None
            self.restarts = self.restarts + 1 if now - self.started < _SETTLED_SECONDS else 1
            self.next_start = now + _BACKOFF[min(self.restarts, len(_BACKOFF)) - 1]
        if now < self.next_start:
            return
        self.started = self.looked = now
        self.silent = 0.0
        self.process = launch(
            self.command,
            {**os.environ, **self.environment},
            log_file=self.log_file,
            # Not the project's folder, because its files must not be read as settings
            working_folder=self.log_file.parent,
            parent_death_signal=signal.SIGTERM,
        )

    def id(self) -> ProcessId | None:
        return None if self.process is None else ProcessId.of(self.process.pid)

    def serves(self) -> bool:
        """Return whether this server answers on its port, and not another process that has taken the port."""
        return self._listens() and self.answers()

    def lost_its_port(self) -> bool:
        """Return whether the server ended and another process uses its port."""
        if self.port is None or self.restarts == 0:
            return False
        return free_port(self.port) != self.port and not self._listens()

    def _listens(self) -> bool:
        me = self.id()
        return me is not None and self.port is not None and listens(me, self.port)
