"""Progress of a run: bars on a terminal, few log lines elsewhere."""

from __future__ import annotations

import contextvars
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rlhf_core.run.summary import duration, headline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from rlhf_core.executors.spec import StageRecord

log = logging.getLogger(__name__)

LINE_SECONDS = 15.0
"""Without a terminal, progress of one task is logged at most this often."""


class Display(ABC):
    """Receives the events of a run. The methods must not fail or wait."""

    summary: dict[str, Any] | None = None
    """Summary of the run, once all its stages have finished."""

    @abstractmethod
    def started(self, stage: str, log_file: str) -> None: ...

    @abstractmethod
    def event(self, stage: str, event: dict[str, Any]) -> None: ...

    @abstractmethod
    def finished(self, stage: str, record: StageRecord) -> None: ...

    def run_finished(self, summary: dict[str, Any]) -> None:
        self.summary = summary

    def close(self) -> None:  # noqa: B027 log lines leave nothing to remove
        """Take what moves off the terminal."""


class Pace:
    """The time left of each task, which follows from the steps after its first report: a stage that continues
    begins at a later step.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, int]] = {}
        """Time and steps of the first report of each task."""

    def left(self, event: dict[str, Any]) -> float | None:
        """Return the seconds that the task of a progress event still needs; None if unknown."""
        now, done, total = time.monotonic(), event["done"], event["total"]
        first_time, first_done = self._first.setdefault(event["task"], (now, done))
        if not total or not first_done < done < total:
            return None
        return float((now - first_time) / (done - first_done) * (total - done))


class Lines(Display):
    """Log lines: one at the start and end of a stage, few in between."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def started(self, stage: str, log_file: str) -> None:
        # The same object shows further runs of this process: their tasks have the same names.
        self._logged.clear()
        log.info("%s: running, log %s", stage, log_file)

    def event(self, stage: str, event: dict[str, Any]) -> None:
        if event["event"] == "resumed":
            log.info("%s: continues after step %d", stage, event["step"])
        if event["event"] == "warning":
            log.warning("%s: %s", stage, event["message"])
        if event["event"] != "progress":
            return
        now = time.monotonic()
        task, done, total = event["task"], event["done"], event["total"]
        if done < total and task in self._logged and now - self._logged[task] < LINE_SECONDS:
            return
        self._logged[task] = now
        line = f"{task}: {done}/{total} {event['unit']}"
        if event.get("left") is not None:
            line += f", {duration(event['left'])} left"
        if numbers := headline("", event.get("metrics") or {}):
            line += f"  {numbers}"
        log.info("%s", line)

    def finished(self, stage: str, record: StageRecord) -> None:
        how = "reused" if record.reused else f"done in {duration(record.seconds)}"
        log.info("%s: %s  %s", stage, how, headline(stage, record.ref.metrics))


class Bars(Display):
    """Progress bars with rates and time left; a finished stage leaves one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def started(self, stage: str, log_file: str) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.close()
        self._progress = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            refresh_per_second=4,
            # The line of `finished` takes the place of the bars.
            transient=True,
        )
        self._progress.start()
        self._tasks = {stage: self._add(self._progress, stage, None, "starting")}

    def event(self, stage: str, event: dict[str, Any]) -> None:
        if event["event"] == "resumed":
            self._print(stage, f"continues after step {event['step']}")
        if event["event"] == "warning":
            self._print(stage, event["message"])
        if self._progress is None or event["event"] != "progress":
            return
        name, unit = event["task"], event["unit"]
        if name not in self._tasks:
            self._tasks[name] = self._add(self._progress, name, event["total"], "")
        for other, number in self._tasks.items():  # one at a time: what came before is done
            if other != name:
                self._progress.update(number, visible=False)
        # rich has no public access to a task by its id.
        task = self._progress.tasks[self._progress.task_ids.index(self._tasks[name])]
        self._progress.update(
            self._tasks[name],
            visible=True,
            total=event["total"],
            completed=event["done"],
            count=f"{event['done']}/{event['total']} {unit}",
            rate=_rate(task.speed, unit),
            left="" if not task.time_remaining else f"{duration(task.time_remaining)} left",
            numbers=headline("", event.get("metrics") or {}, 3),
        )

    @staticmethod
    def _add(progress: Progress, name: str, total: int | None, count: str) -> TaskID:
        return progress.add_task(name, total=total, count=count, rate="", left="", numbers="")

    def finished(self, stage: str, record: StageRecord) -> None:
        self.close()
        how = "reused" if record.reused else duration(record.seconds)
        self._print(stage, f"{how:>12}  {headline(stage, record.ref.metrics)}")

    def _print(self, stage: str, text: str) -> None:
        # Texts of users can contain `[...]`, which rich would take for markup.
        self._console.print(f"{stage:<9} {text}", markup=False, highlight=False)

    @override
    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _rate(speed: float | None, unit: str) -> str:
    if not speed:
        return ""
    return f"{speed:.1f} {unit}/s" if speed >= 1 else f"{1 / speed:.1f} s/{unit.removesuffix('s')}"


_DISPLAY: contextvars.ContextVar[Display | None] = contextvars.ContextVar("display", default=None)


@contextmanager
def showing_progress(console: Console) -> Iterator[Display]:
    """Show what runs in this context: bars if `console` is a terminal, else log lines."""
    display: Display = Bars(console) if console.is_terminal else Lines()
    _DISPLAY.set(display)
    try:
        yield display
    finally:
        display.close()


def current_display() -> Display:
    """Return the display of this context; log lines if none was chosen, as on a worker."""
    display = _DISPLAY.get()
    if display is None:
        display = Lines()
        _DISPLAY.set(display)
    return display
