"""`rlhf data`: what the stage `data` makes of the first rows of each source, before anything is trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.data import SETS, SetName
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import checking
from rlhf_core.run.references import resolve
from rlhf_core.types import PairExample, PromptExample, SFTExample

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

ROWS = 1000
"""Rows of each source that are read: enough for a 99th percentile, and a few seconds."""
_USES: dict[SetName, str] = {
    "sft": "demonstrations (sft)",
    "preference": "pairs (preference)",
    "prompts": "prompts",
}
_SAMPLE_CHARS = 300
_BAD_ROWS = 5


class Part(NamedTuple):
    """Neighbouring tokens of a row."""

    text: str
    learned: bool
    """Whether they are in the loss, or what is scored."""


@dataclass(frozen=True)
class DataTable:
    """What the first rows of the sources are made into."""

    card: dict[str, Any]
    """The data card of these rows (`rlhf_core.data.card`)."""
    formats: dict[SetName, list[str]]
    """Formats of the rows of each set, the most frequent first."""
    samples: dict[SetName, list[Part]]
    """The first training row of each set, as the model reads it."""
    rows: int
    """Rows that were read of each source, at most."""
    bad_rows: tuple[str, ...]
    """The first rows that cannot be read, with the reason."""
    warnings: tuple[str, ...]


def read_data(config_path: str | Path, overrides: Sequence[str] = (), rows: int = ROWS) -> DataTable:
    """Return what the stage `data` makes of the first `rows` rows of each source of a configuration.

    Raises an InputError if the stage would end with it.
    """
    with checking(str(config_path)):
        config = resolve(load_config(config_path, overrides)).config
    return data_table(config, rows)


def data_table(config: PipelineConfig, rows: int = ROWS) -> DataTable:
    """Read, check, encode and split the first rows of each source, as the stage `data` does with all of them.

    Raises DataError or ModelError with the source, the rule and a fix.
    """
    from rlhf_core.data.card import card_warnings
    from rlhf_core.data.prepare import QUARANTINE, read_and_encode

    limited = _limited(config, rows)
    with TemporaryDirectory() as folder, _warnings() as warnings:
        contents = {f"data.{name}[{index}]": None for name, index, _ in limited.data.sources()}
        prepared = read_and_encode(limited, Path(folder), lambda done, total: None, contents)
        card = prepared.card(limited, {})
        bad_rows = _bad_rows(Path(folder) / QUARANTINE)
    warnings = [text for text in warnings if QUARANTINE not in text]
    warnings += card_warnings(card, config.data.eval_fraction)
    formats = {
        name: [kind for kind, _ in count.formats.most_common()] for name, count in prepared.counts.items()
    }
    samples = {
        name: _parts(split["train"][0].example, prepared.encoder.tokenizer)
        for name, split in prepared.splits.items()
        if split["train"]
    }
    return DataTable(card, formats, samples, rows, bad_rows, tuple(warnings))


def _bad_rows(file: Path) -> tuple[str, ...]:
    """Return the first rows of a quarantine: file, line and reason."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()[:_BAD_ROWS])
    return tuple(f"{row['source']}:{row['line']}: {row['reason']}" for row in rows)


def _parts(example: SFTExample | PairExample | PromptExample, tokenizer: Any) -> list[Part]:
    if isinstance(example, SFTExample):
        ids, mask = example.input_ids, example.loss_mask
    elif isinstance(example, PairExample):
        ids = example.prompt_ids + example.chosen_ids
        mask = (0,) * len(example.prompt_ids) + (1,) * len(example.chosen_ids)
    else:
        ids, mask = example.input_ids, (0,) * len(example.input_ids)
    parts = []
    for learned, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        parts.append(Part(text, bool(learned)))
    return parts


def _limited(config: PipelineConfig, rows: int) -> PipelineConfig:
    """Return the configuration with at most `rows` rows of each source."""
    sets: dict[str, Any] = {"min_rows": min(config.data.min_rows, 1)}
    for name in SETS:
        sources = getattr(config.data, name)
        sets[name] = tuple(
            source.model_copy(update={"limit": min(source.limit or rows, rows)}) for source in sources
        )
    return config.model_copy(update={"data": config.data.model_copy(update=sets)})


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of the data stage in place of logging them."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logger = logging.getLogger("rlhf_core.data")
    collector, propagates = Collector(), logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates


def show(table: DataTable, console: Console) -> None:
    """Print the tables, one sample of each set, and the warnings."""
    show_counts(table, console)
    for name, parts in table.samples.items():
        console.print(
            f"\n{_USES[name]}, the first row as the model reads it, ⟦what is learned⟧:", style="bold"
        )
        console.print(_sample(parts))
    console.print()
    show_problems(table, console)


def show_counts(table: DataTable, console: Console) -> None:
    """Print the tables of rows and of lengths."""
    console.print(f"The first {table.rows:,} rows of each source:", highlight=False)
    console.print(_rows(table))
    console.print(_tokens(table.card))


def show_problems(table: DataTable, console: Console) -> None:
    """Print the first rows that cannot be read, and the warnings."""
    for row in table.bad_rows:
        console.print(f"cannot be read: {row}", markup=False, highlight=False)
    for warning in table.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def _rows(data: DataTable) -> Table:
    from rich.table import Table

    table = Table("set", "format", "read", "training", "held out")
    table.add_column("left out", overflow="fold")
    for name in SETS:
        count = data.card["counts"][name]
        if not count["read"]:
            continue
        left_out = [f"{number:,} {reason}" for reason, number in count["dropped"].items()]
        if count["bad"]:
            left_out.append(f"{count['bad']:,} that cannot be read")
        numbers = (f"{count[key]:,}" for key in ("read", "train", "eval"))
        table.add_row(_USES[name], ", ".join(data.formats[name]), *numbers, "\n".join(left_out) or "none")
    return table


def _tokens(card: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("tokens", "99 % have", "longest", "limit", "from", "longer rows")
    for row in card["limits"]["rows"]:
        part = row["field"].removeprefix("data.max_").removesuffix("_tokens")
        cells = ("" if row[key] is None else f"{row[key]:,}" for key in ("p99", "longest", "tokens"))
        table.add_row(part, *cells, row["from"], f"{row['longer']:,}")
    return table


def _sample(parts: Sequence[Part]) -> Text:
    from rich.text import Text

    text = Text()
    for part in parts:
        shown = part.text if len(part.text) <= _SAMPLE_CHARS else f"{part.text[:_SAMPLE_CHARS]} … "
        text.append(f"⟦{shown}⟧" if part.learned else shown, style="green" if part.learned else "dim")
    return text
