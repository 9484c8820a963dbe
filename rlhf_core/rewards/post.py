"""POST requests of JSON to reward services and judges, and the token of reward services.

Redirects are not followed, and proxies of the environment are not used.

status of the answer                          what `Poster.ask` does
200                                           returns the body
400, 413, 422                                 Refused        because of the content of this request
408, 409, 425, 429, 5xx                       Failure        a later try may succeed
any other                                     RewardError    no request would get an answer
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from rlhf_core.config.base import host_of
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.failures import Failure, Refused
from rlhf_core.system.serving import has_public_address

TOKEN_VARIABLE = "RLHF_REWARD_TOKEN"
_MIN_CHARACTERS = 16

MAX_ANSWER_BYTES = 4 << 20
_REFUSED = {400, 413, 422}
# 408, 409 and 429 are what OpenAI's own client repeats; 425 (RFC 8470) asks for a repetition.
_TEMPORARY = {408, 409, 425, 429}
_LONGEST_PAUSE = 120.0
"""Longest pause, in seconds, that the header Retry-After can request."""


def reward_token(*, guards: bool = False) -> str | None:
    """Return the value of `TOKEN_VARIABLE` without surrounding blanks and line breaks, or None if it is empty
    or not set.

    Raises a `ConfigError` that does not contain the value if it cannot be sent in an HTTP header. If `guards`
    is true, the token is the only protection of a service, and a short token is refused because it could be
    guessed.
    """
    value = os.environ.get(TOKEN_VARIABLE) or None
    if value is None:
        return None
    token = value.strip()
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} must not be blank; give a token, or unset it")
    if not fits_header(token):
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be printable ASCII characters without blanks; its {len(token)} characters"
            " hold others; make one by `openssl rand -hex 24`"
        )
    # Not for a client: the token of somebody else's service may be short, and its user cannot change it.
    if guards and len(token) < _MIN_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must have at least {_MIN_CHARACTERS} characters to protect a service; got"
            f" {len(token)}; make one by `openssl rand -hex 24`"
        )
    return token


def fits_header(token: str) -> bool:
    """Return whether a token can be sent in an HTTP header."""
    return token.isascii() and token.isprintable() and " " not in token


def clear_text_problem(url: str) -> str | None:
    """Return why no token may be sent to `url`; None for https, and for hosts that have private addresses
    only or that cannot be found.
    """
    host = host_of(url)
    if urlsplit(url).scheme == "https" or not has_public_address(host):
        return None
    return f"must be https where a token is sent to a public address; got http for {host}; use https"


@contextmanager
def request_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Return threads for requests. After an error, requests that have not begun are not sent."""
    threads = ThreadPoolExecutor(count)
    try:
        yield threads
    finally:
        # Without waiting: after an error, others may be in the pause before their next try.
        threads.shutdown(wait=False, cancel_futures=True)


class Poster:
    """Sends requests from any number of threads. Call `close` at the end.

    Args:
        name: Who asks, for messages.
        urls: The addresses that are asked.
        token: Is sent in the header `Authorization`; None for none.
        token_fix: What the user does about a missing or wrong token.
        other_fix: What the user does about a status without a fix of its own.

    Raises:
        ConfigError: The token would be sent in clear text to a public address.
    """

    def __init__(
        self, name: str, urls: Sequence[str], token: str | None, token_fix: str, other_fix: str
    ) -> None:
        # Here and not only before the run: a token may be known on the cluster alone.
        for url in urls:
            if token and (problem := clear_text_problem(url)):
                raise ConfigError(f"{name}: its url {problem}")
        self.name, self._token_fix, self._other_fix = name, token_fix, other_fix
        # Not compressed: `iter_raw` below, whose bytes are counted, does not decompress.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            headers=headers,
            # The callers limit the number of requests. By default, httpx lets those above 100 wait.
            limits=httpx.Limits(max_connections=None),
            # Reads SSL_CERT_FILE. The default of httpx does not if `trust_env` is false.
            verify=ssl.create_default_context(),
            # HTTP_PROXY would send prompts and the token through
            # another host, also for a service on loopback.
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections. A request of another thread fails, and is not repeated."""
        self._client.close()

    def ask(self, url: str, request: dict[str, Any], seconds: float) -> bytes:
        """Return the body of the answer.

        Raises:
            Failure: There is no answer within `seconds`, or one whose status may pass.
            RewardError: The status is that of every request.
        """
        status, body, pause = self._post(url, json.dumps(request).encode(), seconds)
        answer = f"{url} answers with status {status}"
        if status == 200:
            return body
        if status in _REFUSED:
            raise Refused(f"{answer}: {body[:200]!r}", body=body)
        if status in _TEMPORARY or status >= 500:
            # A sample can cause a 500. Other statuses, such as 429 and 503, mean that the service is
            # overloaded or down.
            raise Failure(f"{answer}: {body[:200]!r}", searchable=status == 500, retry_after=pause)
        raise RewardError(
            f"{self.name}: {answer}, which no further try can change: {body[:200]!r}; {self._fix(status)}"
        )

    def _fix(self, status: int) -> str:
        """Return what the user can do about a status that every request would get."""
        if status in (401, 403):
            return self._token_fix
        if 300 <= status < 400:
            return "give its final address: redirects are not followed"
        if status == 415:
            return "it must take application/json"
        return self._other_fix

    def _post(self, url: str, body: bytes, seconds: float) -> tuple[int, bytes, float]:
        """Return status and body of the answer, and the seconds of its header Retry-After."""
        deadline = time.monotonic() + seconds
        answer = b""
        try:
            with self._client.stream("POST", url, content=body, timeout=seconds) as response:
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise httpx.ReadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    # The limit of httpx is that of one read: a slow network may deliver a byte in each.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("")
                return response.status_code, answer, _pause(response.headers.get("Retry-After", ""))
        except httpx.TimeoutException:
            # Not searched: a slow service is slow for each part as
            # well, and each would cost the whole limit (decision 8).
            raise Failure(f"{url} gave no answer within {seconds:g} s", searchable=False) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            problem = str(error) or type(error).__name__
            raise Failure(f"{url} cannot be reached: {problem}", searchable=False) from error


def _pause(header: str) -> float:
    """Return the seconds of the header Retry-After; 0 if it has a date or is missing."""
    # Without `isascii`, digits such as a superscript two pass `isdigit`, and `float` refuses them.
    if not (header.isascii() and header.isdigit()):
        return 0.0
    return min(float(header), _LONGEST_PAUSE)
