"""Check of the data sources and the chat template before anything is started.

Yields findings: an `InputError` for what would make the run fail, and a text for what the user should know.
Of each file only the beginning is read, by the reader of the data stage, and all rows of regression sets that
are not too large.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from rlhf_core.config.address import Address, parse_address, s3_problem
from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.regression import prompts_for_margin
from rlhf_core.config.rewards import AnswerReward
from rlhf_core.data.examples import to_record
from rlhf_core.data.files import BEGINNING_ROWS, BadRow, Row, check_beginning, first_rows, list_files
from rlhf_core.data.prompt_sets import check_rows
from rlhf_core.data.synthetic import generate
from rlhf_core.data.templates import read_chat_template
from rlhf_core.errors import ConfigError, DataError, Finding, InputError, ModelError, guarded
from rlhf_core.system.files import exists

_FILES_OF_A_FOLDER = 3
"""Number of files of a folder whose beginnings are read."""
_ALL_ROWS_BYTES = 16 * 2**20
"""Maximum size of a regression set of which all rows are read, which takes up to about 5 s."""


_RIGHT_OR_WRONG = ("answer", "format")
"""Types of rewards that are 0 or 1."""


def check_data(config: PipelineConfig) -> Iterator[Finding]:
    """Check every source of the three sets and of regression sets, and the chat template."""
    data = config.data
    for name, index, source in data.sources():
        field = f"data.{name}.{index}"
        found = list(guarded(f"{field}.path", check_source(field, source)))
        yield from found
        if name == "prompts" and not any(isinstance(each, InputError) for each in found):
            yield from guarded(f"{field}.path", _check_answers(config, field, source))
    for index in range(len(config.evaluate.regression)):
        yield from _check_regression_set(config, index)
    if data.chat_template is not None:
        yield from guarded("data.chat_template", _chat_template(data.chat_template))
    if config.ppo.enabled and config.generates_prompts:
        training = round(data.synthetic.prompts * (1 - data.eval_fraction))
        if config.ppo.prompts_per_step > training:
            yield (
                f"ppo.prompts_per_step is {config.ppo.prompts_per_step}, but only about {training} prompts"
                " are for training: some come twice in one step; raise data.synthetic.prompts"
            )


def _check_answers(config: PipelineConfig, field: str, source: Source) -> Iterator[Finding]:
    """Check that the first prompts of a source have the answers that rewards compare with. The stage `data`
    checks all of them, but a run that reuses its artifact would fail only when PPO starts.
    """
    wanted = {reward.field for reward in config.ppo.rewards if isinstance(reward, AnswerReward)}
    address = parse_address(source.path)
    if not wanted or address.kind not in ("local", "synthetic"):
        return
    if address.kind == "synthetic":
        generated = islice(generate(config.data.synthetic, config.run.seed, "prompts"), BEGINNING_ROWS)
        yield from _without_answers(field, source, wanted, [Row("synthetic", 1, data) for data in generated])
        return
    for file in list_files(address, source.split)[:_FILES_OF_A_FOLDER]:
        yield from _without_answers(field, source, wanted, first_rows(file))


def _without_answers(
    field: str, source: Source, wanted: Collection[str], rows: Sequence[Row]
) -> Iterator[Finding]:
    """Yield an error for each `wanted` field that none of the rows has, as far as they are prompts."""
    kept = [row for row in rows if not source.only_split or row.data.get("split") == source.split]
    records = [to_record(row, source, "prompts", "") for row in kept]
    fields = [record.record.meta for record in records if not isinstance(record, BadRow)]
    for name in sorted(wanted):
        if fields and all(each.get(name) is None for each in fields):
            own = ", ".join(sorted(fields[0])) or "none"
            yield DataError(
                f"{field}.path: the reward of type answer needs the field {name!r} in every row, but the"
                f" first rows of {kept[0].file} have none (fields of the first: {own}); add it, or set"
                " `field` of the reward to the one that holds the answer"
            )


def _check_regression_set(config: PipelineConfig, index: int) -> Iterator[Finding]:
    """Check a regression set. All rows of local files are read, up to a size: a single bad one ends the
    evaluation, which comes after hours of training.
    """
    field, source = f"evaluate.regression.{index}", config.evaluate.regression[index]
    found = list(guarded(f"{field}.path", check_source(field, source)))
    yield from found
    if parse_address(source.path).kind == "local" and not any(isinstance(each, InputError) for each in found):
        yield from guarded(field, _check_all_rows(config, index))


def _check_all_rows(config: PipelineConfig, index: int) -> Iterator[Finding]:
    each = config.evaluate.regression[index]
    path = each.path
    size = sum(file.stat().st_size for file in list_files(parse_address(path), each.split))
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


def small_regression_sets(config: PipelineConfig) -> Iterator[str]:
    """Yield the warnings about the rows of local regression sets. Files that cannot be used are left out."""
    for index, each in enumerate(config.evaluate.regression):
        if parse_address(each.path).kind == "local":
            found = guarded(f"evaluate.regression.{index}", _check_all_rows(config, index))
            yield from (text for text in found if isinstance(text, str))


def check_source(field: str, source: Source) -> Iterator[Finding]:
    """Check one source. `field` is its name in messages, such as `data.sft.0`."""
    address = parse_address(source.path)
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
    for file in files[:_FILES_OF_A_FOLDER]:
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
