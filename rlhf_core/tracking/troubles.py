"""Descriptions of MLflow errors."""

from __future__ import annotations

from rlhf_core.config.redact import is_secret, printable, scrubbed


def reason(error: BaseException) -> str:
    """Return the reason of an error in one short line without credentials."""
    text = printable(" ".join(scrubbed(str(error)).split()))[:160]
    return type(error).__name__ if is_secret("", text) else f"{type(error).__name__}: {text}"


def trouble(error: BaseException) -> str:
    """Return a description of MLflow's problem and a fix if the user can apply one.

    It follows "MLflow at ADDRESS" in a message.
    """
    status = getattr(error, "get_http_status_code", lambda: 0)()
    code = getattr(error, "error_code", "")
    if status in (401, 403) or code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"refuses these credentials ({reason(error)}); {fix}"
    if 400 <= status < 500 or isinstance(error, UnusableAnswer):
        return f"does not take this ({reason(error)})"
    return f"does not answer ({reason(error)})"


class UnusableAnswer(Exception):
    """The response has a success status but does not contain the requested data."""
