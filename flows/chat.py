"""`rlhf chat`: a conversation with a served policy in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

_HELP = "one message a line; an empty line starts a new conversation, Ctrl-D ends"


def chat(url: str, model: str, key: str | None) -> None:
    """Read messages from standard input, and print the answers as they arrive.

    Args:
        url: Base address of an OpenAI-compatible server, with `/v1`.
        model: Name of the served model.
        key: API key of the server, if it needs one.

    Raises:
        InputError: The server cannot be reached, does not serve the model, or refuses the request.
    """
    from openai import APIError, OpenAI

    client = OpenAI(base_url=url, api_key=key or "none", max_retries=0)
    try:
        served = [entry.id for entry in client.models.list()]
        if model not in served:
            raise InputError(f"{url} does not serve {model}; it serves {', '.join(served)}")
        print(f"{printable(model)} at {printable(url)}: {_HELP}", flush=True)
        messages: list[ChatCompletionMessageParam] = []
        while message := _next_message():
            if message == "\n":
                messages = []
                continue
            messages.append({"role": "user", "content": message.removesuffix("\n")})
            messages.append({"role": "assistant", "content": _answer(client, model, messages)})
    except APIError as error:
        raise InputError(f"{url}: {error.message}") from error


def _next_message() -> str:
    """Return the next line with its line feed; an empty text at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def _answer(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> str:
    answer = ""
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        answer += piece
        # Line feeds are the only control characters that an answer may send to the terminal.
        print("\n".join(printable(line) for line in piece.split("\n")), end="", flush=True)
    print(flush=True)
    return answer
