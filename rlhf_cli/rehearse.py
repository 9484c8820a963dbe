"""The command `rlhf rehearse`: a run as a whole on this machine's CPU, before GPUs are booked."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rlhf_cli.app import BEFORE, Config, Overrides, app, usage

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_core.ops.rehearse.rehearse import Rehearsal


@app.command(group=BEFORE, usage=usage("rehearse"))
def _rehearse(
    config: Config,
    /,
    *overrides: Overrides,
    model: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    gpus: Annotated[str | None, Parameter(metavar="8xA100-80G")] = None,
    folder: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    seconds: float = 3600,
    checks: bool = False,
) -> int:
    """Run the whole configuration on this CPU with a small model, few rows and one kill.

    The exit code is 2 if something would fail.

    Example: rlhf rehearse production.yaml --model ./llama --gpus 8xA100-80G

    Args:
        model: Folder with config.json and tokenizer of a model that is not on this machine.
        gpus: GPUs of the run, for what rlhf plan says.
        folder: Keep model, rows, logs and artifacts here (default: a temporary folder, which is kept only if
            something failed).
        seconds: Limit of the run.
        checks: Only make the checks before the run.
    """
    from rich.console import Console

    from rlhf_core.errors import InputError
    from rlhf_core.ops.rehearse.rehearse import rehearse

    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise InputError(f"--folder: {folder} must be empty; name another")
    place = Path(tempfile.mkdtemp(prefix="rehearsal-")) if folder is None else folder.absolute()
    place.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    found = rehearse(
        config,
        overrides,
        place,
        [] if checks else [sys.executable, "-m", "rlhf_cli.main", "run"],
        model=model,
        gpus=gpus,
        seconds=seconds,
        say=lambda text: console.print(f"rehearsing: {text}", markup=False),
    )
    _show(found, console)
    if found.problems:
        console.print(f"files of the rehearsal: {place}", markup=False)
        return InputError.exit_code
    if folder is None:
        shutil.rmtree(place)
    return 0


def _show(found: Rehearsal, console: Console) -> None:
    """Print what was exercised, what was not, what would fail, the first step, and the plan."""
    from rich.markup import escape
    from rich.table import Table

    exercised = Table("exercised", "how", title_justify="left")
    for what, how in {**found.rows, **found.exercised}.items():
        exercised.add_row(escape(what), escape(how))
    console.print(exercised)
    missed = Table("not exercised", "because of")
    for change in found.changes:
        if change.missed is not None:
            missed.add_row(escape(change.missed), escape(_setting(change.field, change.used)))
    console.print(missed)
    smaller = [
        f"{change.field} {_short(change.given)} → {_short(change.used)}"
        for change in found.changes
        if change.missed is None
    ]
    console.print(f"smaller: {', '.join(smaller)}", markup=False)
    if found.first_step:
        first = Table("first step of PPO", "value")
        for name, value in found.first_step.items():
            first.add_row(name, f"{value:.4g}")
        console.print(first)
    plan = Table("compared", "rlhf plan", "seen")
    for row in found.plan:
        plan.add_row(*map(escape, row))
    console.print(plan)
    problems = Table("would fail")
    for problem in found.problems or ["nothing was found"]:
        problems.add_row(escape(problem))
    console.print(problems)
    console.print(f"{found.seconds:.0f} s, {found.cpu_seconds:.0f} s of CPU time")


def _setting(field: str, value: object) -> str:
    return f"{field}={_short(value)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
