"""Prefect's server as `rlhf` runs it: `uvicorn --factory flows.application:create_app`.

Web pages from elsewhere are kept out by the rules of `rlhf_core.loopback`, and alone by the password, which Prefect itself
asks for (PREFECT_SERVER_API_AUTH_STRING), also from other users of the machine.
"""

from __future__ import annotations

from typing import Any

from rlhf_core.loopback import OwnAddressOnly


def create_app() -> Any:
    """The application with all settings of the environment."""
    from prefect.server.api.server import create_app

    _take_turns()
    _let_schedules_insert()
    return OwnAddressOnly(create_app())


def _take_turns() -> None:
    """Let every transaction of Prefect's on SQLite wait for the one that writes.

    Most begin by reading, and SQLite then refuses at once, as "database is locked", to let them write where another has
    written meanwhile: a worker that polled an idle server left 25 such tracebacks a minute in its log. Prefect has a mode
    that takes the write lock first, and waits for it up to a minute, but uses it for some transactions only.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(self: Any, session: Any, with_for_update: bool = False) -> Any:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[method-assign]


def _let_schedules_insert() -> None:
    """Let Prefect's scheduler insert flow runs under SQLAlchemy 2.1.

    It inserts rows with a key `state`, which is no column but a hybrid property. SQLAlchemy 2.0 passed over such keys, 2.1
    demands a function for them; without one no schedule ever starts a run.
    """
    from prefect.server.database.orm_models import FlowRun
    from sqlalchemy import inspect

    state: Any = inspect(FlowRun).all_orm_descriptors["state"]
    state.bulk_dml_setter = lambda cls, mapping, value: None
