"""POST requests to hosts of an allow-list, for reward services and judges.

The addresses of the host are resolved and checked against the list for each request, and only those are
connected to. Redirects and proxies of the environment are not used. A token is not sent in clear text to a
public address.

status of the answer                          `status_kind`
200                                           good
400, 413, 422                                 refused      because of the content of this request
408, 409, 425, 429, 5xx                       temporary    a later try may succeed
any other                                     final        no request would get an answer
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import httpx
from tenacity import AsyncRetrying, RetryCallState, stop_after_attempt
from tenacity.retry import retry_base

from rlhf_core.config.allowed_hosts import forbidden, host_of, is_public
from rlhf_core.config.rewards import ChatServiceConfig, RemoteReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.failures import last_result, log_failure
from rlhf_core.system.waiting import backoff

MAX_ANSWER_BYTES = 4 << 20
_REFUSED = {400, 413, 422}
_TEMPORARY = {408, 409, 425, 429}
_LONGEST_PAUSE = 120.0
"""Longest pause, in seconds, that the header Retry-After can request."""


Resolve = Callable[..., Sequence[tuple[Any, ...]]]
"""Returns the addresses of a host, as `socket.getaddrinfo` does."""


class Answer(NamedTuple):
    """An answer to a request."""

    status: int
    body: bytes
    retry_after: float
    """Seconds before which another request should not be sent."""


class NoAnswer(Exception):
    """A request got no answer. The message continues a sentence that begins with the server."""


def status_kind(status: int) -> Literal["good", "refused", "temporary", "final"]:
    """Return what a status means for the request."""
    if status == 200:
        return "good"
    if status in _REFUSED:
        return "refused"
    return "temporary" if status in _TEMPORARY or status >= 500 else "final"


def status_fix(status: int, credentials: str, otherwise: str) -> str:
    """Return what the user can do about a final status.

    Args:
        status: HTTP status of the answer.
        credentials: The fix for a missing or wrong token.
        otherwise: The fix for a status without one of its own.
    """
    if status in (401, 403):
        return credentials
    if 300 <= status < 400:
        return "give its final address: redirects are not followed"
    return "it must take application/json" if status == 415 else otherwise


def retrying(name: str, settings: RemoteReward | ChatServiceConfig, retry: retry_base) -> AsyncRetrying:
    """Return the retries of a request, with growing pauses. The last attempt's result or error is theirs.

    `name` begins the log line of a failed attempt. A pause is at least the attribute `retry_after` of the
    error, if it has one.
    """
    attempts = settings.retries + 1
    pause = backoff(settings.backoff, jitter=(0.5, 1.5))

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(pause(state), getattr(error, "retry_after", 0.0))

    return AsyncRetrying(
        retry=retry,
        wait=wait,
        stop=stop_after_attempt(attempts),
        after=lambda state: log_failure(name, state, attempts),
        retry_error_callback=last_result,
    )


@asynccontextmanager
async def request_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that raises the first RewardError of its tasks, not a group of errors."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except* RewardError as errors:
        raise errors.exceptions[0] from None


class Poster:
    """Sends requests in one event loop. Call `close` at the end.

    Args:
        name: Who asks, for messages.
        allowed_hosts: Hosts, addresses and networks that may be connected to.
        token: Is sent in the header `Authorization`; None for none.
        token_variable: The environment variable that has the token, for messages.
        resolve: Finds the addresses of a host.
    """

    def __init__(
        self,
        name: str,
        allowed_hosts: Sequence[str],
        token: str | None,
        token_variable: str | None,
        resolve: Resolve = socket.getaddrinfo,
    ) -> None:
        self._name = name
        self._allowed_hosts = allowed_hosts
        self._token = token
        self._token_variable = token_variable
        self._resolve = resolve
        # Reads SSL_CERT_FILE. The default of httpx does not if `trust_env` is false.
        self._tls = ssl.create_default_context()
        self._clients: dict[str, httpx.AsyncClient] = {}
        """One for each host. A client keeps connections by address, and would use one whose certificate was
        checked against another host of this address.
        """
        self.is_closed = False

    async def close(self) -> None:
        """Close the connections."""
        self.is_closed = True
        for client in self._clients.values():
            await client.aclose()

    async def post(self, url: str, body: bytes, seconds: float) -> Answer:
        """Return the answer.

        Raises:
            RewardError: The address is forbidden, or the token would be sent in clear text.
            NoAnswer: There is no answer within `seconds`, the name of the host cannot be resolved, none of
                its addresses answers, or the answer is too long.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._post(url, body)
        except TimeoutError:
            # This clause must come before that of OSError, of which TimeoutError is a subclass.
            raise NoAnswer(f"gave no answer within {seconds:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise NoAnswer(f"cannot be reached: {str(error) or type(error).__name__}") from error

    async def _post(self, url: str, body: bytes) -> Answer:
        addresses = await self._addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._post_to(address, url, body)
            except httpx.ConnectError:
                # No request was sent yet. After another error the host may have received it.
                continue
        return await self._post_to(addresses[-1], url, body)

    async def _addresses(self, url: str) -> list[str]:
        """Return the addresses of the url's host. Raises `RewardError` if one of them is forbidden."""
        host, whole = host_of(url), httpx.URL(url)
        resolved = await asyncio.to_thread(self._resolve, host, whole.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in resolved))
        if address := forbidden(host, addresses, self._allowed_hosts):
            raise RewardError(
                f"{self._name}: {host} leads to {address}, which is a private address; if that is"
                " meant, add the address or its network to allowed_hosts"
            )
        if self._token and whole.scheme == "http" and any(map(is_public, addresses)):
            raise RewardError(
                f"{self._name}: {self._token_variable} must not travel in clear text to {host}, a public"
                " address; use https"
            )
        return addresses

    async def _post_to(self, address: str, url: str, body: bytes) -> Answer:
        """Return the answer from this address; the certificate is checked against the url's host."""
        whole = httpx.URL(url)
        headers = {
            "Host": whole.netloc.decode(),
            "Content-Type": "application/json",
            # Not compressed: `aiter_raw` below, whose bytes are counted, does not decompress.
            "Accept-Encoding": "identity",
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        client = self._client_of(whole.host)
        request = client.build_request(
            "POST",
            whole.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": whole.host},
        )
        response = await client.send(request, stream=True)
        try:
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
            return Answer(response.status_code, answer, _pause(response.headers.get("Retry-After", "")))
        finally:
            await response.aclose()

    def _client_of(self, host: str) -> httpx.AsyncClient:
        if host not in self._clients:
            self._clients[host] = httpx.AsyncClient(
                timeout=None,  # the caller limits the whole request
                # The callers limit the number of requests. By default, httpx lets those above 100 wait.
                limits=httpx.Limits(max_connections=None),
                verify=self._tls,
                trust_env=False,
            )
        return self._clients[host]


def _pause(header: str) -> float:
    """Return the seconds of the header Retry-After; 0 if it has a date or is missing."""
    return min(float(header), _LONGEST_PAUSE) if header.isascii() and header.isdigit() else 0.0
