"""Commands that make runs, and what follows them: `rlhf run`, `rounds`, `review`, `prune`."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, RUNS, Config, Endpoint, HomeFolder, Overrides, RunHome, app, usage, with_home
from rlhf_core.config.redact import printable
from rlhf_core.errors import EXIT_VOTES, InputError
from rlhf_core.logs import set_up_logging
from rlhf_core.pipeline import END_OF_ROUND, FIRST_STAGE, LAST_STAGE, EndOfRound, StageName
from rlhf_core.system.home import Home

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_core.config import PipelineConfig
    from rlhf_core.evaluation.review import Opponent
    from rlhf_core.ops.prune import Plan
    from rlhf_core.ops.retention import Item
    from rlhf_core.ops.review import Recorded
    from rlhf_core.ops.rounds import Rounds
    from rlhf_core.run.display import Display

log = logging.getLogger(__name__)

_OPPONENTS: dict[Opponent, str] = {"sft": "the SFT model", "champion": "the champion"}


@app.command(group=RUNS, usage=usage("run"))
def _run(
    config: Config,
    /,
    *overrides: Overrides,
    start: Annotated[StageName, Parameter(name="--from")] = FIRST_STAGE,
    until: StageName = LAST_STAGE,
    home: RunHome = None,
) -> int:
    """Run the pipeline on this machine; no server is needed.

    The same command continues a run that was stopped.

    Example: rlhf run my.yaml run.seed=1 ppo.kl.coef=0.02 --until reward

    Args:
        start: First stage; those before it must have been made already.
        until: Last stage.
    """
    from rlhf_core.ops.api import run_file
    from rlhf_core.pipeline import stages_between
    from rlhf_core.run.checks import load_and_check, remember_check
    from rlhf_core.run.display import showing_progress

    # Only for its error, before anything is read.
    stages_between(start, until)
    overrides = with_home(overrides, home)
    checked = load_and_check(config, overrides, start=start, until=until)
    remember_check(checked)
    run = checked.config.run
    folder = Home.of(run.home)
    console = set_up_logging(folder)
    log.info("%s, seed %d: starting", run.name, run.seed)
    parameters: dict[str, Any] = {"config": config, "overrides": overrides, "start": start, "until": until}
    with showing_progress(console) as display:
        summary = _run_flow(parameters, display) if use_prefect(folder) else run_file(**parameters)
    _print_results(summary, folder)
    return 0


def _run_flow(parameters: dict[str, Any], display: Display) -> dict[str, Any]:
    """Run the flow in this process, and return its summary."""
    import httpx

    from flows.rlhf import rlhf

    try:
        summary: dict[str, Any] = rlhf(**parameters)
    except httpx.HTTPError as error:  # of Prefect's client
        if display.summary is None:
            raise
        # Only the flow's last state could not be reported. All results are stored.
        log.warning("all stages are done, but Prefect's server did not take that (%s)", type(error).__name__)
        return display.summary
    return summary


def _print_results(summary: dict[str, Any], home: Home) -> None:
    from rich.console import Console

    from rlhf_core.run.summary import result_table, stage_table, verdict

    # In a file or a pipe, rich would break lines at 80 characters.
    output = Console(soft_wrap=not sys.stdout.isatty())
    if line := verdict(summary):
        print(line)
    output.print(stage_table(summary))
    if (found := result_table(summary)).row_count:
        output.print(found)
    for name, address in summary["where"].items():
        print(f"{name}: {address}")
    if "version" in (registered := summary.get("registration", {})):
        print(f"model folder: rlhf publish {registered['model']}@{registered['version']} FOLDER")
    print(f"summary: {home.run(summary['run']) / 'summary.json'}")


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
    from rlhf_core.ops.rounds import check_first_round, check_rounds, run_rounds_of_file
    from rlhf_core.run.display import showing_progress

    check_rounds(rounds)
    overrides = with_home(overrides, home)
    checked = check_first_round(config, overrides, until).config
    folder = Home.of(checked.run.home)
    console = set_up_logging(folder)
    log.info("%s, seed %d: %d rounds", checked.run.name, checked.run.seed, rounds)
    parameters: dict[str, Any] = {"config": config, "number": rounds, "overrides": overrides, "until": until}
    with showing_progress(console):
        done = _rounds_flow(parameters) if use_prefect(folder) else run_rounds_of_file(**parameters)
    return print_end(done)


def _rounds_flow(parameters: dict[str, Any]) -> Rounds:
    from flows.rounds import rounds
    from rlhf_core.ops.rounds import Rounds

    done = rounds(**parameters)
    assert isinstance(done, Rounds)  # Prefect returns the data of a state
    return done


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


@app.command(group=RUNS, usage=usage("prune", "[CONFIG] "))
def _prune(
    config: Config | None = None,
    /,
    *overrides: Overrides,
    older_than: Annotated[str, Parameter(metavar="DAYS")] = "90d",
    also: Annotated[tuple[str, ...], Parameter(metavar="KIND=DAYS")] = (),
    delete: bool = False,
    home: HomeFolder | None = None,
) -> int:
    """Show what nothing needs any more; --delete deletes it.

    CONFIG says where the runs are. Without it, they are in --home (default: .rlhf).

    Example: rlhf prune my.yaml --older-than 90d --delete

    Args:
        older_than: Age up to which everything is kept.
        also: Delete what is older of data, evaluations, mlflow, runs or logs, too; can be repeated.
        delete: Delete. Without it, nothing is changed.
    """
    from rich.console import Console

    from rlhf_core.ops.prune import Pruning, parse_age, parse_kinds
    from rlhf_core.storage.bundles import readable_size

    age, kinds = parse_age(older_than), parse_kinds(also)
    field = "--home" if config is None else "run.home"
    pruning = Pruning.of(_config(config, overrides, home), age, kinds, field)
    plan = pruning.plan()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    total, count = sum(item.size for item in plan.deleted), len(plan.deleted)
    console.print(_table_of(plan))
    if not delete:
        for item in plan.deleted:
            print(printable(f"{item.label}, {readable_size(item.size)}: would be deleted, {item.unused}"))
        print(f"would be deleted: {count}, {readable_size(total)}")
        if plan.deleted:
            print("nothing was changed; the same command with --delete deletes")
        return 0
    if plan.deleted:
        # Not for a plan, which deletes nothing: the ages follow from two clocks.
        pruning.check_clock()
    freed = done = 0
    for item, deleted in pruning.delete(plan):
        freed, done = freed + item.size * deleted, done + deleted
        state = "deleted" if deleted else "kept, because it has changed in the meantime"
        # One line for each, at once: what an interrupted command has deleted must be known.
        print(printable(f"{item.label}, {readable_size(item.size)}: {state}"), flush=True)
    print(f"deleted: {done}, {readable_size(freed)}")
    return 0


def _config(config: str | None, overrides: tuple[str, ...], home: str | None) -> PipelineConfig:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.load import load_config

    if config is not None:
        if home is not None:
            raise InputError("--home: CONFIG has run.home; leave one of them out")
        return load_config(config, overrides)
    folder = Home.of(home or HOME)
    return PipelineConfig.model_validate({"run": {"home": str(folder.path)}})


def _table_of(plan: Plan) -> Table:
    """Return what there is, by kind and by the reason for which it is kept."""
    from rich.markup import escape
    from rich.table import Table

    from rlhf_core.ops.retention import Reason
    from rlhf_core.storage.bundles import readable_size

    table = Table()
    for column in ("what", "count", "size", "age", "", "why"):
        table.add_column(column, justify="right" if column in ("count", "size", "age") else "left")
    for (kind, reason), items in plan.groups().items():
        size = readable_size(sum(item.size for item in items))
        state, why = ("goes", items[0].unused) if reason is None else ("stays", reason.value)
        if reason is Reason.VERSION:
            why += f": {escape(', '.join(plan.versions(items)))}"
        table.add_row(kind, str(len(items)), size, _ages(plan, items), state, why)
    return table


def _ages(plan: Plan, items: Sequence[Item]) -> str:
    """Return the days of the youngest and of the oldest; empty if no age is known."""
    from rlhf_core.ops.prune import DAY

    since = [item.since for item in items if item.since is not None and math.isfinite(item.since)]
    if not since:
        return ""
    youngest, oldest = ((plan.known.now - each) / DAY for each in (max(since), min(since)))
    return f"{max(0, youngest):.0f} to {oldest:.0f} d"


def use_prefect(home: Home) -> bool:
    """Return whether a Prefect server responds that shows the runs of this command: the one at
    PREFECT_API_URL, or that of `rlhf up` for the same home. Prefect's client then uses it.

    Prefect must not be imported before, because its import reads the settings that are made here.
    """
    from flows.isolated import client_headers, isolate_prefect
    from rlhf_core.executors.spec import past_proxies
    from rlhf_core.ops.servers.servers import (
        external_prefect_url,
        prefect_responds,
        use_auth_string,
        use_servers,
    )
    from rlhf_core.system.environment import NO_TELEMETRY

    os.environ.update(past_proxies() | NO_TELEMETRY)
    # Before the address is asked for: the servers of `rlhf up` for this home set it in the environment.
    use_servers(home)
    url = external_prefect_url()
    if url is not None:
        use_auth_string(home, url)
        if prefect_responds(url, client_headers):
            isolate_prefect()
            return True
        log.warning("no Prefect server answers at %s: this run is not shown there", url)
    if os.environ.get("RLHF_NOTIFY"):
        log.warning("RLHF_NOTIFY: no message is sent, because its block is in a Prefect server")
    return False
