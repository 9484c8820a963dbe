"""A long-running child process that is restarted when it ends or stops responding."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.system.launch import launch
from rlhf_core.system.processes import ProcessId, free_port, listens

log = logging.getLogger(__name__)

HEALTH_CHECK_SECONDS = 10.0
"""Maximum duration of one health check."""
_KILL_SECONDS = 10.0
_RESTART_DELAYS = (0.0, 2.0, 10.0, 30.0)
"""Seconds before each consecutive restart. The last one applies to all further restarts."""
_STABLE_SECONDS = 120.0
"""Uptime after which the restarts are counted from zero again."""


@dataclass
class SupervisedProcess:
    """A child process with its log, its health check and its restarts.

    No method waits for the process to start or to become healthy, so that one loop can supervise several
    processes.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """The complete environment of the process."""
    log_file: Path
    """stdout and stderr. The folder of this file is the working folder of the process."""
    is_healthy: Callable[[], bool] = lambda: True
    port: int | None = None
    """The port on which the process listens, or None."""
    owns_group: bool = True
    """Whether all processes of its process group are killed with it. False for a worker, whose flow runs must
    survive.
    """
    parent_death_signal: int = signal.SIGTERM
    """Sent to the process when this process ends."""
    silent_seconds: float = 90.0
    """Time without a successful health check after which the process is killed. A busy server responds within
    a few seconds.
    """
    clock: Callable[[], float] = time.monotonic
    """Returns seconds since some start."""

    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    """Number of consecutive restarts."""
    last_end: str = field(default="", init=False)
    """Why it was started again the last time."""
    started: float = field(default=0.0, init=False)
    next_start: float = field(default=0.0, init=False)
    silent: float = field(default=0.0, init=False)
    """Seconds without a successful health check."""
    last_check: float = field(default=0.0, init=False)

    def kill_if_silent(self) -> None:
        """Run the health check, and kill the process if all checks of the last `silent_seconds` failed."""
        if self.process is None or self.process.poll() is not None:
            return
        healthy = self.is_healthy()
        now = self.clock()
        # The bound excludes time in which this process itself was suspended, for example with the machine.
        elapsed = min(now - self.last_check, 2 * HEALTH_CHECK_SECONDS)
        self.silent = 0.0 if healthy else self.silent + elapsed
        self.last_check = now
        if self.silent > self.silent_seconds:
            log.warning(
                "%s has not answered for %.0f s and is killed; see %s", self.name, self.silent, self.log_file
            )
            self.last_end = f"did not answer for {self.silent:.0f} s"
            self._kill(self.process)
            self.process.wait(timeout=_KILL_SECONDS)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process, and what is left of its group if it has ended."""
        if self.owns_group:
            # `mlflow server` starts the actual server as a child, which would keep the port.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()

    def ensure_running(self) -> None:
        """Start the process if it is not running and the delay of this restart has passed.

        Raises OSError if the process cannot be started; a later call tries again.
        """
        if self.process is not None and self.process.poll() is None:
            return
        now = self.clock()
        if self.process is not None:
            log.warning(
                "%s ended with exit code %s and is started again; see %s",
                self.name,
                self.process.returncode,
                self.log_file,
            )
            self._kill(self.process)
            if self.silent <= self.silent_seconds:  # otherwise this process has killed it
                self.last_end = f"exit code {self.process.returncode}"
            self.process = None
            self.restarts = self.restarts + 1 if now - self.started < _STABLE_SECONDS else 1
            self.next_start = now + _RESTART_DELAYS[min(self.restarts, len(_RESTART_DELAYS)) - 1]
        if now < self.next_start:
            return
        self.started = self.last_check = now
        self.silent = 0.0
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

    def serves(self) -> bool:
        """Return whether this process, and not another one that has taken its port, is healthy."""
        return self._listens() and self.is_healthy()

    def lost_its_port(self) -> bool:
        """Return whether the process ended and another process uses its port."""
        if self.port is None or self.restarts == 0:
            return False
        return free_port(self.port) != self.port and not self._listens()

    def _listens(self) -> bool:
        process = self.id()
        return process is not None and self.port is not None and listens(process, self.port)
