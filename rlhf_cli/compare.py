"""The command `rlhf compare`: what differs between finished runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable


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
