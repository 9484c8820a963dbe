"""The MLflow run of one stage, as training loops see it (`MetricLogger` of types.py).

    log_metrics / log_table / ... -> spool on disk -> flush() -> MLflow

Consumes numbers and small files; waits for nothing but its own `flush`, which gives up quickly and tries
again at the next one. Exactly once: a point's time is the run's start plus its step, MLflow's rows are keyed
by it, and a point at or below the highest step that the tracker has of its metric is a replay after a crash
and is dropped.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.tracking.mlflow_client import Mlflow, Point, RunState, clean_name
from rlhf_core.tracking.spool import Spool
from rlhf_core.tracking.troubles import trouble

log = logging.getLogger(__name__)

MS_PER_STEP = 1000
"""Steps are one second apart on MLflow's time axis: a clock would give a replayed point a second row."""

_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0
_TABLES = "tables"


class StageRun:
    """See the module. `run_id` is None until the tracker has answered once."""

    def __init__(
        self, mlflow: Mlflow, opener: Callable[[], RunState], spool: Spool, *, uri: str, system: bool
    ) -> None:
        """`opener` finds or creates the run, and may raise; `uri` is for people."""
        self._mlflow = mlflow
        self._opener = opener
        self._spool = spool
        self._system = system
        self._monitor: Any = None
        self._state: RunState | None = None
        self._recorded: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pause, self._next_try = _FIRST_PAUSE, 0.0
        self.tracking_uri = uri
        """Where the numbers go, without credentials."""
        with self._lock:
            self._attempt(self._open)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run."""
        return self._state.run_id if self._state else None

    @property
    def unsent(self) -> int:
        """Points and files that the tracker does not have yet."""
        return len(self._spool.pending) + len(self._spool.files())

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep `metrics` for `step`; they reach the tracker at the next `flush`. Steps of one metric must
        ascend.
        """
        with self._lock:
            self._spool.add({clean_name(name): float(value) for name, value in metrics.items()}, int(step))

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """A table of samples, `name` without suffix: shown by MLflow as a table, stored as
        `tables/{name}.json`.
        """
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = {
            "columns": columns,
            "data": [[_plain(row.get(column)) for column in columns] for row in rows],
        }
        with self._lock:
            self._spool.add_text(json.dumps(table, ensure_ascii=False), f"{_TABLES}/{name}.json")

    def log_figure(self, name: str, figure: Any) -> None:
        """A matplotlib figure, as `plots/{name}.png`."""
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
        with self._lock:
            self._spool.add_bytes(picture.getvalue(), f"plots/{name}.png")

    def log_file(self, path: Path, folder: str = "") -> None:
        """A small file (report, data card) as an artifact of the run."""
        with self._lock:
            self._spool.add_file(path, f"{folder}/{path.name}" if folder else path.name)

    def flush(self) -> None:
        """Send everything kept so far. Returns soon and never raises when the tracker is down."""
        with self._lock:
            self._spool.sync()
            if time.monotonic() >= self._next_try:
                self._attempt(self._send)

    def finish(self, status: str) -> None:
        """Send the rest and end the run: FINISHED, FAILED or KILLED. What cannot be sent stays in the spool."""
        with self._lock:
            # Its end waits for the tracker, so it is left to die with the process when there is none.
            if self._monitor is not None and not self._next_try:
                self._monitor.finish()
            self._monitor = None
            sent = self._attempt(self._send)
            if sent and self._state is not None:
                self._attempt(lambda: self._mlflow.terminate(self._require().run_id, status))
            if self.unsent:
                log.warning(
                    "%d points and files could not be sent to MLflow at %s; they are kept in %s and are sent when the "
                    "same command is typed again.", self.unsent, self.tracking_uri, self._spool.folder,
                )  # fmt: skip
            self._spool.remove()

    def _open(self) -> None:
        state = self._opener()
        self._recorded = dict(state.last_steps)
        self._state = state
        if self._system and self._monitor is None:
            self._monitor = self._mlflow.system_metrics(state.run_id)

    def _send(self) -> None:
        run_id = self._require().run_id
        points = self._new_points()
        self._mlflow.log_points(run_id, points)
        for point in points:
            self._recorded[point.key] = max(point.step, self._recorded.get(point.key, point.step))
        self._spool.sent()
        files = self._spool.files()
        for path, name in files:
            folder, _, _ = name.rpartition("/")
            self._mlflow.log_file(run_id, path, folder)
        if tables := [name for _, name in files if name.startswith(f"{_TABLES}/")]:
            self._mlflow.announce_tables(run_id, tables)
        for path, _ in files:
            path.unlink()

    def _new_points(self) -> Sequence[Point]:
        state = self._require()
        return [
            Point(key, value, step, state.start + step * MS_PER_STEP)
            for (key, step), value in self._spool.pending.items()
            if step > self._recorded.get(key, step - 1)
        ]

    def _require(self) -> RunState:
        if self._state is None:
            self._open()
        assert self._state is not None
        return self._state

    def _attempt(self, action: Callable[[], object]) -> bool:
        """True if the tracker took it. Whatever goes wrong on that side must not stop the training on this
        one.
        """
        try:
            action()
        except Exception as error:
            if self._next_try == 0.0:
                log.warning(
                    "MLflow at %s %s; training goes on and metrics are kept on disk.",
                    self.tracking_uri,
                    trouble(error),
                )
                log.debug("MLflow's answer", exc_info=error)
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return False
        if self._next_try:
            log.info("MLflow at %s answers again.", self.tracking_uri)
        self._pause, self._next_try = _FIRST_PAUSE, 0.0
        return True


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
