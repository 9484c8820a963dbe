"""The servers of Prefect and MLflow with additional access checks.

    uvicorn --factory flows.application:create_app           Prefect on loopback
    uvicorn --factory flows.application:create_network_app   Prefect in a network (deployments/compose.yaml)
    mlflow server --app-name rlhf                            MLflow; the entry point names `create_mlflow_app`

On loopback, the rules in `rlhf_core.system.serving` refuse requests of web pages from other origins. In
addition, Prefect requires the password in PREFECT_SERVER_API_AUTH_STRING, which also protects against other
users of the machine.
"""

from __future__ import annotations

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from rlhf_core.ops.servers.prefect_server import LOGIN_PATH
from rlhf_core.system.serving import OwnAddressOnly

_LOGIN = """<!doctype html><title>Prefect</title><script>
localStorage.setItem("prefect-password", location.hash.slice(1));
location.replace("/");
</script>
"""
"""The password is the fragment of the address, which a browser does not send."""


def create_mlflow_app() -> Any:
    """Create MLflow's application. MLflow itself accepts every origin on this machine, on any port."""
    # Not at the top: each server's process needs one of the two libraries, whose imports take seconds.
    from mlflow.server.fastapi_app import app

    return OwnAddressOnly(app)


def create_app() -> Any:
    """Create Prefect's application from the settings in the environment."""
    prefect = _prefect()
    # First, because the route of the UI takes every path that is left.
    prefect.router.routes.insert(0, Route(LOGIN_PATH, _login_page))
    return OwnAddressOnly(prefect)


async def _login_page(request: Request) -> HTMLResponse:
    """Store the password of the link where Prefect's UI looks for it, and show the UI."""
    return HTMLResponse(_LOGIN)


def create_network_app() -> Any:
    """Create Prefect's application for clients on other hosts, which must give the password.

    Raises RuntimeError if there is none.
    """
    user, _, password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "").partition(":")
    if not user or not password:
        raise RuntimeError("PREFECT_SERVER_API_AUTH_STRING must be user:password; set it")
    return _prefect()


def _prefect() -> Any:
    from prefect.server.api.server import create_app

    _lock_transactions_at_begin()
    _fix_schedules()
    return create_app()


def _lock_transactions_at_begin() -> None:
    """Make every SQLite transaction of Prefect take the write lock at its beginning.

    Most transactions begin with a read. If another transaction has written in the meantime, SQLite then
    rejects a write immediately with "database is locked". A worker that polled an idle server caused 25 such
    tracebacks per minute. Prefect has a mode that takes the write lock first and waits for it for up to one
    minute, but uses it only for some transactions.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    # Of SQLite only: PostgreSQL locks rows and not the whole database.
    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(self: Any, session: Any, with_for_update: bool = False) -> Any:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[method-assign]


def _fix_schedules() -> None:
    """Make Prefect's scheduler work with SQLAlchemy 2.1.

    The scheduler inserts rows with the key `state`, which is not a column but a hybrid property. SQLAlchemy
    2.0 ignores such keys. SQLAlchemy 2.1 requires a function for them. Without this function, schedules never
    start a run.
    """
    from prefect.server.database.orm_models import FlowRun
    from sqlalchemy import inspect

    state: Any = inspect(FlowRun).all_orm_descriptors["state"]
    state.bulk_dml_setter = lambda cls, mapping, value: None
