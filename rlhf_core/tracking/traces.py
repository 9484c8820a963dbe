"""Prompts with the answers of models as MLflow's traces: its pages search, filter, sort and annotate those.

A trace has a span for each answer, and the measures of the policy's answer as assessments.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

MOST_SECONDS = 20.0
"""Time for all traces of a run. They are for reading, and must not keep a stage from its end."""
_PREVIEW = 1000
"""Characters of a text in MLflow's list of traces."""


def log_traces(uri: str, experiment_id: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Log a trace for each row, the fields of an `AnsweredPrompt`, and return how many fitted into the time.

    A row that was logged before, in the same position, is replaced. Needs a tracker with a database; an older
    server gets no spans. Raises what MLflow's client raises.
    """
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.client import TracingClient

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
