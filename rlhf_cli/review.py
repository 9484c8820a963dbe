"""The command `rlhf review`: people compare the answers of a run's evaluation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.config.redact import printable

_OPPONENTS = {"sft": "the SFT model", "champion": "the champion"}


def add_review_command(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser. `add_command` is the function of `rlhf_cli.main`."""
    text = "write a page of blind pairs for people, or read its votes"
    sub = add_command(commands, "review", text, _review, "rlhf review demo-seed0-46d9a620")
    sub.add_argument("run", metavar="RUN", help="name of a finished run, or the path of its summary.json")
    sub.add_argument("--votes", metavar="FILE", help="votes that the page saved: count and record them")
    sub.add_argument(
        "--output", metavar="FILE", help="the page (default: review/against-sft.html in the run's folder)"
    )
    sub.add_argument(
        "--against",
        choices=("sft", "champion"),
        default="sft",
        help="the other model: samples of the evaluation, or of the match (default: %(default)s)",
    )
    sub.add_argument("--endpoint", help="of an S3-compatible store, such as http://127.0.0.1:9000")
    sub.add_argument("--home", default=".rlhf", help="folder of the runs (default: %(default)s)")


def _review(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.review import open_review, record_votes

    review = open_review(arguments.run, arguments.home, arguments.against, arguments.endpoint)
    if arguments.votes is None:
        page = review.write_page(Path(arguments.output) if arguments.output else None)
        print(
            printable(f"{len(review.pairs)} pairs: open {page} in a browser, vote and save the votes, then")
        )
        more = "" if arguments.against == "sft" else " --against champion"
        print(printable(f"  rlhf review {arguments.run} --home {arguments.home}{more} --votes FILE"))
        return 0
    done = record_votes(review, Path(arguments.votes))
    result = done.result
    rate, verdicts = result.win_rate, result.verdicts
    print(
        f"win rate of the policy over {_OPPONENTS[review.opponent]}:"
        f" {rate.mean:.3f} [{rate.low:.3f}, {rate.high:.3f}] by {done.votes} votes ({verdicts.wins} wins,"
        f" {verdicts.losses} losses, {verdicts.ties} ties); p = {verdicts.p_value:.2g}"
    )
    print(f"agreement with the judge of the run: {result.judge_agreement:.3f}")
    left_out = f"; {done.left_out} without, because their prompt is a conversation" if done.left_out else ""
    print(printable(f"{done.rows} preference rows for data.preference: {done.file}{left_out}"))
    print(printable(f"MLflow: run {done.mlflow_run_id}" if done.mlflow_run_id else "not recorded in MLflow"))
    return 0
