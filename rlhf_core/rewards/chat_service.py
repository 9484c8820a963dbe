"""Asks a language model at an OpenAI-compatible address (`POST {url}/chat/completions`): for
`evaluate.language_model`, and for reward sources of type `language_model`.

    questions -> at most `concurrency` requests -> keep(question, reply)
                   | refused                   failed(question, reason): this question has no reply
                   | temporary, no answer      repeated with growing pauses, then `failed`
                   | final                     RewardError: no question would get a reply

The kinds of status are those of `rewards.post`. A refusal is also final if it is about a parameter that all
requests have: models of OpenAI that reason take neither `max_tokens` nor `temperature` 0.

After `_FAILED_IN_ROW` questions in a row that all retries could not help, the server counts as down, and the
other questions are not asked.

Replies are kept on the disk by the digest of what was asked:

    home/judge/<first two digits>/<sha256 of judge and question>.json

A run that is interrupted asks nothing twice, and ends with the same verdicts and rewards even if the model
would reply differently the second time. Of several runs that ask the same question at the same time, all use
the first reply. The folder can be removed: the questions are then asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhf_core.config.rewards import ChatServiceConfig
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.failures import PAUSE_SECONDS, Failure, Refused, call_with_retries
from rlhf_core.rewards.post import Poster, fits_header, request_threads
from rlhf_core.system.files import create_once, read_bounded, read_json, write_atomic

_FAILED_IN_ROW = 3
_MOST_RUBRIC_BYTES = 64 << 10
# `strip` keeps characters without width, and a letter beside one would be no verdict.
_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff]")
_AROUND = " \t#*_`.\"'()[]"

T = TypeVar("T")


@dataclass(frozen=True)
class ModelReply:
    """Reply of a model to one question."""

    text: str
    prompt_tokens: int
    """0 if the server does not say it."""
    completion_tokens: int
    seconds: float
    """Time that it took when it was asked."""
    is_cut: bool = False
    """Whether it ended at the limit of tokens. It is not used then."""


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
    if not fits_header(key):
        raise ConfigError(
            f"{field}.api_key_env: {settings.api_key_env} must hold printable ASCII characters without blanks"
        )
    return key


def ask_service(
    field: str,
    settings: ChatServiceConfig,
    questions: Sequence[str],
    keep: Callable[[str, ModelReply], None],
    failed: Callable[[str, str], None] | None = None,
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
        RewardError: The server answers with a status that no other question or
            try can change.
    """
    url = f"{str(settings.url).rstrip('/')}/chat/completions"
    lock = threading.Lock()
    in_row = 0
    has_ended = False

    def ask(question: str) -> None:
        nonlocal in_row, has_ended
        if has_ended:
            return  # its thread has begun before the others were cancelled
        # For a server that is down, each further question
        # would cost all its tries and the pauses between them.
        if in_row >= _FAILED_IN_ROW and failed is not None:
            failed(question, f"it was not asked, because {settings.url} gave others no answer")
            return
        try:
            reply = call_with_retries(
                field,
                partial(_ask_once, poster, url, settings, question),
                settings.retries + 1,
                pause=PAUSE_SECONDS,
            )
        except Failure as error:
            if failed is None:
                has_ended = True
                text = f"{field}: {error}"
                if not isinstance(error, Refused):
                    text += f", after {settings.retries + 1} tries"
                raise RewardError(text) from error
            with lock:
                # A refused question does not count, because the server works.
                in_row += not isinstance(error, Refused)
                failed(question, str(error))
            return
        with lock:
            # `keep` under the lock as well: the functions of callers
            # fill dictionaries and need not be safe for threads.
            in_row = 0
            keep(question, reply)

    key = api_key(settings, field)
    poster = Poster(field, [url], key, "correct the key in api_key_env", "correct url or model")
    with closing(poster), request_threads(settings.concurrency) as threads:
        # In the order of completion, so that an error ends the loop while earlier questions still wait.
        for asked in as_completed([threads.submit(ask, question) for question in questions]):
            asked.result()


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
        if reply.is_cut:
            return None
        return read(reply.text)

    found = {question: result_of(reply) for question, reply in ask(questions, False).items()}
    repeated = {f"{question}{again}": question for question, value in found.items() if value is None}
    if repeated and again:
        for text, reply in ask(list(repeated), True).items():
            found[repeated[text]] = result_of(reply)
    return found


def _ask_once(poster: Poster, url: str, settings: ChatServiceConfig, question: str) -> ModelReply:
    request = {
        "model": settings.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    began = time.monotonic()
    try:
        body = poster.ask(url, request, settings.timeout)
    except Refused as error:
        if not _refuses_a_parameter(error.body):
            raise
        raise RewardError(
            f"{poster.name}: {error}; name a model that takes max_tokens and temperature 0"
        ) from error
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
        raise Failure(f"{url} gave no chat completion: {body[:200]!r}") from error


def _count(value: object) -> int:
    """Return a number of tokens; 0 if it is none. It is only shown, so an odd one is no failure."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return value
    return 0


# -- replies and rubrics --


def last_line(reply: str) -> tuple[str, str]:
    """Return the label on the last line of a reply, up to its last colon, and the rest without decoration.

    Only the last line counts, so that a text which the reply quotes decides nothing.
    """
    lines = _INVISIBLE.sub("", reply).strip().splitlines() or [""]
    label, _, rest = lines[-1].rpartition(":")
    return label, rest.strip(_AROUND)


class Replies:
    """Reads and writes replies.

    Args:
        folder: Local folder. It is created with the first reply. None: nothing is kept.
        judge: Digest of the judge.
    """

    def __init__(self, folder: Path | None, judge: str) -> None:
        self._folder = folder
        self._judge = judge

    def find(self, question: str) -> ModelReply | None:
        """Return the reply to a question that was asked before. None if there is none, or it is damaged."""
        file = self._file(question)
        if file is None or (content := read_json(file)) is None:
            return None
        try:
            return ModelReply(**content)
        except TypeError:
            return None

    def find_all(self, questions: Sequence[str]) -> tuple[dict[str, ModelReply], list[str]]:
        """Return the kept replies by question, and the questions without one, each once."""
        replies: dict[str, ModelReply] = {}
        missing = []
        for question in dict.fromkeys(questions):
            reply = self.find(question)
            if reply is None:
                missing.append(question)
            else:
                replies[question] = reply
        return replies, missing

    def keep(self, question: str, reply: ModelReply) -> ModelReply:
        """Write a reply, unless another run has kept one since, and return the one that is kept."""
        file = self._file(question)
        if file is None:
            return reply
        content = json.dumps(asdict(reply)) + "\n"
        if not create_once(file, content.encode(), private=True):
            kept = self.find(question)
            if kept is not None:
                return kept
            write_atomic(file, content, private=True)  # the kept one is damaged
        return reply

    def forget(self, question: str) -> None:
        """Remove the reply to a question, so that it is asked again."""
        file = self._file(question)
        if file is not None:
            file.unlink(missing_ok=True)

    def _file(self, question: str) -> Path | None:
        if self._folder is None:
            return None
        # JSON of a list: joined without a separator, another judge and question could be the same text.
        digest = hashlib.sha256(json.dumps([self._judge, question]).encode()).hexdigest()
        # 256 folders: a run of 200 steps with 512 responses keeps about 100,000 files (decision 8).
        return self._folder / digest[:2] / f"{digest}.json"


def read_rubric(path: str, field: str, digest: str | None = None) -> str:
    """Return the content of a rubric without surrounding blanks.

    Args:
        path: A UTF-8 text file of at most 64 KiB.
        field: Its name in messages.
        digest: sha256 of the file at the beginning of the run. None: any file.

    Raises:
        ConfigError: It cannot be read, is empty, or was changed.
    """
    try:
        content = read_bounded(path, _MOST_RUBRIC_BYTES)
        text = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: cannot be read: {error}; give a UTF-8 text file") from error
    if not text:
        raise ConfigError(f"{field}: {path} is empty; say what makes an answer better, or leave it out")
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{field}: {path} was changed after the run began; run again")
    return text
