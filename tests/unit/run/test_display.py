"""What a terminal shows of a stage: always the bar of what is done now, and nothing that is over."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import pytest
from rich.console import Console

from rlhf_core.run.display import Bars, Lines, Pace


def _progress(task: str, done: int, total: int) -> dict[str, Any]:
    return {"event": "progress", "task": task, "done": done, "total": total, "unit": "steps", "metrics": {}}


@pytest.fixture
def shown() -> Any:
    bars = Bars(Console(file=io.StringIO(), force_terminal=True, width=100))

    def tell(*events: dict[str, Any]) -> list[tuple[str, float, float | None]]:
        bars.started("ppo", "ppo-01.log")
        for event in events:
            bars.event("ppo", event)
        assert bars._progress is not None
        tasks = [(t.description, t.completed, t.total) for t in bars._progress.tasks if t.visible]
        bars.close()
        return tasks

    return tell


def test_bar_begins_as_starting(shown: Any) -> None:
    assert shown() == [("ppo", 0, None)]


def test_bar_of_the_stage_returns_after_a_part(shown: Any) -> None:
    assert shown(_progress("ppo start", 0, 3)) == [("ppo start", 0, 3)]
    assert shown(_progress("ppo start", 3, 3), _progress("ppo", 12, 30)) == [("ppo", 12, 30)]
    assert shown(_progress("ppo", 30, 30), _progress("samples", 1, 8)) == [("samples", 1, 8)]


def test_resumed_step_is_shown() -> None:
    file = io.StringIO()
    Bars(Console(file=file)).event("ppo", {"event": "resumed", "step": 10})
    assert file.getvalue().split() == ["ppo", "continues", "after", "step", "10"]


@pytest.mark.parametrize("display", ["bars", "lines"])
def test_warnings_of_a_stage_are_shown(display: str, caplog: pytest.LogCaptureFixture) -> None:
    file = io.StringIO()
    event = {"event": "warning", "message": "step 3: [20 %] of the responses are empty"}
    (Bars(Console(file=file)) if display == "bars" else Lines()).event("ppo", event)
    assert "[20 %] of the responses are empty" in file.getvalue() + caplog.text


def test_progress_is_logged_rarely_and_with_the_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, logger="rlhf_core.run.display")
    lines = Lines()
    for done in range(1, 101):
        lines.event(
            "ppo",
            {**_progress("ppo", done, 100), "metrics": {"kl": 1.5}, "left": 90.0 if 1 < done < 100 else None},
        )
        now[0] += 1.0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 8  # steps 1, 16, 31, ... 91, and the last one
    assert messages[0] == "ppo: 1/100 steps  kl=1.5"
    assert messages[1] == "ppo: 16/100 steps, 90.0 s left  kl=1.5"
    assert messages[-1] == "ppo: 100/100 steps  kl=1.5"


def test_time_left_counts_the_steps_since_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, now = Pace(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert pace.left(_progress("ppo", 40, 100)) is None, "a stage that continues after step 40"
    now[0] += 30.0
    assert pace.left(_progress("ppo", 50, 100)) == 150.0  # 3 s for each of 10 steps, 50 are left
    assert pace.left(_progress("samples", 1, 8)) is None, "another task"
    assert pace.left(_progress("ppo", 100, 100)) is None
