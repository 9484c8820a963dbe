"""A temporary PostgreSQL server from the system's packages (`apt-get install postgresql`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.system.processes import free_port


def postgres_programs() -> Path | None:
    """Return the folder with `initdb` and `pg_ctl`, or None if PostgreSQL is not installed."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if debian:
        return debian[-1]
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a server on loopback with its data in `folder`. Yield its URL for Prefect."""
    programs = postgres_programs()
    assert programs is not None, "PostgreSQL is not installed"
    folder.mkdir(parents=True)
    # The server refuses to run as root. Debian's package creates a user for it.
    user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")
        for parent in [*folder.parents][:-2]:
            parent.chmod(parent.stat().st_mode | 0o111)
    port = free_port(5432)

    def call(program: str, *arguments: str) -> None:
        # Output goes to a file, because the server would keep an inherited pipe open.
        command = [*user, str(programs / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, timeout=60, cwd=folder, stdout=subprocess.DEVNULL)

    call("initdb", "-U", "rlhf", "--auth=trust")
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories="
    call("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
    try:
        yield f"postgresql+asyncpg://rlhf@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "stop", "-m", "immediate")
