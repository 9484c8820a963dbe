"""The command `rlhf tune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rlhf_cli.app import BEFORE, Config, Overrides, RunHome, app, usage, with_home

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_core.ops.tune import Tuned


@app.command(group=BEFORE, usage=usage("tune"))
def _tune(
    config: Config,
    /,
    *overrides: Overrides,
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("tuned.yaml"),
    home: RunHome = None,
) -> int:
    """Measure settings of PPO, and write the fastest.

    Example: rlhf tune my.yaml --out tuned.yaml

    Args:
        out: New YAML file.
    """
    from rich.console import Console

    from rlhf_core.executors.environment import stage_environment
    from rlhf_core.logs import set_up_logging
    from rlhf_core.ops.tune import tune
    from rlhf_core.run.checks import load_and_check
    from rlhf_core.system.home import Home

    overrides = with_home(overrides, home)
    checked = load_and_check(config, overrides).config
    set_up_logging(Home.of(checked.run.home))
    os.environ.update(stage_environment(checked))  # PPO runs in this process
    tuned = tune(config, overrides, out)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(tuned))
    if any(change.startswith("ppo.staleness") for change in tuned.best.changes):
        console.print("ppo.staleness changes the results of ppo (docs/tuning.md)")
    console.print(f"fastest: {tuned.best.label}", markup=False)
    console.print(f"configuration: {tuned.file}", markup=False)
    return 0


def _table(tuned: Tuned) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="seconds of a PPO step, median of 3")
    phases = ("rollout", "scoring", "training", "sync")
    for column in ("settings", "step", *phases):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for trial in tuned.trials:
        label = escape(trial.label)
        if trial.seconds is None:
            table.add_row(label, "-", escape(trial.problem))
            continue
        times = [f"{trial.phases[phase]:.3f}" for phase in phases]
        table.add_row(label, f"{trial.seconds:.3f}", *times)
    return table
