"""`python -m flows.deploy`, with a real Prefect server.

- a deployment of the file that the server does not have is created; none has a schedule
- parameters, schedules, tags and limits that people have set are kept; the code of a deployment is updated
- `rlhf up --config` creates a deployment and updates it: what it names is changed, and all else is kept
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.config_deployment import config_deployment
from rlhf_core.system.files import shipped
from rlhf_core.system.processes import python_module
from rlhf_core.system.serving import get, patch, post
from tests.support.prefect_server import PrefectServer, prefect_server

ROOT = Path(__file__).resolve().parents[2]


def deploy(server: PrefectServer) -> str:
    done = subprocess.run(
        [*python_module("flows.deploy"), str(shipped("deployments/prefect.yaml"))],
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
        assert set(created) == {"full-pipeline", "rounds", "rollback", "promote"}
        assert not any(each["schedules"] for each in created.values())
        assert created["rollback"]["work_queue_name"] == "champions"

        rounds = created["rounds"]
        assert rounds["global_concurrency_limit"]["limit"] == 1
        assert rounds["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        path = f"{server.url}/deployments/{rounds['id']}"
        changes = {"parameters": {"config": "my.yaml"}, "tags": ["auto-recover", "ours"], "paused": False}
        # As a deployment of another folder and of an earlier release has them.
        earlier = {"pull_steps": [], "parameter_openapi_schema": {"properties": {}, "type": "object"}}
        patch(path, {**changes, **earlier, "concurrency_limit": 3}, auth=server.auth)
        post(f"{path}/schedules", [{"active": True, "schedule": {"interval": 3600.0}}], auth=server.auth)
        before = get(path, auth=server.auth)

        assert deploy(server) == ""
        after = get(path, auth=server.auth)
        for name in ("parameters", "schedules", "tags", "global_concurrency_limit", "work_queue_name"):
            assert after[name] == before[name], name
        assert [schedule["active"] for schedule in after["schedules"]] == [True]
        for name in ("pull_steps", "parameter_openapi_schema", "entrypoint"):
            assert after[name] == rounds[name], name

        # A value that a later release does not accept: the server starts, so that it can be corrected.
        patch(path, {**earlier, "parameters": {"number": "many"}}, auth=server.auth)
        assert "rlhf-rounds/rounds: its parameters {'number': 'many'} do not fit" in deploy(server)
        assert get(path, auth=server.auth)["parameters"] == {"number": "many"}


@contextmanager
def clients_of(server: PrefectServer) -> Iterator[None]:
    post(f"{server.url}/work_pools/", {"name": "rlhf", "type": "process"}, auth=server.auth)
    with temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: server.auth}):
        yield


def test_the_deployment_of_a_configuration_keeps_what_people_have_set(tmp_path: Path) -> None:
    with prefect_server(tmp_path) as server, clients_of(server):
        options: dict[str, Any] = {"cron": "0 2 * * 0", "timezone": "Europe/Berlin", "if_changed": True}
        text = config_deployment("my.yaml", ("ppo.steps=3",), **options).apply()
        assert text == (
            f'deployment rlhf-retrain/my: {Path("my.yaml").resolve()}, "0 2 * * 0" in Europe/Berlin, active'
        )
        created = deployments(server)["my"]
        assert created["entrypoint"] == "flows.retrain.retrain"
        assert created["parameters"]["overrides"] == ["ppo.steps=3"]
        assert set(created["tags"]) == {"rlhf", "auto-recover"}
        path = f"{server.url}/deployments/{created['id']}"
        [own] = created["schedules"]
        assert (own["active"], own["schedule"]["cron"]) == (True, "0 2 * * 0")

        # What people do on its page.
        parameters = {**created["parameters"], "min_new_rows": 7}
        patch(path, {"parameters": parameters}, auth=server.auth)
        patch(f"{path}/schedules/{own['id']}", {"active": False}, auth=server.auth)
        post(f"{path}/schedules", [{"active": True, "schedule": {"interval": 3600.0}}], auth=server.auth)

        options["cron"] = "0 3 * * 0"
        assert "paused: turn it on on its page" in config_deployment("my.yaml", **options).apply()
        after = get(path, auth=server.auth)
        assert after["parameters"] == parameters, "the overrides, too, which the command did not name"
        schedules = {each["id"]: each for each in after["schedules"]}
        assert len(schedules) == 2
        assert schedules[own["id"]]["schedule"]["cron"] == "0 3 * * 0"
        assert not schedules[own["id"]]["active"]

        assert config_deployment("my.yaml", if_changed=True).apply().endswith("turn it on on its page")
        assert get(path, auth=server.auth)["schedules"] == after["schedules"]
        config_deployment("my.yaml", name="by-hand").apply()
        assert deployments(server)["by-hand"]["schedules"] == []
