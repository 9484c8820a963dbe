"""The parts of deployments/compose.yaml as processes of this machine, where no container engine is needed.

Commands and environments are those of the file; only host names, ports and folders are replaced. PostgreSQL
is the system's, the S3 server is moto. The tiny pipeline runs as a run of the deployment `full-pipeline`.

- servers refuse requests without a password, and answer with it
- the run completes; its artifacts are in the bucket `rlhf`, MLflow's files in the bucket `mlflow`, and both
  databases are PostgreSQL's
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import boto3
import pytest
import yaml

from rlhf_core.system.processes import free_port
from rlhf_core.system.serving import basic_auth
from tests.conftest import S3Server
from tests.support.postgres import postgres, postgres_programs

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / ".venv-cluster"
SECRETS = {
    "POSTGRES_PASSWORD": "postgres-secret",
    "S3_ACCESS_KEY": "test",
    "S3_SECRET_KEY": "test-secret",
    "S3_MLFLOW_ACCESS_KEY": "test-mlflow",
    "S3_MLFLOW_SECRET_KEY": "test-mlflow-secret",
    "S3_ADMIN_ACCESS_KEY": "test-admin",
    "S3_ADMIN_SECRET_KEY": "test-admin-secret",
    "PREFECT_AUTH_STRING": "rlhf:prefect-secret",
    "MLFLOW_PASSWORD": "mlflow-secret-1",
    "MLFLOW_SECRET_KEY": "flask-secret",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed"),
    pytest.mark.skipif(not CLUSTER.is_dir(), reason="make .venv-cluster"),
]


class Compose:
    """compose.yaml on this machine."""

    def __init__(self, folder: Path, database: str, s3: str) -> None:
        text = (ROOT / "deployments" / "compose.yaml").read_text(encoding="utf-8")
        text = re.sub(r"\$\{(\w+)(?::[?-][^}]*)?\}", lambda match: SECRETS.get(match[1], ""), text)
        self.mlflow, self.prefect = free_port(5000), free_port(4200)
        self.folder = folder
        replacements = {
            "postgres:5432": database,
            "http://s3:8333": s3,
            "mlflow:5000": f"127.0.0.1:{self.mlflow}",
            "prefect:4200": f"127.0.0.1:{self.prefect}",
            "127.0.0.1:5000": f"127.0.0.1:{self.mlflow}",
            "127.0.0.1:4200": f"127.0.0.1:{self.prefect}",
            "--port=5000": f"--port={self.mlflow}",
            '"4200"': f'"{self.prefect}"',
            "0.0.0.0": "127.0.0.1",
            "/app/": f"{ROOT}/",
            "/tmp/prefect": str(folder / "prefect"),
            "/var/lib/rlhf": str(folder / "home"),
            "/etc/mlflow/auth.ini": str(folder / "auth.ini"),
        }
        for old, new in replacements.items():
            text = text.replace(old, new)
        content = yaml.safe_load(text)
        self.services: dict[str, Any] = content["services"]
        self.configs: dict[str, Any] = content["configs"]
        (folder / "auth.ini").write_text(self.configs["mlflow_auth"]["content"])

    def environment(self, service: str) -> dict[str, str]:
        """Return the environment of a service's container, with the Python of these tests."""
        given = {name: str(value) for name, value in self.services[service]["environment"].items()}
        return {
            **given,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(CLUSTER),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PREFECT_PROFILES_PATH": str(self.folder / "none.toml"),
        }

    def run(self, service: str) -> None:
        """Run a service that ends by itself."""
        with self._start(service) as process:
            assert process.wait(timeout=180) == 0, self.log(service)

    @contextmanager
    def server(self, service: str, address: str = "") -> Iterator[None]:
        """Run a service until the body ends; wait until it answers at `address`."""
        with self._start(service) as process:
            try:
                deadline = time.monotonic() + 180
                while address and status(address) != 200:
                    assert process.poll() is None and time.monotonic() < deadline, self.log(service)
                    time.sleep(0.5)
                yield
            finally:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _start(self, service: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{service}.log").open("wb") as log:
            return subprocess.Popen(
                self.services[service]["command"],
                cwd=ROOT,
                env=self.environment(service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, service: str) -> str:
        """Return the end of a service's output."""
        return (self.folder / f"{service}.log").read_text(errors="replace")[-4000:]


def status(address: str, headers: Mapping[str, str] | None = None) -> int:
    """Return the status of the answer to a GET request; 0 without an answer."""
    try:
        request = urllib.request.Request(address, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def query(url: str, *statements: str) -> list[Any]:
    """Execute statements and return the rows of the last one."""

    async def execute() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            rows: list[Any] = await connection.fetch(statements[-1])
            return rows
        finally:
            await connection.close()

    return asyncio.run(execute())


@pytest.mark.timeout(1800)
def test_the_tiny_pipeline_runs_on_the_parts_of_compose(tmp_path: Path, s3_server: S3Server) -> None:
    # Not below pytest's folder: another pytest of this user takes the rights of PostgreSQL's user away.
    with tempfile.TemporaryDirectory(prefix="rlhf-") as folder, postgres(Path(folder) / "data") as url:
        server = url.partition("@")[2].partition("/")[0]
        compose = Compose(tmp_path, server, s3_server.endpoint)
        admin = f"postgresql://rlhf@{server}"
        query(f"{admin}/postgres", "CREATE DATABASE prefect", "SELECT 1")
        created = compose.configs["databases"]["content"].strip().splitlines()
        query(f"{admin}/prefect", *created, "SELECT 1")
        compose.run("buckets")
        mlflow, prefect = (f"http://127.0.0.1:{port}" for port in (compose.mlflow, compose.prefect))
        with (
            compose.server("mlflow", f"{mlflow}/health"),
            compose.server("prefect", f"{prefect}/api/health"),
        ):
            _check_passwords(mlflow, prefect)
            compose.run("deploy")
            with compose.server("worker"):
                _run_deployment(compose)
        _check_results(compose, s3_server, admin)


def _check_passwords(mlflow: str, prefect: str) -> None:
    experiments = f"{mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    assert status(experiments) == 401
    assert status(experiments, basic_auth("admin:wrong")) == 401
    assert status(experiments, basic_auth(f"admin:{SECRETS['MLFLOW_PASSWORD']}")) == 200
    version = f"{prefect}/api/admin/version"
    assert status(version) == 401
    assert status(version, basic_auth("rlhf:wrong")) == 401
    assert status(version, basic_auth(SECRETS["PREFECT_AUTH_STRING"])) == 200


def _run_deployment(compose: Compose) -> None:
    overrides = [
        f"run.home={compose.folder / 'home'}",
        "run.threads=1",
        "store.url=s3://rlhf/store",
    ]
    parameters = {"config": "tests/assets/tiny.yaml", "overrides": overrides}
    command = [
        *("prefect", "deployment", "run", "rlhf/full-pipeline", "--watch", "--watch-interval", "5"),
        *("--params", json.dumps(parameters)),
    ]
    environment = compose.environment("worker")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    print(done.stdout[-3000:])  # noqa: T201
    assert done.returncode == 0, done.stdout + done.stderr + compose.log("worker")


def _check_results(compose: Compose, s3_server: S3Server, admin: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    stored = [entry["Key"] for entry in client.list_objects_v2(Bucket="rlhf")["Contents"]]
    for stage in ("data", "sft", "reward", "ppo", "evaluate", "register"):
        assert any(key.startswith(f"store/artifacts/{stage}/") for key in stored), stage
    logged = [entry["Key"] for entry in client.list_objects_v2(Bucket="mlflow")["Contents"]]
    assert any(key.startswith("artifacts/") and key.endswith("report.html") for key in logged)
    [state] = query(f"{admin}/prefect", "SELECT state_type::text AS state FROM flow_run")
    assert state["state"] == "COMPLETED"
    [runs] = query(f"{admin}/mlflow", "SELECT count(*) AS runs FROM runs WHERE status = 'FINISHED'")
    assert runs["runs"] == 7, "the pipeline and its six stages"
    [users] = query(f"{admin}/mlflow_auth", "SELECT string_agg(username, ',') AS names FROM users")
    assert users["names"] == "admin"
    for service in ("mlflow", "prefect", "worker"):
        assert not any(value in compose.log(service) for value in SECRETS.values() if len(value) > 8), service
