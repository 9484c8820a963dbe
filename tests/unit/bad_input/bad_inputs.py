"""A table's row of bad input, and what `rlhf run` says to it: in this process, without its slow parts.

Real: the command line, loading, the checks before the start, and the data stage. Left out: Prefect, MLflow
and the child process between the command and the data stage (`tests/integration/test_flow.py` has them).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows import isolated
from rlhf_cli import external
from rlhf_cli import main as cli
from rlhf_core.config.load import load_config
from rlhf_core.testing import stage_context

NOT_FOR_USERS = ("Traceback", "pydantic", "input_value", "<class", "object at 0x", "NoneType", "\x1b", "\0")
SECONDS = 5.0
NO_SERVER = "http://127.0.0.1:9/api"

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
    patch: pytest.MonkeyPatch
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
            self.patch.setenv(name, value)
        message = self.said("run", "c.yaml", *bad.overrides)
        assert [word for word in bad.words if word not in message] == [], message
        return message

    def said(self, *arguments: str) -> str:
        """The message to these arguments."""
        self.patch.setattr(cli, "_run_flow", self._run_data_stage if self.data_stage else _must_not_start)
        began = (
            time.process_time()
        )  # of the processor, so that a busy machine is not taken for a slow message
        code = cli.main(arguments)
        seconds = time.process_time() - began
        out, err = self.captured.readouterr()
        assert (code, out) == (2, ""), err
        assert seconds < SECONDS
        assert err.startswith("error: "), err
        message = err.removeprefix("error: ").removesuffix("\n")
        assert [word for word in NOT_FOR_USERS if word in message] == []
        assert all(0 < len(line) < 1200 for line in message.split("\n")), message
        self.counted.append(message)
        return message

    def _run_data_stage(self, arguments: Any, *_: object) -> int:
        from rlhf_core.stages import data

        data.run(load_config(arguments.config, arguments.overrides), stage_context(self.folder / "stage"))
        return 0


def _must_not_start(*_: object) -> int:
    raise AssertionError("the run went on to its first stage")


def settle(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Two cores, no GPU, no cluster, no server to start, nothing of this machine's settings; in `folder`."""
    from rlhf_core.config import devices

    patch.chdir(folder)
    patch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    patch.setattr(devices, "_installed_gpus", lambda: 0)
    patch.setattr(devices, "_torch_is_cpu_build", lambda: True)
    patch.setattr(signal, "signal", lambda *_: None)
    patch.setattr(cli, "set_up_logging", lambda home: None)
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3"):
        patch.delenv(name, raising=False)
    patch.setenv("PREFECT_API_URL", NO_SERVER)
    patch.setattr(external, "prefect_responds", lambda url: True)
    patch.setattr(isolated, "isolate_prefect", lambda: None)
