"""One server of `rlhf up`: its command, whether it answers, and when it is started again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.processes import ProcessId, die_with_parent, free_port, listens

log = logging.getLogger(__name__)

SILENT_SECONDS = 90.0
"""A server that is merely busy answers within some seconds."""
_KILL_SECONDS = 10.0
ANSWER_SECONDS = 10.0
_BACKOFF = (0.0, 2.0, 10.0, 30.0)
_SETTLED_SECONDS = 120.0


@dataclass
class Server:
    """One child of the supervisor."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log_file: Path
    answers: Callable[[], bool] = lambda: True
    """Whether it does its work; asked in every look."""
    port: int | None = None
    """On which it listens, if it does."""
    owns_group: bool = True
    """Whether all processes of its group are parts of it; the worker's flow runs are not."""
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    """In a row: one that stayed up for a while starts a new count."""
    started: float = 0.0
    next_start: float = field(default=0.0)
    silent: float = 0.0
    """Seconds for which it has not answered; while this process itself was halted, nobody asked."""
    looked: float = 0.0

    def look_after(self) -> None:
        """Kill it if it runs and has not answered for `SILENT_SECONDS`: it is halted, or waits for itself."""
        if self.process is None or self.process.poll() is not None:
            return
        answered, now = self.answers(), time.monotonic()
        self.silent = 0.0 if answered else self.silent + min(now - self.looked, 2 * ANSWER_SECONDS)
        self.looked = now
        if self.silent > SILENT_SECONDS:
            log.warning("%s has not answered for %.0f s and is killed; see %s", self.name, self.silent, self.log_file)
            if self.owns_group:  # MLflow's command only starts the server, which would keep the port
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait(timeout=_KILL_SECONDS)

    def keep_running(self) -> None:
        """Start it if it is not running; each time in a row later, up to half a minute."""
        if self.process is not None and self.process.poll() is None:
            return
        now = time.monotonic()
        if self.process is not None:
            log.warning("%s ended with exit code %s; see %s", self.name, self.process.returncode, self.log_file)
            self.process = None
            self.restarts = self.restarts + 1 if now - self.started < _SETTLED_SECONDS else 1
            self.next_start = now + _BACKOFF[min(self.restarts, len(_BACKOFF)) - 1]
        if now < self.next_start:
            return
        self.started = self.looked = now
        self.silent = 0.0
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.log_file.parent,  # not the project's folder: its files are no settings of a server
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def id(self) -> ProcessId | None:
        return None if self.process is None else ProcessId.of(self.process.pid)

    def serves(self) -> bool:
        """Whether it is the one that answers: another's server may have taken its port since it was chosen."""
        return self._listens() and self.answers()

    def lost_its_port(self) -> bool:
        """Whether it ended, and somebody else has its port."""
        if self.port is None or self.restarts == 0:
            return False
        return free_port(self.port) != self.port and not self._listens()

    def _listens(self) -> bool:
        me = self.id()
        return me is not None and self.port is not None and listens(me, self.port)
