"""The Prefect API behind `rlhf run` where there is no server: started with the command, gone with it.

Prefect can start such a server by itself, but in the terminal's process group, where Ctrl-C ends it before the flow
can report its last state, and in a way that leaves it behind when the command is killed. This one starts while
Prefect is imported, has a session of its own, and dies with its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.environment import prefect_environment
from flows.processes import die_with_parent
from rlhf_core.errors import StageFailed

log = logging.getLogger(__name__)

START_SECONDS = 120.0


class EmbeddedPrefect:
    """Sets the environment of this process and starts the server; call `wait` once Prefect is imported."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "prefect"
        self._log_file = home / "logs" / "prefect.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{free_port(0)}/api"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        os.environ.update(prefect_environment(self._folder))
        os.environ.update({"PREFECT_API_URL": self.url, "PREFECT_LOGGING_TO_API_ENABLED": "false"})
        port = self.url.removesuffix("/api").rpartition(":")[2]
        factory = ["--factory", "prefect.server.api.server:create_app"]
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "uvicorn",
                    *factory,
                    "--host",
                    "127.0.0.1",
                    "--port",
                    port,
                    "--log-level",
                    "error",
                ],
                env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        return self

    def wait(self) -> None:
        """Until the API answers. Raises StageFailed after `START_SECONDS`, or at once if the server died."""
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{self.url}/health"):
            died = self._process is None or self._process.poll() is not None
            if died or time.monotonic() > deadline:
                how = "ended at once" if died else f"did not answer within {START_SECONDS:g} s"
                raise StageFailed(f"Prefect's embedded server {how}; see {self._log_file}")
            time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process is not None:
            # Nothing is lost by SIGKILL: SQLite's journal is safe, and the run's own records are in the store.
            self._process.kill()
            self._process.wait(timeout=10)


def answers(url: str, seconds: float = 2.0) -> bool:
    """Whether a server answers `url` with success. No proxy: the servers asked are on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def free_port(preferred: int) -> int:
    """`preferred` if nothing listens there on loopback, else a free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StageFailed("no free TCP port on 127.0.0.1")
