"""Errors of MLflow's client: what they mean, for messages and decisions."""

from __future__ import annotations

import re

from rlhf_core.config.redact import is_secret, printable, scrubbed

_CAUSE = re.compile(r"\(Caused by (.+)\)")


class UnusableAnswer(Exception):
    """The response has a success status but does not contain the requested data."""


def _status(error: BaseException) -> int:
    """Return the HTTP status of MLflow's error; 0 for other errors."""
    return int(getattr(error, "get_http_status_code", lambda: 0)())


def short_reason(error: BaseException) -> str:
    """Return the reason of an error in one short line without credentials."""
    text = printable(" ".join(scrubbed(str(error)).split()))
    text = text.partition(" [SQL: ")[0]
    # The beginning of an error of urllib3 is an address.
    if cause := _CAUSE.search(text):
        text = cause[1]
    text = text[:160]
    return type(error).__name__ if is_secret("", text) else f"{type(error).__name__}: {text}"


def describe_failure(error: BaseException) -> str:
    """Return a description of MLflow's problem and a fix if the user can apply one.

    It follows "MLflow at ADDRESS" in a message.
    """
    status = _status(error)
    code = getattr(error, "error_code", "")
    if status in (401, 403) or code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"refuses these credentials ({short_reason(error)}); {fix}"
    if 400 <= status < 500 or isinstance(error, UnusableAnswer):
        return f"does not take this ({short_reason(error)})"
    return f"does not answer ({short_reason(error)})"
