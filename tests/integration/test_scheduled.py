"""Retraining on a schedule, and a run of the deployment up to the registry, with the real Prefect, MLflow and
worker.

- an active schedule starts runs of a deployment that `rlhf up --config --if-changed` has created
- the first runs the whole pipeline and registers a model
- the next one, with unchanged data, trains nothing and ends as `Unchanged`
- after a row is added to a data file, the next one runs the pipeline again and registers a second version
- a run of `full-pipeline` then reuses every stage and ends with the same weights

Slow: three runs of the smallest pipeline under `rlhf up`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.ops.servers.servers import HOME_VARIABLE
from rlhf_core.system.files import read_json
from rlhf_core.system.processes import processes_with_env
from rlhf_core.system.serving import get
from tests.chaos.harness import CONFIG
from tests.chaos.servers import Servers, wait

pytestmark = pytest.mark.slow

SECONDS = 45
"""The interval of the schedule."""


def add_row(file: Path, row: int) -> None:
    with file.open("a") as lines:
        lines.write(
            json.dumps({"prompt": f"Tell me about fox {row}.", "completion": f"The fox {row} runs."}) + "\n"
        )


def ended(servers: Servers, deployment: str) -> list[dict[str, Any]]:
    """Return the runs of the deployment that have ended, the oldest first."""
    runs = servers.ask(
        "/flow_runs/filter",
        {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}},
            "sort": "EXPECTED_START_TIME_ASC",
        },
    )
    return list(runs)


def summaries(home: Path) -> list[dict[str, Any]]:
    """Return the summaries of the runs that registered a model, the oldest first."""
    files = sorted(home.glob("runs/*/summary.json"), key=lambda path: path.stat().st_mtime)
    contents = [read_json(path) or {} for path in files]
    return [summary for summary in contents if "register" in summary.get("stages", {})]


def versions(servers: Servers) -> int:
    answer = get(f"{servers.state['mlflow']}/api/2.0/mlflow/model-versions/search")
    return len(answer.get("model_versions", []))


def test_schedule_retrains_when_the_data_have_changed(tmp_path: Path, summary_lines: list[str]) -> None:
    home, trace, rows = tmp_path / "home", tmp_path / "trace", tmp_path / "rows.jsonl"
    trace.mkdir()
    for row in range(3):
        add_row(rows, row)
    overrides = [f"data.sft=[{{path: synthetic}}, {{path: {rows}}}]"]
    servers = Servers(home, trace)
    servers.up("--config", str(CONFIG), "--name", "weekly", "--if-changed", *overrides)
    try:
        deployment = servers.deployment("weekly")
        assert deployment["schedules"] == []
        schedule = {"active": True, "schedule": {"interval": SECONDS}}
        (activated,) = servers.ask(f"/deployments/{deployment['id']}/schedules", [schedule])

        def runs() -> list[dict[str, Any]]:
            return ended(servers, deployment["id"])

        assert wait(lambda: len(runs()) >= 2, 600), runs()
        first, second = runs()[:2]
        assert (first["state_type"], second["state_type"]) == ("COMPLETED", "COMPLETED")
        assert (first["state_name"], second["state_name"]) == ("Completed", "Unchanged")
        assert first["auto_scheduled"] and second["auto_scheduled"]
        assert len(summaries(home)) == 1
        assert versions(servers) == 1

        add_row(rows, 3)
        assert wait(lambda: len(summaries(home)) == 2, 600), runs()

        def unchanged_again() -> bool:
            names = [run["state_name"] for run in runs()]
            return names.count("Completed") == 2 and names[-1] == "Unchanged"

        assert wait(unchanged_again, 300), runs()
        before, after = summaries(home)
        assert before["pipeline_key"] != after["pipeline_key"]
        assert versions(servers) == 2
        names = [run["state_name"] for run in runs()]
        assert names.count("Completed") == 2 and set(names) == {"Completed", "Unchanged"}
        summary_lines.append(f"scheduled every {SECONDS} s: {', '.join(names)}")

        name = servers.deploy(overrides[0], until="register")
        assert servers.wait_for_end(name, 300)
        run = servers.run(name)
        assert run is not None and run["state_type"] == "COMPLETED", run
        assert activated["active"]
        assert versions(servers) == 2, "a registered model is not registered again"
    finally:
        servers.down()
    assert wait(lambda: not [p for p, value in processes_with_env(HOME_VARIABLE) if value == str(home)], 10)
