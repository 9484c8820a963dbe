"""Runs one stage in a child process and ends all processes of the stage.

run_child      starts `python -m rlhf_core.run SPEC` in a session of its own, output into a log file, or takes
               one that was started before and waits (`NextStage`)
events         JSON lines over a pipe: progress to `on_event`, then a result or an error record
waits          bounded by `timeout`; a child that ends without a result is a `StageFailed` that quotes its log
finally        SIGTERM to the child's reaper (rlhf_core/run/reaper.py), which stops the stage within 20 s and
               ends all its processes, also when the flow is cancelled (Prefect's TerminationSignal) or
               interrupted (Ctrl-C)

The process of the next stage starts while the present stage runs (`NextStage`):

    stage n makes progress   prepare   a process imports what stage n + 1 needs, then waits for its spec
    stage n + 1 begins       take      the same process, or None if a new one would not be like it
    the run ends             close     ends a process that nobody has taken

Imports take most of the time of a short stage: torch, transformers, DeepSpeed, Ray and vLLM. A process that
waits has decided nothing: it has no inputs, no lease and no MLflow run. Like every stage it has a reaper, so
that it ends with the process of the flow in every case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_core.config import PipelineConfig
from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import RLHFError, StageFailed, StageTimedOut
from rlhf_core.executors.events import (
    FD_VARIABLE,
    PARENT_VARIABLE,
    STOP_VARIABLE,
    SUSPEND_VARIABLE,
    WAIT_VARIABLE,
    outcome_of,
    parse,
)
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.system.files import read_end
from rlhf_core.system.processes import launch, python_module
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

OnEvent = Callable[[dict[str, Any]], None]

# `checkpoints.LAST_SECONDS`, `follow.Waits.stop` and `reconcile.FLOW_STOP_SECONDS` follow from it. With
# `_REAPER_SECONDS` it is 30 s, which Kubernetes and Slurm leave by default before SIGKILL.
TERM_SECONDS = 20.0
"""How long a stage may take to stop after SIGTERM."""
EXIT_SECONDS = 30.0
"""How long a stage may take to exit after it sent its result, which is committed by then."""
_REAPER_SECONDS = 10.0
"""What the reaper may need beyond that."""
_POLL_SECONDS = 0.25
_STOPPING = (
    "is being stopped, which takes at most {:.0f} s: a training ends its step and saves a checkpoint."
    " Another Ctrl-C ends the stage at once and loses the steps after its last checkpoint"
)
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Died|Stuck|Failed|Interrupt)\b.*:|^Fatal Python error")


@dataclass(frozen=True)
class StageProcess:
    """The child process of a stage, which is the reaper of the stage's own process."""

    process: subprocess.Popen[bytes]
    log_file: Path
    events: BinaryIO
    """Receives the events of the stage."""
    request: BinaryIO | None
    """Pipe to a process that waits: it begins after a line on it, and ends if it is closed."""
    stop_seconds: float = TERM_SECONDS
    """How long the stage may take to stop."""

    @property
    def spec_file(self) -> Path:
        """The file that the process reads its spec from."""
        return _spec_file(self.log_file)

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return not _has_exited(self.process.pid)

    def begin(self, spec: StageSpec) -> None:
        """Let a process that waits run the stage of `spec`."""
        assert self.request is not None
        spec.write(self.spec_file)
        # A process that has just died is reported as any other stage that dies.
        with self.request, contextlib.suppress(BrokenPipeError):
            self.request.write(b"begin\n")

    def kill(self) -> None:
        """End a process that waits, and everything that it started."""
        self.events.close()
        if self.request is not None:
            self.request.close()
        self.end()

    def end(self) -> None:
        """Ask the reaper to stop the stage and all its processes, and wait for that.

        If that takes too long, or the wait is interrupted, the reaper kills them at once. A reaper that does
        not end in time either is killed with its process group.
        """
        try:
            try:
                _ask_to_end(self.process, self.stop_seconds + _REAPER_SECONDS)
            finally:
                # Does nothing if it has ended. Else the wait was interrupted, or too short.
                _ask_to_end(self.process, _REAPER_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=EXIT_SECONDS)


def run_child(
    spec: StageSpec,
    log_file: Path,
    environment: Mapping[str, str],
    timeout: float,
    on_event: OnEvent,
    waiting: StageProcess | None = None,
    *,
    has_terminal: bool = True,
) -> ArtifactRef:
    """Run the stage of `spec` and return its artifact.

    Args:
        spec: The stage, its configuration and its inputs.
        log_file: File for the output of the child. The spec is written next to it.
        environment: All environment variables of the child.
        timeout: Seconds after which the stage is ended.
        on_event: Called with each event that the child sends.
        waiting: A process with this log and this environment that waits for a spec; None starts a new one.
        has_terminal: Whether a person can have interrupted it, who is told what happens then.

    Raises:
        RLHFError: The error that the child sent, with its class; `StageFailed` if the child died, and
            `StageTimedOut` if it took more than `timeout` seconds.
    """
    started = time.monotonic()
    child = waiting or start_child(spec, log_file, environment, waits=False)
    with child.events:
        try:
            if child.request is not None:
                child.begin(spec)
            outcome = _follow(child.process, child.events, timeout, on_event)
        except BaseException as error:
            if has_terminal and not isinstance(error, Exception):  # Ctrl-C, SIGTERM or a cancellation
                on_event({"event": "warning", "message": _STOPPING.format(child.stop_seconds)})
            raise
        finally:
            # Before the return code is read, and also after a result: actors and engines can outlive the
            # stage.
            child.end()
    if isinstance(outcome, RLHFError):
        raise outcome
    if outcome is None:
        where = log_reference(log_file)
        if time.monotonic() - started >= timeout:
            limit = f"run.stage_timeout={spec.config.run.stage_timeout:g}"
            raise StageTimedOut(
                f"stage {spec.stage} was stopped after {timeout:.0f} seconds, all that {limit} left it{where}"
            )
        raise StageFailed(f"stage {spec.stage} {_cause(child.process.returncode)}{where}")
    return outcome


def start_child(
    spec: StageSpec,
    log_file: Path,
    environment: Mapping[str, str],
    *,
    waits: bool,
    stop_seconds: float = TERM_SECONDS,
) -> StageProcess:
    """Start a child process for `spec`. The kernel ends it when the calling thread ends.

    Args:
        spec: The stage, its configuration and its inputs.
        log_file: File for the output of the child. The spec is written next to it.
        environment: All environment variables of the child.
        waits: Whether only stage and configuration of `spec` are used: the process imports what the stage
            needs and waits for `StageProcess.begin`.
        stop_seconds: How long the stage may take to stop.
    """
    spec.write(_spec_file(log_file))
    # `opened` closes the child's ends of the pipes in any case, `on_error` the ends of this process if the
    # child does not start.
    with contextlib.ExitStack() as opened:
        read_fd, write_fd = os.pipe()
        opened.callback(os.close, write_fd)
        # A read returns what is in the pipe, also if that is less than a line (`_Lines`).
        os.set_blocking(read_fd, False)
        # Without a buffer, because `poll` does not see what Python has read ahead.
        events = os.fdopen(read_fd, "rb", buffering=0)
        on_error = opened.enter_context(contextlib.ExitStack())
        on_error.callback(events.close)
        variables = {
            FD_VARIABLE: str(write_fd),
            PARENT_VARIABLE: str(os.getpid()),
            STOP_VARIABLE: str(stop_seconds),
            SUSPEND_VARIABLE: str(spec.config.run.timeouts.stall),
        }
        passed = [write_fd]
        request = None
        if waits:
            request_fd, begin_fd = os.pipe()
            opened.callback(os.close, request_fd)
            request = os.fdopen(begin_fd, "wb", buffering=0)
            on_error.callback(request.close)
            variables[WAIT_VARIABLE] = str(request_fd)
            passed.append(request_fd)
        # No parent_death_signal: the child asks the kernel itself (`fork_reaper`).
        process = launch(
            [*python_module("rlhf_core.run"), str(_spec_file(log_file))],
            {**environment, **variables},
            log_file=log_file,
            pass_fds=passed,
        )
        on_error.pop_all()
    return StageProcess(process, log_file, events, request, stop_seconds)


def _spec_file(log_file: Path) -> Path:
    return log_file.with_suffix(".json")


def _follow(
    child: subprocess.Popen[bytes], reader: BinaryIO, timeout: float, on_event: OnEvent
) -> ArtifactRef | RLHFError | None:
    """Return the result or the error that the child sent, or None if it died or ran out of time before."""
    deadline = time.monotonic() + timeout
    outcome: ArtifactRef | RLHFError | None = None
    lines = _Lines(reader)
    while True:
        # The order matters: what a child wrote before it exited is in the pipe by the time its exit is seen.
        exited = _has_exited(child.pid)
        for line in lines.wait(0.0 if exited else _POLL_SECONDS):
            event = parse(line)
            if event is None:
                continue
            found = outcome_of(event)
            if found is None:
                on_event(event)
            else:
                outcome = found
            if outcome is not None:
                deadline = min(deadline, time.monotonic() + EXIT_SECONDS)
        if exited or time.monotonic() > deadline:
            return outcome


class _Lines:
    """Whole lines out of a non-blocking pipe."""

    def __init__(self, reader: BinaryIO) -> None:
        self._reader = reader
        # Not `select.select`, which refuses descriptors from 1024 on.
        self._poll = select.poll()
        self._poll.register(reader, select.POLLIN)
        self._rest = b""
        self._open = True

    def wait(self, seconds: float) -> list[bytes]:
        """Return the lines that have come. Waits at most `seconds` for the first one."""
        if not self._open:
            # At its end, `poll` would return at once, and the loop of `_follow` would not pause.
            time.sleep(seconds)
            return []
        if not self._poll.poll(seconds * 1000):
            return []
        while (data := self._reader.read(65536)) is not None:
            if not data:
                self._open = False
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _has_exited(pid: int) -> bool:
    """Return whether a child has exited. It is not reaped, so no other process can get its pid or group."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _ask_to_end(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Send SIGTERM to the reaper, and wait at most `seconds` for its end.

    At the first SIGTERM the reaper lets the stage stop, and at the second one it kills the stage.
    """
    if not _has_exited(child.pid):
        child.terminate()
    deadline = time.monotonic() + seconds
    # Not `Popen.wait`, which reaps the process: the pid must stay taken until the group was killed.
    while not _has_exited(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def _cause(code: int) -> str:
    # The reaper exits with 128 + n if signal n ended the stage. -n: signal n ended the reaper itself.
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        hint = "; the kernel may have run out of memory" if number == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(number).name}{hint}"
    return f"ended with exit code {code} and no result"


def log_excerpt(log_file: Path) -> str:
    """Return the end of a log as one line: from the last exception's message on, or the last lines."""
    lines = [line.strip() for line in read_end(log_file, 16384).splitlines()]
    lines = [printable(scrubbed(line))[:300] for line in lines if line]
    start = max(0, len(lines) - 3)
    for number, line in enumerate(lines):
        if _ERROR_LINE.match(line):
            start = number
    return " | ".join(lines[start : start + 3])


def log_reference(log_file: Path) -> str:
    """Return the end of an error message, with the path of a log and `log_excerpt`."""
    excerpt = log_excerpt(log_file)
    return f"; log: {log_file}" + (f"; end of the log: {excerpt}" if excerpt else "")


# -- the process of the next stage --

_SOURCES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Origin:
    """Everything that decides what a waiting process has imported."""

    stage: StageName
    config: PipelineConfig
    environment: Mapping[str, str]
    sources: Mapping[str, tuple[int, int]]


class NextStage:
    """At most one process that waits for the spec of a stage.

    The kernel ends it with the thread that has called `prepare`.
    """

    def __init__(self, start: Callable[..., StageProcess] = start_child, sources: Path = _SOURCES) -> None:
        """No process yet.

        Args:
            start: Starts a process, as `start_child` does.
            sources: Folder of the source code that a process imports.
        """
        self._start = start
        self._sources = sources
        self._process: StageProcess | None = None
        self._origin: _Origin | None = None

    @property
    def stage(self) -> StageName | None:
        """The stage that was prepared last, unless its process has been taken."""
        return None if self._origin is None else self._origin.stage

    def prepare(
        self, stage: StageName, config: PipelineConfig, environment: Mapping[str, str], log_file: Path
    ) -> None:
        """Start a process for `stage` in place of any other. A failure is only logged: nothing depends on it.

        Args:
            stage: Name of the stage.
            config: The configuration.
            environment: The whole environment of the process.
            log_file: File for its output. It is removed again if the process is not used.
        """
        self.close()
        self._origin = _Origin(stage, config, dict(environment), _modification_times(self._sources))
        try:
            self._process = self._start(StageSpec(stage, "", config), log_file, environment, waits=True)
        except OSError as error:
            # `_origin` stays, so that `prepare_next` does not try again at each progress.
            log.info("the process of stage %s starts later: %s", stage, error)
            for file in (log_file, log_file.with_suffix(".json")):
                file.unlink(missing_ok=True)

    def take(
        self, stage: StageName, config: PipelineConfig, environment: Mapping[str, str]
    ) -> StageProcess | None:
        """Return the process that waits for `stage`, which is the caller's from now on.

        None if there is none, if it has died, or if configuration, environment or source code have changed
        since it was started.
        """
        process = self._process
        if process is None or self.stage != stage:
            return None
        same = self._origin == _Origin(stage, config, dict(environment), _modification_times(self._sources))
        if not same or not process.is_alive():
            self.close()
            return None
        self._process = self._origin = None
        return process

    def close(self) -> None:
        """End the process, and remove its log."""
        process = self._process
        if process is None:
            return
        self._process = self._origin = None
        process.kill()
        process.log_file.unlink(missing_ok=True)
        process.spec_file.unlink(missing_ok=True)


def _modification_times(sources: Path) -> dict[str, tuple[int, int]]:
    """Return time of modification and size of each source file below `sources`."""
    times = {}
    for file in sources.rglob("*.py"):
        with contextlib.suppress(OSError):  # removed in the meantime, or a link of an editor to nothing
            status = file.stat()
            # Not digests, for which every stage would read all sources twice.
            times[str(file)] = (status.st_mtime_ns, status.st_size)
    return times
