"""The command `rlhf check-reward`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from rlhf_cli.app import BEFORE, Config, Overrides, RunHome, app, usage, with_home
from rlhf_core.errors import InputError


@app.command(group=BEFORE, usage=usage("check-reward"))
def _check_reward(
    config: Config,
    /,
    *overrides: Overrides,
    prompts: Annotated[int, Parameter(metavar="N")] = 200,
    json: bool = False,
    home: RunHome = None,
) -> int:
    """Look for faults of the rewards, on the prompts of the run.

    The exit code is 1 if there is a finding. Nothing is trained or written.

    Example: rlhf check-reward my.yaml --prompts 50

    Args:
        prompts: Number of prompts; at most 8 are used if a service or a model is asked.
        json: Print the score card as JSON.
    """
    from rich.console import Console

    from rlhf_core.ops.check_reward import as_json, check_reward, show

    if prompts < 1:
        raise InputError(f"--prompts: must be at least 1; got {prompts}")
    card = check_reward(config, with_home(overrides, home), prompts)
    if json:
        print(as_json(card))
    else:
        show(card, Console())
    return int(bool(card.findings))
