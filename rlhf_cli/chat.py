"""`rlhf chat`: a conversation with a served policy in the terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

_HELP = "one message a line; an empty line starts a new conversation, Ctrl-D ends"


def chat(url: str, model: str, key: str | None) -> None:
    """Read messages from standard input, and print the answers as they arrive. Ctrl-C ends the conversation.

    Args:
        url: Base address of an OpenAI-compatible server, with `/v1`.
        model: Name of the served model.
        key: API key of the server, if it needs one.

    Raises:
        InputError: The server cannot be reached, does not serve the model, or refuses the request.
    """
    import httpx2
    from openai import APIConnectionError, APIError, DefaultHttpxClient, OpenAI

    # Without the proxy of the environment, which would see the messages and the key.
    connection = DefaultHttpxClient(trust_env=False)
    try:
        # The client cannot be created without a key, also for a server that needs none.
        client = OpenAI(base_url=url, api_key=key or "none", max_retries=0, http_client=connection)
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
    except APIConnectionError as error:
        raise InputError(
            f"{url}: {error.message.rstrip('.')}; start `rlhf serve`, or correct --port or --url"
        ) from error
    except APIError as error:
        raise InputError(f"{url}: {error.message}") from error
    except (httpx2.InvalidURL, json.JSONDecodeError) as error:
        raise InputError(f"{url}: {error}") from error
    except KeyboardInterrupt:
        print()
    finally:
        connection.close()


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
        # An answer may send no other control characters to the terminal.
        print("".join(c if c in "\n\t" else printable(c) for c in piece), end="", flush=True)
    print(flush=True)
    return answer
