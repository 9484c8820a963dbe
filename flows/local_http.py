"""HTTP requests to servers on this machine, without a proxy.

`login` is the `user:password` of a Prefect server, or None if the server requires no password.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, seconds: float = 2.0) -> bool:
    """Whether a server answers `url` with success."""
    try:
        with _opener.open(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def post(
    url: str, body: Mapping[str, Any] | Sequence[Any], seconds: float = 10.0, login: str | None = None
) -> Any:
    """POST JSON; the parsed answer."""
    headers = {"Content-Type": "application/json", **credentials(login)}
    return _ask(urllib.request.Request(url, json.dumps(body).encode(), headers), seconds)


def get(url: str, seconds: float = 10.0, login: str | None = None) -> Any:
    """GET; the parsed answer."""
    return _ask(urllib.request.Request(url, headers=credentials(login)), seconds)


def credentials(login: str | None) -> dict[str, str]:
    """Return the headers for authentication."""
    if login is None:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _ask(request: urllib.request.Request, seconds: float) -> Any:
    with _opener.open(request, timeout=seconds) as answer:
        return json.load(answer)
