"""What a job on a cluster writes to the store.

- a job that is started again by its scheduler continues the events of its first start
- events are one object, in which later progress of the same task replaces earlier
- the log ends with the last lines of a long one, without secrets, and is there before the final event
- a log that was rotated is copied to the output from its beginning
- events whose write has failed are written with the next ones
- the final event is sent although the log cannot be read or copied to the output
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from rlhf_core.errors import StoreError
from rlhf_core.executors.events import error_event
from rlhf_core.executors.job_files import LOG_BYTES, JobFiles
from rlhf_core.executors.remote import _Reporter
from rlhf_core.storage.store import Store
from tests.support.scripted_store import ScriptedStore

KEY = "0" * 16


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    return JobFiles(Store(tmp_path / "store"), KEY, 1)


def test_a_job_that_is_started_again_continues_its_events(files: JobFiles, tmp_path: Path) -> None:
    for step in (1, 2):
        with _Reporter(files, tmp_path / "log") as reporter:
            reporter.send({"event": "checkpoint", "step": step})
    events, _ = files.read_events()
    assert events == [{"event": "checkpoint", "step": 1}, {"event": "checkpoint", "step": 2}]


def test_progress_is_one_object_that_is_replaced(files: JobFiles, tmp_path: Path) -> None:
    reporter = _Reporter(files, tmp_path / "log")
    for done in range(50):
        reporter.send({"event": "progress", "task": "sft", "done": done})
        reporter.send({"event": "progress", "task": "samples", "done": -done})
        reporter._write_events()
    events, progress = files.read_events()
    assert events == [] and [event["done"] for event in progress] == [49, -49]
    assert files._store.list(files.folder) == [f"{files.folder}/events.jsonl"]


def test_events_whose_write_has_failed_are_written_again(tmp_path: Path) -> None:
    store = ScriptedStore(tmp_path / "store")
    files = JobFiles(store, KEY, 1)
    store.before("put_bytes", StoreError("503"), key="events.jsonl")
    reporter = _Reporter(files, tmp_path / "log")
    reporter.send({"event": "progress", "task": "sft", "done": 5})
    reporter.send({"event": "result"})
    with pytest.raises(StoreError):
        reporter._write_events()
    assert files.read_events() == ([], [])
    reporter._write_events()
    assert files.read_events() == ([{"event": "result"}], [{"event": "progress", "task": "sft", "done": 5}])


def test_the_end_of_the_log_is_kept_without_secrets(
    files: JobFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    log = tmp_path / "log"
    log.write_text("first\n" + "x" * LOG_BYTES + "\ntoken hf_abcdefghijklmnop\nlast\n")
    with _Reporter(files, log) as reporter:
        reporter.send({"event": "result"})
    tail = files.read_log().decode()
    assert tail.endswith("last\n")
    assert "hf_abcdefghijklmnop" not in tail
    assert "first" not in tail
    keys = files._store.list(files.folder)
    assert keys == [f"{files.folder}/events.jsonl", f"{files.folder}/log.txt"]


def test_a_rotated_log_is_copied_from_its_beginning(
    files: JobFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    reporter = _Reporter(files, log)
    for text in ("a long line before the rotation\n", "short\n"):
        log.write_text(text)
        reporter._echo()
    assert capsys.readouterr().err == "a long line before the rotation\nshort\n"


@pytest.mark.parametrize("log_is_readable", [True, False])
def test_the_final_event_does_not_depend_on_the_log(
    files: JobFiles, tmp_path: Path, log_is_readable: bool
) -> None:
    log = tmp_path / "log"
    log.write_text("a line\n") if log_is_readable else log.mkdir()
    with (
        Path("/dev/full").open("wb", buffering=0) as full_disk,
        redirect_stderr(io.TextIOWrapper(full_disk, write_through=True)),
        _Reporter(files, log, last_seconds=0.0) as reporter,
    ):
        reporter.send(error_event(StoreError("the disk is full")))
    events, _ = files.read_events()
    assert [event["type"] for event in events] == ["StoreError"]
