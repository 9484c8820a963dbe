"""`rlhf inspect`: serves the pages on loopback until it is interrupted.

    GET /{token}/{kind}/{page}  --> Host, Origin (`OwnAddressOnly`) --> token --> `Pages` --> HTML
    POST: a label of a response --> the same checks --> an annotation --> the page again

Every address contains a random token, which the printed link has: other users of the machine do not know it.
The pages have no scripts, load nothing but their style, and no other page can embed them.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_urlsafe
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from rlhf_core.errors import RLHFError
from rlhf_core.ops.finished_run import Kind
from rlhf_core.ops.inspect.pages import STYLE, Pages
from rlhf_core.ops.inspect.rollouts import RecordedRun, Rollouts
from rlhf_core.system.files import write_atomic
from rlhf_core.system.serving import OwnAddressOnly, bind

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # with none, browsers hide the origin of a form from us as well
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def serve(kinds: Mapping[Kind, Sequence[RecordedRun]], port: int, ready: Callable[[str], None]) -> None:
    """Serve the pages of one or two runs until a signal arrives.

    Args:
        kinds: The runs that have each kind.
        port: Port of the address 127.0.0.1; 0 for any.
        ready: Called with the address of the first page when the server listens.

    Raises:
        ConfigError: The port cannot be used.
    """
    token = token_urlsafe(16)
    stop = threading.Event()
    with bind("127.0.0.1", port) as bound, tempfile.TemporaryDirectory(prefix="rlhf-inspect-") as folder:
        opened = {kind: _open(runs, Path(folder) / kind, kind) for kind, runs in kinds.items()}
        decoder = threading.Thread(target=_decode, args=[list(opened.values()), stop], daemon=True)
        decoder.start()
        bound.listen()  # a browser that is faster than the server waits
        ready(f"http://127.0.0.1:{bound.getsockname()[1]}/{token}/")
        config = uvicorn.Config(
            make_app(opened, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        try:
            uvicorn.Server(config).run(sockets=[bound])
        finally:
            # Before the temporary folder is deleted, whose database the thread reads and writes.
            stop.set()
            decoder.join(10)


def _open(runs: Sequence[RecordedRun], folder: Path, kind: Kind) -> Rollouts:
    folder.mkdir()
    return Rollouts(runs, folder, kind)


def _decode(opened: Sequence[Rollouts], stop: threading.Event) -> None:
    for rollouts in reversed(opened):  # the few answers of the other kinds first
        rollouts.decode_all(stop)


def export(run: RecordedRun, step: int | None, file: Path) -> int:
    """Write a step, by default the last one, as one file, and return its number."""
    with tempfile.TemporaryDirectory(prefix="rlhf-inspect-") as folder:
        rollouts = Rollouts([run], Path(folder))
        chosen = rollouts.last_step if step is None else step
        write_atomic(file, Pages(rollouts, "").export(chosen))
    return chosen


def make_app(opened: Mapping[Kind, Rollouts], token: str) -> ASGIApp:
    """Return the application for the rollouts of each kind. Every address begins with `token`."""
    root = f"/{token}"
    pages = {kind: Pages(rollouts, root, tuple(opened)) for kind, rollouts in opened.items()}
    first_kind, first_pages = next(iter(pages.items()))
    labelling = asyncio.Lock()

    def first(request: Request) -> Response:
        return RedirectResponse(f"{root}/{first_kind}/{next(iter(first_pages.names))}", headers=_HEADERS)

    def style(request: Request) -> Response:
        return Response(STYLE, media_type="text/css", headers=_HEADERS)

    async def page(request: Request) -> Response:
        of_kind, name = pages.get(request.path_params["kind"]), request.path_params["page"]
        if of_kind is None or name not in (*of_kind.names, "response"):
            return _html(first_pages.problem("there is no such page"), 404)
        try:
            if request.method == "POST":
                form = parse_qsl((await request.body()).decode(errors="replace"))
                async with labelling:  # each label is written after what is there has been read
                    by = await asyncio.to_thread(of_kind.label, dict(form))
                saved = RedirectResponse(f"{request.url.path}?{request.url.query}", 303, headers=_HEADERS)
                # Cookies of 127.0.0.1 are sent to all ports, but only to paths that begin with the token.
                saved.set_cookie("by", by, path=root, httponly=True, samesite="strict")
                return saved
            # The name of who labels is kept by the browser, because several people can use one server.
            query = {"by": request.cookies.get("by", ""), **request.query_params}
            return _html(await asyncio.to_thread(getattr(of_kind, name), query), 200)
        except RLHFError as error:
            return _html(of_kind.problem(error.message), 400)

    every = Route("/{kind}/{page}", page, methods=["GET", "POST"])
    routes: list[BaseRoute] = [Route("/", first), Route("/style.css", style), every]
    return OwnAddressOnly(Starlette(routes=[Mount(root, routes=routes)]))


def _html(document: str, status: int) -> Response:
    return Response(document, status, media_type="text/html", headers=_HEADERS)
