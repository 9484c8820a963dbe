"""The command `rlhf why`: what a run would make again, or where two runs differ, and because of what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rlhf_cli.app import HOME, LOOK, Endpoint, RunHome, app, usage, with_home
from rlhf_cli.replay import print_difference, print_replay
from rlhf_core.config.redact import printable
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.ops.finished_run import FinishedRun

_YAML = (".yaml", ".yml")


@app.command(group=LOOK, usage=f"{usage('why')}\n       rlhf why [OPTIONS] RUN [RUN2] --step N")
def _why(
    what: Annotated[str, Parameter(name="CONFIG")],
    /,
    *others: Annotated[str, Parameter(name="FIELD=VALUE")],
    step: int | None = None,
    endpoint: Endpoint = None,
    home: RunHome = None,
) -> int:
    """Show which stages a run would make again, or the first difference of two runs, and because of what.

    Nothing is started or written, unless RUN is alone: then its steps are made again, as by rlhf replay.

    Example: rlhf why my.yaml ppo.kl.coef=0.02

    Args:
        what: YAML file of a run; or the name of a finished run, or the path of its summary.json.
        others: Fields of CONFIG to override; or a second run.
        step: Compare the steps of PPO until this one.
    """
    if step is None:
        if Path(what).suffix not in _YAML and not Path(what).is_file():
            raise InputError(f"--step: {what} is no YAML file; to explain a run, give a step of PPO")
        return _print_outlooks(what, with_home(others, home))
    if Path(what).suffix in _YAML or len(others) > 1:
        got = " ".join([what, *others])
        raise InputError(f"--step: compares one or two finished runs; got {got}")
    from rlhf_core.ops.finished_run import find_run

    run = find_run(what, home or HOME, endpoint)
    if not others:
        return print_replay(run, step)
    return _print_runs(run, find_run(others[0], home or HOME, endpoint), step)


def _print_outlooks(config: str, overrides: tuple[str, ...]) -> int:
    from rlhf_core.ops.why import forecast
    from rlhf_core.run.state import first_of

    found = forecast(config, overrides)
    made = [each.stage for each in found if each.verdict in ("continues", "runs")]
    stops = [each.stage for each in found if each.verdict == "stops"]
    if stops:
        print(f"the run would stop at {stops[0]}")
    else:
        print(f"{', '.join(made)} would run" if made else "all stages would be reused")
    for each in found:
        text = f"{each.stage:10}{each.verdict:11}{'; '.join(first_of(each.reasons))}"
        if each.compared is not None:
            created = each.compared.created[:16].replace("T", " ")
            text += f" (compared with {each.compared.ref.key} of {created} UTC)"
        print(printable(text.rstrip()))
    return 0


def _print_runs(one: FinishedRun, other: FinishedRun, step: int) -> int:
    from rlhf_core.ops.first_difference import Recording, conditions, differing, first_difference

    recording, compared = (Recording(run.recorded("ppo"), run.name) for run in (one, other))
    for each in (recording, compared):
        each.rollouts(step)  # is it recorded?
    print(printable(f"{one.name} and {other.name}"))
    found = first_difference(recording, compared, step)
    if found is None:
        print(f"steps 1 to {step}: equal")
    return print_difference(found, differing(conditions(one), conditions(other)))
