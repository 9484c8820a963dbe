"""An address of Prefect where something else answers gives one message; without an answer it is no server."""

from __future__ import annotations

import http.server
import subprocess
import threading
from pathlib import Path

import pytest

from rlhf_cli.main import exit_code
from rlhf_core.ops.servers.servers import prefect_responds
from tests.unit.bad_input.bad_inputs import outside


class Strange(http.server.BaseHTTPRequestHandler):
    """Answers every request in the way of its server."""

    def do_POST(self) -> None:
        # A connection that is closed with an unread request is reset, and the client may lose the answer.
        self.rfile.read(int(self.headers["Content-Length"]))
        code, content, headers = STRANGE[self.server.way][:3]  # type: ignore[attr-defined]
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


STRANGE: dict[str, tuple[int, bytes, dict[str, str], tuple[str, ...]]] = {
    "a page": (200, b"<html>hello</html>", {}, ("not a Prefect API", "<html>hello")),
    "an object for everything": (200, b"{}", {}, ("not a Prefect API", "'{}'")),
    "nothing": (200, b"", {}, ("not a Prefect API",)),
    "deep JSON": (200, b"[" * 100_000, {}, ("not a Prefect API",)),
    "who are you": (
        401,
        b"",
        {},
        ("requires authentication", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "HTTP 401"),
    ),
    "not you": (403, b"", {}, ("requires authentication", "PREFECT_API_KEY", "HTTP 403")),
    "somewhere else, for ever": (
        302,
        b"",
        {"Location": "/api/flows/filter"},
        ("not a Prefect API", "HTTP 302"),
    ),
    "no such page": (404, b"", {}, ("not a Prefect API", "HTTP 404", "/api")),
}


@pytest.mark.parametrize("way", STRANGE)
def test_a_prefect_address_where_something_else_answers_gives_one_message(
    way: str, capsys: pytest.CaptureFixture[str], counted: list[str]
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strange) as server:
        server.way = way  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        assert exit_code(lambda: prefect_responds(url, credentials=dict)) == 2
        server.shutdown()
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    words = ("PREFECT_API_URL", url, "unset", *STRANGE[way][3])
    assert [word for word in words if word not in message] == [], message
    counted.append(message)


def test_a_run_asks_at_the_address_of_prefect(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {seed: 1}\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strange) as server:
        server.way = "a page"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        done = outside(tmp_path, "run", "c.yaml", env={"PREFECT_API_URL": url}, stdout=subprocess.PIPE)
        server.shutdown()
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: PREFECT_API_URL: the server at {url} is not a Prefect API" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prefect_address_without_an_answer_is_no_server() -> None:
    assert not prefect_responds("http://127.0.0.1:9/api", credentials=dict)
