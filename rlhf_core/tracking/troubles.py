"""What is said of an MLflow server that does not do what it is asked."""

from __future__ import annotations

from rlhf_core.config.redact import is_secret, printable, scrubbed


def reason(error: BaseException) -> str:
    """What went wrong, in one short line without credentials."""
    text = printable(" ".join(scrubbed(str(error)).split()))[:160]
    return type(error).__name__ if is_secret("", text) else f"{type(error).__name__}: {text}"


def trouble(error: BaseException) -> str:
    """Which trouble MLflow is in, and how to end it if the user can: what follows "MLflow at ADDRESS" in a message."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    code = getattr(error, "error_code", "")
    if status in (401, 403) or code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"refuses these credentials ({reason(error)}); {fix}"
    if 400 <= status < 500 or isinstance(error, UnusableAnswer):
        return f"does not take this ({reason(error)})"
    return f"does not answer ({reason(error)})"


class UnusableAnswer(Exception):
    """A success by its status, without what was asked for."""
