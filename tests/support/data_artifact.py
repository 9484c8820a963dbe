"""The folder of a small data artifact, with the same texts in each set."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PairExample, PromptExample, SFTExample

TEXTS = [f"The {color} fox sees {count} birds." for color in ("red", "old", "shy") for count in range(40)]


def data_artifact(folder: Path, texts: list[str], source: str = "rows") -> Path:
    """Write the files of a data artifact with these texts in each set."""
    tokenizer = train_tokenizer(texts, 400)
    ids = [tuple(tokenizer.encode(text)) for text in texts]
    sft = [SFTExample(each, (1,) * len(each), source) for each in ids]
    pairs = [PairExample(text, text, (1,), each, each, source) for text, each in zip(texts, ids, strict=True)]
    prompts = [PromptExample("p", text, (1,), {}, source) for text in texts]
    return write_data_artifact(folder, sft=sft, pairs=pairs, prompts=prompts, tokenizer=tokenizer)
