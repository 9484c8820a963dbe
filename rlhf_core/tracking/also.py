"""Copies of the metrics of a stage for TensorBoard, Weights & Biases or Trackio (`tracking.also`).

MLflow has the record: a point is copied after MLflow has taken it, and MLflow takes each point once. So a run
that is continued copies no point twice; after a kill the copy can lack the points of the last flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, Finding
from rlhf_core.tracking.mlflow_client import Point, attempt

log = logging.getLogger(__name__)


class Copy(Protocol):
    """The run of a stage in another tracker."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write the metrics of a step."""

    def close(self) -> None:
        """Write the rest, and end the run."""


class TensorBoard:
    """Event files in `folder/project/name`; those of all attempts are one run."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / project / name))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, which is continued by its id. WANDB_API_KEY, or WANDB_MODE=offline, is its own."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder))
        # wandb drops what is behind its own step, and metrics of earlier steps can come later.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, which is continued by its name."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        import trackio

        self._run: Any = trackio.init(project=project, name=name, resume="allow", embed=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[Path, str, str], Copy]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""By `tracking.also`, which are also the names of the packages."""


class Copies:
    """The copies of one stage run. A tracker is opened with the first points, and left out once it fails."""

    def __init__(self, trackers: Sequence[str], folder: Path, project: str, name: str) -> None:
        """Open nothing yet.

        Args:
            trackers: Values of `tracking.also`.
            folder: Where TensorBoard and wandb write files.
            project: Name of the experiment.
            name: Name of the stage's run in it; the same for all attempts.
        """
        self._unopened = list(trackers)
        # `folder / "/a"` is /a, so an absolute name would
        # leave `folder`. wandb refuses a project with a slash.
        self._where = (folder, project.strip("/").replace("/", "-"), name)
        self._copies: dict[str, Copy] = {}

    def log(self, points: Sequence[Point]) -> None:
        """Write points that MLflow has taken."""
        if not points:
            return
        for tracker in self._unopened:
            self._guarded(tracker, partial(self._open, tracker))
        self._unopened.clear()
        # One call for each step: wandb makes a row of its history
        # of each call, and the metrics of a step belong into one.
        for step, found in groupby(sorted(points, key=attrgetter("step")), key=attrgetter("step")):
            metrics = {point.key: point.value for point in found}
            for tracker, copy in list(self._copies.items()):
                self._guarded(tracker, partial(copy.log, metrics, step))

    def close(self) -> None:
        """End the runs."""
        for tracker, copy in list(self._copies.items()):
            self._guarded(tracker, copy.close)
        self._copies.clear()

    def _open(self, tracker: str) -> None:
        self._copies[tracker] = _TRACKERS[tracker](*self._where)

    def _guarded(self, tracker: str, action: Callable[[], object]) -> None:
        if error := attempt(action).exception():
            # Not tried again: a tracker that does not answer would delay each flush by its own time limits.
            self._copies.pop(tracker, None)
            log.warning(
                "%s gets no more metrics of this stage (%s: %s); MLflow has all of them.",
                tracker,
                type(error).__name__,
                str(error)[:200],
            )


def check_also(config: PipelineConfig) -> Iterator[Finding]:
    """Check that the packages of `tracking.also` are installed."""
    for name in config.tracking.also:
        if find_spec(name) is None:
            yield ConfigError(
                f"tracking.also: {name} needs the package {name}, which is not installed; run"
                f" `pip install {name}`, or leave it out"
            )
