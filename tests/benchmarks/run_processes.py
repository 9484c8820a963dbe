"""Processes and CPU seconds of a command, by kind of process.

    python -m tests.benchmarks.run_processes .venv/bin/rlhf run tests/assets/tiny.yaml run.home=/tmp/home

The command is the first process. Its descendants are looked at every 0.2 seconds, also those that another
process has adopted, if they were seen before. What a process uses between its last look and its end is not
counted. Compare two versions in turns, each with a new `run.home`.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import psutil

SECONDS = 0.2
KINDS = {
    "uvicorn": "Prefect's server",
    "gcs_server": "Ray: gcs_server",
    "raylet/raylet": "Ray: raylet",
    "log_monitor.py": "Ray: log monitor",
    "monitor.py": "Ray: monitor",
    "dashboard/dashboard.py": "Ray: dashboard",
    "dashboard/agent.py": "Ray: dashboard agent",
    "runtime_env/agent": "Ray: environment agent",
    "ray::": "Ray: actor or worker",
    "default_worker.py": "Ray: actor or worker",
    "resource_tracker": "resource tracker",
}
"""Part of a command line, and the kind that it means. The first one that fits counts."""


class Seen(NamedTuple):
    """The last look at one process."""

    kind: str
    cpu: float
    """Seconds of the process itself, user and system."""


def kind_of(command: Sequence[str]) -> str:
    """Return the kind of a process by its command line. A stage has the name of its file, and its reaper as
    well.
    """
    line = " ".join(command)
    for part, kind in KINDS.items():
        if part in line:
            return kind
    if "rlhf_core.run" in command:
        return "stage " + command[-1].rpartition("/")[2].removesuffix(".json")
    return line[:60] or "no command line"


def watch(command: Sequence[str]) -> tuple[int, list[Seen]]:
    """Run `command`, and return its exit code and the last look at each of its processes."""
    child = subprocess.Popen(command)
    known: dict[psutil.Process, Seen] = {}
    roots = {psutil.Process(child.pid)}
    while child.poll() is None:
        for root in list(roots):
            try:
                roots.update(root.children(recursive=True))
            except psutil.Error:
                roots.discard(root)
        for process in roots:
            try:
                times = process.cpu_times()
                if line := process.cmdline():
                    known[process] = Seen(kind_of(line), times.user + times.system)
            except psutil.Error:
                continue
        time.sleep(SECONDS)
    return child.returncode, list(known.values())


def table(processes: Sequence[Seen]) -> str:
    """Return a Markdown table of the kinds, the most expensive one first."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for process in processes:
        kinds[process.kind].append(process.cpu)
    lines = ["| process | number | CPU seconds |", "|---|---|---|"]
    for kind, seconds in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        lines.append(f"| {kind} | {len(seconds)} | {sum(seconds):.1f} |")
    total = sum(process.cpu for process in processes)
    lines.append(f"| all | {len(processes)} | {total:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of a command, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, with its arguments")
    code, processes = watch(parser.parse_args(arguments).command)
    print(table(processes))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
