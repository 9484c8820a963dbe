"""Notifications by Prefect's own blocks.

- without RLHF_NOTIFY nothing is sent; with it, one message for each end, sent by a real block of Prefect
- a policy that is promoted or refused is an event
- a block that fails does not fail the run
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker

from flows import champion
from flows.notify import notify, notify_failure, notify_result
from flows.rlhf import rlhf
from rlhf_core.errors import DataDrifted
from tests.support.prefect_api import PrefectApi

SUMMARY: dict[str, Any] = {
    "run": "demo-seed0-1c38a75c",
    "stages": {"register": {"reused": False}},
    "registration": {"model": "demo-policy", "version": "3", "champion": True, "reason": "it won 0.6"},
}


def test_each_end_is_one_message(api: PrefectApi) -> None:
    notify_result(SUMMARY)
    refused = {**SUMMARY["registration"], "champion": False}
    notify_result({**SUMMARY, "registration": refused})
    notify_result({**SUMMARY, "stages": {"register": {"reused": True}}})
    notify_result({"run": "demo"})
    state: Any = SimpleNamespace(name="Failed", message="StageFailed: ppo", data=None)
    run: Any = SimpleNamespace(name="demo-seed0-a1")
    flow: Any = None
    notify_failure(flow, run, state)
    record = SimpleNamespace(result=DataDrifted("vocabulary 0.4"))
    state = SimpleNamespace(name="Failed", message="DataDrifted: vocabulary 0.4", data=record)
    notify_failure(flow, run, state)
    assert api.messages == [
        ("demo-policy version 3 promoted automatically", "demo-seed0-1c38a75c finished. it won 0.6"),
        ("demo-policy version 3 refused", "demo-seed0-1c38a75c finished. it won 0.6"),
        ("demo finished", "It ended before the stage register."),
        ("demo-seed0-a1 failed", "StageFailed: ppo"),
        ("demo-seed0-a1 drifted", "DataDrifted: vocabulary 0.4"),
    ]


def test_ends_of_policies_are_events_for_automations(api: PrefectApi) -> None:
    EventsWorker.set_client_override(AssertingEventsClient)
    notify_result(SUMMARY)
    notify_result({**SUMMARY, "registration": {**SUMMARY["registration"], "champion": False}})
    notify_result({**SUMMARY, "stages": {"register": {"reused": True}}})
    EventsWorker.instance().drain()
    assert AssertingEventsClient.last is not None
    sent = AssertingEventsClient.last.events
    events = [event for event in sent if event.event.startswith("rlhf.")]
    assert [event.event for event in events] == ["rlhf.policy.promoted", "rlhf.policy.refused"]
    assert {event.resource.id for event in events} == {"rlhf.model.demo-policy"}
    assert events[0].payload == {"version": "3", "reason": "it won 0.6"}


@pytest.mark.parametrize("flow", [champion.rollback, champion.promote, rlhf])
def test_failures_of_flows_are_sent(flow: Any) -> None:
    assert flow.on_failure_hooks == flow.on_crashed_hooks == [notify_failure]


def test_nothing_is_sent_without_a_block_and_failures_are_logged(
    api: PrefectApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_NOTIFY", "slack-webhook/other")
    notify("a", "b")
    assert "RLHF_NOTIFY=slack-webhook/other: the notification could not be sent (ValueError)" in caplog.text
    monkeypatch.delenv("RLHF_NOTIFY")
    notify("a", "b")
    assert api.messages == []
