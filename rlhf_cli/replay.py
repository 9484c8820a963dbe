"""The commands `rlhf replay` and `rlhf blame`: a step of PPO again, and the responses behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, HomeFolder, app
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

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
    against: Annotated[str | None, Parameter(metavar="RUN")] = None,
    keep: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    endpoint: Endpoint = None,
    home: HomeFolder = HOME,
) -> int:
    """Make a step of PPO again, and compare it with the record.

    Example: rlhf replay demo-seed0-46d9a620 --step 12

    Args:
        run: Name of a finished run, or the path of its summary.json.
        step: The last step; those before it are compared as well.
        against: Compare with what another run recorded instead; nothing is made again.
        keep: Keep record and checkpoint of the replay here; a replay of a later step continues from there.
    """
    from rlhf_core.ops.finished_run import find_run

    found = find_run(run, home, endpoint)
    if against is None:
        return _print_replay(found, step, keep)
    if keep is not None:
        raise InputError(f"--keep: got {keep} with --against, which makes nothing; leave one of them out")
    return _print_why(found, find_run(against, home, endpoint), step)


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
    for name, share in found.sources.items():
        print(printable(f"source {name}: {share:.1%}"))
    for text, share in list(found.prompts.items())[:top]:
        print(printable(f"prompt {share:.1%}: {_start(text)}"))
    for each in found.responses[:top]:
        print(
            f"response {each.index}: {each.share:.1%} ({of} {each.value:.4g}, score {each.score:.4g},"
            f" KL {each.kl:.4g}, {each.tokens} tokens)"
        )
        print(printable(f"    prompt: {_start(each.prompt)}"))
        print(printable(f"    response: {_start(each.response)}"))
    return 0


def _start(text: str) -> str:
    """Return the first 200 characters as one line."""
    return " ".join(text[:200].split())


def _print_replay(run: FinishedRun, step: int, keep: Path | None) -> int:
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
    return _print_difference(done.difference, changed_since(run))


def _print_why(one: FinishedRun, other: FinishedRun, step: int) -> int:
    from rlhf_core.ops.first_difference import Recording, conditions, differing, first_difference

    recordings = [Recording(run.recorded("ppo"), run.name) for run in (one, other)]
    print(printable(f"{one.name} and {other.name}"))
    found = first_difference(recordings[0], recordings[1], step)
    if found is None:
        print(f"steps 1 to {step}: equal")
    return _print_difference(found, differing(conditions(one), conditions(other)))


def _print_difference(found: Difference | None, differing: Mapping[str, tuple[Any, Any]]) -> int:
    if found is None:
        return 0
    print(printable(f"first difference: {found.describe()}"))
    causes = {name: pair for name, pair in differing.items() if found.can_be_explained_by(name)}
    if not causes:
        print("no setting, version or input that differs can explain it")
    for name, (one, other) in causes.items():
        print(printable(f"can explain it: {name}: {one} and {other}"))
    return DIFFERS
