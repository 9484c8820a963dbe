"""What a stage's log has as a warning reaches the flow: each once, the first of them, nothing secret, and not
what comes with the error that ends the stage, which has no secrets either.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest

from rlhf_core.errors import DataError
from rlhf_core.executors.events import Events, Warnings


@pytest.fixture
def sent() -> Iterator[tuple[logging.Logger, int]]:
    """(a logger whose warnings are sent, the reading end)"""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    log = logging.getLogger("rlhf_core.test_events")
    handler = Warnings(Events(writer), most=3)
    log.addHandler(handler)
    yield log, reader
    log.removeHandler(handler)
    os.close(reader)
    os.close(writer)


def test_warnings_and_errors_are_sent_once(sent: tuple[logging.Logger, int]) -> None:
    log, reader = sent
    log.info("not this")
    for _ in range(3):
        log.warning("step %d is skipped", 4)
    log.error("the checkpoint is damaged; see https://me:hunter2@host/x")
    log.critical("WorkerStuck: this comes as the error")
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("so does this")
    for number in range(9):
        log.warning("another, %d", number)
    log.warning("a third")
    log.warning("one too many")
    log.error("an error is always sent")
    events = [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    assert {event["event"] for event in events} == {"warning"}
    messages = [event["message"] for event in events]
    assert messages[0] == "step 4 is skipped" and "damaged" in messages[1] and "hunter2" not in messages[1]
    assert messages[2:] == [
        "another, 0",
        "a third; further warnings are in the log",
        "an error is always sent",
    ]


def test_guards_are_named_and_never_dropped(
    sent: tuple[logging.Logger, int],
) -> None:
    log, reader = sent
    for text in ("a", "b", "c", "d"):
        log.warning(text)
    log.warning("step 4: guard loops: 30 %", extra={"guard": "loops"})
    *_, guard = [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    assert guard == {"event": "warning", "message": "step 4: guard loops: 30 %", "guard": "loops"}


def test_final_error_event_has_no_secrets() -> None:
    reader, writer = os.pipe()
    Events(writer).error(DataError("training rank 1: https://me:hunter2@host/x does not answer"))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        event = json.loads(pipe.readline())
    assert (event["event"], event["type"]) == ("error", "DataError")
    assert "training rank 1" in event["message"] and "hunter2" not in event["message"]
