"""From records to token examples, with the length limits; what does not fit is counted by reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.config.data import DataConfig
from rlhf_core.data.collect import Loaded, SetName, split_key
from rlhf_core.data.formats import Record
from rlhf_core.data.templates import Encoder
from rlhf_core.types import PairExample, PromptExample, SFTExample

PROMPT_TOO_LONG = "prompt longer than data.max_prompt_tokens"
RESPONSE_TOO_LONG = "response longer than data.max_response_tokens"
NOTHING_TO_LEARN = "no assistant token within data.max_text_tokens"
_MAX_TRAINING_CHARS = 100_000
_LARGEST_MARGIN = 1e9


class Dropped(ValueError):
    """The record is well formed but not usable; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Made:
    """An example, the prompt it belongs to, and its text for reading and for the overlap count."""

    example: SFTExample | PairExample | PromptExample
    key: str
    """Split key of its prompt."""
    text: str
    """Prompt and (chosen) response as plain text."""


def prompt_id(prompt_text: str) -> str:
    """16 hex digits of the prompt's text."""
    return hashlib.blake2b(prompt_text.encode(), digest_size=8).hexdigest()


def make_example(item: Loaded, name: SetName, encoder: Encoder, config: DataConfig, max_text: int) -> Made:
    """The token example of one record. Raises Dropped, or EncodeError if it cannot be encoded."""
    record = item.record
    key = split_key(record.prompt_text)
    if name == "sft":
        return Made(_sft(item, encoder, config, max_text), key, _plain(record))
    if encoder.surely_longer(record.prompt_text, config.max_prompt_tokens):
        raise Dropped(PROMPT_TOO_LONG)
    if name == "prompts":
        ids = encoder.prompt(record.prompt)
        _limit(ids, config.max_prompt_tokens, PROMPT_TOO_LONG)
        text = record.prompt_text
        return Made(PromptExample(prompt_id(text), text, ids, record.meta, item.source), key, text)
    return Made(_pair(item, encoder, config), key, _plain(record))


def _pair(item: Loaded, encoder: Encoder, config: DataConfig) -> PairExample:
    record = item.record
    assert record.response is not None and record.rejected is not None
    prompt, chosen = _respond(record, record.response, encoder, config)
    _, rejected = _respond(record, record.rejected, encoder, config)
    if chosen == rejected:
        raise Dropped("chosen and rejected have the same tokens")
    text = record.prompt_text
    return PairExample(prompt_id(text), text, prompt, chosen, rejected, item.source, _margin(record))


def _margin(record: Record) -> float | None:
    value = record.meta.get("margin")
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST_MARGIN:
        return None
    return float(value)


def _sft(item: Loaded, encoder: Encoder, config: DataConfig, max_text: int) -> SFTExample:
    record = item.record
    if record.text is not None:
        encoded = encoder.text(record.text, max_text)
        return SFTExample(encoded.ids, encoded.mask, item.source)
    if record.kind == "messages":
        if encoder.surely_longer(record.prompt_text, 8 * max_text):
            raise Dropped(NOTHING_TO_LEARN)
        encoded = encoder.conversation(record.messages)
        ids, mask = encoded.ids[:max_text], encoded.mask[:max_text]
        if 1 not in mask:
            raise Dropped(NOTHING_TO_LEARN)
        return SFTExample(ids, mask, item.source)
    assert record.response is not None
    if encoder.surely_longer(record.prompt_text, config.max_prompt_tokens):
        raise Dropped(PROMPT_TOO_LONG)
    prompt, response = _respond(record, record.response, encoder, config)
    return SFTExample(prompt + response, (0,) * len(prompt) + (1,) * len(response), item.source)


def _respond(
    record: Record, text: str, encoder: Encoder, config: DataConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if encoder.surely_longer(text, config.max_response_tokens):
        raise Dropped(RESPONSE_TOO_LONG)
    prompt, response = encoder.response(record.prompt, text)
    _limit(prompt, config.max_prompt_tokens, PROMPT_TOO_LONG)
    _limit(response, config.max_response_tokens, RESPONSE_TOO_LONG)
    return prompt, response


def _limit(ids: tuple[int, ...], limit: int, reason: str) -> None:
    if len(ids) > limit:
        raise Dropped(reason)


def _plain(record: Record) -> str:
    said = record.messages[-1].content if record.messages else record.response
    return record.prompt_text if record.text is not None else f"{record.prompt_text}\n\n{said}"


def training_texts(record: Record) -> Iterator[str]:
    """Every text of a record, for training a tokenizer; of one far over all limits the beginning, since
    megabytes without a blank would take the training minutes.
    """
    yield from (message.content[:_MAX_TRAINING_CHARS] for message in record.messages or record.prompt)
    texts = (record.text, record.response, record.rejected)
    yield from (text[:_MAX_TRAINING_CHARS] for text in texts if text is not None)
