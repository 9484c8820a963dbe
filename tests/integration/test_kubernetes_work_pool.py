"""workpool.json, read by Prefect's Kubernetes worker of the lock, in a process that has its packages.

- its variables are those of the worker, with other defaults, so that the worker understands all of them
- the worker's own checks accept the job that it makes of the template, and so does Kubernetes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import validate

from tests.support.deployment_schemas import KUBERNETES

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / ".venv-cluster"
POOL = ROOT / "deployments" / "kubernetes" / "workpool.json"

pytestmark = pytest.mark.skipif(not CLUSTER.is_dir(), reason="make .venv-cluster")

PROGRAM = """
import json, sys
from uuid import uuid4
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.templating import apply_values
from prefect_kubernetes.worker import KubernetesWorker, KubernetesWorkerJobConfiguration

pool = json.load(open(sys.argv[1]))
fields = pool["variables"]["properties"]
values = {name: field["default"] for name, field in fields.items() if field.get("default") is not None}
job = KubernetesWorkerJobConfiguration(**apply_values(pool["job_configuration"], values))
job.prepare_for_flow_run(FlowRun(id=uuid4(), name="swift-owl", flow_id=uuid4()))
print(json.dumps([KubernetesWorker.get_default_base_job_template(), job.job_manifest]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The worker's own template, and the job that it makes of ours."""
    folder = tmp_path_factory.mktemp("worker")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(CLUSTER), "PREFECT_HOME": str(folder), "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(POOL)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    template, manifest = json.loads(done.stdout)
    return template, manifest


def test_its_variables_are_those_of_the_worker(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    template, _ = answers
    pool = json.loads(POOL.read_text(encoding="utf-8"))
    assert set(pool["job_configuration"]) == set(template["job_configuration"])
    for kind in (pool, template):
        for field in kind["variables"]["properties"].values():
            field.pop("default", None)
    assert pool["variables"] == template["variables"]


def test_the_worker_and_kubernetes_accept_the_job(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, manifest = answers
    validate(manifest, KUBERNETES, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == ["prefect", "flow-run", "execute"]
    assert pod["serviceAccountName"] == "rlhf-flow"
    assert manifest["metadata"]["generateName"] == "swift-owl-"
