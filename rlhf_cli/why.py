"""The command `rlhf why`: what a run would make again, and because of what."""

from __future__ import annotations

from rlhf_cli.app import LOOK, Config, Overrides, RunHome, app, usage, with_home
from rlhf_core.config.redact import printable


@app.command(group=LOOK, usage=usage("why"))
def _why(config: Config, /, *overrides: Overrides, home: RunHome = None) -> int:
    """Show which stages a run would reuse, continue or run again, and because of what.

    Nothing is started or written.

    Example: rlhf why my.yaml ppo.kl.coef=0.02
    """
    from rlhf_core.ops.why import forecast
    from rlhf_core.run.state import first_of

    found = forecast(config, with_home(overrides, home))
    made = [each.stage for each in found if each.verdict != "reused"]
    print(f"{', '.join(made)} would run" if made else "all stages would be reused")
    for each in found:
        text = f"{each.stage:10}{each.verdict:11}{'; '.join(first_of(each.reasons))}"
        if each.compared is not None:
            created = each.compared.created[:16].replace("T", " ")
            text += f" (compared with {each.compared.ref.key} of {created} UTC)"
        print(printable(text.rstrip()))
    return 0
