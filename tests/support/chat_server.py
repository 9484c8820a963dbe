"""An OpenAI-compatible server on loopback whose replies are scripted."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

Respond = Callable[[str], str | int | dict[str, Any]]
"""Text of the reply to a question, a status, or a part of the body that replaces the usual one. Its entries
`status` and `retry_after` are the status and the header Retry-After.
"""


class ChatServer(ThreadingHTTPServer):
    """Answers each request with `respond`. Use it as a context manager."""

    daemon_threads = True

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def questions(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]

    @override
    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        super().__exit__(*args)


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = self.server.respond(request["messages"][0]["content"])
        status = reply if isinstance(reply, int) else 200
        retry_after = ""
        if isinstance(reply, dict):
            status, retry_after = reply.pop("status", status), reply.pop("retry_after", "")
        text = reply if isinstance(reply, str) else ""
        content = {
            "choices": [{"message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2},
        }
        body = json.dumps({**content, **reply} if isinstance(reply, dict) else content).encode()
        self.send_response(status if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Length", str(len(body)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


def answers_of(question: str) -> tuple[str, str]:
    """Return the answers A and B of a question."""
    _, _, rest = question.partition("### Answer A\n")
    a, _, rest = rest.partition("\n\n### Answer B\n")
    return a, rest.partition("\n\n### Verdict")[0]


def listed_answers(question: str) -> list[str]:
    """Return the answers of a question that numbers them."""
    rest = question.partition("\n\n### Verdict")[0]
    return [part.partition("\n")[2].strip("\n") for part in rest.split("### Answer ")[1:]]


def prefer_longer(question: str) -> str:
    """Prefer the longer answer."""
    a, b = answers_of(question)
    if len(a) == len(b):
        return "C"
    return "A" if len(a) > len(b) else "B"


def prefer_first(_question: str) -> str:
    """Prefer the first answer, whatever it says."""
    return "A"
