"""A Prefect server that several commands of a test share. Its start takes longer than that of a command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

COMMAND = """
import json, os, sys
from rlhf_core.ops.servers.prefect_server import EmbeddedPrefect
from rlhf_core.system.home import Home

server = EmbeddedPrefect(Home.of(sys.argv[1]))
server.wait()
settings = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
print(json.dumps([server.pid, server.url, server.auth, settings]), flush=True)
sys.stdin.read()
"""


class PrefectServer(NamedTuple):
    """The server of `rlhf run`, started by a command of its own."""

    command: subprocess.Popen[str]
    home: Path
    pid: int
    url: str
    auth: str
    environment: dict[str, str]
    """The variables by which other commands use it, with the settings that they would make themselves."""


@contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """Start the server with its files in `home`. It ends with the block, or with this process."""
    arguments = [sys.executable, "-c", COMMAND, str(home)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        yield PrefectServer(command, home, *json.loads(command.stdout.readline()))
        command.kill()
