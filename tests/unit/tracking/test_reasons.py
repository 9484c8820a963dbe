"""The reason of an error of MLflow's client, in one line.

- the cause of a failed request, and not its address
- the error of a database, without the statement
"""

from __future__ import annotations

import socket

import pytest

from rlhf_core.tracking.mlflow_client import Mlflow, describe_failure, short_reason


def test_failed_request_has_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Exception) as caught:
        Mlflow(f"http://127.0.0.1:{port}", "test").ping()
    text = describe_failure(caught.value)
    assert text.startswith("does not answer (MlflowException: ") and "Connection refused" in text


def test_statement_of_a_database_is_left_out() -> None:
    error = OSError(
        "(sqlite3.OperationalError) database is locked\n[SQL: SELECT a FROM runs]\n[parameters: (1,)]"
    )
    assert short_reason(error) == "OSError: (sqlite3.OperationalError) database is locked"
