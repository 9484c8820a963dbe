"""Commands and arguments of the parser that several modules add."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_command(
    commands: Any, name: str, text: str, command: Callable[[argparse.Namespace], int], example: str
) -> argparse.ArgumentParser:
    """Add a command to the parser, and return the parser of its arguments.

    Args:
        commands: The commands of the parser.
        name: Name of the command.
        text: What it does, for the help.
        command: Function that runs it and returns the exit code.
        example: A whole command line, for the help.
    """
    description = text[0].upper() + text[1:] + "."
    sub: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, epilog=f"example: {example}"
    )
    sub.set_defaults(command=command)
    return sub


def add_config(sub: argparse.ArgumentParser, override: str) -> None:
    """Add the configuration file and its overrides, with `override` as the example."""
    sub.add_argument("config", metavar="CONFIG", help="YAML file; deployments/configs/ has examples")
    sub.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],  # without it, argparse names them as required if CONFIG is missing
        help=f"fields to override, such as {override}",
    )


def add_home(sub: argparse.ArgumentParser, purpose: str) -> None:
    """Add the option `--home`. `purpose` says what the command uses the folder for."""
    sub.add_argument("--home", default=".rlhf", help=f"{purpose} (default: %(default)s)")


def add_endpoint(sub: argparse.ArgumentParser) -> None:
    """Add the option `--endpoint`, the server of a store with an address `s3://`."""
    sub.add_argument("--endpoint", help="of an S3-compatible store, such as http://127.0.0.1:9000")
