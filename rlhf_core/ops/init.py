"""`rlhf init`: a short configuration for a team's own files and model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from rlhf_core.config.address import parse_address
from rlhf_core.config.data import SetName, Source
from rlhf_core.config.messages import SCHEMA_FILE
from rlhf_core.config.training import SFTConfig
from rlhf_core.config.yaml import quoted
from rlhf_core.data.examples import to_record
from rlhf_core.data.files import BadRow, first_rows, list_files
from rlhf_core.data.formats import Record, field_value
from rlhf_core.data.prepare import FEW_STEPS
from rlhf_core.data.templates import TOOLS_TEMPLATE
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.ops.plan.rows import rows_of_file
from rlhf_core.system.files import exists

Goal = Literal["ppo", "grpo", "dpo"]
PAIRS_OF_TWO = 4000
"""Pairs that are enough for a reward model and a judge, half of them for each."""
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "solution")
"""Fields of the right answer in public sets of prompts; the third is that of verl."""
SMALL, MEDIUM = 100_000_000, 3_000_000_000
"""Parameters from which the rates of the next size apply."""


class Rates(NamedTuple):
    """Learning rates for all parameters. With adapters, the defaults are ten times those of large models."""

    sft: str
    reward: str
    policy: str
    critic: str
    dpo: str
    source: str


_SMALL_RATES = Rates(
    "1.0e-3",
    "5.0e-4",
    "3.0e-4",
    "5.0e-4",
    "2.0e-4",
    "for models below 100 million parameters, as in tinystories.yaml",
)
_MEDIUM_RATES = Rates(
    "2.0e-5", "1.0e-5", "3.0e-6", "1.0e-5", "5.0e-7", "for models below 3 billion, as in TRL's examples"
)
"""SFT, DPO and PPO: TRL's example commands sft.py and dpo.py for Qwen2-0.5B, and ppo.py for Pythia-1B. The
reward model has the default, half the rate of SFT, and the critic that of the reward model.
"""


@dataclass(frozen=True)
class Given:
    """What the user has. The files are addresses of sources, as in the section `data`."""

    model: str
    goal: Goal
    sft: str | None = None
    pairs: str | None = None
    prompts: str | None = None


@dataclass(frozen=True)
class _Seen:
    """What the first rows of the local files have."""

    answers: str | None
    """The field that all prompts have for their right answer; None if there is none."""
    unanswered: str
    """What is said of the prompts without one, if others have one."""
    thoughts: bool
    tools: bool


def configuration(given: Given, name: str) -> str:
    """Return the text of a configuration named `name`. Raises ConfigError if a file is missing that the goal
    needs, and DataError if no row of a file is what it was given for.
    """
    files: dict[SetName, tuple[str, str | None]] = {
        "sft": ("--sft", given.sft),
        "preference": ("--pairs", given.pairs),
        "prompts": ("--prompts", given.prompts),
    }
    records: dict[SetName, Sequence[Record]] = {}
    for set_name, (option, path) in files.items():
        if path is not None:
            records[set_name] = _first_records(option, set_name, path)
    seen = _seen(records)
    _check(given, seen)
    return "\n".join(
        [
            f"# yaml-language-server: $schema={SCHEMA_FILE}",
            f"# {given.goal.upper()} of {given.model}",
            f"run: {{name: {quoted(name)}}}",
            f"model: {{path: {quoted(given.model)}}}",
            "",
            *_data(given, seen),
            "",
            *_stages(given, seen),
            "",
        ]
    )


def _first_records(option: str, name: SetName, path: str) -> Sequence[Record]:
    """Return the first rows of a local file; none of another source. Raises DataError with the option."""
    address = parse_address(path)
    if address.kind != "local":
        return []
    try:
        files = list_files(address, "train")
        rows = first_rows(files[0]) if files else []
    except DataError as error:
        raise DataError(f"{option}: {error.message}") from error
    source = Source(path=path)
    # `keep`, because `drop` would remove the thoughts before `_seen` looks for them.
    records = [to_record(row, source, name, path, "keep") for row in rows]
    bad = [each for each in records if isinstance(each, BadRow)]
    # The stage `data` passes over some bad rows. If all of the first ones are bad, it is the wrong file.
    if bad and len(bad) == len(records):
        raise DataError(f"{option} {path}: none of the first {len(bad)} rows can be used: {bad[0].reason}")
    return [each.record for each in records if not isinstance(each, BadRow)]


def _seen(records: Mapping[SetName, Sequence[Record]]) -> _Seen:
    prompts = records.get("prompts", ())
    thoughts = tools = False
    for record in chain.from_iterable(records.values()):
        answers = [answer for answer in (record.response, record.rejected) if answer is not None]
        messages = [*record.messages, *record.prompt, *answers]
        thoughts = thoughts or any(message.thoughts for message in messages)
        tools = tools or bool(record.tools) or any(message.calls for message in messages)
    missing = {field: sum(field_value(record.meta, field) is None for record in prompts) for field in ANSWERS}
    field = min(ANSWERS, key=missing.__getitem__)
    if prompts and not missing[field]:
        return _Seen(field, "", thoughts, tools)
    some = f"; {missing[field]} of the first {len(prompts)} prompts have no {field!r}: give it or remove them"
    return _Seen(None, some if missing[field] < len(prompts) else "", thoughts, tools)


def _check(given: Given, seen: _Seen) -> None:
    if given.goal == "dpo" and given.pairs is None:
        raise ConfigError("--goal dpo: needs pairs (prompt, chosen, rejected); give --pairs FILE")
    if given.goal != "dpo" and given.pairs is None and seen.answers is None:
        raise ConfigError(
            f"--goal {given.goal}: needs a reward: give --pairs FILE (prompt, chosen, rejected) to train a"
            " reward model, or --prompts FILE whose rows have the right answer in a field"
            f" {', '.join(ANSWERS)}{seen.unanswered}"
        )
    if parse_address(given.model).kind == "local" and not exists(given.model):
        raise ConfigError(f"--model {given.model}: there is no such folder; give one, or a name on the hub")
    if given.sft is None and given.pairs is None and not _is_start(given):
        raise ConfigError(
            f"--model {given.model}: has no chat template, so it must learn to answer first; give --sft FILE"
        )


def _data(given: Given, seen: _Seen) -> Iterator[str]:
    """Yield the section `data`."""
    yield "data:"
    if _leaves_tools_out(given, seen):
        yield f"  chat_template: {TOOLS_TEMPLATE}    # the rows have tools, which the model's own leaves out"
    # Of a model on the hub nothing is known before it is fetched.
    elif exists(given.model) and not ModelFolder(given.model).has_chat_template:
        yield "  template: plain    # the tokenizer has no chat template"
    if seen.thoughts:
        yield "  thoughts: keep     # the answers have thoughts; drop leaves them out"
    if given.sft is not None:
        yield f"  sft: [{{path: {quoted(given.sft)}}}]"
    elif given.pairs is not None and not _is_start(given):
        yield f"  sft: [{{path: {quoted(given.pairs)}}}]  # the chosen responses: none were given"
    if given.pairs is not None:
        yield f"  preference: [{{path: {quoted(given.pairs)}}}]"
    else:
        yield "  preference: []"
    prompts = given.prompts or given.pairs or given.sft or ""
    note = "" if given.prompts else "      # the prompts of these rows: no file of prompts was given"
    rename = f", rename: {{{seen.answers}: answer}}" if seen.answers not in (None, "answer") else ""
    yield f"  prompts: [{{path: {quoted(prompts)}{rename}}}]{note}"


def _leaves_tools_out(given: Given, seen: _Seen) -> bool:
    """Return whether the rows have tools, which the template of the model, a local one, does not name."""
    return seen.tools and exists(given.model) and "tools" not in ModelFolder(given.model).chat_template


def _stages(given: Given, seen: _Seen) -> Iterator[str]:
    rates = rates_of(given.model)
    if rates is not None:
        yield f"# Learning rates: {rates.source}."
    if _is_start(given):
        note = ", which has not learned data.chat_template" if _leaves_tools_out(given, seen) else ""
        yield f"sft: {{enabled: false}}    # the policy starts from the model as it is{note}"
    else:
        fields = [] if rates is None else [f"optimizer: {{learning_rate: {rates.sft}}}"]
        # A tenth of the rows is held out.
        steps = math.ceil(0.9 * _rows(given.sft or given.pairs) / SFTConfig().batch_size)
        if 0 < steps < FEW_STEPS:
            fields.insert(0, f"epochs: {math.ceil(FEW_STEPS / steps)}")
        if fields:
            yield f"sft: {{{', '.join(fields)}}}"
    yield from _reward(given, rates)
    if given.goal == "dpo":
        yield "# DPO learns from the pairs. The reward model, trained on them too, judges the result."
        yield "ppo: {enabled: false}"
        rate = "" if rates is None else f", optimizer: {{learning_rate: {rates.dpo}}}"
        yield f"dpo: {{enabled: true{rate}}}"
        return
    yield "ppo:"
    if given.goal == "grpo":
        yield "  algorithm: grpo"
    if rates is not None:
        yield f"  policy: {{learning_rate: {rates.policy}}}"
        if given.goal == "ppo":
            yield f"  critic: {{learning_rate: {rates.critic}}}"
    yield "  rewards:"
    if seen.answers is not None:
        yield "    - {type: answer}       # 1 if the final answer is that of the row's field `answer`"
    if given.pairs is not None:
        yield "    - {type: model}        # the reward model that is trained on the pairs"


def _reward(given: Given, rates: Rates | None) -> Iterator[str]:
    if given.pairs is None:
        yield "reward: {enabled: false}"
        return
    pairs = _rows(given.pairs)
    fields = [] if rates is None else [f"optimizer: {{learning_rate: {rates.reward}}}"]
    # Not with DPO: there the reward model itself only judges, and the policy never learns from its scores.
    if pairs >= PAIRS_OF_TWO and given.goal != "dpo":
        yield f"# Half of the {pairs:,} pairs train a second reward model, which judges and does not train."
        fields.append("judge: {}")
    if fields:
        yield f"reward: {{{', '.join(fields)}}}"


def _rows(path: str | None) -> int:
    """Return the number of rows of local files; 0 of others."""
    if path is None or parse_address(path).kind != "local":
        return 0
    return sum(map(rows_of_file, list_files(parse_address(path), "train")))


def rates_of(model: str) -> Rates | None:
    """Return the learning rates for the size of a local model. None: the defaults, which are those of models
    of several billion parameters, or the size is not known.
    """
    if not exists(model):
        return None
    parameters = ModelFolder(model).parameters
    if not 0 < parameters < MEDIUM:
        return None
    return _SMALL_RATES if parameters < SMALL else _MEDIUM_RATES


def _is_start(given: Given) -> bool:
    """Return whether the policy starts from the model itself: no demonstrations are given, and its name says
    that it follows instructions, or there are no pairs to learn from and it has a chat template.

    A template alone says little, because base models such as Qwen2.5-0.5B have one.
    """
    if given.sft is not None:
        return False
    name = given.model.rstrip("/").rpartition("/")[2].lower()
    # `-it` is the ending of Gemma's models that follow instructions.
    if re.search(r"instruct|chat|-it(?![a-z])", name):
        return True
    return given.pairs is None and exists(given.model) and ModelFolder(given.model).has_chat_template
