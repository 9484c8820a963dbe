"""The command `rlhf prune`: deletes artifacts and checkpoints that nothing needs any more."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, RUNS, Config, HomeFolder, Overrides, app, usage
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_core.config import PipelineConfig
    from rlhf_core.ops.prune.prune import Plan


@app.command(group=RUNS, usage=usage("prune", "[CONFIG] "))
def _prune(
    config: Config | None = None,
    /,
    *overrides: Overrides,
    older_than: Annotated[str, Parameter(metavar="DAYS")] = "90d",
    delete: bool = False,
    home: HomeFolder | None = None,
) -> int:
    """Show what nothing needs any more; --delete deletes it.

    CONFIG says where the runs are. Without it, they are in --home (default: .rlhf).

    Example: rlhf prune my.yaml --older-than 90d --delete

    Args:
        older_than: Age up to which everything is kept.
        delete: Delete. Without it, nothing is changed.
    """
    from rich.console import Console

    from rlhf_core.ops.prune.prune import Pruning, describe_folder, parse_age
    from rlhf_core.storage.bundles import readable_size

    age = parse_age(older_than)
    pruning = Pruning.of(
        _config(config, overrides, home), age, field="--home" if config is None else "run.home"
    )
    plan = pruning.plan()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    total, count = sum(item.size for item in plan.deleted), len(plan.deleted)
    folder = pruning.home.path
    if not delete:
        if plan.deleted:
            console.print(_table_of_deleted(plan))
        console.print(_table_of_kept(plan))
        print(f"would be deleted: {count}, {readable_size(total)}")
        if plan.deleted:
            print("nothing was changed; the same command with --delete deletes")
        print(printable(describe_folder(folder)))
        return 0
    if plan.deleted:
        # Not for a plan, which deletes nothing: the ages follow from two clocks.
        pruning.check_clock()
    freed = done = 0
    for item, deleted in pruning.delete(plan):
        freed, done = freed + item.size * deleted, done + deleted
        state = "deleted" if deleted else "kept, because it has changed in the meantime"
        print(printable(f"{item.label}, {readable_size(item.size)}: {state}"), flush=True)
    console.print(_table_of_kept(plan))
    print(f"deleted: {done}, {readable_size(freed)}")
    print(printable(describe_folder(folder)))
    return 0


def _config(config: str | None, overrides: tuple[str, ...], home: str | None) -> PipelineConfig:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.load import load_config
    from rlhf_core.system.home import Home

    if config is not None:
        if home is not None:
            raise InputError("--home: CONFIG has run.home; leave one of them out")
        return load_config(config, overrides)
    folder = Home.of(home or HOME)
    return PipelineConfig.model_validate({"run": {"home": str(folder.path)}})


def _table_of_deleted(plan: Plan) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from rlhf_core.ops.prune.prune import DAY
    from rlhf_core.storage.bundles import readable_size

    table = Table(title="to be deleted")
    for column in ("what", "of", "age", "size", "why"):
        table.add_column(column, justify="right" if column in ("age", "size") else "left", overflow="fold")
    for item in plan.deleted:
        date = age = ""
        if item.since is not None:
            date = f"{datetime.fromtimestamp(item.since, UTC):%Y-%m-%d}"
            age = f"{(plan.known.now - item.since) / DAY:.0f} d"
        table.add_row(escape(item.label), date, age, readable_size(item.size), item.unused)
    return table


def _table_of_kept(plan: Plan) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from rlhf_core.storage.bundles import readable_size

    table = Table(title="kept")
    for column, justify in (("why", "left"), ("count", "right"), ("size", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    described = plan.describe_kept()
    for reason, (count, size) in plan.count_kept().items():
        table.add_row(f"{reason.value}\n  {escape(described[reason])}", str(count), readable_size(size))
    return table
