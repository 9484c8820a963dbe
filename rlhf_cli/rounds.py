"""The command `rlhf rounds`."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from rlhf_cli.app import RUNS, Config, Overrides, RunHome, app, usage, with_home
from rlhf_core.config.redact import printable
from rlhf_core.errors import EXIT_VOTES
from rlhf_core.ops.parameters import END_OF_ROUND, EndOfRound

if TYPE_CHECKING:
    from rich.console import Console

    from flows.rounds import Rounds

log = logging.getLogger(__name__)


@app.command(group=RUNS, usage=usage("rounds"))
def _rounds(
    config: Config,
    /,
    *overrides: Overrides,
    rounds: int = 2,
    until: EndOfRound = END_OF_ROUND,
    home: RunHome = None,
) -> int:
    """Run the pipeline several times, each with answers of the last.

    Example: rlhf rounds my.yaml --rounds 3 sample.answers=8

    Args:
        rounds: Number of rounds.
        until: Last stage of each round. With sample and another sample.policy than ppo, PPO is left out.
    """
    from rlhf_cli.with_prefect import with_prefect
    from rlhf_core.logs import set_up_logging
    from rlhf_core.ops.rounds import check_first_round, check_rounds
    from rlhf_core.system.home import Home

    check_rounds(rounds)
    overrides = with_home(overrides, home)
    checked = check_first_round(config, overrides, until).config
    console = set_up_logging(Home.of(checked.run.home))
    log.info("%s, seed %d: %d rounds", checked.run.name, checked.run.seed, rounds)
    flow = {"config": config, "number": rounds, "overrides": overrides, "until": until}
    return with_prefect(checked, lambda: _run(flow, console))


def _run(parameters: dict[str, Any], console: Console) -> int:
    from flows.rounds import Rounds, rounds
    from rlhf_core.run.display import showing_progress

    with showing_progress(console):
        done = rounds(**parameters)
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
