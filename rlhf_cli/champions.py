"""Commands for registered policies: `rlhf champions`, `rollback`, `promote`, `serve`, `chat`, `publish`."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.arguments import add_command, add_endpoint, add_home
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.tracking.champion_log import Move

HUB = "hub:"
"""Prefix of a repository of the Hugging Face hub, as in the addresses of models."""


def add_champion_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    text = "show the champion of a registered model and the history of champions"
    sub = add_command(commands, "champions", text, _champions, "rlhf champions demo-policy")
    sub.add_argument("name", metavar="NAME", nargs="?", help="registered model (default: all)")
    _add_registry(sub)

    text = "take the champion back: revoke it, and make an earlier version champion"
    example = 'rlhf rollback demo-policy --reason "it refuses harmless questions"'
    sub = add_command(commands, "rollback", text, _rollback, example)
    sub.add_argument("name", metavar="NAME", help="registered model")
    sub.add_argument(
        "--to", metavar="VERSION", help="or `none` (default: the last champion that is not revoked)"
    )
    _add_reason(sub)
    _add_registry(sub)

    text = "make a version champion by the decision of a person"
    example = 'rlhf promote demo-policy 4 --reason "first champion under the new judge"'
    sub = add_command(commands, "promote", text, _promote, example)
    sub.add_argument("name", metavar="NAME", help="registered model")
    sub.add_argument("version", metavar="VERSION", help="number of the version")
    _add_reason(sub)
    _add_registry(sub)

    text = "serve a registered policy with vLLM's OpenAI-compatible server"
    sub = add_command(commands, "serve", text, _serve, "rlhf serve demo-policy@champion --port 8000")
    _add_policy(sub)
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        help="others than loopback need VLLM_API_KEY (default: %(default)s)",
    )
    sub.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    sub.add_argument(
        "--vllm",
        metavar="ARGUMENTS",
        nargs=argparse.REMAINDER,
        default=[],
        help="what follows goes to vLLM, such as --vllm --max-model-len 2048",
    )

    text = "talk to a policy that `rlhf serve` serves"
    sub = add_command(commands, "chat", text, _chat, "rlhf chat demo-policy --port 8000")
    sub.add_argument("policy", metavar="NAME[@VERSION]", help="name of the served model")
    sub.add_argument("--port", type=int, default=8000, help="of `rlhf serve` (default: %(default)s)")
    sub.add_argument("--url", help="of another OpenAI-compatible server, such as https://models.example/v1")

    text = "copy a registered policy to a folder or to the Hugging Face hub, with a model card"
    sub = add_command(commands, "publish", text, _publish, "rlhf publish demo-policy published/demo")
    _add_policy(sub)
    sub.add_argument(
        "target",
        metavar="DIR|hub:OWNER/NAME",
        help="folder that does not exist or is empty; or a repository, which is made private if it is new",
    )
    sub.add_argument(
        "--replace",
        action="store_true",
        help="delete the files that a repository has",
    )


def _add_policy(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "policy", metavar="NAME[@VERSION]", help="registered model, and a version or an alias; the champion"
    )
    add_endpoint(sub)
    _add_registry(sub)


def _add_reason(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--reason", required=True, metavar="TEXT", help="why; kept in the history")


def _add_registry(sub: argparse.ArgumentParser) -> None:
    add_home(sub, "folder with the database of MLflow; MLFLOW_TRACKING_URI overrides it")


def _champions(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.registered_policies import open_registry
    from rlhf_core.tracking.champions import champions, moved_by_hand, registered_models

    mlflow = open_registry(arguments.home)
    names = [arguments.name] if arguments.name else registered_models(mlflow)
    if not names:
        print("MLflow has no registered model yet; a run makes one in its stage register")
    for name in names:
        champion, moves = champions(mlflow, name)
        text = f"champion is version {champion.version}" if champion else "no champion"
        print(printable(f"{name}: {text}"))
        for move in moves:
            print(printable(f"  {describe(move)}"))
        if problem := moved_by_hand(champion, moves):
            print(f"  warning: {problem}")
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.registered_policies import open_registry
    from rlhf_core.tracking.champions import rollback

    move, changed = rollback(open_registry(arguments.home), arguments.name, arguments.reason, arguments.to)
    text = describe(move)
    if not changed:
        text = (
            f"nothing changed: this rollback was made at {_utc(move)} UTC; to go back further use --to or"
            " another reason"
        )
    print(printable(f"{arguments.name}: {text}"))
    return 0


def _promote(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.registered_policies import open_registry
    from rlhf_core.tracking.champions import promote

    move, changed = promote(
        open_registry(arguments.home), arguments.name, arguments.version, arguments.reason
    )
    text = describe(move)
    if not changed:
        text = f"nothing changed: version {move.version} is the champion since {_utc(move)} UTC"
    print(printable(f"{arguments.name}: {text}"))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.serve import serve_command, serve_environment, tokenizer_alone
    from rlhf_core.run.registered_policies import open_policy
    from rlhf_core.system.serving import bind

    # vLLM binds the address again, after it has imported its packages.
    bind(arguments.host, arguments.port).close()
    policy = open_policy(arguments.policy, arguments.home, arguments.endpoint)
    more = ["--tokenizer", str(tokenizer_alone(policy, arguments.home)), *arguments.vllm]
    command = serve_command(policy, arguments.host, arguments.port, more)
    print(printable(f"serving {policy.name}@{policy.version.version}, weights {policy.weights}"), flush=True)
    # The server replaces this process, so signals reach it and its exit code is that of the command.
    os.execve(command[0], command, serve_environment())


def _publish(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.publish.publish import publish, publish_to_hub
    from rlhf_core.run.registered_policies import open_policy

    policy = open_policy(arguments.policy, arguments.home, arguments.endpoint)
    if arguments.target.startswith(HUB):
        repository = arguments.target.removeprefix(HUB)
        written, private = publish_to_hub(policy, repository, replace=arguments.replace)
        if private is not None:
            written += f" ({'private' if private else 'public: everybody can read it'})"
    elif arguments.replace:
        raise InputError("--replace: is for hub:OWNER/NAME; got a folder; leave it out")
    else:
        written = str(publish(policy, Path(arguments.target)))
    print(printable(f"{policy.name}@{policy.version.version}, weights {policy.weights}: {written}"))
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from rlhf_cli.chat import chat
    from rlhf_core.system.serving import API_KEY

    if arguments.url:
        chat(arguments.url, arguments.policy, os.environ.get("OPENAI_API_KEY"))
    else:
        chat(f"http://127.0.0.1:{arguments.port}/v1", arguments.policy, os.environ.get(API_KEY))
    return 0


def describe(move: Move) -> str:
    """Return one line about a move, with its time in UTC."""
    from rlhf_core.tracking.champion_log import ACTION_NAMES

    when = _utc(move)
    state = "" if move.state == "done" else f" [{move.state}]"
    if move.action == "rolled_back":
        target = move.version or "no champion"
        return f"{when}  rolled back from version {move.previous} to {target}{state}: {move.reason}"
    return f"{when}  version {move.version} {ACTION_NAMES[move.action]}{state}: {move.reason}"


def _utc(move: Move) -> str:
    return datetime.fromtimestamp(move.time, UTC).strftime("%Y-%m-%d %H:%M")
