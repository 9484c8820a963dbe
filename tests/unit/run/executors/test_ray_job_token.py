"""The token of a Ray cluster's job server.

- it is sent from RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH, also if ray was imported before
- a file that cannot be read is named
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.run.executors.ray_job import ADDRESS, RayJobs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Authorization headers of the requests to a job server without jobs."""
    headers: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers["Authorization"])
            version = b'{"ray_version": "2.60.0", "ray_commit": "x", "version": "4", "session_name": "x"}'
            found = self.path == "/api/version"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(version if found else b"no such job")

        def log_message(self, *_args: object) -> None:
            """Write nothing to standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(ADDRESS, f"http://127.0.0.1:{server.server_port}")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield headers
    server.shutdown()


@pytest.mark.parametrize("given", ["variable", "file", "nothing"])
def test_the_token_is_sent(
    seen: list[str | None], given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    if given == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    elif given == "file":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert RayJobs().status("none").state == "missing"
    assert set(seen) == {None if given == "nothing" else "Bearer secret"}


def test_a_file_that_cannot_be_read_is_named(
    seen: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^RAY_AUTH_TOKEN_PATH: cannot read .*none"):
        RayJobs().status("none")
    assert seen == []
