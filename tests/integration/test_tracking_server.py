"""Tracking and registry against a real MLflow server that dies and comes back.

Locks: runs, points, tables and files over HTTP, an outage in the middle of a stage, registration of a policy
in a local store, links to MLflow's pages.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.tracking.gate import Evaluation, Gate
from rlhf_core.tracking.registry import Candidate, register
from rlhf_core.tracking.stage_run import Pauses
from rlhf_core.tracking.tracker import open_tracking


class Server:
    """A lean MLflow server on loopback, in a process group of its own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{self._home}/server.db"]
        command += ["--artifacts-destination", str(self._home / "artifacts"), "--serve-artifacts"]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self._home / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError((self._home / "server.log").read_text()[-2000:])

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_an_outage_of_the_server_loses_nothing_and_doubles_nothing(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = PipelineConfig.model_validate(
        {"run": {"home": str(tmp_path / "home")}, "tracking": {"uri": server.url, "system_metrics": False}}
    )
    tracking = replace(open_tracking(config), pauses=Pauses(first=0.0))
    parent = tracking.parent_run("p1", "demo", {"preset": "demo"}, {"seed": 0})
    run = tracking.stage_run(parent, "ppo", "k1", {"ppo.steps": 9})
    for step in range(3):
        run.log_metrics({"loss": float(step), "timing/step": 0.1}, step)
    run.flush()
    server.kill()
    start = time.monotonic()
    for step in range(3, 6):
        run.log_metrics({"loss": float(step), "timing/step": 0.1}, step)
    run.log_table("samples", [{"prompt": "a", "response": "b"}])
    run.flush()
    assert time.monotonic() - start < 30 and run.unsent == 7
    server.start()
    run.finish("FINISHED")
    assert run.unsent == 0

    again = open_tracking(config)
    assert again.parent_run("p1", "demo") == parent
    resumed = again.stage_run(parent, "ppo", "k1")
    assert resumed.run_id == run.run_id
    resumed.log_metrics({"loss": 5.0, "timing/step": 0.9}, 5)
    resumed.finish("FINISHED")
    again.finish(parent, "FINISHED")

    from mlflow.tracking import MlflowClient

    assert capfd.readouterr().out == "", "MLflow's links do not disturb the terminal"
    client = MlflowClient(server.url)
    assert [(m.step, m.value) for m in client.get_metric_history(run.run_id, "loss")] == [
        (s, float(s)) for s in range(6)
    ]
    assert [m.step for m in client.get_metric_history(run.run_id, "timing/step")] == list(range(6))
    table = json.loads(
        Path(client.download_artifacts(run.run_id, "tables/samples.json", str(tmp_path))).read_text()
    )
    assert table == {"columns": ["prompt", "response"], "data": [["a", "b"]]}
    with urllib.request.urlopen(tracking.url(parent), timeout=10) as page:
        assert page.status == 200

    policy = Candidate(
        "/a/store/ppo/policy", "digest", run.run_id, {"rlhf.seed": "0"}, Evaluation(0.8, wins=80, losses=20)
    )
    done = register(again.mlflow, "demo-policy", policy, gate=Gate(0.5))
    assert (done.version, done.decision.champion) == ("1", True)
    assert (
        client.get_model_version_by_alias("demo-policy", "champion").source
        == "local-store:///a/store/ppo/policy"
    )


def test_a_server_that_refuses_connections_costs_seconds(tmp_path: Path) -> None:
    config = PipelineConfig.model_validate(
        {"run": {"home": str(tmp_path)}, "tracking": {"uri": "http://127.0.0.1:9"}}
    )
    start = time.monotonic()
    tracking = open_tracking(config)
    run = tracking.stage_run(tracking.parent_run("p", "demo"), "ppo", "k1")
    run.log_metrics({"loss": 1.0}, 0)
    run.flush()
    assert run.run_id is None and run.unsent == 1
    assert time.monotonic() - start < 30
