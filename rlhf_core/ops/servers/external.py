"""External servers that the environment names: PREFECT_API_URL and MLFLOW_TRACKING_URI.

They replace the local servers. If one of them cannot be used, an InputError that names the variable is raised
before anything starts.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlhf_core.config.redact import credential_problem, shown
from rlhf_core.errors import InputError
from rlhf_core.system.waiting import within
from rlhf_core.tracking.check import tracker_problem

_SECONDS = 5.0
"""Time limit for each read."""
_MAX_BYTES = 100_000
"""Maximum size of the response to a query for one flow."""


def external_prefect_url() -> str | None:
    """Return PREFECT_API_URL. Raises InputError if it is not a valid address or contains credentials."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return None
    if problem := credential_problem(url, "give them by PREFECT_API_KEY or PREFECT_API_AUTH_STRING"):
        raise InputError(f"PREFECT_API_URL: {problem}")
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"PREFECT_API_URL: must be http(s)://host:port/api; got {shown(url)}; correct or unset it"
        )
    return url.rstrip("/")


def external_mlflow_uri() -> str | None:
    """Return MLFLOW_TRACKING_URI. Raises InputError if it is not a valid address or contains credentials."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    instead = (
        "give them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or by MLFLOW_TRACKING_TOKEN"
    )
    if problem := credential_problem(uri, instead) or tracker_problem(uri):
        raise InputError(f"MLFLOW_TRACKING_URI: {problem}")
    return uri


def prefect_responds(
    url: str,
    credentials: Callable[[], Mapping[str, str]],
    attempts: int = 3,
    *,
    seconds: float = 10.0,
) -> bool:
    """Return whether a Prefect server responds at `url` and accepts the credentials.

    False if nothing responds.

    Args:
        url: Address of the API.
        credentials: Returns headers of the query.
        attempts: Number of queries, one second apart, if nothing responds.
        seconds: Time limit for a whole query.

    Raises:
        InputError: The response is not from a Prefect server, or the server requires other credentials.
    """
    headers = {"Content-Type": "application/json", **credentials()}
    # Not `/health`, which Prefect answers without a password.
    request = urllib.request.Request(f"{url}/flows/filter", b'{"limit": 1}', headers)
    for attempt in range(attempts):
        if attempt:
            time.sleep(1.0)
        with suppress(TimeoutError):
            if within(seconds, lambda: _query_flows(url, request)):
                return True
    return False


def _query_flows(url: str, request: urllib.request.Request) -> bool:
    """Query one flow. Return False if there is no response, or one of a proxy without a server behind it."""
    try:
        with _opener.open(request, timeout=_SECONDS) as response:
            content = response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError(
                f"PREFECT_API_URL: the server at {url} requires authentication and refuses the"
                f" credentials (HTTP {error.code}); set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for"
                " Prefect Cloud, or unset PREFECT_API_URL to run without it"
            ) from None
        if error.code < 500:
            raise _not_prefect(url, f"HTTP {error.code}") from None
        return False  # a proxy sends 5xx codes while the server behind it is down
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Something responds. Prefect's own TLS settings, which are not used here, may accept its certificate.
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
    if not _is_json_list(content):
        raise _not_prefect(url, shown(content[:40].decode(errors="replace")))
    return True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, because a redirected request would contain the credentials."""

    def redirect_request(self, *_arguments: Any, **_options: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _is_json_list(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), list)
    except (ValueError, RecursionError):
        return False


def _not_prefect(url: str, response: str) -> InputError:
    return InputError(
        f"PREFECT_API_URL: the server at {url} is not a Prefect API (it answered {response} to a query for"
        " flows); correct the address (http://host:port/api), or unset it to run without"
    )
