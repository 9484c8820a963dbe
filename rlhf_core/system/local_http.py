"""HTTP requests to servers on this machine, without a proxy.

`auth` is the `user:password` of a server, or None if the server requires no password.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

# An empty ProxyHandler ignores HTTP_PROXY. A proxy cannot reach the loopback address of this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def responds(url: str, seconds: float = 2.0) -> bool:
    """Return whether a GET request to `url` has status 200."""
    try:
        with _opener.open(url, timeout=seconds) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def post(
    url: str, body: Mapping[str, Any] | Sequence[Any], seconds: float = 10.0, auth: str | None = None
) -> Any:
    """Send `body` as JSON with a POST request and return the parsed response."""
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
