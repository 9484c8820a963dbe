"""Questions to the operating system: is this the process we started, who carries this variable?

A process is known by pid and start time, because pids are used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil

from rlhf_core.errors import InfrastructureError

_PR_SET_PDEATHSIG = 1
_SUSPENDED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_KILL_SECONDS = 5.0
"""The kernel's share of a SIGKILL, on a loaded machine."""


@dataclass(frozen=True)
class ProcessId:
    """One process, for as long as the machine is up."""

    pid: int
    started: float
    """Seconds since the epoch, as the kernel says."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has `pid` now, or None."""
        with contextlib.suppress(psutil.Error):
            return cls(pid, psutil.Process(pid).create_time())
        return None

    def alive(self) -> bool:
        """Whether it is running still; a zombie is not."""
        # A pid from a damaged file may be invalid.
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def stopped(self) -> bool:
        """Whether it is suspended by a SIGSTOP or a debugger: alive, but no code of it runs."""
        with contextlib.suppress(psutil.Error):
            return self.alive() and psutil.Process(self.pid).status() in _SUSPENDED
        return False

    def send(self, signum: int) -> None:
        """Signal it, unless it is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)


def lives(pid: int, started: float, host: str) -> bool | None:
    """Whether the process that noted these of itself still runs; None where that was on another host."""
    return ProcessId(pid, started).alive() if host == socket.gethostname() else None


def free_port(preferred: int = 0) -> int:
    """`preferred` if nobody listens there on loopback now, else a port that nobody listens on."""
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise InfrastructureError("no TCP port is free on 127.0.0.1")


def listens(process: ProcessId, port: int) -> bool:
    """Whether it, or a process it started, listens on TCP `port`."""
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(process.pid)
        for each in (top, *top.children(recursive=True)):
            for connection in each.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def carriers(variable: str) -> Iterator[tuple[ProcessId, str]]:
    """Every live process of this user with `variable` in its environment, and the value."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            value = process.environ().get(variable)
            if value is not None and process.status() != psutil.STATUS_ZOMBIE:
                yield ProcessId(process.pid, process.create_time()), value


def stop(processes: Iterable[ProcessId], patience: float) -> None:
    """SIGTERM to all, `patience` seconds at most to end, then SIGKILL to those that are left."""
    left = list(processes)
    for process in left:
        process.send(signal.SIGTERM)
    if not wait_gone(left, patience):
        kill(left)


def kill(processes: Iterable[ProcessId]) -> None:
    """SIGKILL, also to suspended ones; waits until they are gone."""
    left = list(processes)
    for process in left:
        process.send(signal.SIGKILL)
    wait_gone(left, _KILL_SECONDS)


def wait_gone(processes: Iterable[ProcessId], seconds: float) -> bool:
    """Whether all of them ended within `seconds`."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if process.alive()]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [process for process in left if process.alive()]
    return not left


def die_with_parent(signum: int) -> Callable[[], None]:
    """A `preexec_fn` by which the kernel sends `signum` to the new process when the thread that starts it
    ends.

    All that it needs is looked up here: after the fork of a process with threads, whoever takes a lock may
    wait for ever.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
