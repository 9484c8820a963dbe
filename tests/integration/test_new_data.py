"""Retraining by new data under `rlhf up`: a deployment that looks often, and `promote` and `rollback`, with
the real Prefect, MLflow and worker.

- the first look runs the pipeline and registers version 1, the next one finds nothing new
- fewer new rows than `min_new_rows` start nothing, enough new rows register version 2
- data of another kind end the run after the stage `data`, with a page that names the measure and its limit
- versions 1 and 2 are promoted, version 2 is rolled back, and the champion has the weights of version 1

Slow: two runs of the smallest pipeline under `rlhf up`.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.ops.servers.servers import HOME_VARIABLE
from rlhf_core.system.processes import processes_with_env
from rlhf_core.system.serving import get
from rlhf_core.tracking.champions import WEIGHTS
from tests.chaos.harness import CONFIG
from tests.chaos.servers import Servers, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

SECONDS = 20
"""The interval of the polls."""
MODEL = "tiny-policy"


def add_rows(file: Path, rows: range, text: str) -> None:
    with file.open("a") as lines:
        for row in rows:
            content = {"prompt": f"{text} {row}?", "completion": f"{text} {row}."}
            lines.write(json.dumps(content, ensure_ascii=False) + "\n")


class Polls:
    """The runs of the deployment `on-new-data` on a schedule."""

    def __init__(self, servers: Servers, overrides: list[str]) -> None:
        self._servers = servers
        options = ("--config", str(CONFIG), "--name", "on-new-data", "--if-changed")
        servers.up(*options, "--param", "min_new_rows=3", *overrides)
        self._deployment = servers.deployment("on-new-data")
        schedule = {"active": True, "schedule": {"interval": SECONDS}}
        servers.ask(f"/deployments/{self._deployment['id']}/schedules", [schedule])

    def ended(self) -> list[dict[str, Any]]:
        """Return the runs that ended, the oldest first. Polls during a run are cancelled."""
        runs = self._servers.ask(
            "/flow_runs/filter",
            {
                "deployments": {"id": {"any_": [self._deployment["id"]]}},
                "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}},
                "sort": "EXPECTED_START_TIME_ASC",
            },
        )
        return list(runs)

    def wait_for(self, name: str, seconds: float, after: float) -> dict[str, Any]:
        """Wait for a run that began after `after` and ended in the state `name`."""

        def found() -> list[dict[str, Any]]:
            return [run for run in self.ended() if run["state_name"] == name and began(run) > after]

        assert wait(lambda: bool(found()), seconds), [run["state_name"] for run in self.ended()]
        return found()[0]


def began(run: dict[str, Any]) -> float:
    return datetime.fromisoformat(run["start_time"].replace("Z", "+00:00")).timestamp()


def weights(servers: Servers) -> dict[str, str]:
    """Return the digest of the weights of each registered version."""
    answer = get(f"{servers.state['mlflow']}/api/2.0/mlflow/model-versions/search")
    return {
        version["version"]: next(tag["value"] for tag in version["tags"] if tag["key"] == WEIGHTS)
        for version in answer.get("model_versions", [])
    }


def champion(servers: Servers) -> str:
    """Return the version that has the alias `champion`."""
    address = f"{servers.state['mlflow']}/api/2.0/mlflow/registered-models/alias?name={MODEL}&alias=champion"
    return str(get(address)["model_version"]["version"])


def run_deployment(servers: Servers, name: str, **parameters: Any) -> None:
    deployment = servers.deployment(name)
    run = servers.ask(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
    assert servers.wait_for_end(run["id"], 120)
    ended = servers.run(run["id"])
    assert ended is not None and ended["state_type"] == "COMPLETED", ended


def test_new_data_retrain_and_a_champion_is_taken_back(tmp_path: Path, summary_lines: list[str]) -> None:
    home, trace, rows = tmp_path / "home", tmp_path / "trace", tmp_path / "rows.jsonl"
    trace.mkdir()
    add_rows(rows, range(3), "Tell me about fox")
    overrides = [
        f"data.sft=[{{path: synthetic}}, {{path: {rows}}}]",
        "drift={warn: {vocabulary: 0.15}, stop: {vocabulary: 0.15}}",
    ]
    person = {"model": MODEL, "home": str(home)}
    servers = Servers(home, trace)
    servers.up()
    try:
        polls = Polls(servers, overrides)
        polls.wait_for("Completed", 600, after=0)
        polls.wait_for("Unchanged", 120, after=0)
        run_deployment(servers, "promote", **person, version="1", reason="the first policy")

        add_rows(rows, range(3, 5), "Tell me about fox")
        polls.wait_for("Waiting", 120, after=time.time())
        assert list(weights(servers)) == ["1"], "two new rows are fewer than min_new_rows"
        changed = time.time()
        add_rows(rows, range(5, 8), "Tell me about fox")
        polls.wait_for("Completed", 600, after=changed)
        first, second = (weights(servers)[version] for version in ("1", "2"))
        assert first != second
        run_deployment(servers, "promote", **person, version="2", reason="it has seen more foxes")
        assert champion(servers) == "2"

        changed = time.time()
        add_rows(rows, range(300), "Расскажи мне про лису")
        stopped = polls.wait_for("Failed", 300, after=changed)
        assert "vocabulary" in stopped["state"]["message"], stopped["state"]["message"]
        assert sorted(weights(servers)) == ["1", "2"]
        pages = servers.ask("/artifacts/filter", {"artifacts": {"key": {"any_": ["data-drift"]}}})
        assert any(page["data"].startswith("# Data drift: stop") for page in pages)

        run_deployment(servers, "rollback", **person, reason="it speaks of foxes only")
        assert champion(servers) == "1" and weights(servers)["1"] == first
        names = [run["state_name"] for run in polls.ended()]
        summary_lines.append(
            f"polls every {SECONDS} s: {', '.join(names)}; {stopped['state']['message'][:200]}"
        )
    finally:
        servers.down()
    assert wait(lambda: not [p for p, value in processes_with_env(HOME_VARIABLE) if value == str(home)], 10)
