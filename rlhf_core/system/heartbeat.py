"""Heartbeats of a stage's processes, and the monitor that detects which of them stalled.

    participant  a training rank, Ray worker, engine, or the stage's own process; it keeps one file up to date
                     register(folder, "critic rank 0", stall_after)  once; SIGUSR1 then writes its stacks
                     heartbeat("optimizer step 7")                   on progress, from any depth of the code
                     idle()                                          it waits for a call, without a time limit
                     unregister()                                    at its end
    Monitor      in the stage's own process: a thread polls all files and counts how long each has not changed
                     stalled()       participants that made no progress, or were suspended, beyond their limit
                     diagnose(...)   the error that names them; saves the stacks of all participants
                     abort(error)    fails the stage, from a thread that has found why a wait cannot succeed
                 Code that waits for participants asks the monitor. If nothing asks, or the code that asks is
                 itself stuck, the monitor calls `fail`.

The monitoring thread counts the seconds, so clocks are never compared and a suspended machine is not mistaken
for a stall. Each other host of a cluster has a monitor of its own (`OtherHosts`): the observations are merged
here, the processes can be killed, and their stacks are copied to this host.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

from rlhf_core.errors import InfrastructureError, RLHFError, WorkerDied, WorkerStuck
from rlhf_core.system.processes import ProcessId, kill, this_machine

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Time that code which waits for a stalled participant has to report it, before the monitor calls `fail`."""
_STACKS_SECONDS = 2.0
"""Time in which a process has written its stacks."""
_RECORD_BYTES = 1500
"""More than any record has: 100 characters of the activity, with up to 12 bytes each in JSON."""

State = Literal["running", "suspended", "dead", "lost"]
"""`lost`: the host of the process does not answer any more."""


# -- in a participant --


class _Registration:
    """The heartbeat file of this process."""

    def __init__(self, folder: Path, name: str, stall_after: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        process = ProcessId.of(os.getpid())
        assert process is not None
        self.stall_after = stall_after
        self.beats = 0
        self.activity = ""
        self._identity = [process.pid, process.started, socket.gethostname(), this_machine()]
        self._path = _heartbeat_file(folder, name)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        # Opened to append: an engine that replaces a stuck one keeps the stacks of its predecessor.
        self._stacks: IO[str] = _stacks_file(folder, name).open("a")
        # Before the first record: a monitor sends the signal to every process that has one, and without a
        # handler the signal would kill.
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)

    def write(self, activity: str, stall_after: float) -> None:
        self.beats += 1
        self.activity = activity
        # A limit of math.inf is written as Infinity, which is not JSON, but which Python's json reads.
        record = json.dumps([*self._identity, self.beats, stall_after, activity[:100]])
        # One write of a fixed size: a reader sees the old record or the new one, and the file never grows.
        os.pwrite(self._file, record.ljust(_RECORD_BYTES).encode(), 0)

    def dump_stacks(self) -> None:
        """Write this process's stacks without the signal.

        The signal's handler walks the frames of other threads while they run, which can crash the process.
        """
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        # The handler stays installed: a monitor that has just read the file may still send the signal, and
        # without a handler SIGUSR1 kills the process.


_own_machine = functools.cache(this_machine)
"""There may be thousands of participants, which are polled twice per second."""

_registration: _Registration | None = None


def register(folder: Path, name: str, stall_after: float) -> None:
    """Register this process as participant `name` of the stage that is monitored in `folder`.

    It counts as stalled after `stall_after` seconds without progress, unless `heartbeat` sets another limit.
    """
    global _registration
    unregister()
    _registration = _Registration(folder, name, stall_after)


def unregister() -> None:
    """End the monitoring of this process."""
    global _registration
    if _registration is not None:
        _registration.close()
        _registration = None


def heartbeat(activity: str, stall_after: float | None = None) -> None:
    """Report progress: this process now does `activity`, for at most `stall_after` seconds (None: as
    registered).

    Does nothing in a process that is not registered.
    """
    if _registration is not None:
        _registration.write(activity, _registration.stall_after if stall_after is None else stall_after)


def current_activity() -> str:
    """Return the activity of this process's last heartbeat."""
    return "" if _registration is None else _registration.activity


def idle() -> None:
    """Report that this process waits for a call."""
    heartbeat("")


# -- in the stage's own process --


@dataclass
class Participant:
    """The last observation of one participant."""

    name: str
    process: ProcessId
    host: str
    beats: int
    """Number of its heartbeats."""
    stall_after: float
    """Seconds without progress after which it counts as stalled."""
    activity: str
    """What it does; "" if it is idle."""
    state: State = "running"
    seconds: float = 0.0
    """Since its last heartbeat or change of state."""
    machine: str = ""
    """See `this_machine`."""

    @property
    def stalled(self) -> bool:
        """Whether it has been stuck beyond its limit.

        An idle one needs no progress, but must not be suspended. One whose host is lost is always stalled.
        """
        if self.state == "lost":
            return True
        if self.seconds <= self.stall_after:
            return False
        return self.state == "suspended" or (self.state == "running" and self.activity != "")

    @property
    def is_local(self) -> bool:
        """Whether it runs on this host, so that its process can be looked up."""
        return (self.host, self.machine) == (socket.gethostname(), _own_machine())

    def describe(self) -> str:
        """Return a phrase such as `engine 1 (process 4711) has made no progress in "generate" for 31 s`."""
        where = "" if self.is_local else f" on host {self.host}"
        who = f"{self.name} (process {self.process.pid}{where})"
        if self.state == "dead":
            return f"{who} has died"
        if self.state == "lost":
            return f"{who} is lost, its host does not answer"
        if self.state == "suspended":
            return f"{who} has been suspended (SIGSTOP) for {self.seconds:.0f} s"
        return f'{who} has made no progress in "{self.activity}" for {self.seconds:.0f} s'


class OtherHosts(Protocol):
    """The monitors of all other hosts of the stage, as this host sees them."""

    def participants(self, passed: float, *, fresh: bool) -> list[Participant]:
        """Return the last observations. `passed`: seconds since the last poll of this host's monitor.

        `fresh` waits a moment for new observations.
        """

    def save_stacks(self) -> dict[str, str]:
        """Have each participant write its stacks, and return them by name."""

    def kill(self, names: Sequence[str] | None) -> None:
        """Send SIGKILL to the participants `names` (None: all), and forget them."""


class Monitor:
    """Polls the participants in `folder` between `__enter__` and `__exit__`.

    Args:
        folder: Folder in which the participants register; None for a temporary folder.
        fail: Called in the monitor's thread if a participant stalled and nothing reported it for
            `grace_seconds`; it should end the process.
        grace_seconds: Time that code which waits for a stalled participant has to report it.
    """

    def __init__(
        self,
        folder: Path | None = None,
        fail: Callable[[RLHFError], None] | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="rlhf-heartbeats-"))
        self._fail = fail
        self._grace_seconds = grace_seconds
        self._participants: dict[str, Participant] = {}
        self._other_hosts: OtherHosts | None = None
        self._saved = False
        """Whether the stacks of the present stall have been saved."""
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        """Held for a whole poll: what it has read before a `kill` must not come back after it."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        self._thread.join()
        unregister()
        # Stacks that were written stay for people. The file of a process without any is empty.
        for file in self.folder.glob("*"):
            if self._temporary or file.suffix != ".stacks" or not file.stat().st_size:
                file.unlink()
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def include(self, hosts: OtherHosts | None) -> None:
        """Include the participants of the other hosts; None: of this host alone."""
        self._other_hosts = hosts

    def local(self) -> list[Participant]:
        """Return the participants on this host as of now."""
        # 0.0, here and below: only the thread of the monitor counts seconds, or they would count twice.
        self._poll(0.0)
        return [participant for participant in self._all() if participant.is_local]

    def participant(self, name: str) -> Participant | None:
        """Return its last observation; None if it is not registered."""
        with self._lock:
            return self._participants.get(name)

    def stalled(self) -> list[Participant]:
        """Return the participants that stalled, as of the last poll."""
        return [participant for participant in self._all() if participant.stalled]

    def unhealthy(self) -> list[Participant]:
        """Return the participants that are dead, suspended or stalled now; for use after a call failed."""
        self._poll(0.0, fresh=True)
        return [each for each in self._all() if each.stalled or each.state != "running"]

    def busy(self) -> bool:
        """Return whether any participant other than this process is working."""
        for participant in self._all():
            # This process reports its wait as an activity, which is no sign that the wait will end.
            if participant.state == "running" and participant.activity and not _is_this_process(participant):
                return True
        return False

    def diagnose(self, waiting_for: str, limit: str) -> InfrastructureError:
        """Return the error of a wait that failed, and save the stacks of all participants.

        It is a WorkerDied or WorkerStuck and names the dead participants; if there are none the suspended
        ones, then the stalled ones, then those with the longest current activity.

        Args:
            waiting_for: The thing that the caller waited for.
            limit: The setting that bounds the wait.
        """
        # The last poll is up to half a second old. A process that has died since then, and broke the call of
        # another one, must be the one that is named.
        self._poll(0.0, fresh=True)
        if not self._saved:
            self.save_stacks()
        culprits = _culprits(self._all())
        named = "; ".join(participant.describe() for participant in culprits) or "no process works on it"
        stacks = f"stacks of all processes: {self.folder}"
        if any(participant.state in ("dead", "lost") for participant in culprits):
            return WorkerDied(f"while waiting for {waiting_for}: {named}; {stacks}")
        return WorkerStuck(f"while waiting for {waiting_for} ({limit}): {named}; {stacks}")

    def abort(self, error: RLHFError) -> None:
        """Fail the stage with `error`, for a thread that has found why another's wait cannot succeed."""
        if self._fail is not None:
            self._fail(error)

    def save_stacks(self) -> None:
        """Have each participant write the stacks of its threads into its file in `folder`."""
        asked = False
        for participant in self._all():
            stacks = _stacks_file(self.folder, participant.name)
            if participant.state != "running":
                _append(stacks, f"{participant.describe()}\n")
                continue
            if not participant.is_local:
                continue
            if _registration is not None and _is_this_process(participant):
                _registration.dump_stacks()
            else:
                participant.process.send(signal.SIGUSR1)
                asked = True
        # faulthandler does not report when it has written. Without a wait, a process may be killed before.
        if asked:
            time.sleep(_STACKS_SECONDS)
        elsewhere = {} if self._other_hosts is None else self._other_hosts.save_stacks()
        for name, text in elsewhere.items():
            _append(_stacks_file(self.folder, name), text)

    def kill(self, names: Sequence[str] | None = None) -> None:
        """Send SIGKILL to the participants `names` (None: all but this process), and forget them."""
        with self._polling:
            others = [each for each in self._all() if not _is_this_process(each)]
            killed = [each for each in others if names is None or each.name in names]
            kill([participant.process for participant in killed if participant.is_local])
            if self._other_hosts is not None:
                self._other_hosts.kill(names)
            with self._lock:
                for participant in killed:
                    # A file that stays would be read by the next poll, which would report the killed process
                    # as dead.
                    _heartbeat_file(self.folder, participant.name).unlink(missing_ok=True)
                    self._participants.pop(participant.name, None)

    # -- polling --

    def _all(self) -> list[Participant]:
        with self._lock:
            return list(self._participants.values())

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            now = time.monotonic()
            # This process may have been suspended, too: that time does not count for the participants.
            try:
                self._poll(min(now - last, 4 * POLL_SECONDS))
            except Exception:
                # Such as an error of Ray in a report of another host. This thread must go on: without it, no
                # stall is detected.
                log.exception("the processes of the stage could not be polled")
            last = now
            stalled = self.stalled()
            # At once: a collective with a stalled rank fails soon after, and the stacks of the others change.
            if stalled and not self._saved:
                self.save_stacks()
            self._saved = bool(stalled)
            overdue = any(each.seconds > each.stall_after + self._grace_seconds for each in stalled)
            if overdue and self._fail is not None:
                self._fail(self.diagnose("the stage to make progress", "run.timeouts"))
                return

    def _poll(self, passed: float, *, fresh: bool = False) -> None:
        """Read all heartbeat files; `passed`: seconds since the last poll."""
        with self._polling:
            # Without `_lock`, which every look at the participants needs: the other hosts can take seconds to
            # answer.
            elsewhere = (
                [] if self._other_hosts is None else self._other_hosts.participants(passed, fresh=fresh)
            )
            with self._lock:
                before, self._participants = self._participants, {}
                for file in sorted(self.folder.glob("*.heartbeat")):
                    name = file.stem.replace("_", " ")
                    previous = before.get(name)
                    participant = _read(file, name) or previous
                    if participant is None:
                        continue
                    participant.state = _state(participant)
                    if previous is not None and _unchanged(previous, participant):
                        participant.seconds = previous.seconds + passed
                    self._participants[name] = participant
                # In place of local records with these names: hosts that share the folder read each other's
                # files, but only the host of a process can look it up.
                self._participants.update({each.name: each for each in elsewhere})


def _culprits(participants: list[Participant]) -> list[Participant]:
    """Return the most likely causes of a wait that failed, by severity."""
    for states in (("dead", "lost"), ("suspended",)):
        found = [participant for participant in participants if participant.state in states]
        if found:
            return found
    stalled = [participant for participant in participants if participant.stalled]
    if stalled:
        return stalled
    working = [each for each in participants if each.activity and not _is_this_process(each)]
    # `seconds` grows from poll to poll, so processes that stopped together can differ by a poll.
    longest = max((participant.seconds for participant in working), default=0.0)
    return [participant for participant in working if participant.seconds > longest - 2 * POLL_SECONDS]


def _is_this_process(participant: Participant) -> bool:
    # A process on another host may have the same id, in containers it often has.
    return participant.is_local and participant.process.pid == os.getpid()


def _unchanged(a: Participant, b: Participant) -> bool:
    return (a.process, a.beats, a.state) == (b.process, b.beats, b.state)


def _state(participant: Participant) -> State:
    if not participant.is_local:
        return "running"
    if not participant.process.alive():
        return "dead"
    return "suspended" if participant.process.suspended() else "running"


def _read(file: Path, name: str) -> Participant | None:
    """Return the participant's record; None while its first record is being written."""
    try:
        fields: list[Any] = json.loads(file.read_bytes())
        pid, started, host, machine, beats, stall_after, activity = fields
    except (OSError, ValueError):
        return None
    process = ProcessId(pid, started)
    return Participant(name, process, host, beats, stall_after, activity, machine=machine)


def _heartbeat_file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.heartbeat"


def read_stacks(folder: Path, name: str) -> str:
    """Return the stacks that participant `name` has written on this host."""
    file = _stacks_file(folder, name)
    return file.read_text(errors="replace") if file.exists() else ""


def _stacks_file(folder: Path, name: str) -> Path:
    return _heartbeat_file(folder, name).with_suffix(".stacks")


def _append(file: Path, text: str) -> None:
    """Append to a file of stacks, unless that is not possible: without it, a stall must still be reported."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stacks:
            stacks.write(text)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error.strerror)
