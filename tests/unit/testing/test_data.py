"""The data artifact for tests.

- every reader of the token files returns what was written, and there are no rows where none were given
- its tokenizer has the special tokens that stages need
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core.data.dataset import load_pairs, load_prompts, load_sft
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PairExample, PromptExample, SFTExample

SFT = SFTExample((1, 7, 2), (0, 1, 1), "a.jsonl")
PAIR = PairExample("p", "Why?", (1, 7), (8, 2), (9, 2), "a.jsonl", 0.5)
PROMPT = PromptExample("p", "Why?", (1, 7), {"answer": "4"}, "a.jsonl")


def test_readers_return_what_was_written(tmp_path: Path) -> None:
    train = write_data_artifact(tmp_path / "train", sft=[SFT], pairs=[PAIR], prompts=[PROMPT])
    held_out = write_data_artifact(
        tmp_path / "held_out", eval_sft=[SFT], eval_pairs=[PAIR], eval_prompts=[PROMPT]
    )
    for load, row in ((load_sft, SFT), (load_pairs, PAIR), (load_prompts, PROMPT)):
        assert load(train, "train") == load(held_out, "eval") == [row]
        assert load(train, "eval") == load(held_out, "train") == []


def test_tokenizer_has_special_tokens_and_characters(tmp_path: Path) -> None:
    decoder = load_decoder(write_data_artifact(tmp_path / "data"))
    assert (decoder.pad, decoder.bos, decoder.eos) == (0, 1, 2)
    assert decoder.response((7, 8, 2)) == '!"'
