"""Asks a language model at an OpenAI-compatible address (`POST {url}/chat/completions`): for
`evaluate.language_model`, and for reward sources of type `language_model`.

    questions -> at most `concurrency` requests -> keep(question, reply)
                   | refused                   failed(question, reason): this question has no reply
                   | temporary, no answer      repeated with growing pauses, then `failed`
                   | final                     RewardError: no question would get a reply

The kinds of status are those of `post.status_kind`. A refusal is also final if it is about a parameter that
all requests have: models of OpenAI that reason take neither `max_tokens` nor `temperature` 0.

After `_FAILED_IN_ROW` questions in a row that all retries could not help, the server counts as down, and the
other questions are not asked. The address is checked as those of reward services are (`rewards.post`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from tenacity import retry_if_exception_type

from rlhf_core.config.rewards import ChatServiceConfig
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.post import NoAnswer, Poster, request_group, retrying, status_fix, status_kind
from rlhf_core.rewards.replies import ModelReply

_FAILED_IN_ROW = 3

T = TypeVar("T")
Keep = Callable[[str, ModelReply], None]
Failed = Callable[[str, str], None]


class _NoReply(Exception):
    """A question has no reply."""


class _Passing(_NoReply):
    """A failure that may pass, but not before `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def api_key(settings: ChatServiceConfig, field: str) -> str | None:
    """Return the key of the server, without surrounding blanks, or None if it needs none.

    Raises a `ConfigError`, without the value, if the variable is not set or cannot be sent in a header.
    `field` is the name of the section in the message.
    """
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"{field}.api_key_env: {settings.api_key_env} is not set; set it, or leave it out")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{field}.api_key_env: {settings.api_key_env} must hold printable ASCII characters without blanks"
        )
    return key


def ask_service(
    field: str,
    settings: ChatServiceConfig,
    questions: Sequence[str],
    keep: Keep,
    failed: Failed | None = None,
) -> None:
    """Ask all questions and call `keep(question, reply)` for each reply as it arrives.

    Args:
        field: Name of the section in messages.
        settings: Settings of the server.
        questions: Are asked once each, in any order.
        keep: Is called with a question and its reply.
        failed: Is called with a question that gets no reply, and the reason. None: the first such question
            raises RewardError.

    Raises:
        RewardError: The address is forbidden, or the server answers with a status that no other question or
            try can change.
    """
    asyncio.run(_ask_all(field, settings, questions, keep, failed))


def readings(
    questions: Sequence[str],
    ask: Callable[[Sequence[str], bool], Mapping[str, ModelReply]],
    read: Callable[[str], T | None],
    again: str,
) -> dict[str, T | None]:
    """Return what `read` finds in the reply to each question.

    A question whose reply cannot be read is asked once more. A reply that was cut at the limit of tokens
    cannot be read.

    Args:
        questions: May occur several times.
        ask: Returns the replies to questions; true if they are asked once more. A question without a reply is
            missing in both results.
        read: Returns the result that the text of a reply contains, or None.
        again: Is added to a question that is asked once more. Empty: none is.
    """

    def result_of(reply: ModelReply) -> T | None:
        return None if reply.is_cut else read(reply.text)

    found = {question: result_of(reply) for question, reply in ask(questions, False).items()}
    repeated = {f"{question}{again}": question for question, value in found.items() if value is None}
    if repeated and again:
        for text, reply in ask(list(repeated), True).items():
            found[repeated[text]] = result_of(reply)
    return found


async def _ask_all(
    field: str, settings: ChatServiceConfig, questions: Sequence[str], keep: Keep, failed: Failed | None
) -> None:
    """Ask the questions concurrently. `keep` gets each reply, and `failed` each question without one."""
    poster = Poster(field, settings.allowed_hosts, api_key(settings, field), settings.api_key_env)
    places = asyncio.Semaphore(settings.concurrency)
    in_row = 0

    async def ask(question: str) -> None:
        nonlocal in_row
        async with places:
            # Tested after the wait for a place, because the server may have failed in the meantime.
            if in_row >= _FAILED_IN_ROW and failed is not None:
                failed(question, f"it was not asked, because {settings.url} gave others no answer")
                return
            try:
                reply = await _ask(field, poster, settings, question)
            except _NoReply as error:
                if failed is None:
                    raise RewardError(f"{field}: {error}") from error
                # A refused question does not count, because the server works.
                in_row += isinstance(error, _Passing)
                failed(question, str(error))
                return
            in_row = 0
            keep(question, reply)

    try:
        async with request_group() as group:
            for question in questions:
                group.create_task(ask(question))
    finally:
        await poster.close()


async def _ask(field: str, poster: Poster, settings: ChatServiceConfig, question: str) -> ModelReply:
    retry = retry_if_exception_type(_Passing)
    try:
        reply: ModelReply = await retrying(field, settings, retry)(_once, field, poster, settings, question)
    except _Passing as error:
        raise _Passing(f"{error}, after {settings.retries + 1} tries") from error
    return reply


async def _once(field: str, poster: Poster, settings: ChatServiceConfig, question: str) -> ModelReply:
    url = f"{str(settings.url).rstrip('/')}/chat/completions"
    request = {
        "model": settings.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    began = time.monotonic()
    try:
        status, body, pause = await poster.post(url, json.dumps(request).encode(), settings.timeout)
    except NoAnswer as error:
        raise _Passing(f"{url} {error}") from error
    kind = status_kind(status)
    if kind == "temporary":
        raise _Passing(f"{url} answers with status {status}: {body[:200]!r}", pause)
    if kind != "good":
        problem = f"{url} answers with status {status}, which no further try can change: {body[:200]!r}"
        of_parameter = kind == "refused" and _refuses_a_parameter(body)
        if kind == "refused" and not of_parameter:
            raise _NoReply(problem)
        fix = status_fix(status, "correct the key in api_key_env", "correct url or model")
        if of_parameter:
            fix = "name a model that takes max_tokens and temperature 0"
        raise RewardError(f"{field}: {problem}; {fix}")
    return _read(body, url, time.monotonic() - began)


def _refuses_a_parameter(body: bytes) -> bool:
    """Return whether a refusal is about a parameter of the request and not about the question."""
    try:
        return json.loads(body)["error"]["code"] in ("unsupported_parameter", "unsupported_value")
    except (ValueError, RecursionError, KeyError, TypeError):
        return False


def _read(body: bytes, url: str, seconds: float) -> ModelReply:
    """Return the reply in the body of an answer. A message without text is an empty reply."""
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        is_cut = choice.get("finish_reason") == "length"
        usage = answer.get("usage") or {}
        tokens = [_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        return ModelReply(str(text), tokens[0], tokens[1], seconds, is_cut)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Passing(f"{url} gave no chat completion: {body[:200]!r}") from error


def _count(value: object) -> int:
    """Return a number of tokens; 0 if it is none. It is only shown, so an odd one is no failure."""
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0
