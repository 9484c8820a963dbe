"""`python -m flows.deploy`, with a real Prefect server.

- a deployment of the file that the server does not have is created; schedules are off
- parameters, schedules, tags and limits that people have set are kept; the code of a deployment is updated
- only retrainings have a schedule, and they have no configuration (tests/unit/flows/test_retrain.py)
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from rlhf_core.ops.servers.servers import DEPLOYMENTS
from rlhf_core.system.launch import python_module
from rlhf_core.system.local_http import get, patch, post
from tests.support.prefect_server import PrefectServer, prefect_server

ROOT = Path(__file__).resolve().parents[2]


def deploy(server: PrefectServer) -> str:
    done = subprocess.run(
        [*python_module("flows.deploy"), str(DEPLOYMENTS)],
        env={**os.environ, **server.environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def deployments(server: PrefectServer) -> dict[str, dict[str, Any]]:
    answer = post(f"{server.url}/deployments/filter", {}, auth=server.auth)
    return {deployment["name"]: deployment for deployment in answer}


def test_what_people_have_set_is_kept(tmp_path: Path) -> None:
    with prefect_server(tmp_path) as server:
        post(f"{server.url}/work_pools/", {"name": "rlhf", "type": "process"}, auth=server.auth)
        deploy(server)
        created = deployments(server)
        assert set(created) == {"full-pipeline", "rounds", "weekly", "on-new-data", "rollback", "promote"}
        schedules = [schedule for each in created.values() for schedule in each["schedules"]]
        assert [schedule["active"] for schedule in schedules] == [False, False]
        assert [each["name"] for each in created.values() if each["schedules"]] == ["on-new-data", "weekly"]
        assert not any("config" in each["parameters"] for each in created.values())

        weekly = created["weekly"]
        path = f"{server.url}/deployments/{weekly['id']}"
        changes = {"parameters": {"config": "my.yaml"}, "tags": ["auto-recover", "ours"], "paused": False}
        # As a deployment of another folder and of an earlier release has them.
        earlier = {"pull_steps": [], "parameter_openapi_schema": {"properties": {}, "type": "object"}}
        patch(path, {**changes, **earlier, "concurrency_limit": 3}, auth=server.auth)
        patch(f"{path}/schedules/{weekly['schedules'][0]['id']}", {"active": True}, auth=server.auth)
        post(f"{path}/schedules", [{"active": True, "schedule": {"interval": 3600.0}}], auth=server.auth)
        before = get(path, auth=server.auth)

        assert deploy(server) == ""
        after = get(path, auth=server.auth)
        for name in ("parameters", "schedules", "tags", "global_concurrency_limit", "work_queue_name"):
            assert after[name] == before[name], name
        assert [schedule["active"] for schedule in after["schedules"]] == [True, True]
        for name in ("pull_steps", "parameter_openapi_schema", "entrypoint"):
            assert after[name] == weekly[name], name

        # A value that a later release does not accept: the server starts, so that it can be corrected.
        patch(path, {**earlier, "parameters": {"min_new_rows": "many"}}, auth=server.auth)
        assert "rlhf-retrain/weekly: its parameters {'min_new_rows': 'many'} do not fit" in deploy(server)
        assert get(path, auth=server.auth)["parameters"] == {"min_new_rows": "many"}
