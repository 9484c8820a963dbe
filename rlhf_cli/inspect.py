"""The command `rlhf inspect`: a page of the recorded rollouts of one or two runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError


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
    from rlhf_core.ops.finished_run import find_run, newest_run
    from rlhf_core.ops.inspect.recorded import recorded_runs

    if step is not None and export is None:
        raise InputError(f"--step: got {step} without --export; give a file, or choose the step on the page")
    if export is not None and other is not None:
        raise InputError(f"--export: writes one run; got {other} as well")
    found = [find_run(name, home, endpoint) for name in (run or newest_run(home), other) if name]
    kinds = recorded_runs(found)
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
