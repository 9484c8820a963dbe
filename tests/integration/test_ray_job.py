"""A stage as a job of a real Ray cluster with its job server.

- a flow that is killed and started again follows the same job, and gets the artifact that a local run makes
- Ctrl-C stops the job and its processes
- the packages of requirements/cluster.txt are complete, and satisfy each other and the lock
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.executors.ray_job import RayJobs
from rlhf_core.ops.api import run_stage
from rlhf_core.system.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / ".venv-cluster"
FLOW = """
import sys
from rlhf_core.config.load import load_config
from rlhf_core.ops.api import run_stage
run_stage(load_config("tests/assets/tiny.yaml", sys.argv[1:]), "data")
"""

pytestmark = pytest.mark.skipif(not CLUSTER.is_dir(), reason="make .venv-cluster")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray head on loopback with two CPUs; the environment of this process names it."""
    # Not 10002 to 19999, which are the ports of Ray's workers.
    port, dashboard = free_port(26379), free_port(28265)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{dashboard}")
        program = str(Path(sys.executable).parent)
        environment = {
            **os.environ,
            "PATH": f"{program}:{os.environ['PATH']}",
            "PYTHONPATH": str(CLUSTER),
            "RAY_USAGE_STATS_ENABLED": "0",
            "AUTOSCALER_METRIC_PORT": "-1",
            "RAY_JOB_STOP_WAIT_TIME_S": "30",
        }
        command = [
            *(f"{program}/ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *("--object-store-memory=100000000", f"--dashboard-agent-listen-port={free_port(25365)}"),
        ]
        with (Path(folder) / "head.log").open("wb") as log:
            head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 180
            while not _answers():
                assert head.poll() is None and time.monotonic() < deadline, (
                    Path(folder) / "head.log"
                ).read_text()
                time.sleep(0.5)
            yield
        finally:
            if head.poll() is None:
                processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
                for process in processes:
                    process.kill()
                psutil.wait_procs(processes, timeout=20)


def _answers() -> bool:
    try:
        return RayJobs().status("none").state == "missing"
    except Exception:
        return False


def settings(folder: Path) -> list[str]:
    return [
        "run.executor=ray",
        f"run.home={folder}/home",
        f"store.url={folder}/store",
        f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "run.threads=1",
        "data.synthetic.pairs=20000",  # the stage takes seconds
    ]


def config(folder: Path) -> PipelineConfig:
    return load_config(str(ROOT / "tests/assets/tiny.yaml"), settings(folder))


def start_flow(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", FLOW, *settings(folder)]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)


def jobs(state: str, folder: Path, seconds: float = 180.0) -> list[Any]:
    """Return the jobs of the store in `folder` when the last of them has this state."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [job for job in RayJobs()._client.list_jobs() if str(folder) in job.entrypoint]
        if found and found[-1].status == state and (state != "RUNNING" or _has_started(folder)):
            return found
        time.sleep(0.5)
    raise AssertionError(f"no job is {state}: {[(job.submission_id, job.status) for job in found]}")


def _has_started(folder: Path) -> bool:
    return any((folder / "store" / "checkpoints").glob("*/attempts/*.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_flow_that_was_killed_follows_the_same_job_when_it_is_started_again(tmp_path: Path) -> None:
    flow = start_flow(tmp_path)
    jobs("RUNNING", tmp_path)
    flow.kill()
    flow.wait(timeout=20)
    ref = run_stage(config(tmp_path), "data")
    [job] = jobs("SUCCEEDED", tmp_path)
    assert job.metadata == {"rlhf_stage": "data"}
    local = [*settings(tmp_path / "local"), "run.executor=local"]
    expected = run_stage(load_config(str(ROOT / "tests/assets/tiny.yaml"), local), "data")
    assert (ref.key, ref.digest, ref.metrics) == (expected.key, expected.digest, expected.metrics)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ctrl_c_stops_the_job_and_its_processes(tmp_path: Path) -> None:
    flow = start_flow(tmp_path)
    [job] = jobs("RUNNING", tmp_path)
    flow.send_signal(signal.SIGINT)
    assert flow.wait(timeout=180) != 0
    assert RayJobs().status(job.submission_id).state in ("stopped", "failed")
    left = [process for process in psutil.process_iter(["cmdline"]) if _belongs(process, tmp_path)]
    psutil.wait_procs(left, timeout=15)
    assert [process for process in left if process.is_running()] == []


def _belongs(process: psutil.Process, folder: Path) -> bool:
    words = " ".join(process.info["cmdline"] or ())
    return str(folder) in words and ("rlhf_core.run" in words or "rlhf_core.executors" in words)


def test_the_packages_of_cluster_txt_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CLUSTER))
    wanted = [("ray", "default", importlib.metadata.requires("ray") or [])]
    for found in importlib.metadata.distributions(path=[str(CLUSTER)]):
        wanted.append((found.name, "", found.requires or []))
    assert len(wanted) > 20
    problems = []
    for name, extra, requirements in wanted:
        for requirement in map(Requirement, requirements):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                version = "none"
            if version == "none" or not requirement.specifier.contains(version, prereleases=True):
                problems.append(f"{name} needs {requirement}, got {version}")
    assert problems == []
