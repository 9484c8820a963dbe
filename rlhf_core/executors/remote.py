"""Entry point of a job: `python -m rlhf_core.executors.remote STORE_URL STAGE_KEY NUMBER [ENDPOINT]`.

It runs the stage of `{store}/jobs/{key}/{number}/spec.json` in a child process of this host, as a flow does
on its own machine (rlhf_core/executors/child.py), and writes the stage's events and the end of its log to the
store. SIGTERM and an object `stop` in the store ask the stage to save a checkpoint and end.

Exit codes: 0 a result was sent; 2 and 3 an error was sent (`rlhf_core.errors`); 143 asked to stop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhf_core.config.redact import scrubbed
from rlhf_core.errors import RLHFError, StageFailed, StoreError
from rlhf_core.executors.child import run_child
from rlhf_core.executors.events import error_event
from rlhf_core.executors.job_files import LOG_BYTES, Event, JobFiles
from rlhf_core.executors.spec import stage_environment
from rlhf_core.logs import log_to_stderr
from rlhf_core.storage.store import Store
from rlhf_core.system.files import read_end
from rlhf_core.system.processes import EXIT_STOPPED

log = logging.getLogger("rlhf_core.executors.remote")

SEND_SECONDS = 1.0
"""Between two writes of events."""
_STOP_SECONDS = 5.0
"""Between two looks for a request to stop. Each is a request to the store, for the whole time of a job."""
_LOG_SECONDS = 20.0
"""Between two writes of the log, of up to 1 MiB each."""


def main(store_url: str, stage_key: str, number: str, endpoint: str = "") -> int:
    """Run the stage of a job; the exit code.

    Args:
        store_url: URL of the store in the flow's configuration.
        stage_key: Key of the stage.
        number: Number of the job.
        endpoint: Address of an S3-compatible server.
    """
    # First: by default the signal would end this process without a final event, and the flow would not know
    # why.
    signal.signal(signal.SIGTERM, _exit)
    files = JobFiles(Store(store_url, endpoint or None), stage_key, int(number))
    job = files.submission
    for name, value in job.environment.items():
        os.environ.setdefault(name, value)
    home = job.spec.home.make()
    log_file = home.run_logs("jobs") / f"{job.job_name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with _Reporter(files, log_file) as reporter:
        try:
            environment = stage_environment(job.spec.config)
            seconds = job.seconds
            ref = run_child(job.spec, log_file, environment, seconds, reporter.send, has_terminal=False)
        except RLHFError as error:
            log.error("%s: %s", type(error).__name__, error.message)
            reporter.send(error_event(error))
            return error.exit_code
        except Exception as error:
            log.exception("the job failed")
            reporter.send(error_event(error))
            return RLHFError.exit_code
        except (SystemExit, KeyboardInterrupt):
            reporter.send(error_event(StageFailed("the job was asked to stop, or evicted")))
            return EXIT_STOPPED
        reporter.send({"event": "result", "artifact": ref.to_json()})
    return 0


def _exit(_signum: int, _frame: object) -> None:
    # Once: a second signal would interrupt the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(EXIT_STOPPED)


class _Reporter:
    """Writes events and the log to the store in a thread, and the log to the output of this process."""

    def __init__(self, files: JobFiles, log_file: Path, last_seconds: float = 100.0) -> None:
        """Create a reporter, which `with` starts.

        Args:
            files: Files of the job in the store.
            log_file: The log that it reads.
            last_seconds: Limit for the final event, if the store does not answer.
        """
        self._files = files
        self._log_file = log_file
        self._last_seconds = last_seconds
        # A scheduler that suspends a job and resumes it starts its command again.
        self._events, _ = files.read_events()
        self._progress: dict[str, Event] = {}
        """The latest progress of each task."""
        self._sent = self._written = 0
        """Number of the events that were sent, and of those that the store has."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._copied = 0
        self._thread = threading.Thread(target=self._loop, daemon=True, name="reporter")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        # More than the limit itself, because a request can be under way when it is over.
        self._thread.join(timeout=self._last_seconds + 20.0)

    def send(self, event: Event) -> None:
        """Write `event` with the others. Progress replaces that of the same task."""
        with self._lock:
            self._sent += 1
            if event["event"] != "progress":
                self._events.append(event)
                return
            self._progress.pop(event["task"], None)  # the task that reported last is the last one
            self._progress[event["task"]] = event

    def _loop(self) -> None:
        looked = logged = time.monotonic()
        while not self._done.wait(SEND_SECONDS):
            now = time.monotonic()
            self._echo()
            try:
                self._write_events()
                if now - logged > _LOG_SECONDS:
                    logged = now
                    self._write_log()
                if now - looked > _STOP_SECONDS:
                    looked = now
                    if self._files.is_asked_to_stop():
                        # The handler runs in the main thread: its SystemExit has `run_child` end the stage.
                        os.kill(os.getpid(), signal.SIGTERM)
            except (OSError, StoreError) as error:
                log.warning("%s; trying again", error)
        self._echo()
        deadline = time.monotonic() + self._last_seconds
        # The log first: a flow that reads the final event reads the log next.
        for write in (self._write_log, self._write_events):
            self._write_until(deadline, write)

    def _write_until(self, deadline: float, write: Callable[[], None]) -> None:
        """Call `write` until it succeeds: without the final event, the flow does not know the error."""
        while True:
            try:
                write()
                return
            except (OSError, StoreError) as error:
                log.error("%s", error)
            if time.monotonic() > deadline:
                return
            time.sleep(SEND_SECONDS)

    def _write_events(self) -> None:
        with self._lock:
            if self._written == self._sent:
                return
            sent, events, progress = self._sent, list(self._events), list(self._progress.values())
        # Without the lock: the stage goes on while the store is slow. What it sends meanwhile is written the
        # next time.
        self._files.write_events(events, progress)
        self._written = sent

    def _write_log(self) -> None:
        if self._log_file.exists():
            self._files.write_log(scrubbed(read_end(self._log_file, LOG_BYTES)).encode())

    def _echo(self) -> None:
        """Copy the stage's log to the output of this process, which the scheduler's tools show.

        Errors are ignored: the output can be a file on a full disk, and events do not depend on it.
        """
        with contextlib.suppress(OSError), self._log_file.open("rb") as file:
            if self._log_file.stat().st_size < self._copied:
                self._copied = 0  # the log was rotated
            file.seek(self._copied)
            text = file.read()
            self._copied += len(text)
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 5:
        sys.exit("usage: python -m rlhf_core.executors.remote STORE_URL STAGE_KEY NUMBER [ENDPOINT]")
    log_to_stderr()
    sys.exit(main(*sys.argv[1:]))
