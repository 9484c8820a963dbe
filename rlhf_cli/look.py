"""Commands that look into finished runs: `rlhf compare`, `inspect`, `pass-rates`, `rescore`, `replay`,
`blame`, `why`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, RunHome, app, usage, with_home
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.ops.finished_run import FinishedRun
    from rlhf_core.ops.first_difference import Difference

Quantity = Literal["reward", "kl", "loss", "value"]
DIFFERS = 1
"""Exit code if there is a difference, as of `diff`."""
_YAML = (".yaml", ".yml")


def _find(run: str, home: str, endpoint: str | None) -> FinishedRun:
    from rlhf_core.ops.finished_run import find_run

    return find_run(run, home, endpoint)


@app.command(group=LOOK)
def _compare(
    *runs: str,
    html: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    json: bool = False,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Show what differs between runs, and whether their results do.

    Example: rlhf compare demo-seed0-46d9a620 demo-seed0-1c38a75c --html comparison.html

    Args:
        runs: Names of finished runs, or paths of their summary.json; the first one is compared with.
        html: Also write a page with the curves.
        json: Print everything as JSON.
    """
    from rlhf_core.ops.compare import compare, render, show
    from rlhf_core.system.files import write_atomic

    found = compare(runs, home, endpoint)
    if json:
        # The option `json` hides the module in this function.
        from json import dumps

        print(dumps(found.to_json(), indent=2))
    else:
        from rich.console import Console

        show(found, Console(soft_wrap=not sys.stdout.isatty()))
    if html is not None:
        write_atomic(html, render(found))
        if not json:
            print(printable(f"page: {html}"))
    return 0


@app.command(group=LOOK)
def _inspect(
    run: str | None = None,
    other: Annotated[str | None, Parameter(name="RUN2")] = None,
    /,
    *,
    export: Annotated[Path | None, Parameter(metavar="FILE.html")] = None,
    step: int | None = None,
    port: int = 0,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Show the recorded responses of PPO, evaluation, match and sample in a browser.

    Example: rlhf inspect demo-seed0-46d9a620

    Args:
        run: Name of a finished run, or the path of its summary.json (default: the newest one).
        other: A second run, shown beside the first on the same prompts.
        export: Write one step of PPO as a file that needs no server, instead of serving pages.
        step: Step of --export (default: the last one).
        port: Port on this machine; 0 takes any that is free.
    """
    from rlhf_core.ops.finished_run import newest_run
    from rlhf_core.ops.inspect.rollouts import recorded_runs

    if step is not None and export is None:
        raise InputError(f"--step: got {step} without --export; give a file, or choose the step on the page")
    if export is not None and other is not None:
        raise InputError(f"--export: writes one run; got {other} as well")
    found = [_find(name, home, endpoint) for name in (run or newest_run(home), other) if name]
    kinds = recorded_runs(found)
    # After the runs were found: a misspelled name is answered without the import of a web server.
    from rlhf_core.ops.inspect.server import export as write_step
    from rlhf_core.ops.inspect.server import serve

    if export is not None:
        if "ppo" not in kinds:
            raise InputError(f"--export: {found[0].name} has no recorded steps of PPO; leave --export out")
        written = write_step(kinds["ppo"][0], step, export)
        print(printable(f"step {written} of {found[0].name}: {export}"))
        return 0
    with suppress(KeyboardInterrupt):  # the normal end
        serve(kinds, port, ready=lambda url: print(f"open {url} in a browser; Ctrl-C ends", flush=True))
    return 0


@app.command(group=LOOK)
def _pass_rates(
    run: str,
    /,
    *,
    output: Annotated[Path, Parameter(metavar="FILE")],
    stage: Literal["ppo", "sample"] = "ppo",
    column: str = "score",
    at_least: float = 1.0,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Write the prompts of a run with the share of their recorded responses that pass.

    Example: rlhf pass-rates math-seed0-46d9a620 --column reward/answer --output rated.jsonl

    Args:
        run: Name of a finished run, or the path of its summary.json.
        output: JSONL file for data.prompts, with the fields pass_rate and sampled (number of responses).
        stage: The stage whose recorded responses count.
        column: Column of the record with the value of a response.
        at_least: A response with this value or a higher one passes.
    """
    from rlhf_core.ops.pass_rates import write_pass_rates

    found = write_pass_rates(_find(run, home, endpoint), stage, column, at_least, output)
    print(printable(f"{output}: {found.rated} prompts with a pass rate, {found.unrated} without"))
    print(f"{found.useful} are neither always nor never solved")
    if found.left_out:
        print(f"left out, because they have several messages: {found.left_out}")
    return 0


@app.command(group=LOOK)
def _rescore(
    run: str,
    /,
    *,
    rewards: Annotated[Path, Parameter(metavar="FILE")],
    kind: Literal["ppo", "evaluation"] = "ppo",
    name: str | None = None,
    steps: Annotated[str | None, Parameter(metavar="A:B|A,B,...")] = None,
    limit: int | None = None,
    against: Annotated[str | None, Parameter(metavar="COLUMN")] = None,
    model: Annotated[str | None, Parameter(metavar="ADDRESS")] = None,
    output: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Score the recorded responses of a run with another reward, and compare.

    Example: rlhf rescore demo-seed0-46d9a620 --rewards gold.yaml

    Args:
        run: Name of a finished run, or the path of its summary.json.
        rewards: YAML file with the section rewards, as ppo.rewards; or a Python file with a function score.
        kind: Responses of PPO, or the answers of all models to held-out prompts (evaluation).
        name: Name of the annotation (default: that of the file).
        steps: Steps, such as 10:20 or 1,5,9 (default: all).
        limit: Number of prompts of each step (default: all).
        against: Column of the record to compare with, such as reward/model (default: total; of the
            evaluation, score).
        model: Reward model of type model: a reward artifact or a folder (default: that of the run).
        output: Also write the comparison to a file .html or .json.
    """
    from rich.console import Console

    from rlhf_core.executors.spec import stage_environment
    from rlhf_core.ops.finished_run import STAGE_OF_KIND
    from rlhf_core.system.files import write_atomic, write_json

    if output is not None and output.suffix not in (".html", ".json"):
        raise InputError(f"--output: must end with .html or .json; got {output}; rename it")
    if limit is not None and limit < 1:
        raise InputError(f"--limit: must be at least 1; got {limit}")
    if kind != "ppo" and steps is not None:
        raise InputError(f"--steps: chooses steps of PPO; got {steps} with --kind {kind}; leave it out")
    found = _find(run, home, endpoint)
    chosen = _numbers(steps)
    os.environ.update(stage_environment(found.config(STAGE_OF_KIND[kind])))  # read when torch is imported
    from rlhf_core.ops.rescore import rescore, tables, verdict
    from rlhf_core.ops.tables import render, show

    rescored = rescore(
        found,
        str(rewards),
        kind=kind,
        name=name,
        steps=chosen,
        limit=limit,
        against=against,
        model=model,
        track=_track,
    )
    # In a file or a pipe, rich would break the lines at 80 characters.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    said, shown = verdict(rescored.comparison), tables(rescored.comparison)
    show(said, shown, console)
    if rescored.failed:
        console.print(f"{rescored.failed} responses have no value")
    if rescored.impure:
        console.print(f"another call can give other values: {', '.join(rescored.impure)} (pure: false)")
    print(printable(f"annotation: {rescored.address}"))
    if output is not None:
        if output.suffix == ".html":
            write_atomic(output, render(f"rewards of {rewards.name}", [found.name], said, shown))
        else:
            # JSON has no NaN.
            text = json.dumps(asdict(rescored.comparison))
            write_json(output, json.loads(text, parse_constant=lambda _: None))
        print(printable(f"comparison: {output}"))
    return 0


def _track(steps: Sequence[int]) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import track

    return track(steps, "steps", console=Console(stderr=True), transient=True)


def _numbers(text: str | None) -> Collection[int] | None:
    """Return the numbers of `10:20`, with both ends, or of `1,5,9`. Raises InputError."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        if colon:
            return range(int(first), int(last) + 1)
        return list(map(int, text.split(",")))
    except ValueError as error:
        raise InputError(f"--steps: must be such as 10:20 or 1,5,9; got {text[:40]!r}; correct it") from error


@app.command(group=LOOK)
def _replay(
    run: str,
    /,
    *,
    step: int,
    keep: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Make a step of PPO again, and compare it with the record.

    Example: rlhf replay demo-seed0-46d9a620 --step 12

    Args:
        run: Name of a finished run, or the path of its summary.json.
        step: The last step; those before it are compared as well.
        keep: Keep record and checkpoint of the replay here; a replay of a later step continues from there.
    """
    return print_replay(_find(run, home, endpoint), step, keep)


@app.command(group=LOOK)
def _blame(
    run: str,
    /,
    *,
    step: int | None = None,
    of: Quantity = "reward",
    stage: Literal["sft", "reward", "judge", "dpo"] | None = None,
    regression: Annotated[str | None, Parameter(metavar="SET")] = None,
    top: int = 10,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Show the responses, prompts and sources behind a step of PPO; the rows of a step of another stage; or
    the items of a regression set that the policy lost.

    Example: rlhf blame demo-seed0-46d9a620 --step 12 --of kl

    Args:
        run: Name of a finished run, or the path of its summary.json.
        step: The step. One of PPO is compared with the ten before it.
        of: Of PPO: the score, the KL, the size of the advantages (loss), or the critic's squared errors
            (value).
        stage: Another stage that trains: all rows of its batch.
        regression: Name of a set of evaluate.regression, without --step.
        top: Number of responses and of prompts that are shown.
    """
    from rlhf_core.ops.blame import blame

    finished = _find(run, home, endpoint)
    if regression is not None:
        if step is not None or stage is not None:
            raise InputError("--regression: is of the evaluation; leave --step and --stage out")
        return _print_lost_items(finished, regression, top)
    if step is None:
        raise InputError("--step: is missing; give a step, or --regression SET")
    if stage is not None:
        return _print_rows(finished, stage, step)
    found = blame(finished, step, of)
    before = "nothing before it" if found.before is None else f"{found.before:.4g} in the steps before"
    print(f"step {step}: mean {of} {found.mean:.4g}, {before}")
    for name, (mean, earlier) in found.rewards.items():
        change = "" if earlier is None else f", {earlier:.4g} before"
        print(printable(f"reward {name}: {mean:.4g}{change}"))
    cut, earlier = found.cut
    print(f"cut at the limit: {cut:.0%}" + ("" if earlier is None else f", {earlier:.0%} before"))
    for name, share in found.sources.items():
        print(printable(f"source {name}: {share:.1%}"))
    for text, share in list(found.prompts.items())[:top]:
        print(printable(f"prompt {share:.1%}: {_start(text)}"))
    value = "" if of in ("reward", "kl") else f"{of} {{:.4g}}, "  # the others have a column of their own
    for each in found.responses[:top]:
        print(
            f"response {each.index}: {each.share:.1%} ({value.format(each.value)}score {each.score:.4g},"
            f" KL {each.kl:.4g}, {each.tokens} tokens)"
        )
        print(printable(f"    prompt: {_start(each.prompt)}"))
        print(printable(f"    response: {_start(each.response)}"))
    return 0


def _print_lost_items(run: FinishedRun, name: str, top: int) -> int:
    from rlhf_core.ops.blame import lost_items

    items, count = lost_items(run, name)
    print(printable(f"{name}: the policy lost {len(items)} of {count} items against the SFT model"))
    for item in items[:top]:
        before, after = item.scores
        print(printable(f"item {item.share:.1%} ({before:.4g} -> {after:.4g}): {_start(item.prompt)}"))
        for who, text in zip(("SFT model", "policy"), item.responses, strict=True):
            print(printable(f"    {who}: {_start(text)}"))
    return 0


def _print_rows(run: FinishedRun, stage: Literal["sft", "reward", "judge", "dpo"], step: int) -> int:
    from rlhf_core.ops.blame import trained_rows

    rows = trained_rows(run, stage, step)
    print(
        f"{stage}, step {step}: {len(rows)} rows; they are not ranked, because their losses are not recorded"
        " and the checkpoints of a finished stage are deleted"
    )
    for row in rows:
        print(printable(f"row {row.index} ({row.source or 'no source'}): {_start(row.texts[0])}"))
        for what, text in zip(("chosen", "rejected"), row.texts[1:], strict=False):
            print(printable(f"    {what}: {_start(text)}"))
    return 0


def _start(text: str) -> str:
    """Return the first 200 characters as one line."""
    return " ".join(text[:200].split())


def print_replay(run: FinishedRun, step: int, keep: Path | None = None) -> int:
    """Replay a run, and print the first difference. Return the exit code."""
    from rlhf_core.executors.spec import stage_environment
    from rlhf_core.logs import set_up_logging
    from rlhf_core.ops.replay import changed_since, replay

    set_up_logging(run.home)
    os.environ.update(stage_environment(run.config("ppo")))  # PPO runs in this process
    done = replay(run, step, keep)
    place = f"after step {done.start}" if done.start else "from the beginning"
    print(printable(f"{run.name}: {step - done.start} steps {place} in {done.seconds:.0f} s"))
    if done.difference is None:
        weights = "and the weights after it" if done.has_weights else "(weights after it are not recorded)"
        print(
            f"step {step}: {done.responses} responses, {done.columns} columns, {done.metrics} metrics"
            f" {weights}: equal"
        )
        if step > 1:
            print("the steps before it: equal")
    return print_difference(done.difference, changed_since(run))


def print_difference(found: Difference | None, differing: Mapping[str, tuple[Any, ...]]) -> int:
    """Print a difference, and what can explain it. Return the exit code."""
    if found is None:
        return 0
    print(printable(f"first difference: {found.describe()}"))
    causes = {name: pair for name, pair in differing.items() if found.can_be_explained_by(name)}
    if not causes:
        print("no setting, version or input that differs can explain it")
    for name, (one, other) in causes.items():
        print(printable(f"can explain it: {name}: {one} and {other}"))
    return DIFFERS


@app.command(group=LOOK, usage=f"{usage('why')}\n       rlhf why [OPTIONS] RUN [RUN2] --step N")
def _why(
    what: Annotated[str, Parameter(name="CONFIG")],
    /,
    *others: Annotated[str, Parameter(name="FIELD=VALUE")],
    step: int | None = None,
    endpoint: Endpoint = None,
    home: RunHome = None,
) -> int:
    """Show which stages a run would make again, or the first difference of two runs, and because of what.

    Nothing is started or written, unless RUN is alone: then its steps are made again, as by rlhf replay.

    Example: rlhf why my.yaml ppo.kl.coef=0.02

    Args:
        what: YAML file of a run; or the name of a finished run, or the path of its summary.json.
        others: Fields of CONFIG to override; or a second run.
        step: Compare the steps of PPO until this one.
    """
    if step is None:
        if Path(what).suffix not in _YAML and not Path(what).is_file():
            raise InputError(f"--step: {what} is no YAML file; to explain a run, give a step of PPO")
        return _print_outlooks(what, with_home(others, home))
    if Path(what).suffix in _YAML or len(others) > 1:
        got = " ".join([what, *others])
        raise InputError(f"--step: compares one or two finished runs; got {got}")
    run = _find(what, home or HOME, endpoint)
    if not others:
        return print_replay(run, step)
    return _print_runs(run, _find(others[0], home or HOME, endpoint), step)


def _print_outlooks(config: str, overrides: tuple[str, ...]) -> int:
    from rlhf_core.ops.why import forecast
    from rlhf_core.run.state import first_of

    found = forecast(config, overrides)
    made = [each.stage for each in found if each.verdict in ("continues", "runs")]
    stops = [each.stage for each in found if each.verdict == "stops"]
    if stops:
        print(f"the run would stop at {stops[0]}")
    else:
        print(f"{', '.join(made)} would run" if made else "all stages would be reused")
    for each in found:
        text = f"{each.stage:10}{each.verdict:11}{'; '.join(first_of(each.reasons))}"
        if each.compared is not None:
            created = each.compared.created[:16].replace("T", " ")
            text += f" (compared with {each.compared.ref.key} of {created} UTC)"
        print(printable(text.rstrip()))
    return 0


def _print_runs(one: FinishedRun, other: FinishedRun, step: int) -> int:
    from rlhf_core.ops.first_difference import Recording, conditions, differing, first_difference

    recording, compared = (Recording(run.recorded("ppo"), run.name) for run in (one, other))
    for each in (recording, compared):
        each.rollouts(step)  # is it recorded?
    print(printable(f"{one.name} and {other.name}"))
    found = first_difference(recording, compared, step)
    if found is None:
        print(f"steps 1 to {step}: equal")
    return print_difference(found, differing(conditions(one), conditions(other)))
