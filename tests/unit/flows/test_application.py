"""The applications of Prefect's and MLflow's servers.

- Prefect's scheduler inserts its flow runs under the locked SQLAlchemy. The test only calls the function that
  SQLAlchemy calls; `tests/integration/test_scheduled.py` tests that a schedule starts runs
- the login page stores the password under the key of Prefect's UI
- MLflow finds its application by name and refuses requests of pages from other ports and for other hosts
"""

from __future__ import annotations

import asyncio
import re
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


def test_login_page_stores_the_password_where_the_ui_looks_for_it() -> None:
    import httpx
    import prefect

    transport = httpx.ASGITransport(app=application.create_app())

    async def get_page() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:4200") as client:
            return await client.get("/rlhf-login")

    page = asyncio.run(get_page())
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    [key] = re.findall(r'setItem\("([^"]+)", location\.hash', page.text)
    scripts = (prefect.__ui_static_path__ / "assets").glob("*.js")
    assert any(f"localStorage.getItem(`{key}`)" in file.read_text(encoding="utf-8") for file in scripts)


@pytest.mark.parametrize("password", [None, "", "secret", "rlhf:", ":secret"])
def test_a_server_in_a_network_needs_a_password(
    monkeypatch: pytest.MonkeyPatch, password: str | None
) -> None:
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    if password is not None:
        monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", password)
    with pytest.raises(RuntimeError, match="must be user:password"):
        application.create_network_app()
