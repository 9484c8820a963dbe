"""The commands `rlhf replay` and `rlhf blame`: a step of PPO again, and the responses behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable

Quantity = Literal["reward", "kl", "loss", "value"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.ops.finished_run import FinishedRun
    from rlhf_core.ops.first_difference import Difference

DIFFERS = 1
"""Exit code if there is a difference, as of `diff`."""


@app.command(group=LOOK)
def _replay(
    run: str,
    /,
    *,
    step: int,
    keep: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Make a step of PPO again, and compare it with the record.

    Example: rlhf replay demo-seed0-46d9a620 --step 12

    Args:
        run: Name of a finished run, or the path of its summary.json.
        step: The last step; those before it are compared as well.
        keep: Keep record and checkpoint of the replay here; a replay of a later step continues from there.
    """
    from rlhf_core.ops.finished_run import find_run

    return print_replay(find_run(run, home, endpoint), step, keep)


@app.command(group=LOOK)
def _blame(
    run: str,
    /,
    *,
    step: int,
    of: Quantity = "reward",
    top: int = 10,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Show the responses, prompts and sources behind a step of PPO.

    Example: rlhf blame demo-seed0-46d9a620 --step 12 --of kl

    Args:
        run: Name of a finished run, or the path of its summary.json.
        step: The step. It is compared with the ten before it.
        of: The score, the KL, the size of the advantages (loss), or the critic's squared errors (value).
        top: Number of responses and of prompts that are shown.
    """
    from rlhf_core.ops.blame import blame
    from rlhf_core.ops.finished_run import find_run

    found = blame(find_run(run, home, endpoint), step, of)
    before = "nothing before it" if found.before is None else f"{found.before:.4g} in the steps before"
    print(f"step {step}: mean {of} {found.mean:.4g}, {before}")
    for name, (mean, earlier) in found.rewards.items():
        change = "" if earlier is None else f", {earlier:.4g} before"
        print(printable(f"reward {name}: {mean:.4g}{change}"))
    cut, earlier = found.cut
    print(f"cut at the limit: {cut:.0%}" + ("" if earlier is None else f", {earlier:.0%} before"))
    for name, share in found.sources.items():
        print(printable(f"source {name}: {share:.1%}"))
    for text, share in list(found.prompts.items())[:top]:
        print(printable(f"prompt {share:.1%}: {_start(text)}"))
    value = "" if of in ("reward", "kl") else f"{of} {{:.4g}}, "  # the others have a column of their own
    for each in found.responses[:top]:
        print(
            f"response {each.index}: {each.share:.1%} ({value.format(each.value)}score {each.score:.4g},"
            f" KL {each.kl:.4g}, {each.tokens} tokens)"
        )
        print(printable(f"    prompt: {_start(each.prompt)}"))
        print(printable(f"    response: {_start(each.response)}"))
    return 0


def _start(text: str) -> str:
    """Return the first 200 characters as one line."""
    return " ".join(text[:200].split())


def print_replay(run: FinishedRun, step: int, keep: Path | None = None) -> int:
    """Replay a run, and print the first difference. Return the exit code."""
    from rlhf_core.executors.environment import stage_environment
    from rlhf_core.logs import set_up_logging
    from rlhf_core.ops.replay import changed_since, replay

    set_up_logging(run.home)
    os.environ.update(stage_environment(run.config("ppo")))  # PPO runs in this process
    done = replay(run, step, keep)
    place = f"after step {done.start}" if done.start else "from the beginning"
    print(printable(f"{run.name}: {step - done.start} steps {place} in {done.seconds:.0f} s"))
    if done.difference is None:
        weights = "and the weights after it" if done.has_weights else "(weights after it are not recorded)"
        print(
            f"step {step}: {done.responses} responses, {done.columns} columns, {done.metrics} metrics"
            f" {weights}: equal"
        )
        if step > 1:
            print("the steps before it: equal")
    return print_difference(done.difference, changed_since(run))


def print_difference(found: Difference | None, differing: Mapping[str, tuple[Any, ...]]) -> int:
    """Print a difference, and what can explain it. Return the exit code."""
    if found is None:
        return 0
    print(printable(f"first difference: {found.describe()}"))
    causes = {name: pair for name, pair in differing.items() if found.can_be_explained_by(name)}
    if not causes:
        print("no setting, version or input that differs can explain it")
    for name, (one, other) in causes.items():
        print(printable(f"can explain it: {name}: {one} and {other}"))
    return DIFFERS
