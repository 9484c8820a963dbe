"""The command `rlhf review`: people compare answers of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, RUNS, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.evaluation.review import Opponent
    from rlhf_core.ops.review import Recorded

_OPPONENTS: dict[Opponent, str] = {"sft": "the SFT model", "champion": "the champion"}


@app.command(group=RUNS)
def _review(
    run: str,
    /,
    *,
    votes: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    output: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    of: Literal["evaluation", "sample"] = "evaluation",
    against: Literal["sft", "champion"] | None = None,
    pairs: int | None = None,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Write a page where people vote blindly, or read its votes.

    Example: rlhf review demo-seed0-46d9a620

    Args:
        run: Name of a finished run, or the path of its summary.json.
        votes: Votes that the page saved: record them, and count all that are recorded.
        output: The page (default: review/against-sft.html in the run's folder).
        of: Answers of the evaluation, or of the stage sample, whose votes are data of the next run.
        against: The other model of the evaluation (default: sft).
        pairs: Pairs on the page of --of sample (default: 50).
    """
    from rlhf_core.ops.review import open_review, record_votes, votes_command

    if of == "sample" and against is not None:
        raise InputError(
            f"--against: got {against} with --of sample, whose answers are all of the policy; leave"
            " one of them out"
        )
    if votes is not None and pairs is not None:
        raise InputError(f"--pairs: got {pairs} with --votes, whose file has the number; leave it out")
    opponent: Opponent = "sample" if of == "sample" else against or "sft"
    review = open_review(run, home, opponent, endpoint)
    if votes is None:
        page, shown = review.write_page(output, pairs)
        print(printable(f"{shown} pairs: open {page} in a browser, vote and save the votes, then"))
        command = votes_command(run, home, opponent, endpoint)
        print(printable(f"  {command}"))
        return 0
    _print_recorded(review.opponent, record_votes(review, votes))
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
