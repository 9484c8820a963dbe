"""A part of Prefect's API on loopback: artifacts, the states of a flow run, and a notification block whose
webhook is the same server.

It accepts every state, and knows one flow run and no tasks; others need the real server.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import prefect
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from typing_extensions import override

BLOCK = "custom-webhook/team"
"""Address of the block, for RLHF_NOTIFY."""


class PrefectApi(ThreadingHTTPServer):
    """Records the messages that the block sends and the artifacts that are created."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[tuple[str, str]] = []
        """Subject and body."""
        self.artifacts: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        """States of flow runs, in the order in which they were set."""
        self._flow_run: dict[str, Any] = {}
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @override
    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, content: Any) -> Any:
        """Return the answer to a request; None if the path is not known."""
        if path == "/api/admin/version":
            return prefect.__version__
        kind, name = BLOCK.split("/")
        if path.startswith(f"/api/block_types/slug/{kind}/block_documents/name/{name}"):
            return self._block(name)
        if path == "/api/artifacts/":
            self.artifacts.append(content)
            return {**content, "id": str(uuid.uuid4())}
        if path.startswith("/api/flow"):
            return self._run_of_a_flow(path.removeprefix("/api"), content)
        if path == "/webhook":
            self.messages.append((content["subject"], content["body"]))
            return {}
        return None

    def _run_of_a_flow(self, path: str, content: Any) -> Any:
        if path == "/flows/":
            return {**content, "id": str(uuid.uuid4())}
        if path == "/flow_runs/":
            self._flow_run = {**content, "id": str(uuid.uuid4()), "name": "run"}
        elif path.endswith("/set_state"):
            state = {**content["state"], "id": str(uuid.uuid4())}
            self._flow_run["state"] = state
            self.states.append(state)
            return {"state": state, "status": "ACCEPT", "details": {"type": "accept_details"}}
        return self._flow_run

    def _block(self, name: str) -> dict[str, Any]:
        block = CustomWebhookNotificationBlock(
            name=name,
            url=f"{self.url}/webhook",
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
            allow_private_urls=True,
        )
        kind = {
            "id": str(uuid.uuid4()),
            "name": block.get_block_type_name(),
            "slug": block.get_block_type_slug(),
        }
        schema = {
            "id": str(uuid.uuid4()),
            "block_type_id": kind["id"],
            "block_type": kind,
            "checksum": block._calculate_schema_checksum(),
            "fields": block.model_json_schema(),
            "capabilities": sorted(block.get_block_capabilities()),
        }
        return {
            "id": str(uuid.uuid4()),
            "name": name,
            "data": block.model_dump(mode="json", context={"include_secrets": True}),
            "block_schema_id": schema["id"],
            "block_schema": schema,
            "block_type_id": kind["id"],
            "block_type": kind,
        }


@contextmanager
def prefect_api() -> Iterator[PrefectApi]:
    """Start the server, and make it the server of Prefect's clients."""
    EventsWorker.set_client_override(NullEventsClient)  # they need a websocket
    try:
        with PrefectApi() as api:
            settings = {PREFECT_API_URL: f"{api.url}/api", PREFECT_LOGGING_TO_API_ENABLED: False}
            with temporary_settings(settings):
                yield api
    finally:
        EventsWorker.set_client_override(None)


class _Handler(BaseHTTPRequestHandler):
    server: PrefectApi

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

    do_PATCH = do_POST

    def _answer(self, content: Any) -> None:
        answer = self.server.answer(self.path.partition("?")[0], content)
        body = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass
