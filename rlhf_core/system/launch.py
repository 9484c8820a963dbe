"""Starts child processes of this project. Every one has a session of its own and no standard input.

A session of its own keeps Ctrl-C in the terminal from reaching the child: its parent decides how it ends, and
can signal the whole process group.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rlhf_core.system.processes import die_with_parent

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Prevent Python and its child processes from importing modules, such as a `queue.py`, from the working
folder.
"""


def python_module(name: str) -> list[str]:
    """Return the command that runs the module `name` in a separate process."""
    return [sys.executable, "-P", "-m", name]


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
