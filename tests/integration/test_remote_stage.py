"""A stage as a Slurm job, with real processes: the flow, the batch script, `executors.remote` and the stage.
Slurm's commands are scripts.

- events, log and result come back through the store, and an error keeps its class
- Ctrl-C asks the stage to stop, which has time to save
- a job that is evicted (SIGTERM) or killed is a failure that quotes the log
- a node without the store says so
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import DataError, StageFailed
from rlhf_core.executors.follow import JobFollower, Waits
from rlhf_core.executors.slurm import SlurmJobs
from rlhf_core.executors.spec import StageSpec
from rlhf_core.types import ArtifactRef
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.toy_stage import toy_environment

REF = ArtifactRef("data", "0" * 16, "d" * 64, "/store/x", {"loss": 0.5}, "run1", {"weights_sha256": "w"})
WAITS = Waits(poll=0.1, status=0.5)
UNTIL_ASKED = "stop.defer()\nwhile not stop.requested:\n    time.sleep(0.05)\n"


class Flow:
    """Runs the stage whose body is given as a Slurm job."""

    def __init__(self, folder: Path, slurm: ScriptedSlurm, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.slurm = slurm
        self._patch = patch
        self.events: list[dict[str, Any]] = []
        self.log_file = folder / "data-01.log"
        self.template: Path | None = None

    def __call__(self, body: str, on_event: Callable[[dict[str, Any]], None] | None = None) -> ArtifactRef:
        for name, value in toy_environment(self.folder, body).items():
            self._patch.setenv(name, value)
        self._patch.setenv("PATH", self.slurm.path)
        run: dict[str, Any] = {"home": str(self.folder / "home"), "executor": "slurm"}
        if self.template is not None:
            run["resources"] = {"default": {"template": str(self.template)}}
        config = PipelineConfig.model_validate({"run": run})
        spec = StageSpec("data", "0" * 16, config)
        scheduler = SlurmJobs(self.folder / "output")
        return JobFollower(scheduler, spec, self.log_file, 60.0, on_event or self.events.append, WAITS).run()

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the stage and its job."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if str(self.folder) in words and ("rlhf_core.run" in words or "rlhf_core.executors" in words):
                found.append(process)
        return found


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flow]:
    slurm = ScriptedSlurm(tmp_path / "slurm")
    yield Flow(tmp_path, slurm, monkeypatch)
    slurm.close()


def test_events_log_and_result_come_back(flow: Flow) -> None:
    ref = flow(
        "events.send('checkpoint', step=5)\n"
        "print('at', os.environ['RAY_ADDRESS'], os.environ['PYTHONHASHSEED'], flush=True)\n"
        "return REF"
    )
    assert ref == REF
    assert flow.events == [{"event": "checkpoint", "step": 5}]
    assert flow.log_file.read_text() == "at 127.0.0.1:24711 0\n"


def test_an_error_keeps_its_class_and_message(flow: Flow) -> None:
    with pytest.raises(DataError, match=r"^rows\.jsonl:3: no prompt; add one$"):
        flow("from rlhf_core.errors import DataError\nraise DataError('rows.jsonl:3: no prompt; add one')")


def test_ctrl_c_gives_the_stage_time_to_save(flow: Flow) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    body = f"events.send('checkpoint', step=1)\n{UNTIL_ASKED}(folder / 'saved').touch()\nstop.exit()"
    with pytest.raises(KeyboardInterrupt):
        flow(body, interrupt)
    assert (flow.folder / "saved").exists()
    psutil.wait_procs(flow.processes(), timeout=15)
    assert flow.processes() == []


def test_a_job_that_is_evicted_is_a_failure(flow: Flow) -> None:
    def evict(event: dict[str, Any]) -> None:
        entry = ["-P", "-m", "rlhf_core.executors.remote"]
        [job] = [process for process in flow.processes() if process.cmdline()[1:4] == entry]
        job.send_signal(signal.SIGTERM)

    body = f"events.send('checkpoint', step=1)\n{UNTIL_ASKED}(folder / 'saved').touch()\nstop.exit()"
    with pytest.raises(StageFailed, match="the job was asked to stop, or evicted"):
        flow(body, evict)
    assert (flow.folder / "saved").exists()


def test_a_job_that_is_killed_quotes_its_log(flow: Flow) -> None:
    def kill(event: dict[str, Any]) -> None:
        [job] = flow.slurm.jobs()
        time.sleep(1.5)  # what the stage printed reaches the job's output
        os.killpg(int((job / "pid").read_text()), signal.SIGKILL)
        flow.slurm.set_state(job, "NODE_FAIL|None")

    body = "print('OSError: disk', flush=True)\nevents.send('checkpoint', step=1)\ntime.sleep(600)"
    with pytest.raises(StageFailed, match=r"Slurm job .* failed: NODE_FAIL; .*end of the log: OSError: disk"):
        flow(body, lambda event: threading.Thread(target=kill, args=(event,)).start())


def test_a_node_without_the_store_reports_it(flow: Flow) -> None:
    flow.template = flow.folder / "other.sbatch"
    flow.template.write_text('#!/bin/bash\nexec "${@:1:4}" /nowhere "${@:6}"\n')
    with pytest.raises(StageFailed, match=r"has no spec\.json on this host; use a bucket"):
        flow("return REF")
