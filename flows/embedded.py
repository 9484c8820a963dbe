"""The Prefect API behind `rlhf run` where there is no server: started with the command, gone with it.

Prefect can start such a server by itself, but in the terminal's process group, where Ctrl-C ends it before
the flow can report its last state, and in a way that leaves it behind when the command is killed. This one
starts while Prefect is imported, has a session of its own, is started again where it dies, and dies with its
parent.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from flows.local_http import answers
from flows.login import new_login
from rlhf_core.errors import StageFailed
from rlhf_core.run.environment import prefect_environment
from rlhf_core.run.home import rotate_logs
from rlhf_core.system.launch import launch, python_module
from rlhf_core.system.processes import free_port

log = logging.getLogger(__name__)

START_SECONDS = 120.0
_PAUSE_SECONDS = 0.5
"""Doubled before each start of a server that dies again and again."""
EMBEDDED = "RLHF_EMBEDDED_PREFECT"
"""Set where the server is gone when the command is."""


class EmbeddedPrefect:
    """Start it before Prefect is imported, call `wait` after. It ends with this process, however that ends."""

    def __init__(self, home: Path) -> None:
        self._log_file = home / "logs" / "prefect.log"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        rotate_logs(self._log_file.parent)
        folder = home / "prefect"
        folder.mkdir(parents=True, exist_ok=True)
        # Its database is made in many migrations: one process at a time, anew where one was killed at it.
        self._complete = folder / "complete"
        self._lock = FileLock(folder / ".lock")
        try:
            self._lock.acquire(timeout=START_SECONDS)
        except Timeout as error:
            raise StageFailed(
                f"another run has been making Prefect's database for {START_SECONDS:g} s, or hangs: it holds "
                f"{self._lock.lock_file}; end it and type the command again"
            ) from error
        if self._complete.exists() and _is_database(folder / "prefect.db"):
            self._lock.release()
        else:
            # First: if this process is killed during the migrations, the next one must not accept half a
            # database.
            self._complete.unlink(missing_ok=True)
            for left in folder.glob("prefect.db*"):
                left.unlink()
        self._port = free_port()
        self._folder = folder
        self.login = new_login()
        os.environ.update(prefect_environment(folder, self.login, self._port))
        os.environ.update({"PREFECT_LOGGING_TO_API_ENABLED": "false", EMBEDDED: "1"})
        self.url = os.environ["PREFECT_API_URL"]
        self._process = self._start()
        self._stopping = False
        self._changing = threading.Lock()
        # Prefect's client registers its own exit handler when it is imported: it runs before this one and
        # still reaches the server.
        atexit.register(self.stop)

    def _start(self) -> subprocess.Popen[bytes]:
        application = ["--factory", "flows.application:create_app", "--log-level", "error"]
        return launch(
            [*python_module("uvicorn"), *application, "--host", "127.0.0.1", "--port", str(self._port)],
            {**_without_client_logging(), "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
            log_file=self._log_file,
            working_folder=self._folder,  # this server must not read settings files of the working folder
            parent_death_signal=signal.SIGKILL,
        )

    def wait(self) -> None:
        """Until the API answers. Raises StageFailed after `START_SECONDS`, or at once if the server died."""
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{self.url}/health"):
            died = self._process.poll() is not None
            if died or time.monotonic() > deadline:
                how = "ended at once" if died else f"did not answer within {START_SECONDS:g} s"
                free = shutil.disk_usage(self._folder).free / 1e6
                raise StageFailed(
                    f"Prefect's embedded server {how} ({free:.0f} MB are free in {self._folder}); see"
                    f" {self._log_file}"
                )
            time.sleep(0.1)
        self._complete.touch()
        self._lock.release()
        threading.Thread(target=self._keep_running, daemon=True, name="embedded-prefect").start()

    def _keep_running(self) -> None:
        """Its database outlives it, and Prefect's client asks again for a while: a flow need not notice a
        death.
        """
        pause = _PAUSE_SECONDS
        while True:
            began = time.monotonic()
            code = self._process.wait()
            pause = (
                _PAUSE_SECONDS if time.monotonic() - began > START_SECONDS else min(2 * pause, START_SECONDS)
            )
            time.sleep(pause)
            with self._changing:
                if self._stopping:
                    return
                log.warning(
                    "Prefect's embedded server ended (%s) and is started again; see %s", code, self._log_file
                )
                with suppress(OSError):  # no memory for another process: later, perhaps
                    self._process = self._start()

    def stop(self) -> None:
        """End the server. SIGKILL loses nothing: the run's own records are in the store and in MLflow."""
        # Bounded: a server that is just being started dies with this process anyway.
        held = self._changing.acquire(timeout=10)
        self._stopping = True
        if held:
            self._changing.release()
        self._process.kill()
        self._process.wait(timeout=10)


def _is_database(file: Path) -> bool:
    """Return whether SQLite can read the database. An unreadable database is created again, because its
    content is not needed.
    """
    if not file.exists():
        return False
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=10.0)) as database:
            database.execute("select count(*) from flow").fetchone()
    except sqlite3.OperationalError as error:
        # the database is locked or the disk is full, but the file is a database
        return "no such table" not in str(error)
    except sqlite3.DatabaseError:
        return False
    return True


def _without_client_logging() -> dict[str, str]:
    """The environment; what the flow's terminal is spared, the server's log shall have."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_LOGGING_")}
