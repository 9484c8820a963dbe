"""Stages as Slurm jobs whose base model is a champion in a bucket. Slurm's commands are scripts.

Each job begins on a node that has no copy of the champion.

- `data` fetches it, and makes the artifact of a local run; an attempt after a job that failed has the same
  version, although another one is champion by then
- with a real Ray, SFT starts from it, and makes the artifact of a local run
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import load_config
from rlhf_core.ops.api import run_stage
from rlhf_core.pipeline import StageName
from rlhf_core.tracking.mlflow_client import Mlflow
from rlhf_core.types import ArtifactRef
from tests.support.registered_policy import register_policy
from tests.support.scripted_slurm import ScriptedSlurm

ROOT = Path(__file__).resolve().parents[2]
MODEL = "base-policy"


class Runs:
    """Runs stages that start from the champion of `MODEL`. Its artifacts are in a store of their own."""

    def __init__(self, folder: Path, bucket: str, slurm: ScriptedSlurm) -> None:
        self.folder, self.bucket, self.slurm = folder, f"{bucket}/{folder.name}", slurm
        self.database = f"sqlite:///{folder}/mlflow.db"
        self.register(1)

    def register(self, number: int) -> None:
        """Make another version the champion."""
        mlflow = Mlflow(self.database, "policies")
        store, work = f"{self.bucket}/theirs", self.folder / "work"
        register_policy(mlflow, MODEL, store, work, number, positions=128)

    def __call__(self, stage: StageName, executor: str, ray: str = "127.0.0.1:1") -> ArtifactRef:
        script = self.folder / "node.sbatch"
        # The node has its own `run.home`.
        script.write_text(f'#!/bin/bash\nrm -rf {self.folder}/home/cache\nexec env RAY_ADDRESS={ray} "$@"\n')
        overrides = [
            f"run.executor={executor}",
            f"run.home={self.folder}/home",
            f"run.resources.default.template={script}",
            f"store.url={self.bucket}/{executor}",
            f"tracking.uri={self.database}",
            f"model.path=champion:{MODEL}",
            "run.threads=1",
            "data.synthetic.pairs=60",
            "data.synthetic.sft_examples=60",
            "sft.epochs=1",
        ]
        return run_stage(load_config(str(ROOT / "tests/assets/tiny.yaml"), overrides), stage)

    def fail_first_job(self) -> None:
        """Have the first job fail, after another version has become champion."""
        deadline = time.monotonic() + 120
        while not self.slurm.jobs() and time.monotonic() < deadline:
            time.sleep(0.1)
        [job] = self.slurm.jobs()
        self.register(2)
        self.slurm.release()
        self.slurm.set_state(job, "NODE_FAIL|None")


@pytest.fixture
def runs(s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    slurm = ScriptedSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.path)
    yield Runs(tmp_path, s3_server.url, slurm)
    slurm.close()


@pytest.fixture
def ray_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real Ray of one node."""
    from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
    from ray.cluster_utils import Cluster

    # As `connect` and `ray.init` do it. Ray reads both once in a process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    enable_token_auth_by_default()
    folder = tempfile.mkdtemp(prefix="r-")  # paths of sockets are short
    monkeypatch.setenv("RAY_TMPDIR", folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def identity(ref: ArtifactRef) -> tuple[str, str]:
    return ref.key, ref.digest


def test_a_job_fetches_the_champion_that_the_run_began_with(runs: Runs) -> None:
    local = runs("data", "local")
    runs.slurm.hold()
    events = threading.Thread(target=runs.fail_first_job)
    events.start()
    assert identity(runs("data", "slurm")) == identity(local)
    events.join()
    assert len(runs.slurm.jobs()) == 2


@pytest.mark.slow
def test_sft_as_a_job_starts_from_the_champion(runs: Runs, ray_address: str) -> None:
    for stage in ("data", "sft"):
        job = runs(stage, "slurm", ray_address)
        local = runs(stage, "local")
        assert identity(job) == identity(local)
