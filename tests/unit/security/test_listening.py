"""What `rlhf up` and `rlhf run` start, as they start it, and that SECURITY.md names tests that are there.

Locked here: every server is told to listen on loopback, MLflow takes requests for its own address only and runs no jobs,
and Prefect keeps results as JSON. What really listens is measured in `tests/integration`.
"""

from __future__ import annotations

import re
from pathlib import Path

from flows.environment import prefect_environment
from flows.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[3]


def test_every_server_is_told_to_listen_on_loopback(tmp_path: Path) -> None:
    servers = Supervisor(tmp_path).servers
    listening = {name: server for name, server in servers.items() if name != "worker"}
    assert set(listening) == {"prefect", "mlflow"}
    for server in listening.values():
        assert server.command[list(server.command).index("--host") + 1] == "127.0.0.1"
    mlflow = list(servers["mlflow"].command)
    allowed = mlflow[mlflow.index("--allowed-hosts") + 1].split(",")
    assert all(re.fullmatch(r"(localhost|127\.0\.0\.1):\d+", host) for host in allowed)
    assert servers["mlflow"].environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_no_address_of_every_interface_is_in_the_source() -> None:
    files = [file for top in ("rlhf_core", "flows") for file in (ROOT / top).rglob("*.py")]
    wide = [file for file in files if re.search(r"""["'](0\.0\.0\.0|::)["']""", file.read_text(encoding="utf-8"))]
    assert wide == []


def test_prefect_keeps_results_as_json(tmp_path: Path) -> None:
    assert prefect_environment(tmp_path)["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


def test_every_promise_names_tests_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(promises) >= 15
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)`", promise.rsplit("|", 2)[1])
        assert named, promise
        assert [name for name in named if not (ROOT / name).is_file()] == []
