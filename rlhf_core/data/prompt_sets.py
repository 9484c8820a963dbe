"""Prompts of `evaluate.regression`: read as in the data stage, but every row must be usable.

They are checked three times: by the preflight without a tokenizer (`check_rows`), by the data stage with it
(`read_prompts`), and by the evaluation, which uses them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from rlhf_core.config.data import Limits
from rlhf_core.config.evaluate import RegressionSet
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import AnyReward, GoldReward
from rlhf_core.data.dataset import require_answers
from rlhf_core.data.examples import RecordDropped, SourceRecord, to_record, tokens_of, with_tokens, within
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.sources import Contents, read_rows, regression_contents, short_name
from rlhf_core.data.synthetic import parse_prompt
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import DataError
from rlhf_core.system.files import read_json
from rlhf_core.types import PromptExample

Sets = dict[str, list[PromptExample]]
"""The prompts of each set by its name."""


def read_sets(config: PipelineConfig, data: Path, contents: Mapping[str, Contents] | None = None) -> Sets:
    """Return the prompts of all regression sets, each text once.

    Args:
        config: Configuration of the run.
        data: Folder of the data artifact.
        contents: Expected contents of the sources, from `regression_contents`; None: those that they have.

    Raises:
        DataError: A row cannot be used, a set has none, or a file has changed.
    """
    if not config.evaluate.regression:
        return {}
    contents = contents or regression_contents(config)
    encoder = load_encoder(config, data)
    limits = config.limits._replace(prompt=_longest_prompt(data, config))
    sets: Sets = {}
    for index, each in enumerate(config.evaluate.regression):
        field = f"evaluate.regression[{index}]"
        prompts: dict[str, PromptExample] = {}
        for item in _records(config, field, each, contents[field]):
            example = _encoded(field, item, encoder, limits)
            prompts.setdefault(example.prompt_id, example)
        sets[each.name] = list(prompts.values())
        _require_scorable(sets[each.name], each.reward, f"{field}.reward")
    return sets


def _longest_prompt(data: Path, config: PipelineConfig) -> int:
    """Return the most tokens of a prompt of a regression set, by the card of a data artifact.

    Without it, as in artifacts of earlier versions, it is the limit of the data.
    """
    card = read_json(data / "data_card.json") or {}
    return int(card.get("limits", {}).get("longest_prompt", config.limits.prompt))


def with_room(config: PipelineConfig, sets: Mapping[str, Sequence[PromptExample]]) -> PipelineConfig:
    """Return the configuration with a limit of prompts that those of `sets` fit, for engines."""
    lengths = [len(prompt.input_ids) for prompt in chain.from_iterable(sets.values())]
    limits = config.limits
    return config.with_limits(limits._replace(prompt=max([limits.prompt, *lengths])))


def check_rows(config: PipelineConfig, index: int) -> int:
    """Return the number of different prompts of a regression set. Raises DataError for a row that cannot be
    used, as far as this is known without a tokenizer.
    """
    field, each = f"evaluate.regression.{index}", config.evaluate.regression[index]
    prompts = []
    for item in _records(config, field, each, None):
        prompts.append(PromptExample("", item.record.prompt_text, (), item.record.meta))
    _require_scorable(prompts, each.reward, f"{field}.reward")
    return len({prompt.prompt for prompt in prompts})


def _records(
    config: PipelineConfig, field: str, source: RegressionSet, contents: Contents | None
) -> Generator[SourceRecord]:
    count = 0
    for row in read_rows(source, config.store, contents):
        item: SourceRecord | BadRow | Row = row
        if isinstance(item, Row):
            item = to_record(item, source, "prompts", short_name(source), config.data.thoughts)
        if isinstance(item, BadRow):
            raise DataError(f"{field}: {item.file}:{item.line}: {item.reason}; correct the row")
        count += 1
        yield item
    if count == 0:
        raise DataError(f"{field}: {source.path} has 0 rows; give a source with rows")


def _encoded(field: str, item: SourceRecord, encoder: Encoder, limits: Limits) -> PromptExample:
    try:
        [tokens] = tokens_of(item.record, "prompts", encoder, limits)
        example = with_tokens(item, "prompts", within(tokens, limits)).example
    except (RecordDropped, EncodeError) as error:
        raise DataError(
            f"{field}: {item.file}:{item.line}: {error}; correct the row, or raise the limit"
        ) from error
    assert isinstance(example, PromptExample)
    return example


def _require_scorable(prompts: Sequence[PromptExample], reward: AnyReward, field: str) -> None:
    """Raise DataError for a prompt whose answers the reward cannot score."""
    require_answers(prompts, [reward], field)
    if isinstance(reward, GoldReward):
        for prompt in prompts:
            if parse_prompt(prompt.prompt) is None:
                raise DataError(
                    f"{field}: type gold is the true reward of the demo's task, which has no prompt"
                    f" {prompt.prompt[:60]!r}; use another type"
                )


def load_encoder(config: PipelineConfig, data: Path) -> Encoder:
    """Return the encoder of a data artifact's folder."""
    return Encoder(load_tokenizer(str(data / "tokenizer")), config.data.template, "the data artifact")
