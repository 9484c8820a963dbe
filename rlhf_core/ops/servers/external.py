"""External servers that the environment names: PREFECT_API_URL and MLFLOW_TRACKING_URI.

They replace the local servers. If one of them cannot be used, an InputError that names the variable is raised
before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import httpx

from rlhf_core.config.redact import credential_problem, shown
from rlhf_core.errors import InputError
from rlhf_core.tracking.check import tracker_problem

_SECONDS = 10.0
"""Time limit for the connection and for each read."""


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


def prefect_responds(url: str, credentials: Callable[[], Mapping[str, str]]) -> bool:
    """Return whether a Prefect server responds at `url` and accepts the credentials.

    False if there is no response, or one of a proxy without a server behind it.

    Args:
        url: Address of the API.
        credentials: Returns headers of the query.

    Raises:
        InputError: The response is not from a Prefect server, or the server requires other credentials.
    """
    # Redirects are not followed, because a redirected request would contain the credentials.
    with httpx.Client(headers=dict(credentials()), timeout=_SECONDS) as client:
        try:
            # Not `/health`, which Prefect answers without a password.
            answer = client.post(f"{url}/flows/filter", json={"limit": 1})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Something responds. Prefect's own TLS settings, which are not used here, may accept its
            # certificate.
            return "[SSL" in str(error)
    if answer.status_code in (401, 403):
        raise InputError(
            f"PREFECT_API_URL: the server at {url} requires authentication and refuses the credentials"
            f" (HTTP {answer.status_code}); set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect"
            " Cloud, or unset PREFECT_API_URL to run without it"
        )
    if answer.status_code >= 500:
        return False  # a proxy sends 5xx codes while the server behind it is down
    if answer.status_code != 200:
        raise _not_prefect(url, f"HTTP {answer.status_code}")
    try:
        flows = answer.json()
    except (ValueError, RecursionError):
        flows = None
    if not isinstance(flows, list):
        raise _not_prefect(url, shown(answer.text[:40]))
    return True


def _not_prefect(url: str, response: str) -> InputError:
    return InputError(
        f"PREFECT_API_URL: the server at {url} is not a Prefect API (it answered {response} to a query for"
        " flows); correct the address (http://host:port/api), or unset it to run without"
    )
