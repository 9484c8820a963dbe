"""The MLflow run of one stage, as training loops see it (`MetricLogger` of types.py).

    log_metrics / log_table / ... -> spool on disk -> flush() -> MLflow

Only `flush` waits for the tracker; if that does not answer it returns soon, and a later `flush` tries again.
Each point is stored exactly once: its time is the run's start plus its step, MLflow's rows are keyed by the
time, and a point at or below the highest step that the tracker has of its metric is a replay after a crash
and is dropped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_core.config.redact import without_secrets
from rlhf_core.errors import InputError
from rlhf_core.system.files import TEMPORARY, replacing
from rlhf_core.tracking.also import Copies
from rlhf_core.tracking.mlflow_client import (
    Mlflow,
    Point,
    RunState,
    attempt,
    clean_name,
    describe_failure,
    is_unreachable,
)
from rlhf_core.types import AnsweredPrompt

log = logging.getLogger(__name__)

MS_PER_STEP = 1000
"""Steps are one second apart on MLflow's time axis. With a clock, a replayed point would get a second row."""

_TABLES = "tables"
_ANSWERS = "traces/answers.json"
"""In the spool only: MLflow gets its rows as traces."""
_TAGS = "tags.json"
"""In the spool only: tags of the run."""


@dataclass(frozen=True)
class Pauses:
    """Seconds between requests to a tracker that does not answer."""

    first: float = 15.0
    """Pause after the first failure of a stage's run. It doubles with each failure."""
    longest: float = 300.0
    wait: float = 2.0
    """Between the requests of `Tracking.wait`."""


class Spool:
    """Metrics and files that one attempt at a stage has not sent to the tracker yet, on the local disk.

        {root}/attempt-%06d/points.jsonl     {"step": 7, "metrics": {"loss/policy": 0.1}}
        {root}/attempt-%06d/files/...        under their paths among the run's artifacts

    A killed process leaves its spool, and the next attempt at the stage merges it into its own and sends it.
    An attempt that was only believed dead finds its folder gone and cannot add to its successor's. `root`
    belongs to the stage; the spool is not for several processes at once.
    """

    def __init__(self, root: Path, attempt: int) -> None:
        self.folder = root / f"attempt-{attempt:06d}"
        self._points = self.folder / "points.jsonl"
        self._files = self.folder / "files"
        root.mkdir(parents=True, exist_ok=True)
        # In ascending order, so that values and files of later attempts replace those of earlier ones.
        for number, earlier in sorted(_attempts(root).items()):
            if number < attempt:
                self._merge(earlier)
        self.folder.mkdir(exist_ok=True)
        self.pending: dict[tuple[str, int], float] = self._read()
        """(metric, step) -> value, in the order of logging; the last value of a step counts."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of one step to the file."""
        line = json.dumps({"step": step, "metrics": dict(metrics)})
        # Opened for each line: a handle that stays open would
        # follow the file into the folder of a later attempt.
        with self._points.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        for name, value in metrics.items():
            # A repeated point moves to the end: the steps of a metric must ascend.
            self.pending.pop((name, step), None)
            self.pending[name, step] = value

    def sync(self) -> None:
        """Sync the file to the disk; before a checkpoint, because metrics before it are not logged again."""
        if self._points.exists():
            with self._points.open("rb") as file:
                os.fsync(file.fileno())

    def clear_points(self) -> None:
        """Delete the pending metrics, after they were sent."""
        self._points.unlink(missing_ok=True)
        self.pending.clear()

    def add_file(self, source: Path, path: str) -> None:
        """Add a copy of a small file, to be sent as `path`."""
        # If a later attempt has moved the folder, it must not be created again.
        with replacing(self._target(path), create_folder=False) as temporary:
            shutil.copyfile(source, temporary)

    def add_bytes(self, data: bytes, path: str) -> None:
        """Add a file with this content, to be sent as `path`."""
        with replacing(self._target(path), create_folder=False) as temporary:
            temporary.write_bytes(data)

    def files(self) -> list[tuple[Path, str]]:
        """Return (local file, path among the run's artifacts) of each pending file."""
        return [(path, path.relative_to(self._files).as_posix()) for path in _finished(self._files)]

    def remove(self) -> None:
        """Delete the spool if it is empty."""
        if not self.pending and not self.files():
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()

    def _merge(self, earlier: Path) -> None:
        """Move the content of an earlier attempt's spool into this one.

        A kill in between loses nothing: a point that was copied twice counts once.
        """
        if not self.folder.exists():
            earlier.rename(self.folder)
            return
        points = earlier / self._points.name
        if points.exists():
            with self._points.open("a", encoding="utf-8") as file:
                # A new line, because a kill may have cut the last one short.
                file.write("\n" + points.read_text(encoding="utf-8", errors="replace"))
        files = earlier / self._files.name
        for path in _finished(files):
            os.replace(path, self._target(path.relative_to(files).as_posix()))
        shutil.rmtree(earlier)

    def _target(self, path: str) -> Path:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
            raise InputError(f"The artifact path {path!r} must be relative and must not contain '..'.")
        target = self._files / path
        self._files.mkdir(exist_ok=True)  # raises if a later attempt has moved the folder
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _read(self) -> dict[tuple[str, int], float]:
        pending: dict[tuple[str, int], float] = {}
        if not self._points.exists():
            return pending
        for line in self._points.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                points = {
                    (str(name), int(entry["step"])): float(value) for name, value in entry["metrics"].items()
                }
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a kill cut the line short: its step will be repeated
            for point, value in points.items():
                pending.pop(point, None)
                pending[point] = value
        return pending


def _finished(folder: Path) -> list[Path]:
    """Return the files below `folder` that were written completely, sorted."""
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(TEMPORARY)
    )


def next_attempt(root: Path) -> int:
    """Return a number above those of all spools in `root`, whose attempts have ended."""
    return max(_attempts(root), default=0) + 1


def _attempts(root: Path) -> dict[int, Path]:
    attempts = {}
    for path in root.glob("attempt-*"):
        match = re.fullmatch(r"attempt-(\d+)", path.name)
        if match:
            attempts[int(match[1])] = path
    return attempts


class StageRun:
    """The run of one stage; `run_id` is None until the tracker has answered once."""

    def __init__(
        self,
        mlflow: Mlflow,
        opener: Callable[[], RunState],
        spool: Spool,
        *,
        uri: str,
        system: bool,
        pauses: Pauses,
        copies: Copies | None = None,
    ) -> None:
        """Open the run, if the tracker answers.

        Args:
            mlflow: The tracker.
            opener: Finds or creates the run, and may raise.
            spool: File with the data until it is sent.
            uri: The tracker's address without credentials, for messages.
            system: Sample CPU, memory and GPU during the stage.
            pauses: Pauses between the tries of `flush` while the tracker does not answer.
            copies: The same metrics in other trackers.
        """
        self._mlflow = mlflow
        self._opener = opener
        self._spool = spool
        self._system = system
        self._copies = copies
        self._monitor: Any = None
        self._state: RunState | None = None
        self._recorded: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        # `_next_try` is 0.0 while the tracker answers.
        self._pauses = pauses
        self._pause, self._next_try = pauses.first, 0.0
        self.tracking_uri = uri
        """Address of the tracker, without credentials."""
        with self._lock:
            self._try(self._open)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run."""
        return self._state.run_id if self._state else None

    @property
    def unsent(self) -> int:
        """Points and files that the tracker does not have yet."""
        return len(self._spool.pending) + len(self._spool.files())

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step; the next `flush` sends them. Steps of one metric must ascend."""
        with self._lock:
            # By `float` and `int`, because JSON takes no scalars of numpy and torch.
            self._spool.add({clean_name(name): float(value) for name, value in metrics.items()}, int(step))

    def log_table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Log a table of samples as `tables/{name}.json`, which MLflow shows as a table."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = {
            "columns": columns,
            "data": without_secrets([[_plain(row.get(column)) for column in columns] for row in rows]),
        }
        with self._lock:
            self._spool.add_bytes(
                json.dumps(table, ensure_ascii=False).encode(errors="replace"), f"{_TABLES}/{name}.json"
            )

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib figure as `plots/{name}.png`."""
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
        with self._lock:
            self._spool.add_bytes(picture.getvalue(), f"plots/{name}.png")

    def log_answers(self, rows: list[AnsweredPrompt]) -> None:
        """Log prompts with answers as traces of the run, which MLflow's pages search and sort."""
        with self._lock:
            text = json.dumps(without_secrets([asdict(row) for row in rows]), ensure_ascii=False)
            # MLflow's databases refuse half a character, and with it all traces.
            self._spool.add_bytes(text.encode(errors="replace"), _ANSWERS)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; the next `flush` sends them."""
        with self._lock:
            self._tags.update(tags)
            # All tags again: the file of an earlier call, which may be unsent, is replaced.
            self._spool.add_bytes(json.dumps(self._tags).encode(), _TAGS)

    def log_file(self, path: Path, folder: str = "") -> None:
        """Log a small file, such as a report, as an artifact of the run."""
        with self._lock:
            self._spool.add_file(path, f"{folder}/{path.name}" if folder else path.name)

    def flush(self) -> None:
        """Send everything that is pending. Returns soon and never raises if the tracker is down."""
        with self._lock:
            self._spool.sync()
            if time.monotonic() >= self._next_try:
                self._try(self._send)

    def finish(self, status: str) -> None:
        """Send the rest and end the run: FINISHED, FAILED or KILLED. Unsent data stays in the spool."""
        with self._lock:
            # Its end waits for the tracker. Without a tracker, it ends with the process.
            if self._monitor is not None and not self._next_try:
                self._monitor.finish()
            self._monitor = None
            sent = self._try(self._send)
            if sent and self._state is not None:
                self._try(lambda: self._mlflow.terminate(self._opened().run_id, status))
            if self.unsent:
                log.warning(
                    "%d points and files could not be sent to MLflow at %s; they are kept in %s and are sent"
                    " when the same command is typed again.",
                    self.unsent,
                    self.tracking_uri,
                    self._spool.folder,
                )
            self._spool.remove()
            if self._copies is not None:
                self._copies.close()

    def _open(self) -> None:
        state = self._opener()
        self._recorded = dict(state.last_steps)
        self._state = state
        if self._system and self._monitor is None:
            self._monitor = self._mlflow.system_metrics(state.run_id)

    def _send(self) -> None:
        run_id = self._opened().run_id
        points = self._new_points()
        self._mlflow.log_points(run_id, points)
        for point in points:
            self._recorded[point.key] = max(point.step, self._recorded.get(point.key, point.step))
        # After a kill before this line, `_new_points` of the next attempt drops the points that were sent.
        self._spool.clear_points()
        if self._copies is not None:
            self._copies.log(points)
        files = self._spool.files()
        for path, name in files:
            if name == _ANSWERS:
                self._send_answers(run_id, path)
            elif name == _TAGS:
                self._mlflow.set_tags(run_id, json.loads(path.read_bytes()))
            else:
                folder, _, _ = name.rpartition("/")
                self._mlflow.log_file(run_id, path, folder)
        tables = [name for _, name in files if name.startswith(f"{_TABLES}/")]
        if tables:
            self._mlflow.tag_tables(run_id, tables)
        # At the end: a file that is sent again replaces itself.
        for path, _ in files:
            path.unlink()

    def _send_answers(self, run_id: str, file: Path) -> None:
        rows = json.loads(file.read_bytes())
        done = attempt(lambda: log_traces(self._mlflow.uri, self._mlflow.experiment_id, run_id, rows))
        error = done.exception()
        if error is not None and not is_unreachable(error):
            # It is not tried again: a server that has no traces would keep the run from its end, and the
            # report has the answers too.
            log.warning("MLflow at %s %s; it has no traces.", self.tracking_uri, describe_failure(error))
        # `result` raises the error of an unreachable tracker
        # again: the file then stays, and a later `flush` sends it.
        elif (logged := done.result()) < len(rows):
            log.warning("MLflow was slow: it has traces of %d of %d prompts.", logged, len(rows))

    def _new_points(self) -> Sequence[Point]:
        state = self._opened()
        points = []
        for (key, step), value in self._spool.pending.items():
            if key not in self._recorded or step > self._recorded[key]:
                points.append(Point(key, value, step, state.start + step * MS_PER_STEP))
        return points

    def _opened(self) -> RunState:
        if self._state is None:
            self._open()
        assert self._state is not None
        return self._state

    def _try(self, action: Callable[[], object]) -> bool:
        """Return whether the tracker accepted it. Failures are logged: none may stop the training.

        After a failure, `flush` does not try again for a time that doubles up to `Pauses.longest`.
        """
        error = attempt(action).exception()
        if error is not None:
            if self._next_try == 0.0:
                log.warning(
                    "MLflow at %s %s; training continues and metrics are kept on disk.",
                    self.tracking_uri,
                    describe_failure(error),
                )
                log.debug("MLflow's answer", exc_info=error)
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, self._pauses.longest)
            return False
        if self._next_try:
            log.info("MLflow at %s answers again.", self.tracking_uri)
        self._pause, self._next_try = self._pauses.first, 0.0
        return True


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# -- prompts with the answers of models as traces, which MLflow's pages search, filter, sort and annotate --

MOST_SECONDS = 20.0
"""Time for all traces of a run. They are for reading, and must not keep a stage from its end."""
_PREVIEW = 1000
"""Characters of a text in MLflow's list of traces."""


def log_traces(uri: str, experiment_id: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Log a trace for each row, the fields of an `AnsweredPrompt`, and return how many fitted into the time.

    A trace has a span for each answer, and the measures of the policy's answer as assessments.

    A row that was logged before, in the same position, is replaced. Needs a tracker with a database; an older
    server gets no spans. Raises what MLflow's client raises.
    """
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient

    # Not `mlflow.start_span` and the like: they use the tracker and the experiment that are global
    # in the process, and draw random ids, so that a row that is sent again would be a second trace.
    client = TracingClient(uri)
    deadline = time.monotonic() + MOST_SECONDS
    now = int(time.time() * 1000)
    spans = []
    done = 0
    for number, row in enumerate(rows):
        if time.monotonic() > deadline:
            break
        trace_id = f"tr-{_digest(run_id, number, size=32)}"
        [answer, *_] = row["answers"].values()
        start = now - number  # MLflow lists the last one first
        # The id follows from run and position, so that a row that is sent again replaces itself.
        info = TraceInfo(
            trace_id,
            TraceLocation.from_experiment_id(experiment_id),
            start,
            TraceState.OK,
            request_preview=row["prompt"][:_PREVIEW],
            response_preview=answer[:_PREVIEW],
            execution_duration=0,
            trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
            tags={"mlflow.traceName": "held-out prompt"},
            assessments=_assessments(trace_id, row),
        )
        client.start_trace(info)
        spans += _spans(trace_id, start, row)
        done += 1
    client.log_spans(experiment_id, spans)
    return done


def _assessments(trace_id: str, row: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import AssessmentSource, Feedback

    found = []
    for name, value in row["assessments"].items():
        # A text is the verdict of the judge.
        judge = row["judge"] if isinstance(value, str) else name
        feedback = Feedback(name=name, value=value, source=AssessmentSource("CODE", judge))
        # With an id of its own, an assessment that is sent again would be a second one.
        feedback.assessment_id = f"a-{_digest(trace_id, name, size=32)}"
        found.append(feedback)
    return found


def _spans(trace_id: str, start: int, row: Mapping[str, Any]) -> list[Any]:
    """Return a span for the prompt, and below it one for each answer."""
    root = _digest(trace_id, "prompt", size=16)
    spans = [_span(trace_id, root, None, start, "held-out prompt", "CHAIN", row["prompt"], row["answers"])]
    for model, answer in row["answers"].items():
        span_id = _digest(trace_id, "answer", model, size=16)
        spans.append(_span(trace_id, span_id, root, start, model, "LLM", row["prompt"], answer))
    return spans


def _span(
    trace_id: str, span_id: str, parent: str | None, start: int, name: str, kind: str, given: Any, made: Any
) -> Any:
    """Return a span of MLflow.

    Args:
        trace_id: MLflow's id of the trace.
        span_id: 16 hexadecimal digits.
        parent: Id of the span above.
        start: Milliseconds since 1970.
        name: Name on MLflow's pages.
        kind: MLflow's type of the span.
        given: Its inputs.
        made: Its outputs.
    """
    from mlflow.entities import Span

    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": given,
        "mlflow.spanOutputs": made,
    }
    return Span.from_dict(
        {
            "trace_id": _base64(trace_id.removeprefix("tr-")),
            "span_id": _base64(span_id),
            "parent_span_id": parent and _base64(parent),
            "name": name,
            "start_time_unix_nano": start * 1_000_000,
            "end_time_unix_nano": start * 1_000_000,
            "events": [],
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items()},
        }
    )


def _digest(*parts: object, size: int) -> str:
    """Return an id of `size` hexadecimal digits, the same for the same parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:size]


def _base64(digits: str) -> str:
    return base64.b64encode(bytes.fromhex(digits)).decode()
