"""The commands and settings of the servers that `rlhf up` and `rlhf run` start, and the tests in SECURITY.md.

Every server listens on loopback. MLflow accepts only requests for its own address and runs no jobs. Prefect
requires a password, refuses requests of web pages of other origins, and stores results as JSON. vLLM asks
for its key on every path. The sockets that really listen are measured in `tests/integration`. Every test that
SECURITY.md names exists.
"""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.ops.servers.prefect_server import server_environment
from rlhf_core.ops.servers.supervisor import Supervisor
from rlhf_core.system.home import Home
from rlhf_core.system.serving import KeyOnly, OwnAddressOnly

ROOT = Path(__file__).resolve().parents[3]


def test_every_server_listens_on_loopback(tmp_path: Path) -> None:
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


def test_no_wildcard_address_is_in_the_source() -> None:
    files = [file for top in ("rlhf_core", "flows", "rlhf_cli") for file in (ROOT / top).rglob("*.py")]
    wide = [
        file for file in files if re.search(r"""["'](0\.0\.0\.0|::)["']""", file.read_text(encoding="utf-8"))
    ]
    assert wide == []


def test_prefect_stores_results_as_json(tmp_path: Path) -> None:
    assert server_environment(tmp_path, "rlhf:x", 1)["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


def test_prefect_requires_a_password_that_only_this_user_can_read(tmp_path: Path) -> None:
    server = Supervisor(Home.of(tmp_path)).servers["prefect"]
    file = tmp_path / "servers" / "login"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    password = file.read_text().strip()
    assert len(password) > 30
    assert server.environment["PREFECT_SERVER_API_AUTH_STRING"] == password
    assert password not in " ".join(server.command), "all users can see command lines"
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


NOT_CALLED: Any = None


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
    asyncio.run(OwnAddressOnly(server)({"type": kind, "headers": raw}, NOT_CALLED, send))
    assert reached == [kind] * passes
    if not passes:
        assert sent[0].get("status", sent[0].get("code")) == {"http": 403, "websocket": 1008}[kind]


@pytest.mark.parametrize(
    ("path", "values", "passes"),
    [
        ("/v1/models", ["Bearer secret"], True),
        ("/invocations", ["bearer secret"], True),
        ("/health", [], True),
        ("/invocations", [], False),
        ("/tokenize", ["Bearer secret2"], False),
        ("/tokenize", ["Bearer secre"], False),
        ("/tokenize", ["Bearer "], False),
        ("/tokenize", ["secret"], False),
        ("/tokenize", ["Basic secret"], False),
        ("/tokenize", ["Bearer secret", "Bearer secret"], False),
        ("/health/", [], False),
        ("/v1/models", ["Bearer \u00e9"], False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_path_but_health_needs_the_key(
    path: str, values: list[str], passes: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, sent = [], []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    raw = [(b"authorization", value.encode()) for value in values]
    scope = {"type": kind, "method": "OPTIONS", "path": path, "headers": raw}
    asyncio.run(KeyOnly(server)(scope, NOT_CALLED, send))
    assert reached == [kind] * passes
    if not passes:
        assert sent[0].get("status", sent[0].get("code")) == {"http": 401, "websocket": 1008}[kind]
        assert not any("secret" in str(message) for message in sent)


def test_the_key_is_required_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        KeyOnly(NOT_CALLED)


def test_every_guarantee_names_existing_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    guarantees = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(guarantees) >= 15
    for guarantee in guarantees:
        named = re.findall(r"`(tests/[\w/]+\.py)`", guarantee.rsplit("|", 2)[1])
        assert named, guarantee
        assert [name for name in named if not (ROOT / name).is_file()] == []
