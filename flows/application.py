"""Prefect's server as `rlhf` runs it: `uvicorn --factory flows.application:create_app`.

Loopback is reachable by every web page that the user opens. Three rules keep pages of other origins out, each alone:

    Host        must name loopback: a page whose name was pointed to 127.0.0.1 (DNS rebinding) has its own name there
    Origin      where there is one, must be this server's own address; a browser sends it with all that could change
                anything, and with every WebSocket
    password    is asked for by Prefect itself (PREFECT_SERVER_API_AUTH_STRING), also from other users of the machine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_REFUSED = b"This server answers requests to 127.0.0.1 or localhost only, and none of web pages from elsewhere.\n"


class OwnAddressOnly:
    """Answers 403 to requests whose Host or Origin is another's. A port that was forwarded may differ from the server's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_own(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": _REFUSED})


def is_own(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request with these headers was meant for loopback and comes from no page of another origin."""
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":")
    if not port.isdigit():
        name = hosts[0]
    return name in _LOOPBACK and all(origin == f"http://{hosts[0]}" for origin in origins)


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
