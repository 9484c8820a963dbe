"""Commands before a run: `rlhf configs`, `init`, `data`, `schema`, `plan`,
`check-reward`, `tune`, `rehearse`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from cyclopts import Parameter

from rlhf_cli.app import BEFORE, Config, Overrides, RunHome, app, usage, with_home
from rlhf_core.errors import InputError
from rlhf_core.logs import set_up_logging
from rlhf_core.system.files import CONFIGS
from rlhf_core.system.home import Home

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlhf_core.ops.rehearse import Rehearsal
    from rlhf_core.ops.tune import Tuned

File = Annotated[str | None, Parameter(metavar="FILE")]
_PAGES = {"ppo": "first-run.md", "grpo": "grpo.md", "dpo": "dpo.md"}


@app.command(group=BEFORE)
def _configs(name: Annotated[str | None, Parameter(choices=tuple(CONFIGS))] = None, /) -> int:
    """List the configurations that come with the package, or print one.

    Example: rlhf configs demo > my.yaml

    Args:
        name: The one to print.
    """
    if name is not None:
        print(CONFIGS[name].read_text(encoding="utf-8"), end="")
        return 0
    for each, file in CONFIGS.items():
        first = re.split(r"\.\s", file.read_text(encoding="utf-8"))[0]  # the first sentence of its comment
        print(f"{each:<16}  {' '.join(first.replace('#', ' ').split())}")
    return 0


@app.command(group=BEFORE)
def _init(
    *,
    model: Annotated[str, Parameter(metavar="NAME|FOLDER")],
    sft: File = None,
    pairs: File = None,
    prompts: File = None,
    goal: Literal["ppo", "grpo", "dpo"] = "ppo",
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("my.yaml"),
) -> int:
    """Write a configuration for your own files and model.

    It shows what is made of the rows, as rlhf data does.

    Example: rlhf init --model Qwen/Qwen2.5-0.5B --pairs pairs.jsonl

    Args:
        model: Model to start from: a name on the Hugging Face hub, or a folder.
        sft: Demonstrations: rows with text, messages, or prompt and completion.
        pairs: Rows with prompt, chosen and rejected.
        prompts: Prompts; with a field answer or ground_truth, right answers are rewarded.
        goal: How the policy is trained.
        out: The file to write. Its name is the name of the run.
    """
    from rlhf_core.config.messages import SCHEMA_FILE, schema_json
    from rlhf_core.ops.init import Given, configuration

    if out.exists():
        raise InputError(f"--out: {out} exists already; remove it, or give another name")
    given = Given(model, goal, sft, pairs, prompts)
    text = configuration(given, out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text)
    try:
        # The file is written before it is checked, because the check reads a file as a run does.
        _show(out, (), 1000)
    except InputError:
        out.unlink()  # the next try writes it again
        print(f"{out} was not written; to change these lines, save them in a file and use rlhf data")
        raise
    schema = out.with_name(SCHEMA_FILE)
    schema.write_text(schema_json(), encoding="utf-8")
    print(f"\nwrote {out}, and {schema} for completion in editors")
    print(f"next: rlhf plan {out}, then rlhf run {out}; docs/{_PAGES[goal]} explains both")
    return 0


@app.command(group=BEFORE, usage=usage("data"))
def _data(config: Config, /, *overrides: Overrides, rows: int = 1000, home: RunHome = None) -> int:
    """Show what is made of the rows of your files.

    These are their formats, what is left out and why, lengths, and a sample.

    Example: rlhf data my.yaml --rows 200

    Args:
        rows: Rows of each source to read.
    """
    if rows < 2:
        raise InputError(f"--rows: must be at least 2; got {rows}")
    _show(config, with_home(overrides, home), rows)
    return 0


@app.command(group=BEFORE)
def _schema() -> int:
    """Print the JSON Schema of configurations, for completion and checks in editors.

    Example: rlhf schema > rlhf.schema.json
    """
    from rlhf_core.config.messages import schema_json

    print(schema_json(), end="")
    return 0


def _show(config: str | Path, overrides: tuple[str, ...], rows: int) -> None:
    from rich.console import Console

    from rlhf_core.ops.data_table import read_data, show

    show(read_data(config, overrides, rows), Console())


@app.command(group=BEFORE, usage=usage("plan"))
def _plan(
    config: Config,
    /,
    *overrides: Overrides,
    gpus: Annotated[str | None, Parameter(metavar="8xA100-80G")] = None,
    link: Annotated[str | None, Parameter(metavar="8x400gbit")] = None,
    host_memory: Annotated[float | None, Parameter(metavar="GIB")] = None,
    model_config: Annotated[str | None, Parameter(metavar="FILE|NAME")] = None,
    details: bool = False,
    json: bool = False,
    home: RunHome = None,
) -> int:
    """Show the rows, time and memory that a run needs.

    The exit code is 2 if it does not fit into the machine.

    Example: rlhf plan production.yaml --gpus 8xA100-80G ppo.minibatches=8 'sft.lora={r: 16}'

    Args:
        gpus: Number and kind of GPUs; for several machines 2x8xA100-80G (default: those of this machine).
        link: Network between machines: its speed, or number and speed of the adapters of each.
        host_memory: Main memory of a machine, for what is moved there from GPUs.
        model_config: config.json of the model, or a known name such as llama-3-70b, for a model of the hub.
        details: Also show batches, and the memory of each process.
        json: Print rows, bytes and seconds as JSON.
    """
    from rlhf_core.ops.data_table import ROWS
    from rlhf_core.ops.plan.plan import as_json, make_plan, show

    overrides = with_home(overrides, home)
    plan = make_plan(config, overrides, gpus, model_config, link=link, host_memory_gib=host_memory, rows=ROWS)
    if json:
        print(as_json(plan))
    else:
        from rich.console import Console

        console = Console()
        console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign] # rich would exit with 1
        show(plan, console, details=details)
    return 0 if plan.verdict.fits else InputError.exit_code


def _raise_broken_pipe() -> NoReturn:
    raise BrokenPipeError


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
        prompts: Number of prompts; at most 8 are used for a source that is asked over the network.
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


@app.command(group=BEFORE, usage=usage("tune"))
def _tune(
    config: Config,
    /,
    *overrides: Overrides,
    out: Annotated[Path, Parameter(metavar="FILE")] = Path("tuned.yaml"),
    home: RunHome = None,
) -> int:
    """Measure settings of PPO, and write the fastest.

    Example: rlhf tune my.yaml --out tuned.yaml

    Args:
        out: New YAML file.
    """
    from rich.console import Console

    from rlhf_core.executors.spec import stage_environment
    from rlhf_core.ops.tune import tune
    from rlhf_core.run.checks import load_and_check

    overrides = with_home(overrides, home)
    # Before the log is opened, which is in `run.home`: a home that cannot be used is an error of the
    # configuration.
    checked = load_and_check(config, overrides).config
    set_up_logging(Home.of(checked.run.home))
    os.environ.update(stage_environment(checked))  # PPO runs in this process
    tuned = tune(config, overrides, out)
    # Settings and paths are there to be copied: rich would break them at the width of the terminal.
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(tuned))
    if any(change.startswith("ppo.staleness") for change in tuned.best.changes):
        console.print("ppo.staleness changes the results of ppo (docs/tuning.md)")
    # Without markup: rich would take the brackets of lists in settings for styles, and leave them out.
    console.print(f"fastest: {tuned.best.label}", markup=False)
    console.print(f"configuration: {tuned.file}", markup=False)
    return 0


def _table(tuned: Tuned) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="seconds of a PPO step, median of 3")
    phases = ("rollout", "scoring", "training", "sync")
    for column in ("settings", "step", *phases):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for trial in tuned.trials:
        label = escape(trial.label)
        if trial.seconds is None:
            table.add_row(label, "-", escape(trial.problem))
            continue
        times = [f"{trial.phases[phase]:.3f}" for phase in phases]
        table.add_row(label, f"{trial.seconds:.3f}", *times)
    return table


@app.command(group=BEFORE, usage=usage("rehearse"))
def _rehearse(
    config: Config,
    /,
    *overrides: Overrides,
    model: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    gpus: Annotated[str | None, Parameter(metavar="8xA100-80G")] = None,
    folder: Annotated[Path | None, Parameter(metavar="FOLDER")] = None,
    seconds: float = 3600,
    checks: bool = False,
) -> int:
    """Run the whole configuration on this CPU with a small model, few rows and one kill.

    The exit code is 2 if something would fail.

    Example: rlhf rehearse production.yaml --model ./llama --gpus 8xA100-80G

    Args:
        model: Folder with config.json and tokenizer of a model that is not on this machine.
        gpus: GPUs of the run, for what rlhf plan says.
        folder: Keep model, rows, logs and artifacts here (default: a temporary folder, which is kept only if
            something failed).
        seconds: Limit of the run.
        checks: Only make the checks before the run.
    """
    from rich.console import Console

    from rlhf_core.errors import InputError
    from rlhf_core.ops.rehearse import rehearse

    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise InputError(f"--folder: {folder} must be empty; name another")
    place = Path(tempfile.mkdtemp(prefix="rehearsal-")) if folder is None else folder.absolute()
    place.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        found = rehearse(
            config,
            overrides,
            place,
            # `-P`: `-m` alone puts the working folder first on the search path (`system.processes`).
            [] if checks else [sys.executable, "-P", "-m", "rlhf_cli.main", "run"],
            model=model,
            gpus=gpus,
            seconds=seconds,
            say=lambda text: console.print(f"rehearsing: {text}", markup=False),
        )
    except InputError:
        if folder is None and not (place / "run.log").exists():
            shutil.rmtree(place)
        raise
    _show_rehearsal(found, config, "the checks pass" if checks else "would run", console)
    if found.problems:
        console.print(f"files of the rehearsal: {place}", markup=False)
        return InputError.exit_code
    if folder is None:
        shutil.rmtree(place)
    return 0


def _show_rehearsal(found: Rehearsal, config: str, passed: str, console: Console) -> None:
    """Print whether it would run, what would fail, what was not exercised, and what was."""
    count = len(found.problems)
    verdict = f"{count} problem{'s' if count > 1 else ''}" if count else passed
    used = f"{found.seconds:.0f} s, {found.cpu_seconds:.0f} s of CPU time"
    console.print(f"{verdict}: {config}; {used}", markup=False)
    _print_table(console, ("would fail",), [(problem,) for problem in found.problems])
    _print_table(console, ("warnings of rlhf plan",), [(warning,) for warning in found.warnings])
    missed: dict[str, list[str]] = {}
    for change in found.changes:
        missed.setdefault(change.missed or "", []).append(f"{change.field}={_short(change.used)}")
    smaller = missed.pop("", [])
    _print_table(
        console, ("not exercised", "because of"), [(what, ", ".join(why)) for what, why in missed.items()]
    )
    _print_table(console, ("exercised", "how"), list(found.exercised.items()))
    _print_table(console, ("", "rlhf plan", "seen"), [(what, *both) for what, both in found.plan.items()])
    step = [(name, f"{value:.4g}") for name, value in found.first_step.items()]
    _print_table(console, ("first step of PPO", "value"), step)
    console.print(f"other settings of the rehearsal: {', '.join(smaller)}", markup=False)


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        # As `Text`, because messages and settings can have brackets, which rich takes for markup.
        table.add_row(*map(Text, row))
    if rows:
        console.print(table)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
