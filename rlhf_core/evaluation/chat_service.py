"""Asks a language model at an OpenAI-compatible address (`POST {url}/chat/completions`).

Requests that fail, or that the server answers with status 408, 429 or 5xx, are repeated with growing pauses.
Any other status ends the stage. The address is checked as those of reward services are (`rewards.post`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Sequence

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from rlhf_core.config.language_model import LanguageModelConfig
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.evaluation.replies import Reply
from rlhf_core.rewards.post import Poster
from rlhf_core.system.retries import backoff

log = logging.getLogger(__name__)

_NAME = "evaluate.language_model"


class _Passing(Exception):
    """A failure that may pass."""


def api_key(settings: LanguageModelConfig) -> str | None:
    """Return the key of the server, without surrounding blanks, or None if it needs none.

    Raises a `ConfigError`, without the value, if the variable is not set or cannot be sent in a header.
    """
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"{_NAME}.api_key_env: {settings.api_key_env} is not set; set it, or leave it out")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{_NAME}.api_key_env: {settings.api_key_env} must hold printable ASCII characters without blanks"
        )
    return key


def ask_service(
    settings: LanguageModelConfig, questions: Sequence[str], keep: Callable[[str, Reply], None]
) -> None:
    """Ask all questions and call `keep(question, reply)` for each reply as it arrives.

    Raises:
        RewardError: The server refuses a request, or fails until the last retry.
    """
    asyncio.run(_ask_all(settings, questions, keep))


async def _ask_all(
    settings: LanguageModelConfig, questions: Sequence[str], keep: Callable[[str, Reply], None]
) -> None:
    poster = Poster(_NAME, settings.allowed_hosts, api_key(settings), settings.api_key_env)
    places = asyncio.Semaphore(settings.concurrency)

    async def ask(question: str) -> None:
        async with places:
            keep(question, await _ask(poster, settings, question))

    try:
        async with asyncio.TaskGroup() as group:
            for question in questions:
                group.create_task(ask(question))
    except* RewardError as errors:
        raise errors.exceptions[0] from None
    finally:
        await poster.close()


async def _ask(poster: Poster, settings: LanguageModelConfig, question: str) -> Reply:
    attempts = settings.retries + 1

    def report(state: RetryCallState) -> None:
        if state.outcome is not None and state.outcome.failed:
            error = state.outcome.exception()
            log.warning("%s: try %d of %d failed: %s", _NAME, state.attempt_number, attempts, error)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(_Passing),
        wait=backoff(settings.backoff, jitter=(0.5, 1.5)),
        stop=stop_after_attempt(attempts),
        after=report,
        reraise=True,
    )
    try:
        return await retrying(_once, poster, settings, question)
    except _Passing as error:
        raise RewardError(f"{_NAME}: {error}, after {attempts} tries") from error


async def _once(poster: Poster, settings: LanguageModelConfig, question: str) -> Reply:
    url = f"{str(settings.url).rstrip('/')}/chat/completions"
    request = {
        "model": settings.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    began = time.monotonic()
    try:
        async with asyncio.timeout(settings.timeout):
            status, body = await poster.post(url, json.dumps(request).encode())
    except TimeoutError:
        raise _Passing(f"{url} gave no answer within {settings.timeout:g} s") from None
    except (httpx.HTTPError, OSError) as error:
        raise _Passing(f"{url} cannot be reached: {str(error) or type(error).__name__}") from error
    if status in (408, 429) or status >= 500:
        raise _Passing(f"{url} answers with status {status}: {body[:200]!r}")
    if status != 200:
        raise RewardError(
            f"{_NAME}: {url} answers with status {status}, which no further try can change: {body[:200]!r};"
            " correct url, model or the key in api_key_env"
        )
    return _read(body, url, time.monotonic() - began)


def _read(body: bytes, url: str, seconds: float) -> Reply:
    """Return the reply in the body of an answer. A message without text is an empty reply."""
    try:
        answer = json.loads(body)
        text = answer["choices"][0]["message"].get("content") or ""
        usage = answer.get("usage") or {}
        return Reply(
            str(text),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
            seconds,
        )
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Passing(f"{url} gave no chat completion: {body[:200]!r}") from error
