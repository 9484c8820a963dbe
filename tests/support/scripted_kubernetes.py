"""A Kubernetes API server that answers from a script: RayJobs of one namespace."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

PREFIX = "/apis/ray.io/v1/namespaces/team/rayjobs"


class ScriptedKubernetes:
    """Serves on loopback until `close`."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        """All objects that were created, also those that are deleted."""
        self.statuses: list[dict[str, Any]] = [
            {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "rayClusterName": "c1"}
        ]
        """Statuses of the RayJob, one for each request; the last one stays."""
        self.failures: list[int | str] = []
        """Answers to the next requests: an HTTP status, `drop` (the connection is closed before the request
        has an effect) or `drop after` (after it has).
        """
        self.requests: list[str] = []
        """`METHOD path` of all requests."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            @override
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_DELETE = answer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def kubeconfig(self, file: Path) -> Path:
        """Write a kubeconfig for this server."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def count(self, method: str) -> int:
        """Return the number of requests of this method."""
        return sum(request.startswith(f"{method} ") for request in self.requests)

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(f"{request.command} {request.path}")
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, int):
            self._send(request, failure, {"kind": "Status", "message": f"scripted {failure}"})
        elif failure == "drop":
            request.close_connection = True
        else:
            status, answer = self._handle(request.command, request.path.partition("?")[0], body)
            if failure is None:
                self._send(request, status, answer)
            else:
                request.close_connection = True

    def _handle(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        name = path.removeprefix(PREFIX).strip("/")
        if method == "POST":
            made = json.loads(body)
            if made["metadata"]["name"] in self.objects:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            self.objects[made["metadata"]["name"]] = made
            self.created.append(made)
            return 201, made
        if name not in self.objects:
            return 404, {"kind": "Status", "reason": "NotFound"}
        if method == "DELETE":
            del self.objects[name]
            return 200, {"kind": "Status", "status": "Success"}
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return 200, {**self.objects[name], "status": status}

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, answer: Any) -> None:
        text = isinstance(answer, str)
        data = answer.encode() if text else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "text/plain" if text else "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)
