"""The commands `rlhf replay` and `rlhf blame`: a step of PPO again, and the responses behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

Quantity = Literal["reward", "kl", "loss", "value"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.ops.finished_run import FinishedRun
    from rlhf_core.ops.first_difference import Difference

DIFFERS = 1
"""Exit code if there is a difference, as of `diff`."""


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
    from rlhf_core.ops.finished_run import find_run

    return print_replay(find_run(run, home, endpoint), step, keep)


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
    from rlhf_core.ops.finished_run import find_run

    finished = find_run(run, home, endpoint)
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
    from rlhf_core.ops.blamed_rows import lost_items

    items, count = lost_items(run, name)
    print(printable(f"{name}: the policy lost {len(items)} of {count} items against the SFT model"))
    for item in items[:top]:
        before, after = item.scores
        print(printable(f"item {item.share:.1%} ({before:.4g} -> {after:.4g}): {_start(item.prompt)}"))
        for who, text in zip(("SFT model", "policy"), item.responses, strict=True):
            print(printable(f"    {who}: {_start(text)}"))
    return 0


def _print_rows(run: FinishedRun, stage: Literal["sft", "reward", "judge", "dpo"], step: int) -> int:
    from rlhf_core.ops.blamed_rows import trained_rows

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
    from rlhf_core.executors.environment import stage_environment
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
