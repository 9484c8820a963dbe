"""`rlhf configs`, `rlhf init`, `rlhf data` and `rlhf schema`: configurations to start with, what is made of
rows, and the fields for editors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rlhf_cli.app import BEFORE, Config, Overrides, RunHome, app, usage, with_home
from rlhf_core.errors import InputError
from rlhf_core.system.files import CONFIGS

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
        prompts: Prompts; with a field answer, right answers are rewarded.
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
        _show(out, (), 1000)
    except InputError:
        out.unlink()  # the next try writes it again
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
