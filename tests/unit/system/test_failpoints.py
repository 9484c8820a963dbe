"""What `RLHF_FAIL` and `RLHF_FAIL_TRACE` do.

- nothing without them; the named action at the named pass of a process, and only there
- with a trace every pass is noted, and an entry acts once over all processes
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.system.failpoints import failpoint

PASS_THREE_TIMES = (
    "from rlhf_core.system.failpoints import failpoint\nprint([failpoint('here', 'alter') for _ in range(3)])"
)


def _run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PASS_THREE_TIMES],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_the_variables_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_FAIL", raising=False)
    assert failpoint("anywhere") is None


def test_an_action_comes_at_the_named_pass_only() -> None:
    assert _run(RLHF_FAIL="there:1:alter,here:2:alter").stdout.strip() == "[None, 'alter', None]"
    assert _run(RLHF_FAIL="here:3:kill").returncode == -signal.SIGKILL
    assert "failpoint here asked for an error" in _run(RLHF_FAIL="here:1:raise").stderr
    assert "No space left on device" in _run(RLHF_FAIL="here:1:enospc").stderr
    for unknown in ("truncat", "nan"):  # the second is made, but not at this point
        assert f"no action '{unknown}' at here" in _run(RLHF_FAIL=f"here:1:{unknown}").stderr


def test_trace_records_passes_and_faults_act_once(tmp_path: Path) -> None:
    traced = {"RLHF_FAIL": "here:2:kill", "RLHF_FAIL_TRACE": str(tmp_path)}
    assert _run(**traced).returncode == -signal.SIGKILL
    assert _run(**traced).stdout.strip() == "[None, None, None]"
    passes = [line.split() for line in (tmp_path / "passes").read_text().splitlines()]
    assert [point for _, _, point, _ in passes] == ["here"] * 5
    assert len({pid for _, pid, _, _ in passes}) == 2
