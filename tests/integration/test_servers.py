"""`rlhf up`, a run of the deployment whose process is killed, `rlhf down`: the real Prefect, MLflow and worker.

On SQLite, and in the slow set on PostgreSQL.

- the same flow run is running again within 30 s and completes; its tags tell configuration, seed and pipeline
- progress, reports and links are there as artifacts; the form's schema knows types and descriptions; the schedule is off
- the run's MLflow run leads back to it, and nothing is left after `rlhf down`
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from flows.reconcile import ENGINE_VARIABLE, post
from flows.supervisor import MARK, flow_processes
from rlhf_core.processes import carriers
from tests.chaos.harness import read_passes
from tests.chaos.servers import Servers, wait
from tests.postgres import postgres, postgres_programs

NEEDS_POSTGRES = pytest.mark.skipif(postgres_programs() is None, reason="needs PostgreSQL's programs")


@pytest.mark.parametrize("database", ["SQLite", pytest.param("PostgreSQL", marks=[pytest.mark.slow, NEEDS_POSTGRES])])
def test_a_flow_run_that_is_killed_continues_as_the_same_run(database: str, tmp_path: Path) -> None:
    home, trace = tmp_path / "home", tmp_path / "trace"
    trace.mkdir()
    with postgres(tmp_path / "postgres") if database == "PostgreSQL" else nullcontext() as url:
        _kill_one_that_runs(Servers(home, trace, url), home, trace)
    if database == "PostgreSQL":
        assert not list(home.rglob("prefect.db"))


def _kill_one_that_runs(servers: Servers, home: Path, trace: Path) -> None:
    servers.up()
    try:
        name = servers.deploy(until="sft")
        assert wait(lambda: any(p.point == "bundle.committed" for p in _of_sft(trace)), 240), servers.run(name)
        (first,) = flow_processes(str(home))
        first.send(signal.SIGKILL)
        killed = time.monotonic()
        assert wait(lambda: any(v == name and p != first for p, v in carriers(ENGINE_VARIABLE)), 30)
        assert time.monotonic() - killed < 30
        assert servers.wait_for_end(name, 300)
        run = servers.run(name)
        assert run is not None and run["state_type"] == "COMPLETED", run
        assert run["run_count"] == 2
        assert {"auto-recover", "tiny", "seed=0"} < set(run["tags"])
        api = servers.state["prefect"]
        artifacts = {artifact["key"] for artifact in post(f"{api}/artifacts/filter", {"limit": 100})}
        assert {
            "sft-progress",
            "sft-report",
            "sft-metrics",
            "sft-mlflow",
            "data-report",
            "pipeline-report",
        } <= artifacts
        (deployment,) = (d for d in post(f"{api}/deployments/filter", {}) if d["name"] == "full-pipeline")
        fields = deployment["parameter_openapi_schema"]["properties"]
        assert "PPO iterations" in fields["ppo_steps"]["description"]
        assert [schedule["active"] for schedule in deployment["schedules"]] == [False]
        url = servers.state["mlflow"]
        query = {"experiment_ids": ["1"], "filter": f"tags.`prefect.flow_run_id` = '{name}'"}
        assert len(post(f"{url}/api/2.0/mlflow/runs/search", query)["runs"]) == 1
    finally:
        servers.down()
    assert wait(lambda: not [p for p, value in carriers(MARK) if value == str(home) and p.pid != os.getpid()], 10)


def _of_sft(trace: Path):  # type: ignore[no-untyped-def]
    passes = read_passes(trace)
    steps = [p.time for p in passes if p.point == "sft.step"]
    return [p for p in passes if steps and p.time > steps[0]]
