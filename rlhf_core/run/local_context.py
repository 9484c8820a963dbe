"""A `StageContext` in a local folder, outside of a run: for `rlhf tune`, and for tests.

Its metrics, progress and checkpoints can be inspected.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from rlhf_core.types import AnsweredPrompt, Checkpoints, Lineage, MetricLogger, Progress, StageContext


class RecordingMetrics(MetricLogger):
    """Keeps what a stage logs."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        """(step, metrics) of every `log_metrics`, in order."""
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.figures: list[str] = []
        self.answers: list[AnsweredPrompt] = []
        self.files: list[str] = []
        """Names of the logged files, with their folder."""
        self.flushes = 0

    @property
    def last(self) -> dict[str, float]:
        """The last value of every metric."""
        values: dict[str, float] = {}
        for _, metrics in self.rows:
            values |= metrics
        return values

    def column(self, name: str) -> list[float]:
        """Return the values of one metric in the order in which they were logged."""
        return [metrics[name] for _, metrics in self.rows if name in metrics]

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    @override
    def flush(self) -> None:
        self.flushes += 1

    @override
    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.tables[name] = rows

    @override
    def log_figure(self, name: str, figure: Any) -> None:
        self.figures.append(name)

    @override
    def log_answers(self, rows: list[AnsweredPrompt]) -> None:
        self.answers += rows

    @override
    def log_file(self, path: Path, folder: str = "") -> None:
        if not path.is_file():
            raise FileNotFoundError(path)
        self.files.append(f"{folder}/{path.name}" if folder else path.name)


class RecordingProgress(Progress):
    """Keeps the reports of progress."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int, str]] = []
        """(task, done, total, unit) of every report, in order."""

    @override
    def __call__(self, task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        self.reports.append((task, done, total, unit))


class FolderCheckpoints(Checkpoints):
    """Checkpoints in a local folder, without digests, limits and uploads. A second instance resumes them.

    Args:
        folder: Folder of the checkpoints. It is created by the first `save`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def latest(self) -> tuple[int, Path] | None:
        folders = sorted(self._folder.glob("step-*"))
        if not folders:
            return None
        return int(folders[-1].name.removeprefix("step-")), folders[-1]

    @override
    def prepare(
        self, step: int, folder: Path, size: int, unsharded: int | None = None, *, own: int = 0
    ) -> None:
        """Prepare a checkpoint.

        Args:
            step, folder, size, unsharded, own: See `Checkpoints.prepare`.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    @override
    def save(self, step: int, folder: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, self._folder / f"step-{step:08d}")


def stage_context(
    folder: Path,
    *,
    inputs: Mapping[str, Path] | None = None,
    metrics: MetricLogger | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    lineage: Lineage | None = None,
    sources: Mapping[str, str] | None = None,
) -> StageContext:
    """Return the context for one call of a stage.

    Args:
        folder: The stage writes to `output/`, `scratch/` and `checkpoints/` in this folder. A second context
            with the same folder resumes from the checkpoints.
        inputs: Folder of each input artifact by stage name.
        metrics: Default: a new `RecordingMetrics`.
        progress: Default: a new `RecordingProgress`.
        checkpoints: Default: `FolderCheckpoints` in `checkpoints/`.
        lineage: Default: None, as outside a pipeline.
        sources: Digests of external inputs. Default: none, which are not compared.
    """
    for name in ("output", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return StageContext(
        inputs=dict(inputs or {}),
        output=folder / "output",
        scratch=folder / "scratch",
        checkpoints=checkpoints or FolderCheckpoints(folder / "checkpoints"),
        metrics=metrics or RecordingMetrics(),
        progress=progress or RecordingProgress(),
        lineage=lineage,
        sources=dict(sources or {}),
    )
