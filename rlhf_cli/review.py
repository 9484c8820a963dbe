"""The command `rlhf review`: people compare answers of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.app import add_command, add_endpoint, add_home
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.evaluation.review import Opponent
    from rlhf_core.ops.review.record import Recorded

_OPPONENTS: dict[Opponent, str] = {"sft": "the SFT model", "champion": "the champion"}


def add_review_command(commands: Any) -> None:
    """Add the command to the parser."""
    text = "write a page of blind pairs for people, or read its votes"
    sub = add_command(commands, "review", text, _review, "rlhf review demo-seed0-46d9a620")
    sub.add_argument("run", metavar="RUN", help="name of a finished run, or the path of its summary.json")
    sub.add_argument(
        "--votes",
        metavar="FILE",
        help="votes that the page saved: record them, and count all that are recorded",
    )
    sub.add_argument(
        "--output", metavar="FILE", help="the page (default: review/against-sft.html in the run's folder)"
    )
    sub.add_argument(
        "--of",
        choices=("evaluation", "sample"),
        default="evaluation",
        help="samples of the evaluation, or pairs of answers to training prompts of the stage sample, whose"
        " votes are data of the next run (default: %(default)s)",
    )
    sub.add_argument(
        "--against",
        choices=("sft", "champion"),
        help="the other model: samples of the evaluation, or of the match (default: sft)",
    )
    sub.add_argument("--pairs", type=int, metavar="N", help="pairs on the page of --of sample (default: 50)")
    add_endpoint(sub)
    add_home(sub, "folder of the runs")


def _review(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.review.record import open_review, record_votes, votes_command

    if arguments.of == "sample" and arguments.against is not None:
        raise InputError(
            f"--against: got {arguments.against} with --of sample, whose answers are all of the policy; leave"
            " one of them out"
        )
    if arguments.votes is not None and arguments.pairs is not None:
        raise InputError(
            f"--pairs: got {arguments.pairs} with --votes, whose file has the number; leave it out"
        )
    opponent: Opponent = "sample" if arguments.of == "sample" else arguments.against or "sft"
    review = open_review(arguments.run, arguments.home, opponent, arguments.endpoint)
    if arguments.votes is None:
        output = Path(arguments.output) if arguments.output else None
        page, shown = review.write_page(output, arguments.pairs)
        print(printable(f"{shown} pairs: open {page} in a browser, vote and save the votes, then"))
        command = votes_command(arguments.run, arguments.home, opponent, arguments.endpoint)
        print(printable(f"  {command}"))
        return 0
    _print_recorded(review.opponent, record_votes(review, Path(arguments.votes)))
    return 0


def _print_recorded(opponent: Opponent, done: Recorded) -> None:
    result = done.result
    if (rate := result.win_rate) is not None:
        print(
            f"win rate of the policy over {_OPPONENTS[opponent]}:"
            f" {rate.mean:.3f} [{rate.low:.3f}, {rate.high:.3f}] on {len(result.voted)} pairs"
        )
    print(f"recorded: {result.files} files, {result.people} people, {result.votes} votes")
    judge = "none" if result.judge_agreement is None else f"{result.judge_agreement:.3f}"
    people = "none, because no pair has votes of two people"
    if result.agreement is not None:
        people = f"{result.agreement:.3f} on {result.shared} pairs"
    print(f"agreement with the judge of the run: {judge}; of people: {people}")
    print(printable(f"{done.rows} preference rows for data.preference: {done.file}"))
    print(printable(f"MLflow: run {done.mlflow_run_id}" if done.mlflow_run_id else "not recorded in MLflow"))
