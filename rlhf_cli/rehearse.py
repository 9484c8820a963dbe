"""The command `rlhf rehearse`: a run as a whole on this machine's CPU, before GPUs are booked."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
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
    _show(found, config, "the checks pass" if checks else "would run", console)
    if found.problems:
        console.print(f"files of the rehearsal: {place}", markup=False)
        return InputError.exit_code
    if folder is None:
        shutil.rmtree(place)
    return 0


def _show(found: Rehearsal, config: str, passed: str, console: Console) -> None:
    """Print whether it would run, what would fail, what was not exercised, and what was."""
    count = len(found.problems)
    verdict = f"{count} problem{'s' if count > 1 else ''}" if count else passed
    used = f"{found.seconds:.0f} s, {found.cpu_seconds:.0f} s of CPU time"
    console.print(f"{verdict}: {config}; {used}", markup=False)
    _table(console, ("would fail",), [(problem,) for problem in found.problems])
    _table(console, ("warnings of rlhf plan",), [(warning,) for warning in found.warnings])
    missed: dict[str, list[str]] = {}
    for change in found.changes:
        missed.setdefault(change.missed or "", []).append(f"{change.field}={_short(change.used)}")
    smaller = missed.pop("", [])
    _table(console, ("not exercised", "because of"), [(what, ", ".join(why)) for what, why in missed.items()])
    _table(console, ("exercised", "how"), list(found.exercised.items()))
    _table(console, ("", "rlhf plan", "seen"), [(what, *both) for what, both in found.plan.items()])
    step = [(name, f"{value:.4g}") for name, value in found.first_step.items()]
    _table(console, ("first step of PPO", "value"), step)
    console.print(f"other settings of the rehearsal: {', '.join(smaller)}", markup=False)


def _table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    if rows:
        console.print(table)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
