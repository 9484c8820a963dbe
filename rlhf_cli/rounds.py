"""The command `rlhf rounds`."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING, Any, get_args

from rlhf_cli.app import add_command, add_config
from rlhf_core.config.redact import printable
from rlhf_core.errors import EXIT_VOTES
from rlhf_core.ops.parameters import END_OF_ROUND, EndOfRound

if TYPE_CHECKING:
    from rich.console import Console

    from flows.rounds import Rounds

log = logging.getLogger(__name__)


def add_rounds_command(commands: Any) -> None:
    """Add the command to the parser."""
    text = "run the pipeline several times, each time with samples of the policies before"
    example = "rlhf rounds deployments/configs/demo.yaml --rounds 3 sample.answers=8"
    sub = add_command(commands, "rounds", text, _rounds, example)
    add_config(sub, "sample.answers=8")
    sub.add_argument("--rounds", type=int, default=2, help="number of rounds (default: %(default)s)")
    sub.add_argument(
        "--until",
        choices=get_args(EndOfRound),
        default=END_OF_ROUND,
        help="last stage of each round; with sample and another sample.policy than ppo, PPO is left out"
        " (default: %(default)s)",
    )


def _rounds(arguments: argparse.Namespace) -> int:
    from rlhf_cli.with_prefect import with_prefect
    from rlhf_core.logs import set_up_logging
    from rlhf_core.ops.rounds import check_first_round, check_rounds
    from rlhf_core.system.home import Home

    check_rounds(arguments.rounds)
    given = tuple(arguments.overrides)
    checked = check_first_round(arguments.config, given, arguments.until)
    console = set_up_logging(Home.of(checked.config.run.home))
    log.info("%s, seed %d: %d rounds", checked.config.run.name, checked.config.run.seed, arguments.rounds)
    return with_prefect(checked.config, lambda: _run(arguments, console))


def _run(arguments: argparse.Namespace, console: Console) -> int:
    from flows.rounds import Rounds, rounds
    from rlhf_core.run.display import showing_progress

    with showing_progress(console):
        done = rounds(
            config=arguments.config,
            number=arguments.rounds,
            overrides=tuple(arguments.overrides),
            until=arguments.until,
        )
    assert isinstance(done, Rounds)  # Prefect returns the data of a state
    return print_end(done)


def print_end(done: Rounds) -> int:
    """Print the table of the rounds, their reports, and what people must do. Returns the exit code."""
    from rich.console import Console

    from rlhf_core.ops.rounds import rounds_table

    Console(soft_wrap=not sys.stdout.isatty()).print(rounds_table(done.summaries))
    for summary in done.summaries:
        if "report" in summary["where"]:
            print(f"report of {summary['run']}: {summary['where']['report']}")
    if done.votes_needed is None:
        return 0
    print(printable(done.votes_needed))
    return EXIT_VOTES
