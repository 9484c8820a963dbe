"""The command `rlhf pass-rates`: how difficult the prompts of a run are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable


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
    from rlhf_core.ops.finished_run import find_run
    from rlhf_core.ops.pass_rates import write_pass_rates

    found = write_pass_rates(find_run(run, home, endpoint), stage, column, at_least, output)
    print(printable(f"{output}: {found.rated} prompts with a pass rate, {found.unrated} without"))
    print(f"{found.useful} are neither always nor never solved")
    if found.left_out:
        print(f"left out, because they have several messages: {found.left_out}")
    return 0
