"""Check of the data sources and the chat template before anything is started.

Yields findings: an `InputError` for what would make the run fail, and a text for what the user should know.
Of each file only the beginning is read, by the reader of the data stage, and all rows of regression sets that
are not too large.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rlhf_core.config.address import (
    BASE_STAGES,
    Address,
    BaseModelAddress,
    base_of,
    is_hub_model,
    is_reference,
    s3_problem,
)
from rlhf_core.config.data import Limits, SetName, Source, fitted_limits
from rlhf_core.config.evaluate import prompts_for_margin
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import AnswerReward
from rlhf_core.data.dataset import require_answers
from rlhf_core.data.examples import estimated_lengths, to_record
from rlhf_core.data.files import BEGINNING_ROWS, BadRow, Row, check_beginning, first_rows, list_files
from rlhf_core.data.lengths import LEAST, Lengths
from rlhf_core.data.prompt_sets import check_rows
from rlhf_core.data.sources import address_of, read_rows
from rlhf_core.data.synthetic import generate
from rlhf_core.data.templates import read_chat_template
from rlhf_core.data.tokenizer import require_same_tokens
from rlhf_core.errors import ConfigError, DataError, Finding, InputError, ModelError, guarded
from rlhf_core.models.check import further_length_problems, length_limits
from rlhf_core.models.folder import ModelFolder
from rlhf_core.system.files import exists
from rlhf_core.types import PromptExample

_FILES_OF_A_FOLDER = 3
"""Number of files of a folder whose first rows are used, and of those whose problems are listed."""
_CHECKED_FILES = 1000
"""Number of files of a folder whose beginnings are checked, which takes about a second."""
_ALL_ROWS_BYTES = 16 * 2**20
"""Maximum size of a regression set of which all rows are read. 400,000 short rows take about 20 s."""
_ALL_ANSWERS_BYTES = 4 * 2**20
"""Maximum size of prompts of which all answers are read: 100,000 short rows take about 5 s."""
_ASSUMED = Limits(prompt=1024, response=1024, text=2048, new=1024)
"""Lengths of sources of which no row can be read before the run, for checks and plans."""
_RIGHT_OR_WRONG = ("answer", "format")
"""Types of rewards that are 0 or 1."""


def check_data(config: PipelineConfig) -> Iterator[Finding]:
    """Check every source of the three sets and of regression sets, the chat template, and whether the judge
    has the tokens of the data.
    """
    data = config.data
    for name, index, source in data.sources():
        field = f"data.{name}.{index}"
        found = list(guarded(f"{field}.path", check_source(field, source)))
        yield from found
        if name == "prompts" and not any(isinstance(each, InputError) for each in found):
            yield from guarded(f"{field}.path", _check_answers(config, field, source))
    if data.sft and not config.trains_on_demonstrations:
        yield "data.sft: its rows are not trained, because sft.enabled is false; leave data.sft out"
    for index in range(len(config.evaluate.regression)):
        yield from _check_regression_set(config, index)
    if data.chat_template is not None:
        yield from guarded("data.chat_template", _chat_template(data.chat_template))
    for stage in BASE_STAGES:
        if stage != "sft" and (model := base_of(config, stage)) is not None:
            yield from guarded(model.field, check_further_model(config, model))
    if config.ppo.enabled and config.generates_prompts:
        training = round(data.synthetic.prompts * (1 - data.eval_fraction))
        if config.ppo.prompts_per_step > training:
            yield (
                f"ppo.prompts_per_step is {config.ppo.prompts_per_step}, but only about {training} prompts"
                " are for training: some come twice in one step; raise data.synthetic.prompts"
            )


def with_assumed_limits(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration with all length limits, for checks before the stage `data` knows them.

    Those that are null are estimated from the characters of the first rows of local files.
    """
    if None not in config.given_limits:
        return config
    context = 2**31
    if config.model.path is None:
        context = config.model.tiny.max_positions
    elif exists(config.model.path):
        with suppress(InputError):
            settings = ModelFolder(config.model.path).text_config
            context = min(length_limits(settings, config.model.attention).values(), default=context)
    lengths = Lengths(context)
    unmeasured = LEAST
    for name, _, source in config.data.sources():
        records = 0
        # An estimate must not fail. `check_data` names what is wrong with a source.
        with suppress(Exception):
            for row in _first_rows(config, name, source):
                record = to_record(row, source, name, "", config.data.thoughts)
                if not isinstance(record, BadRow):
                    lengths.add(name, estimated_lengths(record.record, name))
                    records += 1
        # Rows in a bucket or on the hub can have any length. With the least ones, a plan would be too small.
        if records == 0:
            unmeasured = _ASSUMED
    return config.with_limits(
        fitted_limits(config.given_limits, lengths.needed(config.given_limits, unmeasured), context)
    )


def _first_rows(config: PipelineConfig, name: SetName, source: Source) -> Iterator[Row]:
    """Yield the first rows of a local or generated source."""
    address = address_of(source)
    if address.kind == "synthetic":
        for data in islice(generate(config.data.synthetic, config.run.seed, name), BEGINNING_ROWS):
            yield Row("synthetic", 1, data)
    # Of a bucket or the hub nothing is read: the checks before a run take seconds, also without a network.
    elif address.kind == "local":
        for file in list_files(address, source.split)[:_FILES_OF_A_FOLDER]:
            yield from first_rows(file)


def _check_answers(config: PipelineConfig, field: str, source: Source) -> Iterator[Finding]:
    """Check the answers of a source's prompts that rewards compare with: all of a local source that is not
    too large, else the first ones. The stage `data` checks all of them, but a run that reuses its artifact
    would fail only when PPO starts.
    """
    address = address_of(source)
    if not config.ppo.answer_fields or address.kind not in ("local", "synthetic"):
        return
    if address.kind == "synthetic":
        samples = [list(_first_rows(config, "prompts", source))]
        is_whole = False
    else:
        files = list_files(address, source.split)
        is_whole = sum(file.stat().st_size for file in files) <= _ALL_ANSWERS_BYTES
        if is_whole:
            samples = [[row for row in read_rows(source, config.store, None) if isinstance(row, Row)]]
        else:
            samples = list(map(first_rows, files[:_FILES_OF_A_FOLDER]))
    for rows in samples:
        # Of the first rows, only a fault that all of them have is an error.
        most = config.data.max_bad_rows if is_whole else 0.99
        yield from _answer_findings(config, field, source, rows, most)


def _answer_findings(
    config: PipelineConfig, field: str, source: Source, rows: Sequence[Row], most: float
) -> Iterator[Finding]:
    """Yield what there is to say about the answers of the rows, as far as they are prompts."""
    kept = [row for row in rows if not source.only_split or row.data.get("split") == source.split]
    prompts = []
    for row in kept:
        item = to_record(row, source, "prompts", "", config.data.thoughts)
        if not isinstance(item, BadRow):
            prompts.append(PromptExample("", item.record.prompt_text, (), item.record.meta))
    rewards = [each for each in config.ppo.rewards if isinstance(each, AnswerReward)]
    # Of several with one field the strictest, so that nothing is said twice.
    rewards.sort(key=lambda each: each.extract == "final_number")
    for reward in {each.field: each for each in rewards}.values():
        try:
            yield from require_answers(prompts, [reward], f"{field}.path", most)
        except DataError as error:
            yield error


def _check_regression_set(config: PipelineConfig, index: int) -> Iterator[Finding]:
    """Check a regression set. All rows of local files are read, up to a size: a single bad one ends the
    evaluation, which comes after hours of training.
    """
    field, source = f"evaluate.regression.{index}", config.evaluate.regression[index]
    found = list(guarded(f"{field}.path", check_source(field, source)))
    yield from found
    if address_of(source).kind == "local" and not any(isinstance(each, InputError) for each in found):
        yield from guarded(field, _check_all_rows(config, index))


def _check_all_rows(config: PipelineConfig, index: int) -> Iterator[Finding]:
    each = config.evaluate.regression[index]
    path = each.path
    size = sum(file.stat().st_size for file in list_files(address_of(each), each.split))
    if size > _ALL_ROWS_BYTES:
        yield (
            f"evaluate.regression.{index}.path: {path} has {size // 2**20} MiB. With more than"
            f" {_ALL_ROWS_BYTES // 2**20} MiB the rows are not checked now, but by the stage `data`"
        )
        return
    try:
        count = check_rows(config, index)
    except DataError as error:
        yield error
        return
    least = prompts_for_margin(each.margin, config.evaluate.confidence)
    if each.reward.type in _RIGHT_OR_WRONG and count < least:
        yield (
            f"evaluate.regression.{index}.margin: {each.margin:g} needs about {least:,} prompts, but {path}"
            f" has {count}: a policy that loses this share of the answers often passes, because no loss is"
            " seen; add prompts, or raise the margin"
        )


def check_source(field: str, source: Source) -> Iterator[Finding]:
    """Check one source. `field` is its name in messages, such as `data.sft.0`."""
    address = address_of(source)
    if address.kind == "s3" and (problem := s3_problem(address.text)):
        yield ConfigError(f"{field}.path: {problem}")
    elif address.kind == "url":
        scheme = address.text.split("://")[0][:20]
        yield ConfigError(
            f"{field}.path: must be a local path, s3://, a hub id or `synthetic`; got scheme {scheme}://; "
            "download the file first"
        )
    elif _is_misspelt_synthetic(address):
        yield DataError(
            f"{field}.path: file not found: {address.text}; did you mean synthetic? A hub data set is"
            f" owner/name, a local file ./{address.text}"
        )
    elif address.kind == "hub" and source.revision is None:
        yield (
            f"{field}.path: {address.text} is no local path, so it is read from the Hugging Face hub; "
            f"pin {field}.revision to a commit, or a later run may read another one"
        )
    elif address.kind == "local":
        yield from _local(field, address, source.split)


def _is_misspelt_synthetic(address: Address) -> bool:
    if address.kind not in ("hub", "local") or address.looks_like_path or exists(address.path):
        return False
    return difflib.SequenceMatcher(a=address.text.lower(), b="synthetic").ratio() >= 0.85


def _local(field: str, address: Address, split: str) -> Iterator[Finding]:
    if not address.looks_like_path and not exists(address.path):
        yield DataError(
            f"{field}.path: file not found, and {address.text[:80]!r} is no hub id either; correct the path"
        )
        return
    try:
        files = list_files(address, split)
        others = len(list_files(address)) - len(files)
    except DataError as error:
        yield DataError(f"{field}.path: {error.message}")
        return
    if others:
        yield (
            f"{field}.path: {len(files)} of {len(files) + others} files of {address.text} are read: those"
            f" whose names are of the split {split!r}; set {field}.split for others"
        )
    yield from islice(_unusable(field, files[:_CHECKED_FILES]), _FILES_OF_A_FOLDER)


def _unusable(field: str, files: Sequence[Path]) -> Iterator[DataError]:
    for file in files:
        try:
            check_beginning(file)
        except DataError as error:
            yield DataError(f"{field}.path: {error.message}")


def _chat_template(path: str) -> Iterator[Finding]:
    try:
        content = read_chat_template(path)
    except ModelError as error:
        yield ConfigError(error.message)
        return
    if not content.strip():
        yield ConfigError(f"data.chat_template: {path} is empty; a template must render something")


def check_further_model(config: PipelineConfig, model: BaseModelAddress) -> Iterator[Finding]:
    """Check that the model of a judge or teacher exists, has the tokens of a local `model.path`, and has
    enough positions.
    """
    base = config.model.path
    if model.is_hub:
        yield from model.unpinned()
        return
    if not (Path(model.path) / "config.json").is_file():
        yield ConfigError(
            f"{model.field}: must be a folder in Hugging Face layout, or a hub id as owner/name; got"
            f" {model.path}, which has no config.json; correct it, or leave it out"
        )
        return
    yield from further_length_problems(config, model)
    if base is not None and not is_reference(base) and not is_hub_model(base):
        try:
            require_same_tokens(model, Path(base))
        except ModelError as error:
            yield ConfigError(error.message)
