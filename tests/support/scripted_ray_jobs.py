"""A job server of a Ray cluster that has no jobs, accepts every job and records the requests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

_VERSION = {"ray_version": "2.60.0", "ray_commit": "x", "version": "4", "session_name": "x"}


class ScriptedRayJobs:
    """Serves on loopback until `close`."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []
        """The Authorization header of each request."""
        self.submitted: list[dict[str, Any]] = []
        """The body of each request to submit a job."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.tokens.append(self.headers["Authorization"])
                if self.path == "/api/version":
                    self._send(200, _VERSION)
                else:
                    self._send(404, "no such job")

            def do_POST(self) -> None:
                server.tokens.append(self.headers["Authorization"])
                job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.submitted.append(job)
                name = job["submission_id"]
                self._send(200, {"job_id": name, "submission_id": name})

            def _send(self, status: int, answer: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            @override
            def log_message(self, *_args: object) -> None:
                """Write nothing to standard error."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
