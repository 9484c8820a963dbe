"""A long-running child process that is restarted when it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.system.processes import ProcessId, launch, listens

log = logging.getLogger(__name__)

_RESTART_DELAYS = (0.0, 2.0, 10.0, 30.0)
"""Seconds before each consecutive restart. The last one applies to all further restarts."""
_STABLE_SECONDS = 120.0
"""Uptime after which the restarts are counted from zero again."""


@dataclass
class SupervisedProcess:
    """A child process with its log and its restarts.

    No method waits, so that one loop can supervise several processes.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """The complete environment of the process."""
    log_file: Path
    """stdout and stderr. The folder of this file is the working folder of the process."""
    port: int | None = None
    """The port on which the process listens, or None."""
    owns_group: bool = True
    """Whether all processes of its process group are killed with it. False for a worker, whose flow runs must
    survive.
    """
    parent_death_signal: int = signal.SIGTERM
    """Sent to the process when this process ends."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    """Number of consecutive restarts."""
    last_end: str = field(default="", init=False)
    """Why it was started again the last time."""
    started: float = field(default=0.0, init=False)
    next_start: float = field(default=0.0, init=False)

    def ensure_running(self) -> None:
        """Start the process if it is not running and the delay of this restart has passed.

        Raises OSError if the process cannot be started; a later call tries again.
        """
        if self.process is not None and self.process.poll() is None:
            return
        now = time.monotonic()
        if self.process is not None:
            log.warning(
                "%s ended with exit code %s and is started again; see %s",
                self.name,
                self.process.returncode,
                self.log_file,
            )
            if self.owns_group:
                # `mlflow server` starts the actual server as a child, which would keep the port.
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            # Kept for `rlhf status`, because the log of the server does not have its exit code.
            self.last_end = f"exit code {self.process.returncode}"
            self.process = None
            if now - self.started >= _STABLE_SECONDS:
                self.restarts = 0
            self.restarts += 1
            self.next_start = now + _RESTART_DELAYS[min(self.restarts, len(_RESTART_DELAYS)) - 1]
        if now < self.next_start:
            return
        self.started = now
        self.process = launch(
            self.command,
            self.environment,
            log_file=self.log_file,
            # Not the current folder: Prefect would read settings from the files there.
            working_folder=self.log_file.parent,
            parent_death_signal=self.parent_death_signal,
        )

    def id(self) -> ProcessId | None:
        """Return the identity of the running process, or None."""
        return None if self.process is None else ProcessId.of(self.process.pid)

    def has_its_port(self) -> bool:
        """Return whether this process, and not another one, listens on the port."""
        process = self.id()
        return process is not None and self.port is not None and listens(process, self.port)
