"""What `rlhf up` and `rlhf run` start, as they start it, and that SECURITY.md names tests that are there.

Locked here: every server is told to listen on loopback, MLflow takes requests for its own address only and
runs no jobs, Prefect asks for a password, refuses requests of web pages from elsewhere, and keeps results as
JSON. What really listens is measured in `tests/integration`.
"""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from flows.prefect_server import server_environment
from flows.supervisor import Supervisor
from rlhf_core.system.home import Home
from rlhf_core.system.loopback import OwnAddressOnly

ROOT = Path(__file__).resolve().parents[3]


def test_every_server_is_told_to_listen_on_loopback(tmp_path: Path) -> None:
    servers = Supervisor(Home.of(tmp_path)).servers
    listening = {name: server for name, server in servers.items() if name != "worker"}
    assert set(listening) == {"prefect", "mlflow"}
    for server in listening.values():
        assert server.command[list(server.command).index("--host") + 1] == "127.0.0.1"
    mlflow = list(servers["mlflow"].command)
    allowed = mlflow[mlflow.index("--allowed-hosts") + 1].split(",")
    assert all(re.fullmatch(r"(localhost|127\.0\.0\.1):\d+", host) for host in allowed)
    assert mlflow[mlflow.index("--app-name") + 1] == "rlhf"
    assert servers["mlflow"].environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_no_address_of_every_interface_is_in_the_source() -> None:
    files = [file for top in ("rlhf_core", "flows") for file in (ROOT / top).rglob("*.py")]
    wide = [
        file for file in files if re.search(r"""["'](0\.0\.0\.0|::)["']""", file.read_text(encoding="utf-8"))
    ]
    assert wide == []


def test_prefect_keeps_results_as_json(tmp_path: Path) -> None:
    assert server_environment(tmp_path, "rlhf:x", 1)["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


def test_prefects_server_asks_for_a_password_that_only_this_user_can_read(tmp_path: Path) -> None:
    server = Supervisor(Home.of(tmp_path)).servers["prefect"]
    file = tmp_path / "servers" / "login"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    password = file.read_text().strip()
    assert len(password) > 30
    assert server.environment["PREFECT_SERVER_API_AUTH_STRING"] == password
    assert password not in " ".join(server.command), "everybody sees command lines"
    assert Supervisor(Home.of(tmp_path)).servers["prefect"].environment["PREFECT_API_AUTH_STRING"] == password
    file.chmod(0o644)
    assert Supervisor(Home.of(tmp_path)).servers["prefect"].environment["PREFECT_API_AUTH_STRING"] != password
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


HEADERS = {
    "the address itself": ({"Host": "127.0.0.1:4200"}, True),
    "by name": ({"Host": "localhost:4200"}, True),
    "by IPv6": ({"Host": "[::1]:4200"}, True),
    "another address of loopback": ({"Host": "127.0.1.1:8600"}, True),
    "a forwarded port": ({"Host": "localhost:14200", "Origin": "http://localhost:14200"}, True),
    "a page of its own": ({"Host": "127.0.0.1:4200", "Origin": "http://127.0.0.1:4200"}, True),
    "another web site": ({"Host": "127.0.0.1:4200", "Origin": "https://evil.example"}, False),
    "another port of this machine": ({"Host": "127.0.0.1:4200", "Origin": "http://127.0.0.1:8000"}, False),
    "the other name": ({"Host": "127.0.0.1:4200", "Origin": "http://localhost:4200"}, False),
    "a sandboxed frame or a file": ({"Host": "127.0.0.1:4200", "Origin": "null"}, False),
    "DNS rebinding": ({"Host": "evil.example:4200"}, False),
    "DNS rebinding with its own origin": (
        {"Host": "evil.example:4200", "Origin": "http://evil.example:4200"},
        False,
    ),
    "a name that begins like loopback": ({"Host": "127.0.0.1.evil.example:4200"}, False),
    "a name that ends like loopback": ({"Host": "evil.localhost:4200"}, False),
    "all interfaces": ({"Host": "0.0.0.0:4200"}, False),
    "a short spelling of loopback": ({"Host": "127.1:4200"}, False),
    "no host": ({"Host": ""}, False),
}


@pytest.mark.parametrize("title", HEADERS)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_requests_of_other_origins_do_not_reach_the_server(title: str, kind: str) -> None:
    headers, passes = HEADERS[title]
    reached, sent = [], []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(OwnAddressOnly(server)({"type": kind, "headers": raw}, None, send))  # type: ignore[arg-type]
    assert reached == [kind] * passes
    if not passes:
        assert sent[0].get("status", sent[0].get("code")) == {"http": 403, "websocket": 1008}[kind]


def test_every_promise_names_tests_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(promises) >= 15
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)`", promise.rsplit("|", 2)[1])
        assert named, promise
        assert [name for name in named if not (ROOT / name).is_file()] == []
