"""Small real tokenizers for the tests of the data layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.data.data_samples import SENTENCEPIECE_TEMPLATE, TEXTS


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """What the pipeline trains itself: byte-level BPE, role marks, BOS put by the tokenizer and by the
    template.
    """
    from rlhf_core.data.tokenizer import train_tokenizer

    return train_tokenizer(TEXTS, 512)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A tokenizer of the SentencePiece kind: a blank is put before each text, bytes for unknown
    characters.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(
        chat_template: str | None = SENTENCEPIECE_TEMPLATE,
        specials: tuple[str, ...] = ("<unk>", "<s>", "</s>"),
        **names: Any,
    ) -> Any:
        bytes_ = [f"<0x{value:02X}>" for value in range(256)]
        bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bpe.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=[*specials, *bytes_], show_progress=False
        )
        words = [word for text in TEXTS for word in text.split()]
        bpe.train_from_iterator(words, trainer)
        # Byte tokens are ordinary ones: rebuild without marking them special.
        plain = Tokenizer.from_str(_without_special_bytes(bpe.to_str(), set(specials)))
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", **names}
        names = {name: value for name, value in names.items() if value is not None}
        if "bos_token" in names:
            bos = names["bos_token"]
            plain.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, plain.token_to_id(bos))]
            )
        return PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=chat_template, **names)

    return make


def _without_special_bytes(text: str, specials: set[str]) -> str:
    data = json.loads(text)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in specials]
    return json.dumps(data)


@pytest.fixture(scope="session")
def sp_tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()
