"""Who of a stage's processes moves, and who is stuck.

    part      a training rank, Ray worker, engine, or the stage's own process: it says in a file what it is doing
                  take_part(folder, "critic rank 0", limit)       first; also: SIGUSR1 writes its stacks beside the file
                  doing("optimizer step 7")                       whenever it moves on, from any depth of the code
                  idle()                                          it waits to be called, for as long as may be
                  leave_part()                                    it is done
    Watch     in the stage's own process: a thread looks at all parts, and counts how long each has not moved
                  late()          parts that stood still, or were halted by a SIGSTOP, for longer than their limit
                  blame(...)      the error that names them, with the stacks of all parts saved
                  give_up(error)  fails the stage: for a thread that knows why whoever waits will wait in vain
              Whoever waits for parts asks it. For where nobody asks, or whoever asks is stuck, `fail` is
              called.

Seconds are counted by the watching thread, so that no clock is compared and a machine that was asleep blames
nobody. Parts on other hosts are seen where the folder is shared, but neither signalled nor asked for their
stacks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

from rlhf_core.errors import InfrastructureError, RLHFError, WorkerDied, WorkerStuck
from rlhf_core.system.processes import ProcessId, kill

LOOK_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""What whoever waits for a part has beyond its limit, before `fail` is called."""
_STACKS_SECONDS = 3.0
_RECORD_BYTES = 400

State = Literal["running", "halted", "gone"]


# -- in a part --


class _Own:
    """This process's file."""

    def __init__(self, folder: Path, name: str, limit: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        process = ProcessId.of(os.getpid())
        assert process is not None
        self.limit = limit
        self.moves = 0
        self.what = ""
        self._who = [process.pid, process.started, socket.gethostname()]
        self._path = _file(folder, name)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        # Appended to: an engine that takes the place of a stuck one leaves what that one told.
        self._stacks: IO[str] = _stacks(folder, name).open("a")
        faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)

    def write(self, what: str, limit: float) -> None:
        self.moves += 1
        self.what = what
        record = json.dumps([*self._who, self.moves, limit, what[:100]])
        os.pwrite(self._file, record.ljust(_RECORD_BYTES).encode(), 0)

    def dump_stacks(self) -> None:
        """Not by the signal: its handler walks the other threads' frames while they run, which can end the
        process.
        """
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        # Not unregistered: whoever saw the file a moment ago may still send the signal, which would kill.


_own: _Own | None = None


def take_part(folder: Path, name: str, limit: float) -> None:
    """From now on this process is the part `name` of the stage watched in `folder`; it may stand still for
    `limit` seconds, unless `doing` says otherwise.
    """
    global _own
    leave_part()
    _own = _Own(folder, name, limit)


def leave_part() -> None:
    """This process is done, and no longer watched."""
    global _own
    if _own is not None:
        _own.close()
        _own = None


def doing(what: str, limit: float | None = None) -> None:
    """This process moved, and is at `what` now, for `limit` seconds at most (None: its own). Nothing if it is
    no part.
    """
    if _own is not None:
        _own.write(what, _own.limit if limit is None else limit)


def working_on() -> str:
    """What this process said last that it is doing."""
    return "" if _own is None else _own.what


def idle() -> None:
    """This process waits to be called."""
    doing("")


# -- in the stage's own process --


@dataclass
class Part:
    """What is known of one part."""

    name: str
    process: ProcessId
    host: str
    moves: int
    """Counts up with all it does."""
    limit: float
    """Seconds it may stand still."""
    what: str
    """What it is doing; "" where it is idle."""
    state: State = "running"
    seconds: float = 0.0
    """Since it moved, or changed its state."""

    @property
    def late(self) -> bool:
        """Stuck for longer than its limit; an idle one need not move, but must be able to."""
        return self.seconds > self.limit and (
            self.state == "halted" or (self.state == "running" and self.what != "")
        )

    @property
    def here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    def describe(self) -> str:
        """`engine 1 (process 4711) has stood still at "generate" for 31 s`"""
        who = f"{self.name} (process {self.process.pid})"
        if self.state == "gone":
            return f"{who} is gone"
        if self.state == "halted":
            return f"{who} has been halted (SIGSTOP) for {self.seconds:.0f} s"
        return f'{who} has stood still at "{self.what}" for {self.seconds:.0f} s'


class Watch:
    """Looks at the parts in `folder` (None: a temporary one) while it is entered. `fail` gets the error where
    parts are late for `GRACE_SECONDS` more, in a thread of its own; it should end the process.
    """

    def __init__(self, folder: Path | None = None, fail: Callable[[RLHFError], None] | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="rlhf-watch-"))
        self._fail = fail
        self._parts: dict[str, Part] = {}
        self._saved = False
        """Whether the stacks of those that are late now have been saved."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        self._thread.join()
        leave_part()
        for file in self.folder.glob("*"):
            if self._temporary or file.suffix != ".stacks" or not file.stat().st_size:
                file.unlink()
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def part(self, name: str) -> Part | None:
        """What was seen of it last."""
        with self._lock:
            return self._parts.get(name)

    def late(self) -> list[Part]:
        """Those that are stuck."""
        return [part for part in self._all() if part.late]

    def lost(self) -> list[Part]:
        """Those that are gone, halted or late, as of now: to be asked after something failed."""
        self._look(0.0)
        return [part for part in self._all() if part.late or part.state != "running"]

    def busy(self) -> bool:
        """Whether any part but this process works."""
        return any(
            part.what and part.process.pid != os.getpid() for part in self._all() if part.state == "running"
        )

    def blame(self, waiting_for: str, limit: str) -> InfrastructureError:
        """The error for a wait that failed: WorkerDied or WorkerStuck, naming who is gone, else halted, else
        late, else longest at the same thing. `limit`: the setting that bounds it. The stacks of all parts are
        saved by then.
        """
        self._look(0.0)
        if not self._saved:
            self.save_stacks()
        parts = self._all()
        culprits = [part for part in parts if part.state == "gone"] or [
            part for part in parts if part.state == "halted"
        ]
        culprits = culprits or [part for part in parts if part.late]
        if not culprits:
            working = [part for part in parts if part.what and part.process.pid != os.getpid()]
            longest = max((part.seconds for part in working), default=0.0)
            culprits = [part for part in working if part.seconds > longest - 2 * LOOK_SECONDS]
        named = "; ".join(part.describe() for part in culprits) or "no process works on it"
        kind = WorkerDied if any(part.state == "gone" for part in culprits) else WorkerStuck
        rule = "" if kind is WorkerDied else f" ({limit})"
        return kind(f"while waiting for {waiting_for}{rule}: {named}; stacks of all processes: {self.folder}")

    def give_up(self, error: RLHFError) -> None:
        """Fail the stage with `error`: for a thread that knows why whoever waits will wait in vain."""
        if self._fail is not None:
            self._fail(error)

    def save_stacks(self) -> None:
        """Have every part that can write the stacks of its threads into its file in `folder`."""
        able = [part for part in self._all() if part.here and part.state == "running"]
        before = {part.name: _size(_stacks(self.folder, part.name)) for part in able}
        for part in able:
            if _own is not None and part.process.pid == os.getpid():
                _own.dump_stacks()
            else:
                part.process.send(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline:
            sizes = {part.name: _size(_stacks(self.folder, part.name)) for part in able}
            time.sleep(0.1)
            if all(before[name] < size == _size(_stacks(self.folder, name)) for name, size in sizes.items()):
                break
        for part in self._all():
            if part.name not in before:
                with _stacks(self.folder, part.name).open("a") as file:
                    file.write(f"{part.describe()}\n")

    def kill(self, names: Sequence[str] | None = None) -> None:
        """SIGKILL those parts, or all but this process, where they run on this host; they are forgotten."""
        chosen = [part for part in self._all() if names is None or part.name in names]
        others = [part for part in chosen if part.process.pid != os.getpid()]
        kill([part.process for part in others if part.here])
        with self._lock:
            for part in others:
                _file(self.folder, part.name).unlink(missing_ok=True)
                self._parts.pop(part.name, None)

    # -- looking --

    def _all(self) -> list[Part]:
        with self._lock:
            return list(self._parts.values())

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            # This process may have been halted, too: it saw nothing meanwhile.
            self._look(min(now - before, 4 * LOOK_SECONDS))
            before = now
            # At once: a collective that is waited in breaks soon after, and who was where is lost.
            late = bool(self.late())
            if late and not self._saved:
                self.save_stacks()
            self._saved = late
            if self._fail is not None and any(
                part.late and part.seconds > part.limit + GRACE_SECONDS for part in self._all()
            ):
                self._fail(self.blame("the stage to move", "run.timeouts"))
                return

    def _look(self, passed: float) -> None:
        with self._lock:
            before, self._parts = self._parts, {}
            for file in sorted(self.folder.glob("*.part")):
                name = file.stem.replace("_", " ")
                known = before.get(name)
                part = _read(file, name) or known
                if part is None:
                    continue
                part.state = _state(part)
                if known is not None and _same(known, part):
                    part.seconds = known.seconds + passed
                self._parts[name] = part


def _same(a: Part, b: Part) -> bool:
    return (a.process, a.moves, a.state) == (b.process, b.moves, b.state)


def _state(part: Part) -> State:
    if not part.here:
        return "running"
    if not part.process.alive():
        return "gone"
    return "halted" if part.process.stopped() else "running"


def _read(file: Path, name: str) -> Part | None:
    """None while it is being written."""
    try:
        fields: list[Any] = json.loads(file.read_bytes())
        pid, started, host, moves, limit, what = fields
    except (OSError, ValueError):
        return None
    return Part(name, ProcessId(pid, started), host, moves, limit, what)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.part"


def _stacks(folder: Path, name: str) -> Path:
    return _file(folder, name).with_suffix(".stacks")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
