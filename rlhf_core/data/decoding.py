"""The data artifact's tokenizer for those who only decode: without the seconds that importing transformers
takes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ModelError


@dataclass(frozen=True)
class Decoder:
    """Token ids to text, and the special ids. `pad` is never `eos`."""

    tokenizer: Any
    pad: int
    eos: int
    bos: int | None
    prefix: str = ""
    """Text that the chat template puts before each answer (`Encoder.response_prefix`)."""

    def __call__(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def response(self, ids: Sequence[int]) -> str:
        """Return the response without the blank that the chat template put before it.

        A service that renders prompt and response again adds the blank itself.
        """
        return self(ids).removeprefix(self.prefix)


def write_response_prefix(data: Path, prefix: str) -> None:
    """Save the settings in the folder of a data artifact for `load_decoder`."""
    (data / "response.json").write_text(json.dumps({"prefix": prefix}) + "\n", encoding="utf-8")


def load_decoder(data: Path) -> Decoder:
    """From the data artifact's folder. Raises ModelError if the tokenizer lacks a pad or EOS token."""
    from tokenizers import Tokenizer

    folder = data / "tokenizer"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = json.loads((folder / "tokenizer_config.json").read_text())

    def token_id(kind: str) -> int | None:
        token = names.get(kind)
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else tokenizer.token_to_id(content)

    pad, eos = token_id("pad_token"), token_id("eos_token")
    if pad is None or eos is None or pad == eos:
        raise ModelError(
            f"{folder}: the tokenizer needs a pad token and another EOS token; got ids {pad} and {eos}"
        )
    answers = data / "response.json"
    prefix = json.loads(answers.read_text(encoding="utf-8"))["prefix"] if answers.exists() else ""
    return Decoder(tokenizer, pad, eos, token_id("bos_token"), prefix)
