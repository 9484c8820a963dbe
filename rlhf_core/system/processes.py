"""Processes: identity, signals, ports, and the start and restart of child processes.

A process is identified by its pid and start time, because pids are used again.

Every child process of this project has a session of its own and no standard input. A session of its own keeps
Ctrl-C in the terminal from reaching the child: its parent decides how it ends, and can signal the whole
process group.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import psutil

from rlhf_core.errors import InfrastructureError

_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")
_KILL_SECONDS = 5.0
"""Time that the kernel may need for a SIGKILL on a loaded machine."""


@dataclass(frozen=True)
class ProcessId:
    """The identity of a process. It is unique until the machine restarts."""

    pid: int
    started: float
    """Start time in seconds since the boot of the machine. A change of the clock does not affect it."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of the process that has `pid` now, or None."""
        fields = _stat(pid)
        # Field 22 of proc(5), `starttime` in clock ticks: the list begins with field 3.
        return cls(pid, int(fields[19]) / _TICKS) if fields else None

    def alive(self) -> bool:
        """Return whether the process is running. A zombie is not."""
        return self._state() not in (b"", b"Z", b"X")

    def suspended(self) -> bool:
        """Return whether the process is suspended by SIGSTOP or a debugger: alive, but not executing."""
        return self._state() in (b"T", b"t")

    def _state(self) -> bytes:
        """Return the kernel's letter for the state of the process; empty if another one has its pid now."""
        fields = _stat(self.pid)
        # Equal and not close: both are quotients of the same integers, and JSON gives a float back as it was.
        return fields[0] if fields and int(fields[19]) / _TICKS == self.started else b""

    def send(self, signum: int) -> None:
        """Send a signal to the process if it is running."""
        if self.alive():
            # Since the look at `/proc` the pid can have become free, or that of another user's process.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of `/proc/{pid}/stat` from the state on; empty if there is no such process."""
    # Not psutil's `create_time`, which is a time of the system's clock.
    with suppress(OSError):
        # The name of the program before them can contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return []


def this_machine() -> str:
    """Identify the processes that this one can look up: those of its boot and of its namespace of pids.

    The hostname does not identify a machine: two containers can have the same.
    """
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def here() -> tuple[str, str]:
    """Return the hostname and `this_machine`. Processes with the same two values can be looked up."""
    return socket.gethostname(), this_machine()


def installation() -> str:
    """Return the id of this host that a restart does not change. Most containers have none: ""."""
    with suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return ""


class RecordedProcess(NamedTuple):
    """A process in a file that several hosts may read. In JSON it is a list."""

    pid: int
    started: float
    """See `ProcessId`."""
    host: str
    machine: str = ""
    """See `this_machine`. Empty in records of earlier releases."""
    installation: str = ""
    """See `installation`."""

    @classmethod
    def own(cls) -> RecordedProcess:
        """Return the record of this process."""
        own = ProcessId.of(os.getpid())
        return cls(os.getpid(), 0.0 if own is None else own.started, *here(), installation())

    def alive(self, observer: RecordedProcess | None = None) -> bool | None:
        """Return whether the process is running. None if it can be one of another host or container, perhaps
        with the same hostname.

        Args:
            observer: Who asks. Default: this process.
        """
        own = observer or RecordedProcess.own()
        if self.host != own.host:
            return None
        if self.machine == own.machine:
            return ProcessId(self.pid, self.started).alive()
        # Only another boot proves the end. A restart of a container changes the second word too, and a
        # process can go on in the namespace of before.
        same_boot = self.machine.split()[:1] == own.machine.split()[:1]
        if self.installation and self.installation == own.installation and not same_boot:
            return False  # the host has been restarted
        return None


def free_port(preferred: int = 0) -> int:
    """Return `preferred` if no process listens on it on loopback, and another free port otherwise."""
    # Nothing holds the port for the server that gets it: `mlflow server` listens in a child that inherits no
    # socket (decision 14).
    for port in (preferred, 0):
        with socket.socket() as probe, suppress(OSError):
            # A port in TIME_WAIT after the end of its server is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise InfrastructureError("no TCP port is free on 127.0.0.1")


def listens(process: ProcessId, port: int) -> bool:
    """Return whether the process, or one of its descendants, listens on TCP `port`."""
    with suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        for member in (parent, *parent.children(recursive=True)):
            for connection in member.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def processes_with_env(variable: str) -> Iterator[tuple[ProcessId, str]]:
    """Yield each running process of this user that has `variable` in its environment, and the value."""
    for process in psutil.process_iter():
        # The environment of other users' processes cannot be read.
        with suppress(psutil.Error, OSError):
            value = process.environ().get(variable)
            identity = ProcessId.of(process.pid)
            if value is not None and identity is not None and process.status() != psutil.STATUS_ZOMBIE:
                yield identity, value


def stop(processes: Iterable[ProcessId], grace_seconds: float) -> None:
    """Send SIGTERM to all, wait up to `grace_seconds`, then send SIGKILL to those that are still running."""
    processes = list(processes)
    for process in processes:
        process.send(signal.SIGTERM)
    if not wait_gone(processes, grace_seconds):
        kill(processes)


def kill(processes: Iterable[ProcessId]) -> None:
    """Send SIGKILL, which also ends suspended processes, and wait until they have ended."""
    processes = list(processes)
    for process in processes:
        process.send(signal.SIGKILL)
    wait_gone(processes, _KILL_SECONDS)


def wait_gone(processes: Iterable[ProcessId], seconds: float) -> bool:
    """Return whether all of the processes ended within `seconds`."""
    # `waitpid` is not possible: they need not be children of this process.
    deadline = time.monotonic() + seconds
    running = [process for process in processes if process.alive()]
    while running and time.monotonic() < deadline:
        time.sleep(0.1)
        running = [process for process in running if process.alive()]
    return not running


def die_with_parent(signum: int) -> Callable[[], None]:
    """Return a function for the child of a fork, such as a `preexec_fn`: the kernel sends `signum` to the
    process that calls it when its parent thread ends.

    The C function is looked up here and not after the fork: in the child of a process with threads, any lock
    may be held by a thread that does not exist there.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Prevent Python and its child processes from importing modules, such as a `queue.py`, from the working
folder.
"""


def python_module(name: str) -> list[str]:
    """Return the command that runs the module `name` in a separate process."""
    # `-m` puts the working folder first on the search path. `-P` prevents that also in an environment without
    # SAFE_PATH.
    return [sys.executable, "-P", "-m", name]


def leave_out(packages: Iterable[str]) -> None:
    """Let this process find none of `packages`, which libraries import only because they are installed."""
    for name in packages:
        # With None, Python treats a module that is not imported yet as missing.
        sys.modules.setdefault(name, cast(Any, None))


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    log_file: Path | None = None,
    working_folder: Path | None = None,
    pass_fds: Sequence[int] = (),
    parent_death_signal: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` and return its process.

    Args:
        command: Program and arguments.
        environment: The whole environment of the process; nothing is inherited.
        log_file: Output and errors are appended to this file. None: the streams of this process.
        working_folder: None: that of this process.
        pass_fds: Descriptors that the process inherits, besides its standard streams.
        parent_death_signal: Signal that the kernel sends when the thread that called `launch` ends. The
            calling thread must therefore live as long as the process is needed. None: the process survives.
    """
    with nullcontext() if log_file is None else log_file.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=working_folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=None if parent_death_signal is None else die_with_parent(parent_death_signal),
        )


# -- a child process that is restarted when it ends --


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
            parent_death_signal=signal.SIGTERM,
        )

    def id(self) -> ProcessId | None:
        """Return the identity of the running process, or None."""
        return None if self.process is None else ProcessId.of(self.process.pid)

    def has_its_port(self) -> bool:
        """Return whether this process, and not another one, listens on the port."""
        process = self.id()
        return process is not None and self.port is not None and listens(process, self.port)


# -- requests to stop this process --


EXIT_STOPPED = 128 + signal.SIGTERM


class StopRequest:
    """The stop request of a process, from a cancellation, Ctrl-C, or a machine that shuts down. `on_signal`
    is its handler of SIGTERM and SIGINT.

        before `defer`     the stage ends at once (SystemExit) and continues from its last checkpoint
        after `defer`      a training loop checks `requested` after each step, saves a checkpoint and exits
        after the loop     the stage goes on, and saves what the loop has trained

    The process that sends the signal waits for about 20 s (`run.reaper`) before it kills: a longer step is
    lost.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def on_signal(self, _signum: int, _frame: Any) -> None:
        """Record the request and exit, unless that is deferred.

        Further signals are ignored, because they would interrupt the clean-up.
        """
        if not self.requested:
            self.requested = True
            if not self._deferred:
                self.exit()

    def defer(self) -> None:
        """Do not exit on a signal any more: the loop that follows checks `requested`, and must call `exit`
        soon after it is true.
        """
        self._deferred = True

    def exit(self) -> NoReturn:
        """End the process with clean-up."""
        raise SystemExit(EXIT_STOPPED)
