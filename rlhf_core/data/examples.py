"""From the rows of the sources to token examples, and which of them are held out for evaluation.

sources -> `read_records` (checked records, bad rows in the quarantine)
        -> `stored` (a list, or a file)                                  -> `rlhf_core.data.repeats`
        -> `tokens_of`, `within`, `with_tokens` (token examples)         -> `held_out` (groups for evaluation)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.config.data import PROMPT, RESPONSE, TEXT, Limits, SetName, Source, Thoughts
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import PythonReward, RemoteReward
from rlhf_core.data.dataset import Counted, Rows
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import Record, field_value, normalise, other_fields
from rlhf_core.data.messages import INVISIBLE, Call, Message, RowError
from rlhf_core.data.sources import Contents, read_rows, short_name
from rlhf_core.data.synthetic import generate
from rlhf_core.data.templates import Encoder
from rlhf_core.errors import DataError
from rlhf_core.types import PairExample, PromptExample, SFTExample

log = logging.getLogger(__name__)

PROMPT_TOO_LONG = f"prompt longer than {PROMPT}"
RESPONSE_TOO_LONG = f"response longer than {RESPONSE}"
NOTHING_TO_LEARN = f"no assistant token within {TEXT}"
OTHER_ANSWER = "duplicate prompt with another answer"
JOINED = "joined with another answer to a pair, by `label`"
UNPAIRED = "no answer with the other `label` to its prompt"
MARKED_BAD = "not to be trained, by `label`, `train` or `weight`"
_MEASURED_TEXT = 2**13
"""Tokens of a text that are counted if it is cut. Those of a longer one are estimated."""
_CHARS_PER_TOKEN = 4
"""Of usual text, for estimates."""
_MAX_TRAINING_CHARS = 100_000
_MAX_MARGIN = 1e9
_RENDERED_SHARE = 0.01
LISTED_ROWS = 2**12
"""More rows of a set are in a file."""
_SHOWN_REASONS = 3
NAMED = "\x1f"
"""First character of the key of a group that a row names, which sorts before the keys of prompts."""
_INVISIBLE = re.compile(f"[{''.join(char for char in INVISIBLE if not char.isspace())}]")
_MOST_FIELDS = 200
"""Maximum number of fields of a source that are counted."""
_KINDS: dict[SetName, tuple[str, ...]] = {
    "sft": ("text", "messages", "completion", "preference"),
    "preference": ("preference",),
    "prompts": ("messages", "completion", "preference", "prompt"),
}
"""Kinds of records that each set can use. Of a pair, `sft` uses the chosen response."""
_NEEDS: dict[SetName, str] = {
    "sft": "a demonstration needs 'text', 'messages' or 'prompt' and 'completion'",
    "preference": "a pair needs 'chosen' and 'rejected'",
    "prompts": "a prompt row needs 'prompt' or 'messages'",
}


# -- reading --


class SourceRecord(NamedTuple):
    """A checked record and the row it comes from."""

    record: Record
    source: str
    file: str
    line: int
    group: str
    """Key of its group; see `own_group` and `join_groups`."""


class StoredRecords(Rows[SourceRecord]):
    """Records in a file of `folder` without a name, which are made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # open while the records are used
        ends = array("q", [0])

        # No method: the file is closed with the last reference to this object, which must not be its own.
        def item(index: int) -> SourceRecord:
            file.flush()
            # Not mapped: its pages would count as memory of this process.
            start, end = ends[index : index + 2]
            return _record(os.pread(file.fileno(), end - start, start).decode())

        super().__init__(0, item)
        self._file, self._ends = file, ends

    def append(self, item: SourceRecord) -> None:
        """Write a record."""
        self._ends.append(self._ends[-1] + self._file.write(json.dumps(item).encode()))
        self._count += 1


def _record(content: str) -> SourceRecord:
    (kind, prompt, text, messages, response, rejected, *others), *place = json.loads(content)
    prompt, messages = tuple(map(_message, prompt)), tuple(map(_message, messages))
    response, rejected = response and _message(response), rejected and _message(rejected)
    return SourceRecord(Record(kind, prompt, text, messages, response, rejected, *others), *place)


def _message(fields: list[Any]) -> Message:
    fields[4] = tuple(Call(*call) for call in fields[4])
    return Message(*fields)


def stored(rows: Iterable[SourceRecord], folder: Path) -> Sequence[SourceRecord]:
    """Return the rows. Many are in a file of `folder` without a name."""
    rest = iter(rows)
    few = list(islice(rest, LISTED_ROWS + 1))
    if len(few) <= LISTED_ROWS:
        return few
    many = StoredRecords(folder)
    for row in chain(few, rest):
        many.append(row)
    return many


@dataclass
class OtherFields:
    """Numbers of the usable rows of a source that have a field which no text or mask is made of."""

    rows: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    """Those in which the field is a long text."""

    def add(self, fields: Mapping[str, bool]) -> None:
        """Count the fields of one row, which are true where they are long texts."""
        for name, is_text in fields.items():
            if name in self.rows or len(self.rows) < _MOST_FIELDS:
                self.rows[name] += 1
                self.texts[name] += is_text

    def mostly_texts(self, read: int) -> list[str]:
        """Return the fields that are long texts in most of the rows that have them, and are in 1 % of all
        `read` rows or more.
        """
        return [
            name for name, count in self.rows.items() if 2 * self.texts[name] > count and 100 * count >= read
        ]


@dataclass
class SetCounts:
    """Numbers of rows of one set. Without weights of sources, `read` + `further` = `bad` + the sum of
    `dropped` + `train` + `eval`.
    """

    read: int = 0
    bad: int = 0
    """Rows in the quarantine."""
    most_of_a_source: int = 0
    """Rows that were read of the source with the most."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Usable rows that were left out, by reason."""
    train: int = 0
    eval: int = 0
    further: int = 0
    """Sequences beyond the first one of conversations with a sequence for each answer."""
    others: dict[str, OtherFields] = field(default_factory=dict)
    """Fields that no text is made of, by source."""
    formats: Counter[str] = field(default_factory=Counter)
    """Usable rows, by format."""
    weighted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Training rows of each source, and how many are made of them by its weight, if one is not 1."""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, for the data card."""
        return {
            "read": self.read,
            "bad": self.bad,
            "dropped": dict(self.dropped),
            "train": self.train,
            "eval": self.eval,
            "further": self.further,
        }


class Quarantine:
    """Bad rows, one JSON object per line: source, line, reason, row (at most 500 characters)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.first: dict[str, list[str]] = {}
        """The first different reasons of each source, with file and line, for the message that stops the run.
        """

    def add(self, source: str, file: str, line: int, reason: str, text: str) -> None:
        """Write one bad row.

        Args:
            source: Field of its source, such as `data.sft[0]`.
            file: File that contains it.
            line: Line in the file, starting at 1.
            reason: Why it is bad.
            text: The row.
        """
        row = {"source": file, "line": line, "reason": reason, "row": text[:500]}
        # In ASCII: a bad row can have lone surrogates, which UTF-8 cannot encode.
        self._file.write(json.dumps(row) + "\n")
        first = self.first.setdefault(source, [])
        is_new = not any(each.endswith(f": {reason}") for each in first)
        if is_new and len(first) < _SHOWN_REASONS:
            first.append(f"{file}:{line}: {reason}")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def read_records(
    config: PipelineConfig,
    name: SetName,
    quarantine: Quarantine,
    counts: SetCounts,
    contents: Mapping[str, Contents | None],
    folder: Path,
) -> Iterator[SourceRecord]:
    """Yield all usable records of a set.

    Args:
        config: Configuration of the pipeline.
        name: The set.
        quarantine: Receives the bad rows.
        counts: Its `read` and `bad` are increased.
        contents: Expected contents of each source by its field, such as `data.sft[0]`; None: not checked.
        folder: Has a file without a name meanwhile.

    Raises DataError if a source is empty, has too many bad rows, or has other contents.
    """
    sources: tuple[Source, ...] = getattr(config.data, name)
    names = distinct_names(sources)
    for index, source in enumerate(sources):
        field_name = f"data.{name}[{index}]"
        read = bad = marked_bad = 0
        halves = StoredRecords(folder)
        others = counts.others[field_name] = OtherFields()
        absent = set(source.rename)
        for row in _rows(config, name, source, contents[field_name]):
            read += 1
            result = (
                row
                if isinstance(row, BadRow)
                else to_record(row, source, name, names[index], config.data.thoughts)
            )
            if isinstance(result, BadRow):
                bad += 1
                quarantine.add(field_name, result.file, result.line, result.reason, result.text)
                continue
            assert isinstance(row, Row)
            absent = {theirs for theirs in absent if field_value(row.data, theirs) is None}
            others.add(other_fields(row.data, source.rename, result.record))
            counts.formats[result.record.kind] += 1
            if result.record.marked_bad:
                marked_bad += 1
            elif name == "preference" and result.record.kind != "preference":
                halves.append(result)
            else:
                yield result
        counts.read += read
        counts.most_of_a_source = max(counts.most_of_a_source, read)
        counts.bad += bad
        counts.dropped.update({MARKED_BAD: marked_bad} if marked_bad else {})
        if read == 0:
            only = f" whose `split` is {source.split!r}" if source.only_split else ""
            raise DataError(f"{field_name}: {source.path} has 0 rows{only}; give a source with rows")
        check_bad_share(config, field_name, source.path, bad, read, quarantine)
        if absent and bad < read:
            raise DataError(
                f"{field_name}.rename: no row of {source.path} has the field {sorted(absent)[0]!r}; correct"
                " the name, or take it out of `rename`"
            )
        if marked_bad:
            log.warning(
                "%s: %d of %d rows (%.0f %%) are no demonstrations, because their `label`, `train` or"
                " `weight` is false or 0; they are left out",
                field_name, marked_bad, read, 100 * marked_bad / read,
            )  # fmt: skip
        _warn_of_texts(config, name, source, field_name, others, read)
        if halves:
            only_halves = len(halves) == read - bad - marked_bad
            yield from _joined(halves, field_name, counts, only=only_halves, cut=read == source.limit)


def _label(record: Record) -> bool | None:
    """Return whether the `label` of a row says that its answer is good; None if it says nothing."""
    label = record.meta.get("label")
    if isinstance(label, str):  # a cell of a CSV file
        label = {"true": True, "false": False}.get(label.strip().lower())
    return label if isinstance(label, bool) else None


def _joined(
    halves: Sequence[SourceRecord], field_name: str, counts: SetCounts, *, only: bool, cut: bool
) -> Iterator[SourceRecord]:
    """Yield the pairs of good and bad answers to the same prompt, as rows of KTO have them by their `label`.
    Raises DataError if they make none and are the `only` rows of the source, or the only first ones (`cut`).
    """
    joined = 0
    answers: dict[int, tuple[list[int], list[int]]] = {}
    for place, item in enumerate(halves):
        prompt = bits64(json.dumps((item.record.prompt, item.record.tools)))
        answers.setdefault(prompt, ([], []))[0 if _label(item.record) else 1].append(place)
    for good, bad in answers.values():
        for places in zip(good, bad, strict=False):
            better, worse = map(halves.__getitem__, places)
            if better.record.response != worse.record.response:
                joined += 1
                record = better.record._replace(kind="preference", rejected=worse.record.response)
                yield better._replace(record=record)
    labelled, alone = len(halves), len(halves) - 2 * joined
    words = (
        f"{field_name}: {alone} of {labelled} rows with a `label` ({100 * alone / labelled:.0f} %) have no"
        " answer with the other label to the same prompt"
    )
    if only and not joined:
        fix = "give pairs, or train the good ones as data.sft"
        if cut:
            fix = "if they come later, read more rows (--rows, `limit`), or mix the rows of the file"
        raise DataError(f"{words}; {fix}")
    counts.dropped.update({JOINED: joined} | ({UNPAIRED: alone} if alone else {}))
    if alone:
        log.warning("%s; they are left out", words)


def _warn_of_texts(
    config: PipelineConfig, name: SetName, source: Source, field_name: str, others: OtherFields, read: int
) -> None:
    """Warn of fields that are mostly long texts, but are in no text that is trained or prompts a model."""
    known = {*source.ignore, "meta"}
    if name == "prompts":
        if any(isinstance(reward, PythonReward | RemoteReward) for reward in config.ppo.rewards):
            return  # they can read every field
        known |= {answer.split(".")[0] for answer in config.ppo.answer_fields}
    texts = [each for each in others.mostly_texts(read) if each not in known]
    if texts:
        shares = ", ".join(
            f"{each!r} in {100 * others.rows[each] / read:.0f} % of the rows" for each in texts
        )
        log.warning(
            "%s: fields with texts are not used (%s); if one belongs to the prompt or the answer, use"
            " `rename` or write it there; if not, name it in `ignore`",
            field_name, shares,
        )  # fmt: skip


def distinct_names(sources: Sequence[Source]) -> list[str]:
    """Return the `short_name` of each source. Equal names (`a/train.jsonl`, `b/train.jsonl`) get their index
    in the list.
    """
    names = list(map(short_name, sources))
    counts = Counter(names)
    shown = []
    for index, name in enumerate(names):
        is_repeated = counts[name] > 1
        shown.append(f"{name} {index}" if is_repeated else name)
    return shown


def check_bad_share(
    config: PipelineConfig, field_name: str, path: str, bad: int, read: int, quarantine: Quarantine
) -> None:
    """Raise DataError with the first reasons if more rows are bad than `data.max_bad_rows` allows.

    Args:
        config: Configuration of the pipeline.
        field_name: Field of the source or the set, which is also its name in the quarantine.
        path: Path of the source, for the message.
        bad: Number of bad rows.
        read: Number of all rows.
        quarantine: The bad rows.
    """
    if bad > config.data.max_bad_rows * read:
        raise DataError(
            f"{field_name}: {bad} of {read} rows of {path} cannot be used, more than"
            f" data.max_bad_rows={config.data.max_bad_rows:g} allows:"
            f" {'; '.join(quarantine.first[field_name])}; correct the rows or raise the limit"
        )
    if bad:
        log.warning("%s: %d of %d rows are in quarantine.jsonl", field_name, bad, read)


def _rows(
    config: PipelineConfig, name: SetName, source: Source, contents: Contents | None
) -> Iterator[Row | BadRow]:
    if source.path != "synthetic":
        yield from read_rows(source, config.store, contents)
        return
    generated = generate(config.data.synthetic, config.run.seed, name)
    for index, data in enumerate(islice(generated, source.limit), start=1):
        yield Row("synthetic", index, data)


def to_record(
    row: Row, source: Source, name: SetName, shown_name: str, thoughts: Thoughts | None = None
) -> SourceRecord | BadRow:
    """Return the checked record of a row, or the reason why a set cannot use it.

    Args:
        row: The row.
        source: Its source.
        name: The set.
        shown_name: Name of the source in the results.
        thoughts: `data.thoughts`.
    """
    try:
        record = normalise(
            row.data,
            source.format,
            source.rename,
            demonstration=name == "sft",
            ignore=source.ignore,
            thoughts=thoughts,
        )
        is_half = name == "preference" and record.kind == "completion" and "label" in record.meta
        if is_half and _label(record) is None:
            raise RowError(
                f"'label' must be true (a good answer) or false; got {record.meta['label']!r}; convert it"
            )
        if record.kind not in _KINDS[name] and not is_half:
            raise RowError(
                f"this is a `{record.kind}` row; {_NEEDS[name]}; use `rename` if fields are named otherwise"
            )
        group = own_group(record)
    except RowError as error:
        # With `default`: rows of Parquet files have values that JSON does not have, such as dates and bytes.
        return BadRow(row.file, row.line, str(error), json.dumps(row.data, default=str)[:500])
    except RecursionError:
        return BadRow(row.file, row.line, "nested too deeply", "")
    return SourceRecord(record, shown_name, row.file, row.line, group)


# -- groups --


def own_group(record: Record) -> str:
    """Return the key of the group of a row alone: its field `group`, or else its first user message.

    Raises RowError if the field is neither text nor a number.
    """
    value = record.meta.get("group")
    if value is None:
        return split_key(until_first_question(record)[-1])
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with gaps
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise RowError(f"'group' must be a text or a number; got {json.dumps(value)[:40]}; rename the field")
    # The name of a group is not checked as texts are, and can have lone surrogates.
    return NAMED + split_key(str(value).encode(errors="replace").decode())


def until_first_question(record: Record) -> list[str]:
    """Return the texts of the messages until the first one of the user; the text of a `text` row."""
    texts = []
    for message in record.prompt:
        texts.append(message.content)
        if message.role == "user":
            break
    return texts or [record.prompt_text]


def check_rendered(name: str, records: Sequence[SourceRecord], encoder: Encoder, max_share: float) -> None:
    """Raise DataError for a source with more rows than `max_share` that spell special tokens or role marks,
    as rows do that a chat template has already rendered. Such text stays text and is rendered again, which is
    right for single rows that mention a mark. From 1 % on, it is logged.
    """
    rows: Counter[str] = Counter()
    found: dict[str, Counted[str]] = {}
    for item in records:
        rows[item.source] += 1
        mark = encoder.rendered_mark(item.record.texts)
        if mark is not None:
            found.setdefault(item.source, Counted()).add(f"{mark!r} in {item.file}:{item.line}")
    for source, marked in found.items():
        share = marked.number / rows[source]
        text = (
            f"{name}: {marked.number} of {rows[source]} rows of {source} spell special tokens or role marks,"
            f" the first {marked.first}. If they are already rendered, they would be rendered twice; give the"
            " messages without them"
        )
        if share > max_share:
            raise DataError(f"{text}, or, if the texts are about such marks, raise data.max_bad_rows")
        if share >= _RENDERED_SHARE:
            log.warning("%s", text)


# -- encoding --


class RecordDropped(ValueError):
    """The record is well formed but not usable. The message is the reason under which it is counted.

    Args:
        reason: The reason.
        lengths: Its tokens, estimated, for a record that is so long that it was not encoded.
    """

    def __init__(self, reason: str, lengths: Mapping[str, int] | None = None) -> None:
        super().__init__(reason)
        self.lengths = dict(lengths or {})


@dataclass(frozen=True)
class EncodedRecord:
    """A token example with the text it was made from."""

    example: SFTExample | PairExample | PromptExample
    key: str
    """Split key of its prompt."""
    text: str
    """Prompt and (chosen) response as plain text, for samples and for the count of overlaps."""
    group: str
    """Key of its group."""


def prompt_id(prompt_text: str) -> str:
    """Return 16 hex digits that identify the text of a prompt."""
    return f"{bits64(prompt_text):016x}"


def bits64(text: str) -> int:
    """Return 64 bits that identify a text."""
    # Of ten million texts, two have the same ones with a probability of 3e-6.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a record, or of one sequence of it."""

    ids: tuple[Any, ...]
    """The columns of its example: of a demonstration tokens and mask, of a pair prompt and both responses.
    Tuples or `Numbers`.
    """
    lengths: Mapping[str, int]
    """Their numbers, by the field that limits them."""
    longest_turn: int | None = None
    """Tokens of the longest answer of a conversation."""

    @property
    def measures(self) -> tuple[int, int, float]:
        """Tokens of the prompt and of the response, and the place of the first trained token of a
        conversation; 0 of other rows.
        """
        first = 0.0
        if self.longest_turn is not None:
            first = self.ids[1].index(1) if 1 in self.ids[1] else math.inf
        return self.lengths.get(PROMPT, 0), self.lengths.get(RESPONSE, 0), first


def tokens_of(record: Record, name: SetName, encoder: Encoder, bounds: Limits) -> list[Tokens]:
    """Return the tokens of one record, to which `within` applies the limits. A conversation can be several
    sequences (`Encoder.conversations`). They follow from the arguments alone.

    Args:
        record: The record.
        name: Its set.
        encoder: Tokenizer with the chat template.
        bounds: A record that is surely longer is not encoded, and texts are cut.

    Raises RecordDropped if it is not encoded, and EncodeError if it cannot be.
    """
    text = record.prompt_text
    if record.text is not None:
        return [_tokens_of_text(text, encoder, bounds.text)]
    if name == "sft" and record.kind == "messages":
        return _tokens_of_conversation(record, encoder, bounds.text)
    _require_bound(encoder, text, bounds.prompt, PROMPT)
    if name == "prompts":
        ids = encoder.prompt(record.prompt, record.tools)
        return [Tokens((ids,), {PROMPT: len(ids)})]
    assert record.response is not None
    prompt, response = _response(record, record.response, encoder, bounds)
    if name == "sft":
        mask = (0,) * len(prompt) + (1,) * len(response)
        return [Tokens((prompt + response, mask), {PROMPT: len(prompt), RESPONSE: len(response)})]
    assert record.rejected is not None
    _, rejected = _response(record, record.rejected, encoder, bounds)
    if response == rejected:
        raise RecordDropped("chosen and rejected have the same tokens")
    lengths = {PROMPT: len(prompt), RESPONSE: max(len(response), len(rejected))}
    return [Tokens((prompt, response, rejected), lengths)]


def with_tokens(item: SourceRecord, name: SetName, tokens: Tokens) -> EncodedRecord:
    """Return the example of a record of the set `name` with its tokens."""
    record, group, text = item.record, prompt_id(item.group), item.record.prompt_text
    example: SFTExample | PairExample | PromptExample
    if name == "sft":
        ids, mask = tokens.ids
        example = SFTExample(ids, mask, item.source, group)
    elif name == "preference":
        prompt, chosen, rejected = tokens.ids
        margin = _margin(record)
        example = PairExample(prompt_id(text), text, prompt, chosen, rejected, item.source, margin, group)
    else:
        [ids] = tokens.ids
        example = PromptExample(prompt_id(text), text, ids, record.meta, item.source, group)
    whole = text if name == "prompts" else _plain_text(record)
    return EncodedRecord(example, split_key(text), whole, item.group)


def within(tokens: Tokens, limits: Limits) -> Tokens:
    """Return the tokens of a text or conversation cut to `limits.text`, and others as they are.

    Raises RecordDropped if the prompt or response is longer than its limit, or if nothing to learn is left.
    """
    if reason := why_dropped(tokens.measures, limits):
        raise RecordDropped(reason)
    if TEXT not in tokens.lengths:
        return tokens
    return replace(tokens, ids=tuple(column[: limits.text] for column in tokens.ids))


def why_dropped(measures: Iterable[float], limits: Limits) -> str | None:
    """Return why tokens with these `Tokens.measures` are left out, or None if they are not."""
    prompt, response, first_trained = measures
    if prompt > limits.prompt:
        return PROMPT_TOO_LONG
    if response > limits.response:
        return RESPONSE_TOO_LONG
    return NOTHING_TO_LEARN if first_trained >= limits.text else None


def _margin(record: Record) -> float | None:
    value = record.meta.get("margin")
    if isinstance(value, str):  # a cell of a CSV file, or a decimal number of a parquet file
        with suppress(ValueError):
            value = float(value)
    # Not `>`: NaN is not a margin either.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_MARGIN:
        return None
    return float(value)


def _tokens_of_text(text: str, encoder: Encoder, most: int) -> Tokens:
    encoded = encoder.text(text, most)
    tokens = len(encoded.ids)
    if tokens == most < _MEASURED_TEXT:  # it is cut: measure it
        tokens = len(encoder.text(text, _MEASURED_TEXT).ids)
    if tokens >= _MEASURED_TEXT:
        tokens = max(tokens, estimated_tokens(text))
    return Tokens((encoded.ids, encoded.mask), {TEXT: tokens})


def _tokens_of_conversation(record: Record, encoder: Encoder, most: int) -> list[Tokens]:
    # Only a part of a conversation has to fit, so that one that is somewhat longer is still encoded.
    if encoder.surely_longer(record.prompt_text, 8 * most):
        raise RecordDropped(NOTHING_TO_LEARN, {TEXT: estimated_tokens(record.prompt_text)})
    last = record.messages[-1]
    # The rest is cut. Tokenizing it could take minutes.
    last = last._replace(content=encoder.beginning(last.content, max(most, _MEASURED_TEXT)))
    found = []
    for encoded in encoder.conversations([*record.messages[:-1], last], record.tools):
        turns = "".join(map(str, encoded.mask)).split("0")
        lengths = {TEXT: len(encoded.ids)}
        found.append(Tokens((encoded.ids, encoded.mask), lengths, max(map(len, turns))))
    return found


def _response(
    record: Record, answer: Message, encoder: Encoder, bounds: Limits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the prompt and of one response to it."""
    _require_bound(encoder, answer.text, bounds.response, RESPONSE)
    return encoder.response(record.prompt, answer, record.tools)


def _require_bound(encoder: Encoder, text: str, bound: int, limited_by: str) -> None:
    """Raise RecordDropped for a text that is surely longer. Encoding one of megabytes takes long."""
    if encoder.surely_longer(text, bound):
        reason = PROMPT_TOO_LONG if limited_by == PROMPT else RESPONSE_TOO_LONG
        raise RecordDropped(reason, {limited_by: estimated_tokens(text)})


def estimated_lengths(record: Record, name: SetName) -> dict[str, int]:
    """Return about what `Tokens.lengths` will be in the set `name`, without a tokenizer."""
    if record.text is not None:
        return {TEXT: estimated_tokens(record.text)}
    if name == "sft" and record.kind == "messages":
        return {TEXT: estimated_tokens(_plain_text(record))}
    prompt = estimated_tokens(record.prompt_text)
    answers = [answer for answer in (record.response, record.rejected) if answer is not None]
    if not answers:
        return {PROMPT: prompt}
    return {PROMPT: prompt, RESPONSE: max(estimated_tokens(answer.text) for answer in answers)}


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has, by its characters."""
    return math.ceil(len(text) / _CHARS_PER_TOKEN)


def _plain_text(record: Record) -> str:
    if record.text is not None:
        return record.prompt_text
    answer = record.messages[-1] if record.messages else record.response
    assert answer is not None
    return f"{record.prompt_text}\n\n{answer.text}"


def training_texts(record: Record) -> Iterator[str]:
    """Yield the texts of a record for training a tokenizer.

    Long texts are cut, because the training takes minutes for megabytes without a blank.
    """
    for text in record.texts:
        yield text[:_MAX_TRAINING_CHARS]


# -- split --


def split_key(prompt_text: str) -> str:
    """Return the key of a prompt. Prompts that look the same have the same key: they differ only in white
    space, invisible characters, or composed and decomposed letters.
    """
    if not prompt_text.isascii():
        # Not NFKC, by which x² and x2 would be one prompt.
        prompt_text = unicodedata.normalize("NFC", _INVISIBLE.sub("", prompt_text))
    return " ".join(prompt_text.split())


def split_position(seed: int, key: str) -> float:
    """Return the position of a group in [0, 1), by the hash of its key.

    A group is held out if its position is below the evaluation share. The position is the same in all sets,
    runs and machines.
    """
    return bits64(f"{seed}\x1fsplit\x1f{key}") / 2**64


def held_out(positions_by_set: Mapping[SetName, Sequence[float]], fraction: float) -> frozenset[float]:
    """Return the positions of the groups that are kept for evaluation in all sets together: those below
    `fraction`. The positions are those of the groups of each row (`split_position`).

    In a set that is so small that all or none of its groups were chosen, the one nearest to the border is
    moved. Raises DataError if a set has only one group.
    """
    import numpy as np

    groups = {name: np.unique(positions) for name, positions in positions_by_set.items()}
    held = {each for distinct in groups.values() for each in distinct[distinct < fraction].tolist()}
    pinned: set[float] = set()
    # Training groups of all sets first: one that a set needs for training must not be held out later.
    for side in ("train", "eval"):
        for name, distinct in groups.items():
            if len(distinct) < 2:
                raise DataError(
                    f"data.{name}: only {len(distinct)} group of prompts left (the same first user message or"
                    " `group`); at least 2 are needed, one of them for evaluation; give more rows, or give"
                    " all rows a field `group` that separates them"
                )
            if side == "train" and all(each in held for each in distinct):
                held.discard(distinct[-1])
                pinned.add(distinct[-1])
            elif side == "eval" and not any(each in held for each in distinct):
                # Not a group that another set needs for training.
                held.add(next((each for each in distinct if each not in pinned), distinct[0]))
    for name, distinct in groups.items():
        # A group that was held out for one set can be the last one of another for training.
        if all(each in held for each in distinct):
            raise DataError(
                f"data.{name}: too few groups of prompts ({len(distinct)}) to hold some out; give more rows"
            )
    return frozenset(held)
