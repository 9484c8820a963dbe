"""`rlhf init` and `rlhf data`: from files to a configuration, and what is made of its rows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlhf_cli.app import add_command, add_config
from rlhf_core.errors import InputError


def add_init_commands(commands: Any) -> None:
    """Add `rlhf init` and `rlhf data` to the parser."""
    text = "write a configuration for your own files and model, and show what is made of the rows"
    sub = add_command(
        commands, "init", text, _init, "rlhf init --model Qwen/Qwen2.5-0.5B --pairs pairs.jsonl"
    )
    add = sub.add_argument
    add("--model", required=True, help="a Hugging Face id or a folder")
    add("--sft", metavar="FILE", help="demonstrations: text, messages, or prompt and completion")
    add("--pairs", metavar="FILE", help="prompt, chosen and rejected")
    add("--prompts", metavar="FILE", help="prompts; with a field `answer`, right answers are rewarded")
    add(
        "--goal",
        choices=("ppo", "grpo", "dpo"),
        default="ppo",
        help="how the policy is trained (default: %(default)s)",
    )
    add(
        "--out",
        metavar="CONFIG",
        default="my.yaml",
        help="the file to write; the name of the run is its name (default: %(default)s)",
    )
    text = "show what the stage `data` makes of the first rows: formats, what is left out, lengths, a sample"
    sub = add_command(commands, "data", text, _data, "rlhf data my.yaml --rows 200")
    add_config(sub, "data.eval_fraction=0.05")
    sub.add_argument("--rows", type=int, default=1000, help="rows of each source (default: %(default)s)")


def _init(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.init import Given, configuration

    out = Path(arguments.out)
    if out.exists():
        raise InputError(f"--out: {out} exists already; remove it, or give another name")
    given = Given(arguments.model, arguments.goal, arguments.sft, arguments.pairs, arguments.prompts)
    text = configuration(given, out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text)
    try:
        _show(out, [], 1000)
    except InputError:
        out.unlink()  # the next try writes it again
        raise
    print(f"\nwrote {out}")
    print(f"next: rlhf plan {out}, then rlhf run {out}")
    return 0


def _data(arguments: argparse.Namespace) -> int:
    if arguments.rows < 2:
        raise InputError(f"--rows: must be at least 2; got {arguments.rows}")
    _show(arguments.config, arguments.overrides, arguments.rows)
    return 0


def _show(config: str | Path, overrides: list[str], rows: int) -> None:
    from rich.console import Console

    from rlhf_core.ops.data_table import read_data, show

    show(read_data(config, overrides, rows), Console())
