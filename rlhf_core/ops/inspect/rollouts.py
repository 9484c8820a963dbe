"""The recorded rollouts of one kind and of one or two runs in a database, for the pages of `rlhf inspect`.

    Parquet parts --> `rollouts`  one row for each response: what has one value, length, gap, annotations
                  --> `texts`     decoded responses to search in, filled by a thread (`decode_all`)
    annotations   --> `labels`    the texts of those that have some

Tokens and what has a value for each token stay in the parts and are read when a response is shown. The
database is a file in a temporary folder. After it is filled it can read the parts and no other file, and none
of its settings can be changed. Values of users are bound as parameters; names of columns are those of
`numbers`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import ClippedWeightLoss, SequenceLoss
from rlhf_core.config.redact import without_secret_values
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import STAGE_OF_KIND, FinishedRun, Kind
from rlhf_core.ops.first_difference import Recording
from rlhf_core.ppo.watching.guards import raised_guards
from rlhf_core.ppo.watching.selection import read_evaluations
from rlhf_core.record.annotations import LABELS, annotations_of, label_response
from rlhf_core.record.reader import RECORD, parts_of
from rlhf_core.record.schema import REWARD, WEIGHTED
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef

ANNOTATION = "annotation/"
"""Begins the name of the column with the scores of an annotation."""
LENGTH, GAP = "length", "gap"
"""Number of tokens of a response, and root mean square of the differences between `rollout_logprobs` and
`old_logprobs` over its tokens, in nats.
"""
GUARDS, CLIPPED = "guards", "clipped"
"""Number of guards that the step raised, and share of the tokens of a response that the clip of the policy's
loss holds after the update.
"""
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "400MB",
    # DuckDB would otherwise fetch and load code from its server when a query or a file name asks for it.
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # An unknown table name in SQL would otherwise stand for a variable of this process.
    "python_enable_replacements": "false",
}
_PARTS = "read_parquet(?, union_by_name = true, hive_partitioning = false)"
"""Without partitioning, because a folder `step=7` in their path would replace the column."""
_TEXTS = ("source", "excluded", "model", "prompt_set")
"""Columns that filters name. A kind without one has null there."""
_DECODED_AT_ONCE = 1000
Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a response: number of the run, step, and number in the step."""

    run: int
    step: int
    index: int


@dataclass(frozen=True)
class ClipRange:
    """The ratios of new to old probabilities that the policy's loss does not clip."""

    low: float
    """Distance of the lowest ratio from 1."""
    high: float
    """Distance of the highest ratio from 1."""
    of_response: bool = False
    """Whether a response has one ratio, the geometric mean of those of its tokens."""


@dataclass(frozen=True)
class RecordedRun:
    """A run with a record."""

    name: str
    folder: Path
    """The artifact with its `record`."""
    annotations: Mapping[str, Path] = field(default_factory=dict)
    """Parquet files with the columns kind, step, index and score, by name."""
    guards: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Names of the guards that a step raised, by step."""
    clip: ClipRange | None = None
    """None: the policy's loss has none that is known."""
    tokenizer: Path | None = None
    """`tokenizer.json` of its tokens; None: that of `policy` in the folder."""
    artifact: tuple[ArtifactStore, ArtifactRef] | None = None
    """Where labels are kept; None: nowhere."""


@dataclass(frozen=True)
class Filter:
    """Which responses are shown. What is empty or None does not exclude any."""

    ranges: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Lowest and highest value by the name of a column."""
    run: int | None = None
    prompt: str = ""
    """A prompt_id."""
    source: str = ""
    """Data source of the prompt."""
    excluded: str = ""
    """`yes` or `no`, or a reason."""
    guard: str = ""
    """Name of a guard that the step raised, or `any`."""
    model: str = ""
    """What answered, in kinds with several models."""
    prompt_set: str = ""
    label: str = ""
    """A label that a response has, or `any`."""
    person: str = ""
    """Name of the annotation with a label."""
    text: str = ""
    """Part of the response. Upper and lower case are alike, and so is white space of any length."""

    @classmethod
    def of(cls, query: Mapping[str, str], numbers: Sequence[str]) -> Self:
        """Return the filter of a query with `min:COLUMN`, `max:COLUMN` and the names of the other fields.

        Raises InputError for a value that is no number.
        """
        limits = {}
        for name in bounded(query, numbers):
            limits[name] = _number(query, f"min:{name}"), _number(query, f"max:{name}")
        run = query.get("run")
        names = ("prompt", "source", "excluded", "guard", "model", "prompt_set", "label", "person", "text")
        others = {name: query.get(name, "") for name in names}
        return cls(limits, whole("run", run) if run else None, **others)

    def condition(self) -> tuple[str, list[Any]]:
        """Return the condition of a WHERE, and its parameters."""
        parts, values = ["true"], list[Any]()
        for name, limits in self.ranges.items():
            for limit, sign in zip(limits, (">=", "<="), strict=True):
                if limit is not None:
                    parts.append(f"{quoted(name)} {sign} ?")
                    values.append(limit)
        equal = {
            "run": self.run,
            "prompt_id": self.prompt,
            "source": self.source,
            "model": self.model,
            "prompt_set": self.prompt_set,
        }
        for column, value in equal.items():
            if value not in (None, ""):
                parts.append(f"{column} = ?")
                values.append(value)
        if self.excluded in ("yes", "no"):
            parts.append(f"excluded IS {'NOT ' if self.excluded == 'yes' else ''}NULL")
        elif self.excluded:
            parts.append("excluded = ?")
            values.append(self.excluded)
        if self.guard == "any":
            parts.append(f"{GUARDS} > 0")
        elif self.guard:
            parts.append("list_contains(raised, ?)")
            values.append(self.guard)
        if self.label or self.person:
            parts.append(_exists("labels", "? IN ('', 'any', other.label) AND ? IN ('', other.person)"))
            values += [self.label, self.person]
        if self.text:
            parts.append(_exists("texts", "contains(other.text, ?)"))
            values.append(_searched(self.text))
        return " AND ".join(parts), values


def _exists(table: str, condition: str) -> str:
    """Return the SQL of whether another table has a row of the same response that meets a condition."""
    same = '(other.run, other.step, other."index") = (rollouts.run, rollouts.step, rollouts."index")'
    return f"EXISTS (FROM {table} other WHERE {same} AND {condition})"


def whole(name: str, text: str) -> int:
    """Return a number of an address. Raises InputError if it has not one to nine digits."""
    # Nine digits always fit an INTEGER of the database, and int() also takes signs, blanks and underscores.
    if re.fullmatch("[0-9]{1,9}", text) is None:
        raise InputError(f"{name} must be a number of at most nine digits; got {text[:40]}")
    return int(text)


def _searched(text: str) -> str:
    """Return a text as searches compare it, with words as in `phrases`."""
    return " ".join(text.lower().split())


def bounded(query: Mapping[str, str], numbers: Sequence[str]) -> list[str]:
    """Return the columns that a query has bounds for."""
    return [name for name in numbers if query.get(f"min:{name}") or query.get(f"max:{name}")]


def _number(query: Mapping[str, str], name: str) -> float | None:
    given = query.get(name, "").strip()
    if not given:
        return None
    try:
        value = float(given)
    except ValueError:
        raise InputError(f"{name} must be a number; got {given}") from None
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number; got {given}")
    return value


class Rollouts:
    """The rollouts of one or two runs.

    Args:
        runs: The runs. The number of a run is its place.
        folder: An empty folder for the database.
        kind: The kind of the rollouts, which both have (`recorded_runs`).
    """

    def __init__(self, runs: Sequence[RecordedRun], folder: Path, kind: Kind = "ppo") -> None:
        self.runs = tuple(runs)
        self.kind: Kind = kind
        self._parts = [parts_of(run.folder / RECORD) for run in runs]
        files = [run.tokenizer or run.folder / "policy" / "tokenizer.json" for run in runs]
        self.tokenizers = [Tokenizer.from_file(str(file)) for file in files]
        self._database = duckdb.connect(folder / "rollouts.duckdb", config=_SETTINGS)
        self._database.execute("SET temp_directory = ?", [str(folder)])
        # To keep the order of the files takes more memory, and each query of a page has an order of its own.
        self._database.execute("SET preserve_insertion_order = false")
        selects, values = [], list[Any]()
        for number, run in enumerate(runs):
            select, parameters = self._select(number, run)
            selects.append(select)
            values += parameters
        self._database.execute(f"CREATE TABLE rollouts AS {' UNION ALL BY NAME '.join(selects)}", values)
        place = 'run INTEGER, step INTEGER, "index" INTEGER'
        self._database.execute(f"CREATE TABLE texts ({place}, text VARCHAR)")
        self._database.execute(f"CREATE TABLE labels ({place}, person VARCHAR, label VARCHAR, note VARCHAR)")
        for number, run in enumerate(runs):
            for name, file in run.annotations.items():
                if set(LABELS.names) <= set(pq.read_schema(file).names):
                    self._read_labels(number, name, file)
        self._database.execute("SET allowed_paths = ?", [list(map(str, chain.from_iterable(self._parts)))])
        self._database.execute("SET enable_external_access = false")
        # In this order: no paths can be allowed without external access, and nothing is set after the lock.
        self._database.execute("SET lock_configuration = true")
        self.numbers = self._numbers()
        """Columns with a number for each response, in the order in which they are shown."""
        self.count, self.first_step, self.last_step = self.one(
            "SELECT count(*), min(step), max(step) FROM rollouts"
        )
        self.choices = {name: self.distinct(name) for name in ("source", "model", "prompt_set")}
        """Values of these columns."""
        self.guards = sorted({name for run in runs for names in run.guards.values() for name in names})
        """Names of the guards that any step raised."""
        self.decoded = 0
        """Responses that a search for text finds."""

    @property
    def lacks_clipped(self) -> bool:
        """Whether a run has a clip range and no log-probabilities after the update (`record.level`)."""
        return CLIPPED not in self.numbers and any(run.clip for run in self.runs)

    def distinct(self, name: str, table: str = "rollouts") -> list[str]:
        """Return the texts in a column that are not empty."""
        rows = self.rows(f"SELECT DISTINCT {name} AS v FROM {table} WHERE {name} <> '' ORDER BY v")
        return [str(row["v"]) for row in rows]

    @property
    def sources(self) -> list[str]:
        """Names of the columns of reward sources and annotations."""
        return [name for name in self.numbers if name.startswith((REWARD, ANNOTATION))]

    def _select(self, number: int, run: RecordedRun) -> tuple[str, list[Any]]:
        """Return the rows of a run, with the parameters."""
        parts = list(map(str, self._parts[number]))
        columns = self._database.execute(f"DESCRIBE FROM {_PARTS}", [parts]).fetchall()
        names = [str(name) for name, *_ in columns]
        values: list[Any] = [number]
        shown = ["?::INTEGER AS run", f"len(record.response_ids) AS {LENGTH}"]
        for name, kind, *_ in columns:
            column = f"record.{quoted(name)}"
            if kind in ("FLOAT", "DOUBLE"):
                shown.append(f"{_without_nan(column)} AS {quoted(name)}")
            elif not kind.endswith("[]"):
                shown.append(column)
        shown += [f"NULL::VARCHAR AS {name}" for name in _TEXTS if name not in names]
        if {"rollout_logprobs", "old_logprobs"} <= set(names):
            # `[1:]` copies. The function refuses missing lists in others, which filtered responses have.
            distance = "list_distance(record.rollout_logprobs[1:], record.old_logprobs[1:])"
            shown.append(f"{_without_nan(f'({distance} / sqrt(len(record.response_ids)))')} AS {GAP}")
        if run.clip is not None and {"new_logprobs", "old_logprobs"} <= set(names):
            shown.append(f"{_without_nan(_clipped(run.clip))} AS {CLIPPED}")
        joins, files = [], list[Any]()
        if run.guards:
            shown.append(f"guards.raised, coalesce(len(guards.raised), 0)::DOUBLE AS {GUARDS}")
            joins.append("LEFT JOIN (SELECT unnest(?) AS step, unnest(?) AS raised) guards USING (step)")
            files += [list(run.guards), [list(names) for names in run.guards.values()]]
        else:
            shown.append(f"NULL::VARCHAR[] AS raised, NULL::DOUBLE AS {GUARDS}")
        for place, (name, file) in enumerate(run.annotations.items()):
            shown.append(f"{_without_nan(f'a{place}.score')} AS {quoted(ANNOTATION + name)}")
            joins.append(
                f'LEFT JOIN read_parquet(?) a{place} ON (a{place}.kind, a{place}.step, a{place}."index")'
                ' = (record.kind, record.step, record."index")'
            )
            files.append(str(file))
        return f"SELECT {', '.join(shown)} FROM {_PARTS} record {' '.join(joins)}", [*values, parts, *files]

    def _read_labels(self, number: int, person: str, file: Path) -> None:
        """Take the labels of an annotation, in place of what was read before."""
        cursor = self._database.cursor()
        cursor.register("given", pq.read_table(file))
        cursor.execute("DELETE FROM labels WHERE run = ? AND person = ?", [number, person])
        cursor.execute(
            'INSERT INTO labels SELECT ?, step, "index", ?, label, note FROM given WHERE label IS NOT NULL',
            [number, person],
        )

    def label(self, key: Key, person: str, label: str, note: str) -> None:
        """Keep what a person says about a response, in place of what it was before (`label_response`). One
        thread may call this at a time.

        Raises InputError if there is no such response, or if the name cannot be used.
        """
        if key not in self.tokens([key], ["kind"]) or (artifact := self.runs[key.run].artifact) is None:
            raise InputError(f"there is no response {key.index} of step {key.step} in a store")
        said = {"kind": self.kind, "step": key.step, "index": key.index, "label": label, "note": note}
        self._read_labels(key.run, person, label_response(*artifact, person, said))

    def _numbers(self) -> list[str]:
        columns = self._database.execute("DESCRIBE rollouts").fetchall()
        names = [str(name) for name, kind, *_ in columns if kind in ("FLOAT", "DOUBLE")]
        names = [name for name in names if not name.startswith(WEIGHTED)]
        counts = self.one(f"SELECT {', '.join(f'count({quoted(name)})' for name in names)} FROM rollouts")
        found = [name for name, count in zip(names, counts, strict=True) if count]
        equal = "SELECT bool_and(total IS NOT DISTINCT FROM score) FROM rollouts"
        # Without penalties both are the same numbers, and a page would have two equal columns and curves.
        if {"total", "score"} <= set(found) and self.one(equal) == (True,):
            found.remove("total")
        rewards = [name for name in found if name.startswith((REWARD, ANNOTATION))]
        own = [name for name in ("score", "total", "kl") if name in found]
        # All rows of the other kinds have the step 0.
        place = "step" if self.kind == "ppo" else "group"
        return [place, *own, LENGTH, *rewards, *(name for name in found if name not in {*own, *rewards})]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query, by name. Any thread may call this."""
        cursor = self._database.cursor()
        cursor.execute(sql, values)
        names = [str(name) for name, *_ in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def one(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the first row of a query."""
        row = self._database.cursor().execute(sql, values).fetchone()
        assert row is not None
        return tuple(row)

    def page(
        self, chosen: Filter, sort: str, *, descending: bool, offset: int, limit: int
    ) -> tuple[int, list[Row]]:
        """Return how many responses a filter has, and some of them.

        Args:
            chosen: The filter.
            sort: A column of `numbers`.
            descending: Whether the largest values are first. Responses without a value are last.
            offset: Responses to leave out before the first one.
            limit: The largest number of responses.
        """
        where, values = chosen.condition()
        (count,) = self.one(f"SELECT count(*) FROM rollouts WHERE {where}", values)
        order = f"{quoted(sort)} {'DESC' if descending else 'ASC'} NULLS LAST"
        rows = self.rows(
            f'FROM rollouts WHERE {where} ORDER BY {order}, run, step, "index" LIMIT ? OFFSET ?',
            [*values, limit, offset],
        )
        return count, self.with_texts(rows)

    def with_texts(self, rows: list[Row]) -> list[Row]:
        """Return the rows with `prompt` and `text`, decoded, and `labels`."""
        keys = [Key(row["run"], row["step"], row["index"]) for row in rows]
        tokens = self.tokens(keys, ["prompt_ids", "response_ids"])
        for row, key in zip(rows, keys, strict=True):
            found = tokens[key]
            row["labels"] = found["labels"]
            row["prompt"], row["text"] = self.decode(key.run, [found["prompt_ids"], found["response_ids"]])
        return rows

    def decode(self, run: int, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return texts without special tokens and without secrets that this process knows."""
        # Unlike `decode`, it releases Python's lock.
        return without_secret_values(
            self.tokenizers[run].decode_batch(list(tokens), skip_special_tokens=True)
        )

    def tokens(self, keys: Iterable[Key], columns: Collection[str] = ("*",)) -> dict[Key, Row]:
        """Return columns of the record, by default all of them, for some responses, and their `labels`.

        Raises InputError if a part was deleted or replaced.
        """
        found: dict[Key, Row] = {}
        these = '(step, "index") IN (SELECT unnest(?), unnest(?))'
        known = sorted(key for key in keys if key.run < len(self.runs))
        for (run, part), group in groupby(known, lambda key: (key.run, self._part(key))):
            wanted = list(group)
            places = [[key.step for key in wanted], [key.index for key in wanted]]
            try:
                rows = self.rows(
                    f'SELECT step, "index", {", ".join(columns)} FROM {_PARTS}'
                    f" WHERE step BETWEEN ? AND ? AND {these}",
                    [str(part), wanted[0].step, wanted[-1].step, *places],
                )
            except duckdb.Error as error:
                raise InputError(
                    f"{part} was pruned or replaced; run its configuration again, and then rlhf inspect"
                ) from error
            found |= {Key(run, row["step"], row["index"]): {**row, "labels": []} for row in rows}
            labels = self.rows(f"FROM labels WHERE run = ? AND {these} ORDER BY person", [run, *places])
            for said in labels:
                if (key := Key(run, said["step"], said["index"])) in found:
                    found[key]["labels"].append(said)
        return found

    def _part(self, key: Key) -> Path:
        """Return the part with a step. Its name ends with its first step."""
        earlier = [part for part in self._parts[key.run] if int(part.stem[-8:]) <= key.step]
        return earlier[-1] if earlier else self._parts[key.run][0]

    def decode_all(self, stop: threading.Event) -> None:
        """Decode all responses, from the last step to the first, until `stop` is set."""
        cursor = self._database.cursor()
        for run, part in self._backwards():
            # A cursor of its own: the INSERT below would replace the result that is read here.
            source = self._database.cursor()
            source.execute(f'SELECT step, "index", response_ids FROM {_PARTS}', [str(part)])
            while rows := source.fetchmany(_DECODED_AT_ONCE):
                if stop.is_set():
                    return
                steps, indices, tokens = zip(*rows, strict=True)
                texts = list(map(_searched, self.decode(run, tokens)))
                batch = pa.table({"step": steps, "index": indices, "text": texts})
                cursor.register("batch", batch)
                cursor.execute('INSERT INTO texts SELECT ?, step, "index", text FROM batch', [run])
                self.decoded += len(rows)

    def _backwards(self) -> Iterator[tuple[int, Path]]:
        for run, parts in enumerate(self._parts):
            for part in reversed(parts):
                yield run, part


def _clipped(clip: ClipRange) -> str:
    """Return the SQL of the share of a response's tokens whose ratio is outside a range."""
    # From 1 on, the clip has no lower end: a ratio is never below 0.
    low = math.log(1 - clip.low) if clip.low < 1 else -math.inf
    # As text, because SQL has no literal for the negative infinity.
    beyond = f"BETWEEN '{low}'::DOUBLE AND {math.log(1 + clip.high)}"
    if clip.of_response:
        return f"(list_avg(record.new_logprobs) - list_avg(record.old_logprobs) NOT {beyond})::DOUBLE"
    pairs = "list_zip(record.new_logprobs, record.old_logprobs)"
    count = f"len(list_filter({pairs}, lambda p: p[1] - p[2] NOT {beyond}))"
    # A missing list is zipped as one of nulls.
    return f"(CASE WHEN record.new_logprobs IS NOT NULL THEN {count} / len(record.new_logprobs) END)"


def _without_nan(column: str) -> str:
    """Return the SQL of a column with null in place of NaN, which is larger than every number in DuckDB.

    A comparison with NaN would be decided by the statistics of a Parquet file, which leave it out.
    """
    return f"CASE WHEN NOT isnan({column}) THEN {column} END"


def quoted(name: str) -> str:
    """Return the name of a column for SQL."""
    return '"' + name.replace('"', '""') + '"'


def recorded_runs(runs: Sequence[FinishedRun]) -> dict[Kind, list[RecordedRun]]:
    """Return the runs that have each kind.

    Raises InputError if a run has none, or if an artifact of its summary is not in the store any more.
    """
    found: dict[Kind, list[RecordedRun]] = {}
    for run in runs:
        kinds = [kind for kind in STAGE_OF_KIND if _has(run, kind)]
        if not kinds:
            raise InputError(f"{run.name} has no record (record.level, record.max_bytes); name another run")
        for kind in kinds:
            found.setdefault(kind, []).append(_recorded(run, kind))
    return found


def _has(run: FinishedRun, kind: Kind) -> bool:
    stage = STAGE_OF_KIND[kind]
    is_made = bool(run.stages.get(stage, {}).get("artifact"))
    return is_made and bool(parts_of(run.recorded(stage) / RECORD))


def _recorded(run: FinishedRun, kind: Kind) -> RecordedRun:
    stage = STAGE_OF_KIND[kind]
    artifact = run.artifact(stage)
    folder, annotations = run.recorded(stage), annotations_of(*artifact)
    if kind != "ppo":
        tokenizer = run.data() / "tokenizer" / "tokenizer.json"
        return RecordedRun(run.name, folder, annotations, tokenizer=tokenizer, artifact=artifact)
    ppo = run.config("ppo").ppo
    evaluations, _ = read_evaluations(folder / "evaluations.jsonl")
    guards = raised_guards(ppo, Recording(folder, run.name).metrics, evaluations)
    return RecordedRun(run.name, folder, annotations, guards, clip_range(ppo), artifact=artifact)


def clip_range(ppo: PPOConfig) -> ClipRange | None:
    """Return the ratios that the policy's loss does not clip; None if it is a user's function."""
    match ppo.loss:
        case None:
            return ClipRange(ppo.clip_low, ppo.clip_high)
        case SequenceLoss() | ClippedWeightLoss() as loss:
            return ClipRange(loss.clip_low, loss.clip_high, isinstance(loss, SequenceLoss))
        case _:
            return None
