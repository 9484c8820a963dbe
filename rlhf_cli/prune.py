"""The command `rlhf prune`: deletes artifacts and checkpoints that nothing needs any more."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlhf_cli.app import add_command
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_core.config import PipelineConfig
    from rlhf_core.ops.prune.prune import Plan

_HOME = ".rlhf"


def add_prune_command(commands: Any) -> None:
    """Add the command to the parser."""
    text = "show which artifacts of old runs nothing needs any more, and delete them with --delete"
    example = "rlhf prune deployments/configs/demo.yaml --older-than 90d --delete"
    sub = add_command(commands, "prune", text, _prune, example)
    sub.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file with the store and the tracker of the runs"
    )
    sub.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="fields to override, such as store.url=s3://my-bucket/rlhf",
    )
    sub.add_argument(
        "--older-than",
        metavar="DAYS",
        default="90d",
        help="age up to which everything is kept (default: %(default)s)",
    )
    sub.add_argument("--delete", action="store_true", help="delete; without it, nothing is changed")
    sub.add_argument(
        "--home",
        help=f"without CONFIG: folder of the runs with their store and the database of MLflow (default:"
        f" {_HOME}); MLFLOW_TRACKING_URI overrides the database",
    )


def _prune(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from rlhf_core.ops.prune.prune import Pruning, parse_age
    from rlhf_core.storage.bundles import readable_size

    age = parse_age(arguments.older_than)
    config = _config(arguments)
    pruning = Pruning.of(config, age, field="--home" if arguments.config is None else "run.home")
    plan = pruning.plan()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    total, count = sum(item.size for item in plan.deleted), len(plan.deleted)
    if not arguments.delete:
        if plan.deleted:
            console.print(_table_of_deleted(plan))
        console.print(_table_of_kept(plan))
        print(f"would be deleted: {count}, {readable_size(total)}")
        if plan.deleted:
            print("nothing was changed; the same command with --delete deletes")
        return 0
    if plan.deleted:
        pruning.check_clock()
    freed = done = 0
    for item, deleted in pruning.delete(plan):
        freed, done = freed + item.size * deleted, done + deleted
        state = "deleted" if deleted else "kept, because it has changed in the meantime"
        print(printable(f"{item.label}, {readable_size(item.size)}: {state}"), flush=True)
    console.print(_table_of_kept(plan))
    print(f"deleted: {done}, {readable_size(freed)}")
    return 0


def _config(arguments: argparse.Namespace) -> PipelineConfig:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.load import load_config
    from rlhf_core.system.home import Home

    if arguments.config is not None:
        if arguments.home is not None:
            raise InputError("--home: CONFIG has run.home; leave one of them out")
        return load_config(arguments.config, arguments.overrides)
    home = Home.of(arguments.home or _HOME)
    return PipelineConfig.model_validate({"run": {"home": str(home.path)}})


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
    from rich.table import Table

    from rlhf_core.storage.bundles import readable_size

    table = Table(title="kept")
    for column, justify in (("why", "left"), ("count", "right"), ("size", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for reason, (count, size) in plan.count_kept().items():
        table.add_row(reason.value, str(count), readable_size(size))
    return table
