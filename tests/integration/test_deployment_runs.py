"""`rlhf up`, runs of the deployment that are killed or cancelled, and `rlhf down`, with the real Prefect,
MLflow and worker.

On SQLite, and in the slow set on PostgreSQL.

- a killed flow run is running again within 30 s and completes; its tags name configuration, seed and pipeline
- progress, reports and links exist as artifacts; the form has types and descriptions; there is no schedule
- the MLflow run has the id of the flow run, and no process is left after `rlhf down`
- a change of the champion does not wait for the end of a pipeline; another pipeline does
- a restart of Prefect's server does not end a running flow: its lease can still be renewed
- a flow run that is cancelled in Prefect commits a checkpoint of its current step and is not started again
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext, suppress
from json import JSONDecodeError
from pathlib import Path

import pytest

from rlhf_core.ops.servers.reconcile import CANCEL_SECONDS, ENGINE_VARIABLE, FLOW_STOP_SECONDS
from rlhf_core.ops.servers.servers import HOME_VARIABLE, flow_processes
from rlhf_core.ops.servers.supervisor import POLL_SECONDS
from rlhf_core.system.home import Home
from rlhf_core.system.processes import processes_with_env
from rlhf_core.system.serving import post
from tests.chaos.harness import CONFIG, read_passes
from tests.chaos.servers import Servers, wait
from tests.support.postgres import postgres, postgres_programs

NEEDS_POSTGRES = pytest.mark.skipif(postgres_programs() is None, reason="needs PostgreSQL's programs")


@pytest.mark.parametrize(
    "database", ["SQLite", pytest.param("PostgreSQL", marks=[pytest.mark.slow, NEEDS_POSTGRES])]
)
def test_killed_flow_run_continues_and_cancelled_one_does_not(database: str, tmp_path: Path) -> None:
    home, trace = tmp_path / "home", tmp_path / "trace"
    trace.mkdir()
    with postgres(tmp_path / "postgres") if database == "PostgreSQL" else nullcontext() as url:
        servers = Servers(home, trace, url)
        servers.up()
        try:
            _kill_running_flow(servers, home, trace)
            _cancel_running_flow(servers, home, trace)
        finally:
            servers.down()
    assert wait(
        lambda: (
            not [
                p
                for p, value in processes_with_env(HOME_VARIABLE)
                if value == str(home) and p.pid != os.getpid()
            ]
        ),
        10,
    )
    if database == "PostgreSQL":
        assert not list(home.rglob("prefect.db"))


def _kill_running_flow(servers: Servers, home: Path, trace: Path) -> None:
    name = servers.deploy(until="sft")
    assert wait(lambda: any(p.point == "bundle.committed" for p in _of_sft(trace)), 240), servers.run(name)
    (first,) = flow_processes(Home.of(home))
    first.send(signal.SIGKILL)
    killed = time.monotonic()
    assert wait(lambda: any(v == name and p != first for p, v in processes_with_env(ENGINE_VARIABLE)), 30)
    assert time.monotonic() - killed < 30
    assert servers.wait_for_end(name, 300)
    run = servers.run(name)
    assert run is not None and run["state_type"] == "COMPLETED", run
    assert run["run_count"] == 2
    assert Home.of(home).run(run["name"]).is_dir(), "the flow run has the name of the pipeline"
    assert {"auto-recover", "tiny", "seed=0"} < set(run["tags"])
    artifacts = {artifact["key"] for artifact in servers.ask("/artifacts/filter", {"limit": 100})}
    assert {"sft-progress", "sft-report", "data-report", "pipeline-report"} <= artifacts
    deployment = servers.deployment("full-pipeline")
    fields = deployment["parameter_openapi_schema"]["properties"]
    assert "PPO iterations" in fields["ppo_steps"]["description"]
    assert deployment["schedules"] == [], "a schedule needs a configuration of its own"
    url = servers.state["mlflow"]
    query = {"experiment_ids": ["1"], "filter": f"tags.`prefect.flow_run_id` = '{name}'"}
    assert len(post(f"{url}/api/2.0/mlflow/runs/search", query)["runs"]) == 1


def _cancel_running_flow(servers: Servers, home: Path, trace: Path) -> None:
    began = time.time()
    name = servers.deploy("sft.epochs=500", "sft.checkpoint_every=10000", until="sft")

    def steps() -> list[float]:
        return [p.time for p in read_passes(trace) if p.point == "sft.step" and p.time > began]

    assert wait(lambda: len(steps()) > 1, 240), servers.run(name)
    _change_the_champion(servers)
    _kill_the_server(servers, name)
    servers.cancel(name)
    # Prefect's worker may not learn of the cancellation, because the server was restarted.
    seconds = CANCEL_SECONDS + FLOW_STOP_SECONDS
    assert wait(lambda: not flow_processes(Home.of(home)), seconds), servers.run(name)
    assert wait(lambda: (servers.run(name) or {}).get("state_type") == "CANCELLED", 35), servers.run(name)
    committed = [p.time for p in read_passes(trace) if p.point == "bundle.committed" and p.time > steps()[0]]
    assert len(committed) == 1 and committed[0] > steps()[-1], "a checkpoint of the current step"
    time.sleep(3 * POLL_SECONDS)
    run = servers.run(name)
    assert run is not None and (run["state_type"], run["run_count"]) == ("CANCELLED", 1)
    assert not flow_processes(Home.of(home))


def _change_the_champion(servers: Servers) -> None:
    """While a pipeline runs."""
    waiting = servers.start("rounds", {"config": str(CONFIG)})
    rollback = servers.start("rollback", {"model": "no-such-model", "reason": "too many words"})
    assert servers.wait_for_end(rollback, 120), servers.run(rollback)
    run, other = servers.run(rollback), servers.run(waiting)
    assert run is not None and "no registered model 'no-such-model'" in run["state"]["message"]
    assert other is not None and other["state_type"] == "SCHEDULED"
    servers.ask(f"/flow_runs/{waiting}/set_state", {"state": {"type": "CANCELLED"}})


def _kill_the_server(servers: Servers, name: str) -> None:
    """While the flow run `name` runs. Its process renews the lease every 225 s."""
    details = (servers.run(name) or {})["state"]["state_details"]
    lease = details["deployment_concurrency_lease_id"]
    (server,) = servers.pids(["prefect"])
    os.kill(server, signal.SIGKILL)
    assert wait(lambda: servers.run(name) is not None, 120)
    with suppress(JSONDecodeError):  # its answer is empty; a lost lease is an HTTPError with status 410
        servers.ask(f"/v2/concurrency_limits/leases/{lease}/renew", {"lease_duration": 300})


def _of_sft(trace: Path):  # type: ignore[no-untyped-def]
    passes = read_passes(trace)
    steps = [p.time for p in passes if p.point == "sft.step"]
    return [p for p in passes if steps and p.time > steps[0]]
