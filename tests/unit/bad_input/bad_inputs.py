"""A table's row of bad input, and what `rlhf run` says to it: in this process, without its slow parts.

Real: the command line, loading, the checks before the start, and the data stage. Left out: Prefect, MLflow
and the child process between the command and the data stage (`tests/integration/test_flow.py` has them).
A configuration that passes ends at the address of Prefect, which is wrong.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import main as cli
from rlhf_cli.main import exit_code, main
from rlhf_core.run.checks import load_and_check
from rlhf_core.testing import stage_context
from tests.support.scripted_machine import ScriptedMachine, on_machine

NOT_FOR_USERS = ("Traceback", "pydantic", "input_value", "<class", "object at 0x", "NoneType", "\x1b", "\0")
SECONDS = 5.0
NO_SERVER = "none://all-checks-passed"
STARTS = re.compile(r"\A[\w.-]+, seed \d+: starting\n")
"""What a run logs once its configuration has passed."""

Content = str | bytes


@dataclass(frozen=True)
class Bad:
    """One bad input and the words its message must have."""

    title: str
    text: Content
    """The configuration file."""
    words: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    files: Mapping[str, Content] = field(default_factory=dict)
    """Other files, by name."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Command:
    """`rlhf run c.yaml` in an empty folder."""

    folder: Path
    environment: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]
    counted: list[str]
    data_stage: bool = False
    """Whether the run goes on to the data stage where the configuration passes; otherwise passing is a
    failure.
    """

    def complaint(self, bad: Bad) -> str:
        """The message for `bad`, which the user sees with exit code 2 and nothing else, in `SECONDS`."""
        for name, content in {"c.yaml": bad.text, **bad.files}.items():
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content if isinstance(content, bytes) else content.encode())
        for name, value in bad.environment.items():
            self.environment.setenv(name, value)
        if self.data_stage:
            message = self._said(lambda: exit_code(lambda: self._run_data_stage(bad.overrides)))
        else:
            message = self.message("run", "c.yaml", *bad.overrides)
        assert [word for word in bad.words if word not in message] == [], message
        return message

    def message(self, *arguments: str) -> str:
        """The message to these arguments."""
        return self._said(lambda: main(arguments))

    def _said(self, command: Callable[[], int]) -> str:
        # Of the processor, so that a busy machine is not taken for a slow message.
        began = time.process_time()
        code = command()
        seconds = time.process_time() - began
        out, err = self.captured.readouterr()
        err = STARTS.sub("", err)
        assert (code, out) == (2, ""), err
        assert seconds < SECONDS
        assert err.startswith("error: ") and NO_SERVER not in err, err
        message = err.removeprefix("error: ").removesuffix("\n")
        assert [word for word in NOT_FOR_USERS if word in message] == []
        assert all(0 < len(line) < 1200 for line in message.split("\n")), message
        self.counted.append(message)
        return message

    def _run_data_stage(self, overrides: Sequence[str]) -> int:
        from rlhf_core.stages import data

        data.run(load_and_check("c.yaml", overrides).config, stage_context(self.folder / "stage"))
        return 0


@contextmanager
def settled(environment: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Two cores, no GPU, no cluster, no server to start, nothing of this machine's settings; in `folder`.

    Signals and variables are afterwards as they were: a command changes them for its process.
    """
    environment.chdir(folder)
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3"):
        environment.delenv(name, raising=False)
    environment.setenv("PREFECT_API_URL", NO_SERVER)
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with on_machine(ScriptedMachine(cores=2)):
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(variables)


def outside(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "rlhf_cli.main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), **options.pop("env", {})}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
