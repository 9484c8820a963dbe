"""Protection of vLLM's server by a key on every path.

vLLM itself asks for the key below `/v1` and a few other prefixes only. `/invocations`, `/tokenize` and
others would answer without it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

API_KEY = "VLLM_API_KEY"
"""Environment variable of vLLM with the key that clients must send."""
_OPEN = "/health"
"""Load balancers ask it. Its answer has no content."""


class KeyOnly:
    """ASGI middleware that answers 401 to requests without the header `Authorization: Bearer KEY`.

    The key is the value of VLLM_API_KEY. Raises RuntimeError without one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        key = os.environ.get(API_KEY)
        if not key:
            raise RuntimeError(f"{API_KEY} is not set")
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == _OPEN or self._is_sent(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = f"The key of this server must be sent as Authorization: Bearer, see {API_KEY}.\n"
            await send({"type": "http.response.body", "body": body.encode()})

    def _is_sent(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key, self._key)
