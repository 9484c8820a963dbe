"""Prefect's pages.

Tested here:
- the key of an artifact is valid in Prefect for the name of any stage
- progress has its percentage and the time left
- a flow run inside a command has the process of the command.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.actions import ArtifactCreate

from flows import pages
from flows.pages import _artifact_key, describe
from rlhf_core.ops.servers.reconcile import COMMAND_TAG, PROCESS_LABEL
from rlhf_core.pipeline import STAGES
from rlhf_core.system.processes import RecordedProcess


@pytest.mark.parametrize("stage", [*STAGES, "best_of_n"])
@pytest.mark.parametrize("content", ["progress", "report"])
def test_artifact_key_is_valid_in_prefect(stage: str, content: str) -> None:
    ArtifactCreate(key=_artifact_key(stage, content), type="markdown", data="")


def test_progress_has_its_percentage_and_the_time_left() -> None:
    event = {"task": "ppo", "done": 3, "total": 12, "unit": "steps", "metrics": {"kl": 2.5}}
    assert describe(event | {"left": 42.0}) == (25.0, "ppo: 3 of 12 steps, 25 %, 42.0 s left (kl 2.5)")
    assert describe(event | {"metrics": {}}) == (25.0, "ppo: 3 of 12 steps, 25 %")


@pytest.mark.parametrize("deployment", [None, "deployment"])
def test_the_runs_inside_a_command_have_its_process_and_those_of_a_deployment_have_not(
    deployment: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        "round": SimpleNamespace(id="round", tags=["demo"], deployment_id=None, parent_task_run_id="task"),
        "rounds": SimpleNamespace(id="rounds", tags=[], deployment_id=deployment, parent_task_run_id=None),
    }
    changes: list[Any] = []
    client = SimpleNamespace(
        read_flow_run=runs.__getitem__,
        update_flow_run_labels=lambda *change: changes.append(change),
        update_flow_run=lambda name, tags: changes.append((name, tags)),
    )
    monkeypatch.setattr(pages, "get_client", lambda sync_client: nullcontext(client))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "round")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", "rounds")
    pages.publish_process()
    own = {PROCESS_LABEL: json.dumps(RecordedProcess.own())}
    expected = [("round", own), ("round", ["demo", COMMAND_TAG])]
    assert changes == ([] if deployment else expected)
