"""`rlhf data`: what the stage `data` makes of the first rows of each source, before anything is trained."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

    from rlhf_core.data.prepare import Prepared

ROWS = 1000
"""Rows of each source that are read: enough for a 99th percentile, and a few seconds."""
_USES: dict[SetName, str] = {
    "sft": "demonstrations (sft)",
    "preference": "pairs (preference)",
    "prompts": "prompts",
}
_LENGTHS = ("rows", "p50", "p99", "longest", "tokens")
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
    samples: dict[SetName, list[list[Part]]]
    """A training row of each set as the model reads it: of a pair, with each of its responses."""
    rows: int
    """Rows that were read of each source, at most."""
    is_whole: bool
    """Whether no source has more."""
    bad_rows: tuple[str, ...]
    """The first rows that cannot be read, with the reason."""
    warnings: tuple[str, ...]
    shown: tuple[SetName, ...] = SETS
    """The sets that the run uses."""


def read_data(config_path: str | Path, overrides: Sequence[str] = (), rows: int = ROWS) -> DataTable:
    """Return what the stage `data` makes of the first `rows` rows of each source of a configuration.

    Raises an InputError if the stage would end with it.
    """
    from rlhf_core.data.check import check_data

    with checking(str(config_path)):
        config = resolve(load_config(config_path, overrides)).config
        table = data_table(config, rows)
        # The check names the source of what the stage says of its set in the same words.
        said = {text.partition(": ")[2] for text in table.warnings}
        found = [each for each in check_data(config) if isinstance(each, str)]
        new = tuple(text for text in found if text.partition(": ")[2] not in said)
    return replace(table, warnings=new + table.warnings)


def data_table(config: PipelineConfig, rows: int = ROWS) -> DataTable:
    """Read, check, encode and split the first rows of each source, as the stage `data` does with all of them.

    Raises DataError or ModelError with the source, the rule and a fix.
    """
    from rlhf_core.data.card import Facts, card_warnings
    from rlhf_core.data.prepare import QUARANTINE, read_and_encode, size_warnings

    few = limited(config, rows)
    with TemporaryDirectory() as folder, _warnings() as warnings:
        # None, because a digest is that of a whole source, of which only the first rows are read.
        contents = {f"data.{name}[{index}]": None for name, index, _ in few.data.sources()}
        prepared = read_and_encode(few, Path(folder), lambda done, total: None, contents)
        card = prepared.card(few, {}, Facts.of(prepared.splits))
        bad_rows = _bad_rows(Path(folder) / QUARANTINE)
    # That warning names a file in the temporary folder, which is deleted. The bad rows are shown instead.
    warnings = [text for text in warnings if QUARANTINE not in text]
    warnings += card_warnings(card, config.data.eval_fraction)
    # Not `<=`: a source with exactly this many rows was cut, or was not. Nothing tells which.
    is_whole = all(count.most_of_a_source < rows for count in prepared.counts.values())
    if is_whole:
        warnings += size_warnings(config, prepared.splits, card)
    formats = {}
    for name, count in prepared.counts.items():
        formats[name] = [kind for kind, _ in count.formats.most_common()]
    unused = () if config.trains_on_demonstrations else ("sft",)
    sets = tuple(name for name in SETS if _read(card, name) and name not in unused)
    samples = _samples(prepared, sets)
    return DataTable(card, formats, samples, rows, is_whole, bad_rows, tuple(warnings), sets)


def _read(card: dict[str, Any], name: SetName) -> int:
    """Return the number of rows of a set that were read."""
    return int(card["counts"][name]["read"])


def _samples(prepared: Prepared, sets: Sequence[SetName]) -> dict[SetName, list[list[Part]]]:
    """Return the first training row of each set whose prompt no other sample has."""
    samples: dict[SetName, list[list[Part]]] = {}
    shown: set[str] = set()
    for name in sets:
        rows = prepared.splits[name]["train"]
        if not rows:
            continue
        # Sets can share prompts, and the same sample twice shows less.
        item = next((each for each in rows if each.key not in shown), rows[0])
        shown.add(item.key)
        samples[name] = _views(item.example, prepared.encoder.tokenizer)
    return samples


def _bad_rows(file: Path) -> tuple[str, ...]:
    """Return the first rows of a quarantine: file, line and reason."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()[:_BAD_ROWS])
    return tuple(f"{row['source']}:{row['line']}: {row['reason']}" for row in rows)


def _views(example: SFTExample | PairExample | PromptExample, tokenizer: Any) -> list[list[Part]]:
    if isinstance(example, SFTExample):
        return [_parts(example.input_ids, example.loss_mask, tokenizer)]
    if isinstance(example, PromptExample):
        return [_parts(example.input_ids, (0,) * len(example.input_ids), tokenizer)]
    prompt, views = example.prompt_ids, []
    for ids in (example.chosen_ids, example.rejected_ids):
        views.append(_parts(prompt + ids, (0,) * len(prompt) + (1,) * len(ids), tokenizer))
    return views


def _parts(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> list[Part]:
    parts = []
    for learned, run in groupby(zip(ids, mask, strict=True), key=itemgetter(1)):
        # The clean-up of some tokenizers hides blanks before punctuation, which the model reads.
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        parts.append(Part(text, bool(learned)))
    return parts


def limited(config: PipelineConfig, rows: int) -> PipelineConfig:
    """Return the configuration with at most `rows` rows of each source."""
    # A limit for all rows says nothing about the first ones.
    sets: dict[str, Any] = {"min_rows": min(config.data.min_rows, 1)}
    for name in SETS:
        limited = []
        for source in getattr(config.data, name):
            limited.append(source.model_copy(update={"limit": min(source.limit or rows, rows)}))
        sets[name] = tuple(limited)
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
    # They are shown with the table, and would be on the terminal twice.
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates


def show(table: DataTable, console: Console) -> None:
    """Print the tables, one sample of each set, and the warnings."""
    show_counts(table, console)
    for name, views in table.samples.items():
        learned = "" if name == "prompts" else ", ⟦what is learned⟧"
        console.print(f"\n{_USES[name]}, a row as the model reads it{learned}:", style="bold")
        console.print(_sample(views[0]))
        for view in views[1:]:
            console.print("rejected:", style="bold")
            console.print(_sample(view[-1:]))
    console.print()
    show_problems(table, console)


def show_counts(table: DataTable, console: Console) -> None:
    """Print the tables of rows and of lengths."""
    rows = "All rows" if table.is_whole else f"The first {table.rows:,} rows of each source"
    template = table.card["template_from"]
    console.print(f"{rows}, with the chat template {template}:", markup=False, highlight=False)
    console.print(_rows(table))
    for row in table.card["weights"]:
        # Of the first rows of each source it is not the share in all rows.
        share = f", {row['share']:.1%} of the set" if table.is_whole else ""
        console.print(
            f"{row['field']} ({row['path']}), weight {row['weight']:g}: its {row['rows']:,} training rows are"
            f" used as {row['used']:,}{share}",
            markup=False,
            highlight=False,
        )
    console.print(_tokens(table))


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
    for name in data.shown:
        count = data.card["counts"][name]
        # The table of lengths has the fields of the limits.
        reasons = {reason: re.sub(" longer than .*", " too long", reason) for reason in count["dropped"]}
        left_out = [f"{number:,} {reasons[reason]}" for reason, number in count["dropped"].items()]
        if count["bad"]:
            left_out.append(f"{count['bad']:,} that cannot be read")
        numbers = (f"{count[key]:,}" for key in ("read", "train", "eval"))
        table.add_row(_USES[name], ", ".join(data.formats[name]), *numbers, "\n".join(left_out) or "none")
    return table


def _tokens(data: DataTable) -> Table:
    from rich.table import Table

    table = Table("tokens", "rows", "p50", "p99", "longest", "limit", "from")
    table.add_column("longer", overflow="fold")
    for row in data.card["limits"]["rows"]:
        if row["set"] not in (*data.shown, "sampled"):
            continue
        part = row["field"].removeprefix("data.max_").removesuffix("_tokens")
        if row["longer"] is None:
            what, longer = "sampled responses", ""
        else:
            fate = "cut" if part == "text" else "left out"
            what, longer = f"{row['set']}: {part}", f"{row['longer']:,} {fate}" if row["longer"] else "none"
        numbers = ("" if row[key] is None else f"{row[key]:,}" for key in _LENGTHS)
        table.add_row(what, *numbers, row["from"], longer)
    return table


def _sample(parts: Sequence[Part]) -> Text:
    from rich.text import Text

    text = Text()
    for part in parts:
        shown = part.text if len(part.text) <= _SAMPLE_CHARS else f"{part.text[:_SAMPLE_CHARS]} … "
        if part.learned:
            text.append(f"⟦{shown}⟧", style="green")
        else:
            text.append(shown, style="dim")
    return text
