"""The process of the next stage, which starts while the present stage runs.

    stage n makes progress   prepare   a process imports what stage n + 1 needs, then waits for its spec
    stage n + 1 begins       take      the same process, or None if a new one would not be like it
    the run ends             close     ends a process that nobody has taken

Imports take most of the time of a short stage: torch, transformers, DeepSpeed, Ray and vLLM. A process that
waits has decided nothing: it has no inputs, no lease and no MLflow run. Like every stage it has a reaper
(rlhf_core/run/reaper.py), so that it ends with the process of the flow in every case.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.executors.child import StageProcess, start_child
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Origin:
    """Everything that decides what a waiting process has imported."""

    stage: StageName
    config: PipelineConfig
    environment: Mapping[str, str]
    sources: Mapping[str, tuple[int, int]]


class NextStage:
    """At most one process that waits for the spec of a stage.

    The kernel ends it with the thread that has called `prepare`.
    """

    def __init__(self, start: Callable[..., StageProcess] = start_child, sources: Path = _SOURCES) -> None:
        """No process yet.

        Args:
            start: Starts a process, as `start_child` does.
            sources: Folder of the source code that a process imports.
        """
        self._start = start
        self._sources = sources
        self._process: StageProcess | None = None
        self._origin: _Origin | None = None

    @property
    def stage(self) -> StageName | None:
        """The stage that was prepared last, unless its process has been taken."""
        return None if self._origin is None else self._origin.stage

    def prepare(
        self, stage: StageName, config: PipelineConfig, environment: Mapping[str, str], log_file: Path
    ) -> None:
        """Start a process for `stage` in place of any other. A failure is only logged: nothing depends on it.

        Args:
            stage: Name of the stage.
            config: The configuration.
            environment: The whole environment of the process.
            log_file: File for its output. It is removed again if the process is not used.
        """
        self.close()
        self._origin = _Origin(stage, config, dict(environment), _modification_times(self._sources))
        try:
            self._process = self._start(StageSpec(stage, "", config), log_file, environment, waits=True)
        except OSError as error:
            # `_origin` stays, so that `prepare_next` does not try again at each progress.
            log.info("the process of stage %s starts later: %s", stage, error)
            for file in (log_file, log_file.with_suffix(".json")):
                file.unlink(missing_ok=True)

    def take(
        self, stage: StageName, config: PipelineConfig, environment: Mapping[str, str]
    ) -> StageProcess | None:
        """Return the process that waits for `stage`, which is the caller's from now on.

        None if there is none, if it has died, or if configuration, environment or source code have changed
        since it was started.
        """
        process = self._process
        if process is None or self.stage != stage:
            return None
        same = self._origin == _Origin(stage, config, dict(environment), _modification_times(self._sources))
        if not same or not process.is_alive():
            self.close()
            return None
        self._process = self._origin = None
        return process

    def close(self) -> None:
        """End the process, and remove its log."""
        process = self._process
        if process is None:
            return
        self._process = self._origin = None
        process.kill()
        process.log_file.unlink(missing_ok=True)
        process.spec_file.unlink(missing_ok=True)


def _modification_times(sources: Path) -> dict[str, tuple[int, int]]:
    """Return time of modification and size of each source file below `sources`."""
    times = {}
    for file in sources.rglob("*.py"):
        with contextlib.suppress(OSError):  # removed in the meantime, or a link of an editor to nothing
            status = file.stat()
            times[str(file)] = (status.st_mtime_ns, status.st_size)
    return times
