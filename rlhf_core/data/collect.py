"""Collects distinct, valid records from the sources: reading, quarantine, duplicates, contradictions and the
split.

    sources -> rows -> records          invalid rows go to the quarantine, counted and limited by `data.max_bad_rows`
    records -> distinct records         duplicates and contradictory pairs are dropped and counted
    prompts of all sets -> held out     depends on (data.split_seed, prompt text), the same for all three sets
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import Record, RowError, normalise
from rlhf_core.data.sources import Contents, read_rows, source_name
from rlhf_core.data.synthetic import generate
from rlhf_core.errors import DataError

log = logging.getLogger(__name__)

SetName = Literal["sft", "preference", "prompts"]
SETS: tuple[SetName, ...] = ("sft", "preference", "prompts")


@dataclass(frozen=True)
class Loaded:
    """A checked record and where it came from."""

    record: Record
    source: str
    file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Counts:
    """What became of the rows of one set. `read` = `bad` + the drops + `train` + `eval`."""

    read: int = 0
    bad: int = 0
    """In the quarantine."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Usable rows that were left out, by reason."""
    train: int = 0
    eval: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict, for the data card."""
        return {
            "read": self.read,
            "bad": self.bad,
            "dropped": dict(self.dropped),
            "train": self.train,
            "eval": self.eval,
        }


class Quarantine:
    """Bad rows, one JSON object per line: source, line, reason, row (at most 500 characters)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.first: dict[str, list[str]] = {}
        """The first reasons of each source, with file and line, for the message that stops the run."""

    def add(self, source: str, file: str, line: int, reason: str, text: str) -> None:
        """Keep one bad row."""
        row = {"source": file, "line": line, "reason": reason, "row": text[:500]}
        self._file.write(json.dumps(row) + "\n")
        first = self.first.setdefault(source, [])
        if len(first) < 3:
            first.append(f"{file}:{line}: {reason}")

    def close(self) -> None:
        """Write everything out."""
        self._file.close()


def load_set(
    config: PipelineConfig,
    name: SetName,
    quarantine: Quarantine,
    counts: Counts,
    contents: Mapping[str, Contents],
) -> list[Loaded]:
    """Return all usable records of a set. `contents` has the expected contents of the sources by field.

    Raises DataError if a source is empty, has too many invalid rows, or has other contents.
    """
    records: list[Loaded] = []
    sources: tuple[Source, ...] = getattr(config.data, name)
    names = _distinct_names(sources)
    for index, source in enumerate(sources):
        field_name = f"data.{name}[{index}]"
        read = bad = 0
        for row in _rows(config, name, source, contents[field_name]):
            read += 1
            loaded = row if isinstance(row, BadRow) else _checked(row, source, name, names[index])
            if isinstance(loaded, BadRow):
                bad += 1
                quarantine.add(field_name, loaded.file, loaded.line, loaded.reason, loaded.text)
            else:
                records.append(loaded)
        counts.read += read
        counts.bad += bad
        if read == 0:
            only = f" whose `split` is {source.split!r}" if source.only_split else ""
            raise DataError(f"{field_name}: {source.path} has 0 rows{only}; give a source with rows")
        check_bad_share(config, field_name, source.path, bad, read, quarantine)
    return records


def _distinct_names(sources: Sequence[Source]) -> list[str]:
    """Return the `source_name` of each source. Equal names (`a/train.jsonl`, `b/train.jsonl`) get their list
    index.
    """
    names = [source_name(source) for source in sources]
    return [f"{name} {place}" if names.count(name) > 1 else name for place, name in enumerate(names)]


def check_bad_share(
    config: PipelineConfig, field_name: str, path: str, bad: int, read: int, quarantine: Quarantine
) -> None:
    """DataError with the first three reasons if more rows are bad than `data.max_bad_rows` allows."""
    if bad > config.data.max_bad_rows * read:
        raise DataError(
            f"{field_name}: {bad} of {read} rows of {path} cannot be used, more than"
            f" data.max_bad_rows={config.data.max_bad_rows:g} allows:"
            f" {'; '.join(quarantine.first[field_name])}; mend the rows or raise the limit"
        )
    if bad:
        log.warning("%s: %d of %d rows are in quarantine.jsonl", field_name, bad, read)


def _rows(
    config: PipelineConfig, name: SetName, source: Source, contents: Contents
) -> Iterator[Row | BadRow]:
    if source.path != "synthetic":
        yield from read_rows(source, config.store, contents)
        return
    for index, data in enumerate(generate(config.data.synthetic, config.run.seed, name), start=1):
        if source.limit is not None and index > source.limit:
            return
        yield Row("synthetic", index, data)


def _checked(row: Row, source: Source, name: SetName, known_as: str) -> Loaded | BadRow:
    try:
        record = normalise(row.data, source.format, source.rename)
        fits = {
            "sft": record.kind != "prompt",
            "preference": record.kind == "preference",
            "prompts": record.kind != "text",
        }
        if not fits[name]:
            needs = {
                "sft": "a demonstration needs 'text', 'messages' or 'prompt' and 'completion'",
                "preference": "a pair needs 'chosen' and 'rejected'",
                "prompts": "a prompt row needs 'prompt' or 'messages'",
            }
            raise RowError(
                f"this is a `{record.kind}` row; {needs[name]}; use `rename` if fields are named otherwise"
            )
    except RowError as error:
        return BadRow(row.file, row.line, str(error), json.dumps(row.data, default=str)[:500])
    except RecursionError:
        return BadRow(row.file, row.line, "nested too deeply", "")
    return Loaded(record, known_as, row.file, row.line)


def drop_repeats(
    loaded: Sequence[Loaded], name: SetName, deduplicate: bool, dropped: Counter[str]
) -> list[Loaded]:
    """Distinct records in their order; of pairs with both orders of preference, none is kept."""
    contradictory = _contradictory(loaded) if name == "preference" else frozenset()
    kept = []
    seen: set[Any] = set()
    for item in loaded:
        record = item.record
        key: Any = record.prompt_text if name == "prompts" else _content(record)
        if name == "preference" and _unordered(record) in contradictory:
            dropped["contradictory pair"] += 1
        elif deduplicate and key in seen:
            dropped["duplicate"] += 1
        else:
            seen.add(key)
            kept.append(item)
    return kept


def _content(record: Record) -> tuple[Any, ...]:
    return (record.text, record.messages or record.prompt, record.response, record.rejected)


def _unordered(record: Record) -> tuple[Any, ...]:
    return (record.prompt, frozenset((record.response, record.rejected)))


def _contradictory(loaded: Sequence[Loaded]) -> frozenset[tuple[Any, ...]]:
    winners: dict[tuple[Any, ...], set[str | None]] = {}
    for item in loaded:
        winners.setdefault(_unordered(item.record), set()).add(item.record.response)
    return frozenset(key for key, chosen in winners.items() if len(chosen) > 1)


def split_key(prompt_text: str) -> str:
    """Prompts that differ in white space only are held out together."""
    return " ".join(prompt_text.split())


def split_position(seed: int, key: str) -> float:
    """Where a prompt stands in [0, 1): held out if below the evaluation share. Stable over sets, runs and
    machines.
    """
    digest = hashlib.blake2b(f"{seed}\x1fsplit\x1f{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def held_out(seed: int, keys_by_set: Mapping[str, Sequence[str]], fraction: float) -> frozenset[str]:
    """The prompts (as split keys) kept for evaluation, for all sets together.

    By `split_position`; then, in sets too small for chance, the prompt nearest to the border is moved so that
    each set has at least one prompt on either side. Raises DataError if a set has only one distinct prompt.
    """
    position = {key: split_position(seed, key) for keys in keys_by_set.values() for key in keys}
    held = {key for key, at in position.items() if at < fraction}
    pinned: set[str] = set()
    for side in ("train", "eval"):
        for name, keys in keys_by_set.items():
            distinct = sorted(set(keys), key=lambda key: (position[key], key))
            if len(distinct) < 2:
                raise DataError(
                    f"data.{name}: only {len(distinct)} distinct prompt left; at least 2 are needed, one of"
                    " them for evaluation"
                )
            if side == "train" and all(key in held for key in distinct):
                held.discard(distinct[-1])
                pinned.add(distinct[-1])
            elif side == "eval" and not any(key in held for key in distinct):
                held.add(next((key for key in distinct if key not in pinned), distinct[0]))
    for name, keys in keys_by_set.items():
        if all(key in held for key in keys):
            raise DataError(
                f"data.{name}: too few distinct prompts ({len(set(keys))}) to hold some out; give more rows"
            )
    return frozenset(held)
