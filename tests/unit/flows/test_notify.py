"""Notifications by Prefect's own blocks.

- without RLHF_NOTIFY nothing is sent; with it, one message for each end
- a block that fails does not fail the run
- a real block of Prefect sends its message over HTTP
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock

from flows import champion
from flows import notify as module
from flows.notify import notify, notify_failure, notify_result
from flows.rlhf import rlhf
from rlhf_core.errors import DataDrifted

SUMMARY = {
    "run": "demo-seed0-1c38a75c",
    "stages": {"register": {"reused": False}},
    "registration": {"model": "demo-policy", "version": "3", "champion": True, "reason": "it won 0.6"},
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    messages: list[tuple[str, str]] = []
    block = SimpleNamespace(notify=lambda body, subject: messages.append((subject, body)))
    monkeypatch.setattr(
        module, "Block", SimpleNamespace(load=lambda name: {"slack-webhook/team": block}[name])
    )
    monkeypatch.setenv("RLHF_NOTIFY", "slack-webhook/team")
    return messages


def test_each_end_is_one_message(sent: list[tuple[str, str]]) -> None:
    notify_result(SUMMARY)
    refused = {**SUMMARY["registration"], "champion": False}  # type: ignore[dict-item]
    notify_result({**SUMMARY, "registration": refused})
    notify_result({**SUMMARY, "stages": {"register": {"reused": True}}})
    notify_result({"run": "demo"})
    state: Any = SimpleNamespace(name="Failed", message="StageFailed: ppo", data=None)
    run: Any = SimpleNamespace(name="demo-seed0-a1")
    notify_failure(None, run, state)  # type: ignore[arg-type]
    record = SimpleNamespace(result=DataDrifted("vocabulary 0.4"))
    state = SimpleNamespace(name="Failed", message="DataDrifted: vocabulary 0.4", data=record)
    notify_failure(None, run, state)  # type: ignore[arg-type]
    assert sent == [
        ("demo-policy version 3 promoted automatically", "demo-seed0-1c38a75c finished. it won 0.6"),
        ("demo-policy version 3 refused", "demo-seed0-1c38a75c finished. it won 0.6"),
        ("demo finished", "It ended before the stage register."),
        ("demo-seed0-a1 failed", "StageFailed: ppo"),
        ("demo-seed0-a1 drifted", "DataDrifted: vocabulary 0.4"),
    ]


@pytest.mark.parametrize("flow", [champion.rollback, champion.promote, rlhf])
def test_failures_of_flows_are_sent(flow: Any) -> None:
    assert flow.on_failure_hooks == flow.on_crashed_hooks == [notify_failure]


def test_nothing_is_sent_without_a_block_and_failures_are_logged(
    sent: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_NOTIFY", "slack-webhook/other")
    notify("a", "b")
    assert "RLHF_NOTIFY=slack-webhook/other: the notification could not be sent (KeyError)" in caplog.text
    monkeypatch.delenv("RLHF_NOTIFY")
    notify("a", "b")
    assert sent == []


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_block_of_prefect_sends_it(
    received: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = received
    block = CustomWebhookNotificationBlock(
        name="test", url=url, json_data={"text": "{{subject}}: {{body}}"}, allow_private_urls=True
    )
    monkeypatch.setattr(module, "Block", SimpleNamespace(load=lambda name: block))
    monkeypatch.setenv("RLHF_NOTIFY", "custom-webhook/test")
    notify("demo-policy version 3 promoted automatically", "it won")
    [body] = bodies
    assert b"demo-policy version 3 promoted automatically: it won" in body
