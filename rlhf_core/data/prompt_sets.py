"""Prompts of `evaluate.regression`: read as in the data stage, but every row must be usable."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.examples import RecordDropped, encode_record, to_record
from rlhf_core.data.files import BadRow
from rlhf_core.data.sources import Contents, read_rows, source_name
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import DataError
from rlhf_core.types import PromptExample


def read_prompts(
    config: PipelineConfig, field: str, source: Source, encoder: Encoder, contents: Contents
) -> list[PromptExample]:
    """Return the prompts of a source, each text once.

    Args:
        config: Configuration of the run.
        field: Field of the source, for messages.
        source: The source.
        encoder: Of `load_encoder`.
        contents: Expected contents of its files.

    Raises:
        DataError: A row is malformed or too long, there are none, or a file has changed.
    """
    prompts: dict[str, PromptExample] = {}
    for row in read_rows(source, config.store, contents):
        item = row if isinstance(row, BadRow) else to_record(row, source, "prompts", source_name(source))
        if isinstance(item, BadRow):
            raise DataError(f"{field}: {item.file}:{item.line}: {item.reason}; correct the row")
        try:
            example = encode_record(
                item, "prompts", encoder, config.data, config.data.max_text_tokens
            ).example
        except (RecordDropped, EncodeError) as error:
            raise DataError(
                f"{field}: {item.file}:{item.line}: {error}; correct the row, or raise the limit"
            ) from error
        assert isinstance(example, PromptExample)
        prompts.setdefault(example.prompt_id, example)
    if not prompts:
        raise DataError(f"{field}: {source.path} has 0 rows; give a source with rows")
    return list(prompts.values())


def load_encoder(config: PipelineConfig, data: Path) -> Encoder:
    """Return the encoder of a data artifact's folder."""
    return Encoder(load_tokenizer(str(data / "tokenizer")), config.data.template, "the data artifact")
