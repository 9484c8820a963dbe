"""Nothing waits for ever.

- a call that can wait says for how long, or stands in the list here with what bounds it
- the list names nothing that is gone
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.source_tree import product

ROOT = Path(__file__).resolve().parents[2]

WAITS = {"join", "wait", "result", "recv", "communicate", "acquire", "get"}
"""Methods of threads, processes, futures, locks, pipes and queues that wait for ever without a limit."""
CALLS = {
    ("subprocess", "run"),
    ("subprocess", "check_output"),
    ("ray", "get"),
    ("ray", "wait"),
    ("opener", "open"),
}
"""Functions that do, also with other arguments, without a `timeout`."""

BOUNDED = {
    "rlhf_core/ops/review.py: review.result()": "what votes say, no wait",
    "rlhf_core/ops/review.py: self.result()": "the same",
    "rlhf_core/run/checks.py: _CHECKED.get()": "a context variable",
    "rlhf_core/run/display.py: _DISPLAY.get()": "a context variable",
    "rlhf_core/storage/s3.py: _digest_of_upload.get()": "a context variable",
    "rlhf_core/tracking/stage_run.py: done.result()": "`attempt` returns after the call",
    "rlhf_core/tracking/tracker.py: done.result()": "the same",
    "flows/pages.py: FlowRunContext.get()": "a context variable",
    "flows/pages.py: self._changed.wait()": "a daemon thread that has nothing else to do",
    "flows/tasks.py: state.result()": "the state of a task that has ended",
    "rlhf_core/rewards/python_function.py: self._process.wait()": "after SIGKILL",
    "rlhf_core/rewards/chat_service.py: asked.result()": "the question has an answer or an error",
    "rlhf_core/cluster/mailbox.py: self._replies.get()": "the stage's process ends this one if it ends",
    "rlhf_core/storage/checkpoints.py: self._background_upload[1].result()": (
        "store.retry_seconds bounds each call of the upload"
    ),
    "rlhf_core/system/heartbeat.py: self._thread.join()": "a thread that polls twice a second and then ends",
    "rlhf_core/engines/sync/wire.py: work.wait()": "the group's timeout, run.timeouts.sync",
    "rlhf_core/engines/sync/sender.py: joined.result()": "RayEngineClient waits for run.timeouts.sync",
    "rlhf_core/engines/sync/sender.py: received.result()": "RayEngineClient waits for run.timeouts.sync",
    "rlhf_core/engines/sync/sender.py: sending.wait()": "is completed",
    "rlhf_core/data/parts.py: future.result()": "a process that ends is an error; run.stage_timeout",
}


@cache
def unbounded() -> set[str]:
    found = set()
    for module in product().modules.values():
        for node in module.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and _may_wait(node, node.func)
            ):
                found.add(f"{module.path.relative_to(ROOT)}: {ast.unparse(node)}")
    return found


def _may_wait(call: ast.Call, function: ast.Attribute) -> bool:
    named = {keyword.arg for keyword in call.keywords}
    if isinstance(function.value, ast.Name) and (function.value.id, function.attr) in CALLS:
        return "timeout" not in named
    return function.attr in WAITS and not call.args and not named


def test_every_wait_is_bounded_or_names_its_bound() -> None:
    assert sorted(unbounded() - set(BOUNDED)) == []


def test_the_list_of_bounded_waits_names_nothing_that_is_gone() -> None:
    assert sorted(set(BOUNDED) - unbounded()) == []
