"""The applications of Prefect's and MLflow's servers.

- Prefect's scheduler inserts its flow runs under the locked SQLAlchemy. The test only calls the function that
  SQLAlchemy calls; `tests/integration/test_scheduled.py` tests that a schedule starts runs
- MLflow finds its application by name and refuses requests of pages from other ports and for other hosts
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flows import application


def test_scheduled_run_can_be_inserted_with_its_state() -> None:
    from prefect.server.database.orm_models import FlowRun
    from sqlalchemy import inspect
    from sqlalchemy.ext.hybrid import HybridExtensionType

    application._fix_schedules()
    hybrid = inspect(FlowRun).all_orm_descriptors["state"]
    assert hybrid.extension_type is HybridExtensionType.HYBRID_PROPERTY
    row = {"state": {"type": "SCHEDULED"}}
    setter: Any = FlowRun.state._bulk_dml_setter
    setter("state")(row)  # raises an exception without a function for it
    assert row == {"state": {"type": "SCHEDULED"}}, "the state is inserted into another table afterwards"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:5000"}, 200),
        ({"host": "localhost:5000", "origin": "http://localhost:5000"}, 200),
        ({"host": "localhost:5000", "origin": "http://localhost:6666"}, 403),
        ({"host": "127.0.0.1:5000", "origin": "http://localhost:5000"}, 403),
        ({"host": "evil.example:5000"}, 403),
    ],
)
def test_mlflow_server_accepts_only_its_own_pages(headers: dict[str, str], status: int) -> None:
    import httpx
    from mlflow.server import _find_app

    assert _find_app("rlhf") == "flows.application:create_mlflow_app"
    transport = httpx.ASGITransport(app=application.create_mlflow_app())

    async def get_status() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:5000") as client:
            return (await client.get("/health", headers=headers)).status_code

    assert asyncio.run(get_status()) == status


@pytest.mark.parametrize("password", [None, "", "secret", "rlhf:", ":secret"])
def test_a_server_in_a_network_needs_a_password(
    monkeypatch: pytest.MonkeyPatch, password: str | None
) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    if password is not None:
        monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", password)
    with pytest.raises(RuntimeError, match="must be user:password"):
        application.create_network_app()
