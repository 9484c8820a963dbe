"""A tokenizer with one token for each word, so that tests can count tokens by reading."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf_core.data.tokenizer import BOS, EOS, PAD, TINY_TEMPLATE, UNK


def word_tokenizer(texts: Iterable[str]) -> Any:
    """Return a tokenizer for the words of `texts`, with pad 0, BOS 1 and EOS 2.

    Words end at blanks, so a full stop belongs to its word.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    # The sentences that a chat template is tried with (`Encoder`).
    known = [*texts, "Is it late?", "It is noon."]
    words = sorted({word for text in known for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([PAD, BOS, EOS, UNK, *roles, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=roles,
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
