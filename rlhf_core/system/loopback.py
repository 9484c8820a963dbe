"""Protection of servers on loopback against requests of web pages.

Every web page that the user opens can send requests to loopback addresses. Two rules refuse pages of other
origins:

    Host        must be a loopback address or `localhost`. In a DNS rebinding attack, the page's host name
                resolves to 127.0.0.1, and the header contains that host name.
    Origin      must be the server's own address if it is present. Browsers send it with every request that
                can change something, and with every WebSocket.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_REFUSED = (
    b"This server answers requests to a loopback address or localhost only, and none of web pages from"
    b" elsewhere.\n"
)


class OwnAddressOnly:
    """ASGI middleware that answers 403 to requests with a foreign Host or Origin.

    The port in the header is not compared with the server's port, so that forwarded ports work.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or has_own_origin(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send(
                {"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]}
            )
            await send({"type": "http.response.body", "body": _REFUSED})


def has_own_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the headers name a loopback host and no other origin."""
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":")
    # `localhost` and `[::1]` without a port: the last colon, if there is one, is part of the address.
    if not port.isdigit():
        name = hosts[0]
    return is_loopback(name) and all(origin == f"http://{hosts[0]}" for origin in origins)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: localhost, 127.0.0.0/8 or ::1, which may be in brackets."""
    if host in ("localhost", "[::1]"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
