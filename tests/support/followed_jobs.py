"""A job of a stage that a flow follows, and what the job does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from rlhf_core.executors import base, follow
from rlhf_core.executors.follow import Waits
from rlhf_core.executors.job_files import Event, JobFiles
from rlhf_core.executors.spec import StageSpec
from rlhf_core.storage.store import Store
from rlhf_core.system.waiting import SYSTEM_CLOCK, Clock
from rlhf_core.types import ArtifactRef

KEY = "0" * 16
REF = ArtifactRef("data", KEY, "d" * 64, "/store/x", {"loss": 0.5}, "run1", {"rows": "3"})
RESULT = {"event": "result", "artifact": REF.to_json()}
FAST = Waits(poll=0.01, status=0.0, log=0.02, stop=10.0)


def follower(
    scheduler: base.Scheduler,
    spec: StageSpec,
    log_file: Path,
    timeout: float = 20.0,
    waits: Waits = FAST,
    clock: Clock = SYSTEM_CLOCK,
) -> follow.JobFollower:
    return follow.JobFollower(scheduler, spec, log_file, timeout, lambda event: None, waits, clock)


def add_events(files: JobFiles, events: Sequence[Event]) -> None:
    """Write further events of a job."""
    before, progress = files.read_events()
    files.write_events([*before, *events], progress)


class Job(threading.Thread):
    """What the job does, in a thread: waits for the spec of number `number`, then calls `work`."""

    def __init__(self, store: Store, work: Callable[[JobFiles], None], number: int = 1) -> None:
        super().__init__(daemon=True)
        self._files = JobFiles(store, KEY, number)
        self._work = work
        self._store = store
        self.start()

    @override
    def run(self) -> None:
        while not self._store.exists(f"{self._files.folder}/spec.json"):
            time.sleep(0.01)
        self._work(self._files)
