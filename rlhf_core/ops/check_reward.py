"""`rlhf check-reward`: the rewards of a configuration on its own prompts, before anything is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.config.redact import printable
from rlhf_core.data.messages import without_thoughts
from rlhf_core.data.prepare import Prepared, read_and_encode
from rlhf_core.errors import InputError, checking
from rlhf_core.evaluation.reward_checks import check_sources
from rlhf_core.evaluation.reward_views import PROMPTS, Card, rows_of
from rlhf_core.ops.data_table import limited
from rlhf_core.run.references import resolve
from rlhf_core.types import PairExample, PromptExample

if TYPE_CHECKING:
    from rich.console import Console

_READ = 5
"""Rows of a source that are read for each prompt, because some pairs have other prompts."""


def check_reward(config_path: str | Path, overrides: Sequence[str] = (), prompts: int = PROMPTS) -> Card:
    """Check the rewards of a configuration with its first rows. Nothing is written.

    Args:
        config_path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        prompts: Number of prompts.

    Raises:
        InputError: The configuration or its data are wrong, or a function cannot be loaded.
    """
    with checking(str(config_path)):
        config = limited(resolve(load_config(config_path, overrides)).config, _READ * prompts)
    if not config.ppo.rewards:
        raise InputError(f"{config_path}: ppo.rewards is empty; there is nothing to check")
    with TemporaryDirectory() as folder:
        # None: the expected digests are those of whole sources, of which only the first rows are read.
        contents = {f"data.{name}[{index}]": None for name, index, _ in config.data.sources()}
        prepared = read_and_encode(config, Path(folder), lambda done, total: None, contents)
    return score_card(config, prepared, prompts)


def score_card(
    config: PipelineConfig,
    prepared: Prepared,
    prompts: int,
    *,
    checks: Container[str] | None = None,
) -> Card:
    """Check the rewards of a configuration with its encoded rows.

    Args:
        config: The configuration.
        prepared: Its encoded rows.
        prompts: Number of prompts.
        checks: Names of the checks besides those of failures; None for all.

    Raises:
        ConfigError: A function cannot be loaded, or a response of its `smoke` has a wrong value.
    """
    examples = [
        item.example
        for name in ("prompts", "preference")
        for items in prepared.splits[name].values()
        for item in items
    ]
    encoder = prepared.encoder
    tokenizer, opened = encoder.tokenizer, encoder.opens_thoughts

    def decode(ids: Sequence[int]) -> str:
        # What a reward gets in PPO (`Decoder.response`).
        text = str(tokenizer.decode(ids, skip_special_tokens=True)).removeprefix(encoder.response_prefix)
        return without_thoughts(text, opened) if config.data.thoughts == "drop" else text

    rows = rows_of(
        [each for each in examples if isinstance(each, PromptExample)],
        [each for each in examples if isinstance(each, PairExample)],
        decode,
        config.ppo.rewards,
        prompts,
    )
    with _quiet():
        return check_sources(
            config.ppo.rewards,
            rows,
            lambda text: [*tokenizer.encode(text, add_special_tokens=False), encoder.eos_id],
            checks=checks,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the processes of rewards write to stderr: the evidence has the reason of a failure."""
    # The descriptor, because processes inherit it. They would not see another object in `sys.stderr`.
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def as_json(card: Card) -> str:
    """Return the card as JSON."""
    return json.dumps({"verdict": card.verdict, **asdict(card)}, indent=2, ensure_ascii=False)


def show(card: Card, console: Console) -> None:
    """Print the verdict, and a table: a row for each finding, and the names of the other checks."""
    from rich.table import Table
    from rich.text import Text

    console.print(card.verdict, markup=False, highlight=False, soft_wrap=True)
    table = Table("reward", "result", show_lines=True)
    table.add_column("what is wrong, what shows it, and what to do", overflow="fold")
    for row in card.findings:
        lines = (f"{row.check}: {row.looks_for}", f"Seen: {row.evidence}", f"To do: {row.advice}.")
        table.add_row(row.source, Text("finding", "bold red"), Text("\n".join(map(printable, lines))))
    others: dict[tuple[str, str, str], list[str]] = {}
    for row in card.rows:
        if row.result != "finding":
            others.setdefault((row.source, row.result, row.evidence), []).append(row.check)
    for (source, result, reason), checks in others.items():
        names = ", ".join(checks)
        table.add_row(source, result, Text(f"{names}: {reason}" if reason else names))
    console.print(table)
