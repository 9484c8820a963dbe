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
from typing import Any

from flows.isolated import isolate_prefect
from flows.local_http import credentials
from rlhf_core.config.checkplaces import tracker_problem
from rlhf_core.config.redact import HIDDEN, has_credentials, shown
from rlhf_core.errors import InputError

_SECONDS = 5.0
_MOST_BYTES = 100_000
"""Maximum size of the answer to a query for one flow."""


def prefect_address() -> str | None:
    """Return PREFECT_API_URL. Raises InputError if it is not a valid address or contains credentials."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return None
    if has_credentials(url):
        raise InputError(
            f"PREFECT_API_URL: credentials in a URL are refused; got {HIDDEN}; give them by PREFECT_API_KEY"
            " or PREFECT_API_AUTH_STRING"
        )
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"PREFECT_API_URL: must be http(s)://host:port/api; got {shown(url)}; correct or unset it"
        )
    return url.rstrip("/")


def mlflow_address() -> str | None:
    """Return MLFLOW_TRACKING_URI. Raises InputError if it is not a valid address or contains credentials."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    if has_credentials(uri):
        raise InputError(
            f"MLFLOW_TRACKING_URI: credentials in a URL are refused; got {HIDDEN}; give them by"
            " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or by MLFLOW_TRACKING_TOKEN"
        )
    if problem := tracker_problem(uri):
        raise InputError(f"MLFLOW_TRACKING_URI: {problem}")
    return uri


def prefect_answers(url: str, tries: int = 3) -> bool:
    """Return whether a Prefect server answers at `url` and accepts the credentials. False if nothing answers.

    Raises InputError if the answer is not from a Prefect server, or if the server requires other credentials.
    """
    request = urllib.request.Request(
        f"{url}/flows/filter", b'{"limit": 1}', {"Content-Type": "application/json", **_headers()}
    )
    for attempt in range(tries):
        try:
            with _opener.open(request, timeout=_SECONDS) as answer:
                found = _read(answer)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise InputError(
                    f"PREFECT_API_URL: the server at {url} requires authentication and refuses the"
                    f" credentials (HTTP {error.code}); set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for"
                    " Prefect Cloud, or unset PREFECT_API_URL to run without it"
                ) from None
            if error.code < 500:  # for 5xx codes, a proxy may answer while the server is down
                raise _no_prefect(url, f"HTTP {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(
                getattr(error, "reason", None), ssl.SSLError
            ):  # Prefect has separate settings for TLS
                return True
        else:
            if not _is_list(found):
                raise _no_prefect(url, shown(found[:40].decode(errors="replace")))
            return True
        time.sleep(attempt < tries - 1)
    return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, because a redirected request would contain the credentials."""

    def redirect_request(self, *_arguments: Any, **_options: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Return the body, or the part of it that arrived in time, so that a slow server cannot delay the start."""
    found = b""
    deadline = time.monotonic() + _SECONDS
    while len(found) < _MOST_BYTES and time.monotonic() < deadline and (part := answer.read1(_MOST_BYTES)):
        found += part
    return found


def _headers() -> dict[str, str]:
    """Return the headers that Prefect's client would send, from the environment or the user's profile."""
    isolate_prefect()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    headers = dict(settings.client.custom_headers)
    if settings.api.auth_string is not None:
        headers |= credentials(settings.api.auth_string.get_secret_value())
    elif settings.api.key is not None:
        headers["Authorization"] = f"Bearer {settings.api.key.get_secret_value()}"
    return headers


def _is_list(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), list)
    except (ValueError, RecursionError):
        return False


def _no_prefect(url: str, what: str) -> InputError:
    return InputError(
        f"PREFECT_API_URL: the server at {url} is not a Prefect API (it answered {what} to a query for"
        " flows); correct the address (http://host:port/api), or unset it to run without"
    )
