"""`rlhf chat` against a scripted OpenAI-compatible server.

- the conversation is sent whole with each message, and an empty line starts a new one
- an answer cannot control the terminal
- a server that is not there or breaks off, another model, and a refused request are one message each
- the key of `rlhf serve` goes to no other server, and no proxy sees it
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.system.processes import free_port

PIECES = ["Once\nupon", " a \x1b[31m\ttime"]


class Handler(BaseHTTPRequestHandler):
    """Serves one model, which answers with PIECES.

    It refuses messages with the word `template`, and breaks off at the word `break`.
    """

    requests: list[dict[str, Any]]
    keys: list[str | None]

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"object": "list", "data": [{"id": "demo", "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(body)
        self.keys.append(self.headers["authorization"])
        if "template" in body["messages"][-1]["content"]:
            self.reply(400, json.dumps({"error": {"message": "the model has no chat template"}}))
            return
        chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in PIECES]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {"choices": []}]]
        breaks_off = "break" in body["messages"][-1]["content"]
        text = "".join(lines) + ("" if breaks_off else "data: [DONE]\n\n")
        self.reply(200, text, "text/event-stream", length=9999 if breaks_off else None)

    def reply(
        self, status: int, text: str, kind: str = "application/json", length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length or len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    Handler.requests, Handler.keys = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def chat(
    monkeypatch: pytest.MonkeyPatch, port: int, typed: str, model: str = "demo", option: str = "--port"
) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    address = str(port) if option == "--port" else f"http://127.0.0.1:{port}/v1"
    return main(["chat", model, option, address])


def test_a_conversation_is_sent_whole(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert chat(monkeypatch, port, "hello\nand then?\n\nagain") == 0
    roles = [[message["role"] for message in request["messages"]] for request in Handler.requests]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    assert [request["messages"][-1]["content"] for request in Handler.requests] == [
        "hello",
        "and then?",
        "again",
    ]
    assert Handler.requests[1]["messages"][1]["content"] == "".join(PIECES)
    assert set(Handler.keys) == {"Bearer secret"}
    printed = capsys.readouterr().out
    assert printed.count("Once\nupon a \\x1b[31m\ttime\n") == 3
    assert "\x1b" not in printed


def test_the_key_goes_to_the_own_server_only(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "own")
    monkeypatch.setenv("OPENAI_API_KEY", "others")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port(18000)}")
    assert chat(monkeypatch, port, "hello\n", option="--url") == 0
    assert chat(monkeypatch, port, "hello\n") == 0
    assert Handler.keys == ["Bearer others", "Bearer own"]


@pytest.mark.parametrize(
    ("typed", "model", "message"),
    [
        ("write a template\n", "demo", "the model has no chat template"),
        ("hello\n", "other", "does not serve other; it serves demo"),
        ("break\n", "demo", "Connection error"),
    ],
)
def test_what_the_server_refuses_is_one_message(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    model: str,
    message: str,
) -> None:
    assert chat(monkeypatch, port, typed, model) == 2
    assert message in capsys.readouterr().err


def test_without_a_server_there_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port(18000)
    assert chat(monkeypatch, port, "hello\n") == 2
    assert (
        f"http://127.0.0.1:{port}/v1: Connection error; start `rlhf serve`, or correct"
        in capsys.readouterr().err
    )
