"""Commands for registered policies: `rlhf champions`, `rollback`, `promote`, `serve`, `chat`, `publish`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, REGISTRY, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

    from rlhf_core.tracking.champion_log import Move

Policy = Annotated[
    str,
    Parameter(
        help="NAME of a registered model, or NAME@VERSION with a number or an alias (default: champion)."
    ),
]
Reason = Annotated[str, Parameter(metavar="TEXT", help="Why; it is kept in the history.")]

HUB = "hub:"
"""Prefix of a repository of the Hugging Face hub, as in the addresses of models."""
_HELP = "one message a line; an empty line starts a new conversation, Ctrl-D ends"


@app.command(group=REGISTRY)
def _champions(name: str | None = None, /, *, home: HomeFolder = HOME, json: bool = False) -> int:
    """Show champions of registered models, and every decision with its reason.

    Example: rlhf champions demo-policy

    Args:
        name: Registered model (default: all).
        json: Print the champions and their histories as JSON.
    """
    from rlhf_core.tracking.champions import champions, moved_by_hand, registered_models
    from rlhf_core.tracking.mlflow_client import open_registry
    from rlhf_core.tracking.registry import refusals

    mlflow = open_registry(home)
    names = [name] if name else registered_models(mlflow)
    if json:
        found = {}
        for each in names:
            champion, moves = champions(mlflow, each)
            history = list(map(asdict, moves))
            refused = [refusal._asdict() for refusal in refusals(mlflow, each, moves)]
            found[each] = {
                "champion": champion and champion.version,
                "history": history,
                "refused": refused,
            }
        print(dumps(found))
        return 0
    if not names:
        print("no registered models yet; a run makes one in its stage register")
    for each in names:
        champion, moves = champions(mlflow, each)
        text = f"champion is version {champion.version}" if champion else "no champion"
        print(printable(f"{each}: {text}"))
        # Refusals are not in the history: a version that never was champion has made no move.
        decisions = [(move.time, describe(move)) for move in moves]
        for time, version, reason, unfinished in refusals(mlflow, each, moves):
            what = "decided, not finished (run it again)" if unfinished else "refused"
            decisions.append((time, f"{_utc(time)}  version {version} {what}: {reason}"))
        for _, line in sorted(decisions, key=lambda decision: decision[0]):
            print(printable(f"  {line}"))
        if problem := moved_by_hand(mlflow, each, champion, moves):
            print(f"  warning: {problem}")
    return 0


@app.command(group=REGISTRY)
def _rollback(
    name: str,
    /,
    *,
    to: Annotated[str | None, Parameter(metavar="VERSION")] = None,
    reason: Reason,
    home: HomeFolder = HOME,
) -> int:
    """Take the champion back, and make an earlier version champion.

    The version that is taken back never becomes champion again by itself.

    Example: rlhf rollback demo-policy --reason "it refuses harmless questions"

    Args:
        name: Registered model.
        to: The earlier version, or none for no champion (default: the last champion that was not taken back).
    """
    from rlhf_core.tracking.champions import rollback
    from rlhf_core.tracking.mlflow_client import open_registry

    move, changed = rollback(open_registry(home), name, reason, to)
    text = describe(move)
    if not changed:
        text = (
            f"nothing changed: this rollback was made at {_utc(move.time)} UTC; to go back further use --to"
            " or another reason"
        )
    print(printable(f"{name}: {text}"))
    _describe_missing_event("rollback", home, changed=changed)
    return 0


@app.command(group=REGISTRY)
def _promote(name: str, version: str, /, *, reason: Reason, home: HomeFolder = HOME) -> int:
    """Make a version champion by the decision of a person.

    Example: rlhf promote demo-policy 4 --reason "first champion under the new judge"

    Args:
        name: Registered model.
        version: Number of the version.
    """
    from rlhf_core.tracking.champions import promote
    from rlhf_core.tracking.mlflow_client import open_registry

    move, changed = promote(open_registry(home), name, version, reason)
    text = describe(move)
    if not changed:
        text = f"nothing changed: version {move.version} is the champion since {_utc(move.time)} UTC"
    print(printable(f"{name}: {text}"))
    _describe_missing_event("promote", home, changed=changed)
    return 0


@app.command(group=REGISTRY)
def _serve(
    policy: Policy,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
    vllm: Annotated[
        tuple[str, ...], Parameter(metavar="OPTION", consume_multiple=True, allow_leading_hyphen=True)
    ] = (),
) -> int:
    """Serve a policy with vLLM's OpenAI-compatible server.

    Example: rlhf serve demo-policy@champion --port 8000

    Args:
        host: Address to listen on. Others than loopback need VLLM_API_KEY.
        port: Port to listen on.
        vllm: All that follows goes to vLLM, such as --vllm --max-model-len 2048.
    """
    from rlhf_core.run.registered_policies import open_policy
    from rlhf_core.system.serving import bind

    # vLLM binds the address again, after it has imported its packages.
    bind(host, port).close()
    opened = open_policy(policy, home, endpoint)
    # After the checks above: it imports torch, which takes seconds.
    from rlhf_core.ops.serve import serve_command, serve_environment, tokenizer_alone

    # The user's options come last, because vLLM's parser takes the last value of an option.
    more = ["--tokenizer", str(tokenizer_alone(opened, home)), *vllm]
    command = serve_command(opened, host, port, more)
    # Flushed, because `execve` drops what is buffered.
    print(printable(f"serving {opened.name}@{opened.version.version}, weights {opened.weights}"), flush=True)
    # The server replaces this process, so signals reach it and its exit code is that of the command.
    os.execve(command[0], command, serve_environment())


@app.command(group=REGISTRY)
def _publish(
    policy: Policy,
    target: str,
    /,
    *,
    replace: bool = False,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Copy a policy to a folder or to the Hugging Face hub.

    A model card with its evaluation is written beside it.

    Example: rlhf publish demo-policy published/demo

    Args:
        target: A new or empty folder; or hub:OWNER/NAME, a repository that is made private if it is new.
        replace: Delete the files that a repository has.
    """
    from rlhf_core.ops.publish import publish, publish_to_hub
    from rlhf_core.run.registered_policies import open_policy

    opened = open_policy(policy, home, endpoint)
    if target.startswith(HUB):
        repository = target.removeprefix(HUB)
        written, private = publish_to_hub(opened, repository, replace=replace)
        if private is not None:
            written += " (private)" if private else " (public: everybody can read it)"
    elif replace:
        raise InputError("--replace: is for hub:OWNER/NAME; got a folder; leave it out")
    else:
        written = str(publish(opened, Path(target)))
    print(printable(f"{opened.name}@{opened.version.version}, weights {opened.weights}: {written}"))
    return 0


@app.command(group=REGISTRY)
def _chat(policy: str, /, *, port: int = 8000, url: str | None = None) -> int:
    """Talk to a policy that rlhf serve serves.

    Example: rlhf chat demo-policy --port 8000

    Args:
        policy: NAME or NAME@VERSION, as rlhf serve got it.
        port: Port of rlhf serve on this machine.
        url: Another OpenAI-compatible server, such as https://models.example/v1.
    """
    from rlhf_core.system.serving import API_KEY

    if url:
        chat(url, policy, os.environ.get("OPENAI_API_KEY"))
    else:
        chat(f"http://127.0.0.1:{port}/v1", policy, os.environ.get(API_KEY))
    return 0


def _describe_missing_event(deployment: str, home: str, *, changed: bool) -> None:
    """Print that automations of Prefect do not learn of a change, if there is a server that has some."""
    from rlhf_core.ops.servers.servers import are_up
    from rlhf_core.system.home import Home

    if changed and are_up(Home.of(home)):
        print(f"no event was emitted; the deployment rlhf-{deployment}/{deployment} does the same with one")


def describe(move: Move) -> str:
    """Return one line about a move, with its time in UTC."""
    from rlhf_core.tracking.champion_log import ACTION_NAMES

    when = _utc(move.time)
    state = "" if move.state == "done" else f" [{move.state}]"
    if move.action == "rolled_back":
        target = move.version or "no champion"
        return f"{when}  rolled back from version {move.previous} to {target}{state}: {move.reason}"
    return f"{when}  version {move.version} {ACTION_NAMES[move.action]}{state}: {move.reason}"


def _utc(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


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
        # Without its two retries: the message about a server that does not answer would only come later.
        client = OpenAI(base_url=url, api_key=key or "none", max_retries=0, http_client=connection)
        served = [entry.id for entry in client.models.list()]
        if model not in served:
            raise InputError(f"{url} does not serve {model}; it serves {', '.join(served)}")
        print(f"{printable(model)} at {printable(url)}: {_HELP}", flush=True)
        messages: list[ChatCompletionMessageParam] = []
        # Only the end of the input is an empty text: an empty line has its line feed.
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
        # The last piece of some servers has the token counts and no choice.
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        answer += piece
        # An answer may send no other control characters to the terminal.
        print("".join(c if c in "\n\t" else printable(c) for c in piece), end="", flush=True)
    print(flush=True)
    return answer
