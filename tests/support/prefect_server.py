"""A Prefect server that several commands of a test share: the command of `rlhf up`, without the page, the
scheduler and the types of blocks.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rlhf_core.ops.servers.prefect_server import new_auth_string, server_command, server_environment
from rlhf_core.system.processes import free_port
from rlhf_core.system.serving import responds


class PrefectServer(NamedTuple):
    """A server with its files in `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str
    auth: str
    environment: dict[str, str]
    """The variables by which commands use it."""

    @property
    def log(self) -> Path:
        return self.folder / "prefect.log"


@contextmanager
def prefect_server(folder: Path) -> Iterator[PrefectServer]:
    """Start the server. It ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    port, auth = free_port(), new_auth_string()
    environment = server_environment(folder, auth, port)
    # The types of blocks are a third of the start.
    own = {"PREFECT_UI_ENABLED": "0", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}
    with (
        (folder / "prefect.log").open("wb") as log,
        subprocess.Popen(
            server_command(port),
            env={**os.environ, **environment, **own, "PREFECT__SERVER_EPHEMERAL": "1"},
            # Not the current folder: Prefect would read settings from the files there.
            cwd=folder,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            url = environment["PREFECT_API_URL"]
            deadline = time.monotonic() + 120
            while not responds(f"{url}/health"):
                assert process.poll() is None and time.monotonic() < deadline, log.name
                time.sleep(0.1)
            # Each batch of log lines locks the database.
            client = {**environment, "PREFECT_LOGGING_TO_API_ENABLED": "false"}
            yield PrefectServer(process, folder, url, auth, client)
        finally:
            process.kill()
