"""Slurm's commands as scripts on PATH. Jobs are real processes; their states are files that a test can
overwrite.

    {folder}/bin/sbatch, squeue, sacct, scancel, scontrol, srun, ray
    {folder}/jobs/{name}/   args, pid, exit code, `state` (replaces the state that follows from the process),
                            `left` (the queue), `hidden` (its partition), `old` (of another day)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

_COMMANDS = r"""
import json, os, signal, subprocess, sys
from pathlib import Path

FOLDER = Path({folder!r})
command, arguments = Path(sys.argv[0]).name, sys.argv[1:]
with (FOLDER / "calls.jsonl").open("a") as file:
    file.write(json.dumps([command, *arguments]) + "\n")
failures = FOLDER / f"{{command}}.failures"
if failures.exists() and (left := failures.read_text().splitlines()):
    failures.write_text("\n".join(left[1:]))
    sys.exit(left[0])


def option(name):
    return next((word.split("=", 1)[1] for word in arguments if word.startswith(f"--{{name}}=")), "")


def state_of(job):
    if (job / "state").exists():
        return (job / "state").read_text().strip()
    if not (job / "pid").exists():
        return "PENDING|Resources"
    if (job / "code").exists():
        code = int((job / "code").read_text())
        return "COMPLETED|None" if code == 0 else f"FAILED|NonZeroExitCode"
    return "RUNNING|None"


if command == "sbatch":
    job = FOLDER / "jobs" / option("job-name")
    job.mkdir(parents=True)
    (job / "args").write_text(json.dumps(arguments))
    script = next(index for index, word in enumerate(arguments) if not word.startswith("--"))
    inherited = dict(os.environ)
    if os.environ.get("SBATCH_EXPORT") == "NONE":
        inherited = {{"PATH": os.environ["PATH"], "SLURM_EXPORT_ENV": "NONE"}}
    environment = {{
        **inherited, "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": option("nodes"), "SLURM_JOB_NAME": job.name,
    }}
    if not (FOLDER / "held").exists():
        program = (
            "import pathlib, subprocess, sys\n"
            "code = subprocess.call(sys.argv[2:])\n"
            "pathlib.Path(sys.argv[1], 'code').write_text(str(code))\n"
        )
        with open(option("output"), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(job), "bash", *arguments[script:]],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )
        (job / "pid").write_text(str(process.pid))
    print("4711")
elif command in ("squeue", "sacct"):
    job = FOLDER / "jobs" / option("name")
    is_filtered = any(name.startswith(f"{{command.upper()}}_") for name in os.environ)
    is_hidden = (job / "hidden").exists() and "--all" not in arguments
    is_old = (job / "old").exists() and not option("starttime")
    left = command == "squeue" and (job / "left").exists()
    if job.is_dir() and not (left or is_filtered or (is_hidden if command == "squeue" else is_old)):
        print(state_of(job))
elif command == "scancel":
    job = FOLDER / "jobs" / option("name")
    if (job / "pid").exists():
        try:
            os.killpg(int((job / "pid").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass
    if job.is_dir() and state_of(job).split("|")[0] not in ("COMPLETED", "FAILED"):
        (job / "state").write_text("CANCELLED by 0|None")
elif command == "scontrol":
    print("node1\nlocalhost")
elif command == "srun":
    start = next(index for index, word in enumerate(arguments) if not word.startswith("--"))
    environment = dict(os.environ)
    if os.environ.get("SLURM_EXPORT_ENV") == "NONE" and option("export") != "ALL":
        environment = {{
            name: value for name, value in environment.items() if name == "PATH" or name.startswith("SLURM_")
        }}
    for node in reversed(range(int(option("nodes")))):
        code = subprocess.call(arguments[start:], env={{**environment, "SLURM_NODEID": str(node)}})
    sys.exit(code)
elif command == "ray":
    # The first node is the head, which runs the command.
    start = arguments.index("--") + 1
    if os.environ["SLURM_NODEID"] == "0":
        os.execvp(arguments[start], arguments[start:])
"""


class ScriptedSlurm:
    """A Slurm of one machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        text = f"#!{sys.executable} -S\n" + _COMMANDS.format(folder=str(folder))
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun", "ray"):
            file = self.bin / name
            file.write_text(text)
            file.chmod(file.stat().st_mode | stat.S_IXUSR)

    @property
    def path(self) -> str:
        """PATH with these commands and with the Python of this environment."""
        return os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]])

    def jobs(self) -> list[Path]:
        """Return the folders of all jobs, in the order of submission."""
        folder = self.folder / "jobs"
        return sorted(folder.iterdir(), key=lambda job: job.stat().st_mtime) if folder.exists() else []

    def hold(self) -> None:
        """Leave new jobs in the queue."""
        (self.folder / "held").touch()

    def release(self) -> None:
        """Start new jobs again."""
        (self.folder / "held").unlink()

    def set_state(self, job: Path, state: str) -> None:
        """Replace the state of a job, such as `PENDING|Resources`."""
        (job / "state").write_text(state)

    def fail(self, command: str, *messages: str) -> None:
        """Have the next calls of `command` fail with these messages."""
        (self.folder / f"{command}.failures").write_text("\n".join(messages))

    def close(self) -> None:
        """End all jobs."""
        for job in self.jobs():
            if (job / "pid").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int((job / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
