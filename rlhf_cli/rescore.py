"""The command `rlhf rescore`: another reward of recorded responses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError


@app.command(group=LOOK)
def _rescore(
    run: str,
    /,
    *,
    rewards: Annotated[Path, Parameter(metavar="FILE")],
    name: str | None = None,
    steps: Annotated[str | None, Parameter(metavar="A:B|A,B,...")] = None,
    limit: int | None = None,
    against: Annotated[str, Parameter(metavar="COLUMN")] = "total",
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
        name: Name of the annotation (default: that of the file).
        steps: Steps, such as 10:20 or 1,5,9 (default: all).
        limit: Number of prompts of each step (default: all).
        against: Column of the record to compare with, such as reward/model.
        model: Reward model of type model: a reward artifact or a folder (default: that of the run).
        output: Also write the comparison to a file .html or .json.
    """
    from rich.console import Console

    from rlhf_core.executors.environment import stage_environment
    from rlhf_core.ops.finished_run import find_run
    from rlhf_core.system.files import write_atomic, write_json

    if output is not None and output.suffix not in (".html", ".json"):
        raise InputError(f"--output: must end with .html or .json; got {output}; rename it")
    if limit is not None and limit < 1:
        raise InputError(f"--limit: must be at least 1; got {limit}")
    found = find_run(run, home, endpoint)
    chosen = _numbers(steps)
    os.environ.update(stage_environment(found.config("ppo")))  # read when torch is imported
    from rlhf_core.ops.rescore import rescore, tables

    rescored = rescore(
        found,
        str(rewards),
        name=name,
        steps=chosen,
        limit=limit,
        against=against,
        model=model,
        track=_track,
    )
    page = output is not None and output.suffix == ".html"
    console = Console(record=page, highlight=False, soft_wrap=not sys.stdout.isatty())
    for each in tables(rescored.comparison):
        console.print(each)
    if rescored.failed:
        console.print(f"{rescored.failed} responses have no value")
    if rescored.impure:
        console.print(f"another call can give other values: {', '.join(rescored.impure)} (pure: false)")
    print(printable(f"annotation: {rescored.address}"))
    if output is not None:
        if page:
            write_atomic(output, console.export_html())
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


def _numbers(text: str | None) -> list[int] | None:
    """Return the numbers of `10:20`, with both ends, or of `1,5,9`. Raises InputError."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        if colon:
            return list(range(int(first), int(last) + 1))
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise InputError(f"--steps: must be such as 10:20 or 1,5,9; got {text[:40]!r}; correct it") from error
