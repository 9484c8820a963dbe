"""`rlhf serve-reward`: serves a reward model over HTTP with the protocol in `remote`.

    POST /score --> size, token --> encode --> queue --> one forward pass for several requests --> answers
    GET /health

A request waits for the forward pass that contains it. One whose client has gone is left out. Encoding and
scoring never run at the same time, because the memory of the whole process is limited while a chat template
is rendered. Without a token, the server listens on loopback only and refuses requests of web pages from other
origins. An invalid item gets `null` and a reason. An invalid request gets a status: 400, 401, 403, 408, 413,
415, 500 or 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_core.errors import ConfigError
from rlhf_core.ops.serve_reward.connections import GuardedProtocol
from rlhf_core.rewards.post import TOKEN_VARIABLE, reward_token
from rlhf_core.rewards.scorer import ItemError
from rlhf_core.system.serving import OwnAddressOnly, bind
from rlhf_core.types import PromptAndResponse

log = logging.getLogger(__name__)

_BROKEN_OFF = "the request broke off"


@dataclass(frozen=True)
class Limits:
    """What the server accepts."""

    request_bytes: int = 16 << 20
    items: int = 10_000
    """Maximum number of items of a request. The answer has one entry for each, and a reason for each item
    without a score.
    """
    header_seconds: float = 10.0
    """Time limit from the connection or the last answer until the headers of a request are complete."""
    body_seconds: float = 30.0
    """Time limit from the headers of a request to its end."""
    connections: int = 256


class Scores(Protocol):
    """The model that is served; see `Scorer`."""

    micro_batch_tokens: int

    def encode(self, item: Any) -> PromptAndResponse: ...

    def scores(self, pairs: Sequence[PromptAndResponse]) -> list[float]: ...


class MicroBatches:
    """Joins queued requests into forward passes of at most `micro_batch_tokens` tokens,
    in order of arrival.
    """

    def __init__(self, scorer: Scores, model_lock: asyncio.Lock | None = None) -> None:
        """`model_lock` is held during each forward pass."""
        self._scorer = scorer
        self._model_lock = model_lock or asyncio.Lock()
        self._waiting: deque[tuple[list[PromptAndResponse], asyncio.Future[list[float]]]] = deque()
        self._arrived = asyncio.Event()

    async def score(self, pairs: list[PromptAndResponse]) -> list[float]:
        """Return the (n,) scores. Raises HTTPException 500 if the model fails.

        If it is cancelled before its forward pass begins, it is left out.
        """
        result: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((pairs, result))
        self._arrived.set()
        return await result

    async def run(self) -> None:
        """Process the queue until cancelled."""
        with ThreadPoolExecutor(1) as thread:
            while True:
                await self._arrived.wait()
                try:
                    async with self._model_lock:
                        # After the wait for the lock, so that requests that arrived meanwhile share the pass.
                        requests = self._next()
                        if not requests:
                            continue
                        pairs = [pair for own, _ in requests for pair in own]
                        scores = await asyncio.get_running_loop().run_in_executor(
                            thread, self._scorer.scores, pairs
                        )
                except Exception:
                    log.exception("a forward pass of %d items failed", len(pairs))
                    for _, result in requests:
                        if not result.done():  # its client has gone
                            result.set_exception(
                                HTTPException(
                                    500, "the forward pass failed; the reason is in the service's log"
                                )
                            )
                    continue
                for own, result in requests:
                    if not result.done():
                        result.set_result(scores[: len(own)])
                    scores = scores[len(own) :]

    def _next(self) -> list[tuple[list[PromptAndResponse], asyncio.Future[list[float]]]]:
        """Remove and return the first request, and those after it while their tokens fit."""
        chosen: list[tuple[list[PromptAndResponse], asyncio.Future[list[float]]]] = []
        tokens = 0
        while self._waiting:
            if self._waiting[0][1].cancelled():
                self._waiting.popleft()
                continue
            tokens += sum(len(prompt) + len(response) for prompt, response in self._waiting[0][0])
            # A first request above the limit is taken too, and `Scorer.scores` divides it.
            if chosen and tokens > self._scorer.micro_batch_tokens:
                break
            chosen.append(self._waiting.popleft())
        if not self._waiting:
            self._arrived.clear()
        return chosen


def make_app(scorer: Scores, token: str | None, limits: Limits) -> Starlette:
    """Return the application. Clients must send `token`, unless it is None."""
    model_lock = asyncio.Lock()
    batches = MicroBatches(scorer, model_lock)

    async def score(request: Request) -> Response:
        _check_token(request, token)
        items = await _items(request, limits)
        async with model_lock:
            if await request.is_disconnected():
                raise HTTPException(400, _BROKEN_OFF)
            encoded = await asyncio.to_thread(_encode, scorer, items)
        pairs: dict[int, PromptAndResponse] = {}
        errors: dict[str, str] = {}
        for index, pair_or_reason in enumerate(encoded):
            if isinstance(pair_or_reason, str):
                errors[str(index)] = pair_or_reason
            else:
                pairs[index] = pair_or_reason
        values: list[float] = []
        if pairs:
            values = await _while_connected(request, batches.score(list(pairs.values())))
        scores: list[float | None] = [None] * len(items)
        for index, value in zip(pairs, values, strict=True):
            if math.isnan(value):
                errors[str(index)] = "the model's score is not finite"
            else:
                scores[index] = value
        return JSONResponse({"scores": scores, "errors": errors})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    @contextlib.asynccontextmanager
    async def working(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    return Starlette(
        routes=[Route("/score", score, methods=["POST"]), Route("/health", health)],
        exception_handlers={HTTPException: refuse},
        lifespan=working,
    )


def make_server(scorer: Scores, token: str | None, limits: Limits = Limits()) -> uvicorn.Server:
    """Return the server; run it with the sockets of `listen`."""
    app = make_app(scorer, token, limits)

    class TimedProtocol(GuardedProtocol):
        header_seconds = limits.header_seconds

    return uvicorn.Server(
        uvicorn.Config(
            # With a token, web pages cannot send valid requests.
            OwnAddressOnly(app) if token is None else app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            http=TimedProtocol,
            timeout_graceful_shutdown=5,
        )
    )


def listen(host: str, port: int) -> tuple[socket.socket, str | None]:
    """Return a bound socket, and the token that clients must send.

    Raises `ConfigError` for an unusable address, and without a token for an address other than loopback.
    """
    token = reward_token(guards=True)
    bound = bind(host, port)
    address = str(bound.getsockname()[0]).partition("%")[0]
    if token is None and not ipaddress.ip_address(address).is_loopback:
        bound.close()
        raise ConfigError(
            f"--host must be a loopback address without a token; got {host}; set {TOKEN_VARIABLE}, here and"
            " for the clients"
        )
    return bound, token


def _check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    # Bytes, because `compare_digest` raises TypeError for text that is not ASCII.
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(
            401, f"the token of this service must be sent; clients take it from {TOKEN_VARIABLE}"
        )


async def _while_connected(request: Request, scoring: Coroutine[Any, Any, list[float]]) -> list[float]:
    """Return the scores. If the client disconnects first, raise HTTPException and cancel the scoring."""
    scores = asyncio.ensure_future(scoring)
    # The body was read, so that the next message says that the client has disconnected.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((scores, gone), return_when=asyncio.FIRST_COMPLETED)
        if not scores.done():
            raise HTTPException(400, _BROKEN_OFF)
        return await scores
    finally:
        scores.cancel()
        gone.cancel()


async def _items(request: Request, limits: Limits) -> list[Any]:
    # Any web page can post text to loopback. JSON needs this server's consent (CORS), which it never gives.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.request_bytes:
                    raise HTTPException(
                        413, f"the request must have at most {limits.request_bytes} bytes; send fewer items"
                    )
    except TimeoutError:
        raise HTTPException(408, f"the request must come within {limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, _BROKEN_OFF) from None
    try:
        items = json.loads(body)["items"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise HTTPException(400, 'the request must be {"items": [...]}') from error
    if not isinstance(items, list):
        raise HTTPException(400, "items must be a list")
    if len(items) > limits.items:
        raise HTTPException(413, f"the request must have at most {limits.items} items; send fewer")
    return items


def _encode(scorer: Scores, items: Sequence[Any]) -> list[PromptAndResponse | str]:
    """Return the tokens of each item, or the reason why it has none."""
    encoded: list[PromptAndResponse | str] = []
    for item in items:
        try:
            encoded.append(scorer.encode(item))
        except ItemError as error:
            # The reason may contain text that cannot be encoded as JSON.
            encoded.append(str(error).encode(errors="replace").decode())
    return encoded
