"""Servers of this project: the address that they listen on, which requests they answer, and requests to the
servers on this machine, without a proxy.

Every web page that the user opens can send requests to loopback addresses. Two rules refuse pages of other
origins (`OwnAddressOnly`):

    Host        must be a loopback address or `localhost`. In a DNS rebinding attack, the page's host name
                resolves to 127.0.0.1, and the header contains that host name.
    Origin      must be the server's own address if it is present. Browsers send it with every request that
                can change something, and with every WebSocket.

vLLM's server on other addresses asks for a key below `/v1` and a few other prefixes only. `/invocations`,
`/tokenize` and others would answer without it. `KeyOnly` protects every path.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import secrets
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


API_KEY = "VLLM_API_KEY"
"""Environment variable of vLLM with the key that clients must send."""
_OPEN = "/health"
"""Load balancers ask it. Its answer has no content."""
_REFUSED = (
    b"This server answers requests to a loopback address or localhost only, and none of web pages from"
    b" elsewhere.\n"
)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of this machine. Port 0 is any free one.

    Raises ConfigError, which names `--host` and `--port`, if there is no such address or it is in use.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port must be from 0 to 65535; got {port}")
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this machine; got {host} {port}: {error}"
        ) from error
    return bound


class OwnAddressOnly:
    """ASGI middleware that answers 403 to requests with a foreign Host or Origin.

    The port in the header is not compared with the server's port, so that forwarded ports work.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # `lifespan` is the start and the end of the server: it is no request and has no headers.
        if scope["type"] == "lifespan" or has_own_origin(scope["headers"]):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send, 403, _REFUSED)


async def _refuse(scope: Scope, send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Answer a request with an error, or close a WebSocket before it is accepted."""
    if scope["type"] == "websocket":
        # A server answers such a handshake with 403 itself. 1008 is "policy violation" (RFC 6455).
        await send({"type": "websocket.close", "code": 1008})
        return
    all_headers = [(b"content-type", b"text/plain"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


def has_own_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the headers name a loopback host and no other origin."""
    # A header can have any bytes. latin-1 decodes all of them, where an error would become an answer with
    # status 500.
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    # RFC 9112 forbids several: what has checked the first one could pass the request to what obeys the last
    # one.
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":")
    # `localhost` and `[::1]` without a port: the last colon, if there is one, is part of the address.
    if not port.isdigit():
        name = hosts[0]
    # `null`, which sandboxed pages and local files send, is refused like every other origin.
    return is_loopback(name) and all(origin == f"http://{hosts[0]}" for origin in origins)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: localhost, 127.0.0.0/8 or ::1, which may be in brackets."""
    if host in ("localhost", "[::1]"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
        else:
            body = f"The key of this server must be sent as Authorization: Bearer, see {API_KEY}.\n"
            await _refuse(scope, send, 401, body.encode(), (b"www-authenticate", b"Bearer"))

    def _is_sent(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        # `==` takes longer the more of the key is right, which tells it byte by byte.
        return scheme.lower() == b"bearer" and secrets.compare_digest(key, self._key)


def has_public_address(host: str) -> bool:
    """Return whether a host has an address on the public internet; False if it cannot be found."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    # A zone follows a link-local address.
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    return any(ipaddress.ip_address(address).is_global for address in addresses)


# -- requests to servers on this machine --

# An empty ProxyHandler ignores HTTP_PROXY. A proxy cannot reach the loopback address of this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def responds(url: str, seconds: float = 2.0) -> bool:
    """Return whether a GET request to `url` has status 200."""
    try:
        with _opener.open(url, timeout=seconds) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False


def post(
    url: str, body: Mapping[str, Any] | Sequence[Any], seconds: float = 10.0, auth: str | None = None
) -> Any:
    """Send `body` as JSON with a POST request and return the parsed response.

    `auth`, also below, is the `user:password` of the server, or None if it requires no password.
    """
    headers = {"Content-Type": "application/json", **basic_auth(auth)}
    return _send(urllib.request.Request(url, json.dumps(body).encode(), headers), seconds)


def patch(url: str, body: Mapping[str, Any], seconds: float = 10.0, auth: str | None = None) -> None:
    """Send `body` as JSON with a PATCH request."""
    headers = {"Content-Type": "application/json", **basic_auth(auth)}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PATCH")
    with _opener.open(request, timeout=seconds):
        pass


def get(url: str, seconds: float = 10.0, auth: str | None = None) -> Any:
    """Send a GET request and return the parsed response."""
    return _send(urllib.request.Request(url, headers=basic_auth(auth)), seconds)


def basic_auth(auth: str | None) -> dict[str, str]:
    """Return the header for HTTP basic authentication, or no header if `auth` is None."""
    if auth is None:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"}


def _send(request: urllib.request.Request, seconds: float) -> Any:
    with _opener.open(request, timeout=seconds) as response:
        return json.load(response)
