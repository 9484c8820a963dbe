"""Token files of a data artifact: writing them, and reading them as the records of `rlhf_core.types`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlhf_core.config.rewards import AnswerReward, AnyReward
from rlhf_core.data.answers import gold_answers, is_reachable, rewording
from rlhf_core.data.formats import field_value
from rlhf_core.errors import DataError
from rlhf_core.types import PairExample, PromptExample, SFTExample

Split = Literal["train", "eval"]
_T = TypeVar("_T")
_TOKENS, _MASK, _TEXT, _NUMBER = "list<int32>", "list<int8>", "string", "double"
_COLUMNS: dict[str, dict[str, str]] = {
    "sft": {"input_ids": _TOKENS, "loss_mask": _MASK, "source": _TEXT, "group": _TEXT},
    "pairs": {
        "prompt_id": _TEXT,
        "prompt": _TEXT,
        "prompt_ids": _TOKENS,
        "chosen_ids": _TOKENS,
        "rejected_ids": _TOKENS,
        "source": _TEXT,
        "margin": _NUMBER,
        "group": _TEXT,
    },
    "prompts": {
        "prompt_id": _TEXT,
        "prompt": _TEXT,
        "input_ids": _TOKENS,
        "meta": _TEXT,
        "source": _TEXT,
        "group": _TEXT,
    },
}
"""`meta` is JSON in a string."""
_ADDED = {"sft": ("group",), "pairs": ("group",), "prompts": ("source", "group")}
"""Columns that artifacts of earlier versions do not have."""


def load_sft(folder: Path, split: Split) -> list[SFTExample]:
    """Return the demonstrations of a data artifact's folder.

    Raises DataError if the file is missing or damaged.
    """
    return [
        SFTExample(tuple(ids), tuple(mask), source, group or "")
        for ids, mask, source, group in _read(
            folder, "sft", split, ("input_ids", "loss_mask", "source", "group")
        )
    ]


def load_pairs(folder: Path, split: Split) -> list[PairExample]:
    """Return the preference pairs of a data artifact's folder. There may be none."""
    names = ("prompt_id", "prompt", "prompt_ids", "chosen_ids", "rejected_ids", "source", "margin", "group")
    return [
        PairExample(
            prompt_id, prompt, tuple(prompt_ids), tuple(chosen), tuple(rejected), source, margin, group or ""
        )
        for prompt_id, prompt, prompt_ids, chosen, rejected, source, margin, group in _read(
            folder, "pairs", split, names
        )
    ]


def load_pair_prompts(folder: Path, split: Split) -> list[tuple[str, str]]:
    """Return the ids of the prompts and of the groups of all preference pairs."""
    rows = _read(folder, "pairs", split, ("prompt_id", "group"))
    return [(prompt_id, group or prompt_id) for prompt_id, group in rows]


def sft_prompts(example: SFTExample) -> Iterator[tuple[int, ...]]:
    """Yield the tokens before each answer of a demonstration, as `PromptExample.input_ids` has them.

    A conversation has several answers. Plain text has none.
    """
    for end in range(1, len(example.loss_mask)):
        if example.loss_mask[end] and not example.loss_mask[end - 1]:
            yield example.input_ids[:end]


def require_margins(pairs: Sequence[PairExample]) -> None:
    """Raise DataError unless every pair has a margin."""
    without = [pair for pair in pairs if pair.margin is None]
    if without:
        raise DataError(
            f"reward.margin: field needs a finite number `margin` in every preference row; {len(without)} of"
            f" {len(pairs)} have none (the first: source {without[0].source!r}, prompt"
            f" {without[0].prompt[:60]!r}); add it, `rename` another field to it, or use none or constant"
        )


def require_answers(
    prompts: Sequence[PromptExample],
    rewards: Sequence[AnyReward],
    where: str = "ppo.rewards",
    most: float = 0.0,
) -> list[str]:
    """Return warnings about the answers that `rewards` compare with.

    Args:
        prompts: Prompts with the fields of their rows.
        rewards: Rewards; those of another type are ignored.
        where: Field of the rewards.
        most: Largest share of prompts, 0 to 1, whose answer is missing or cannot be reached.

    Raises:
        DataError: No prompt has an answer, or more than `most` of them have none that can be reached.
    """
    warnings: list[str] = []
    for source in rewards:
        if isinstance(source, AnswerReward):
            warnings += _answer_warnings(prompts, source, where, most)
    return warnings


def _answer_warnings(
    prompts: Sequence[PromptExample], source: AnswerReward, where: str, most: float
) -> Iterator[str]:
    field, count = source.field, len(prompts)
    values = [field_value(prompt.meta, field) for prompt in prompts]
    without = [prompt for prompt, value in zip(prompts, values, strict=True) if value is None]
    if without and (len(without) == count or len(without) > most * count):
        raise DataError(
            f"{where}: type answer needs the field {field!r} in every prompt row; {len(without)} of"
            f" {count} have none (the first: {without[0].prompt[:60]!r}, whose fields are"
            f" {', '.join(sorted(without[0].meta)) or 'none'}); add it, or set `field` to the one that"
            " holds the answer"
        )
    unreachable, reworded = [], []
    for value in values:
        answers = gold_answers(value)
        if not any(is_reachable(each, only_numbers=source.extract == "final_number") for each in answers):
            unreachable.append(value)
        elif reading := rewording(value):
            reworded.append(f"{value!r:.60} as {reading}")
    if unreachable:
        problem = (
            f"{where}: type answer: no response can get the reward for {len(unreachable)} of {count} prompts"
            f" ({len(unreachable) / count:.1%}), because their field {field!r} is no answer that can be read"
            f" (the first: {unreachable[0]!r:.80}); write each as a number or a short text, or set `field` to"
            " the one that holds it, such as `reward_model.ground_truth`"
        )
        if len(unreachable) > most * count:
            raise DataError(f"{problem} (data.max_bad_rows={most:g})" if most else problem)
        yield problem
    if reworded:
        yield (
            f"{where}: type answer: {len(reworded)} of {count} answers in the field {field!r} are read as"
            f" what they contain (the first: {reworded[0]}); if that is not meant, write them as plain text"
        )


def read_evenly(
    folder: Path, name: str, split: Split, columns: Sequence[str], most: int | None
) -> list[tuple[Any, ...]]:
    """Return columns of rows at equal distances.

    Args:
        folder: Folder of the data artifact.
        name: Name of the table.
        split: Split of the rows.
        columns: Their names.
        most: Number of rows if there are more; None for all.

    Raises:
        DataError: The file is missing or damaged.
    """
    rows = list(_read(folder, name, split, columns))
    return rows if most is None else evenly(rows, most)


def evenly(rows: list[_T], most: int) -> list[_T]:
    """Return `rows`, or `most` of them at equal distances if there are more."""
    if len(rows) <= most:
        return rows
    return [rows[index * len(rows) // most] for index in range(most)]


def load_prompts(folder: Path, split: Split) -> list[PromptExample]:
    """Return the prompts of a data artifact's folder."""
    return [
        PromptExample(prompt_id, prompt, tuple(ids), json.loads(meta), source or "", group or "")
        for prompt_id, prompt, ids, meta, source, group in _read(
            folder, "prompts", split, ("prompt_id", "prompt", "input_ids", "meta", "source", "group")
        )
    ]


def write(
    folder: Path, name: str, split: Split, examples: Sequence[SFTExample | PairExample | PromptExample]
) -> None:
    """Write `{name}_{split}.parquet` with the columns of the record.

    The same examples give the same bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        _TOKENS: pa.list_(pa.int32()),
        _MASK: pa.list_(pa.int8()),
        _TEXT: pa.string(),
        _NUMBER: pa.float64(),
    }
    schema = pa.schema([(column, types[kind]) for column, kind in _COLUMNS[name].items()])
    columns: dict[str, list[Any]] = {}
    for column in _COLUMNS[name]:
        values = [getattr(example, column) for example in examples]
        if column == "meta":
            values = [json.dumps(dict(value), sort_keys=True) for value in values]
        columns[column] = values
    pq.write_table(pa.table(columns, schema=schema), folder / f"{name}_{split}.parquet", compression="zstd")


def _read(folder: Path, name: str, split: Split, columns: Sequence[str]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{name}_{split}.parquet"
    try:
        table = pq.read_table(path)
        # Data of earlier versions may belong to a champion, whose prompts are needed for a match.
        for column in _ADDED[name]:
            if column not in table.column_names:
                table = table.append_column(column, pa.nulls(len(table), pa.string()))
        table = table.select(list(columns))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; run the data stage again") from error
    return zip(*(table.column(column).to_pylist() for column in columns), strict=True)
