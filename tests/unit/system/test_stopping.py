"""A stop request ends the process before a training loop, and is left to the loop in it. After the loop, the
process goes on and saves what was trained.
"""

from __future__ import annotations

import signal

import pytest

from rlhf_core.system.processes import StopRequest


def test_a_stop_request_ends_the_process_only_before_the_training() -> None:
    before = StopRequest()
    with pytest.raises(SystemExit):
        before.on_signal(signal.SIGTERM, None)
    during = StopRequest()
    during.defer()
    during.on_signal(signal.SIGTERM, None)
    assert before.requested and during.requested
