"""The tokens of one response, with their text and their values, for the coloured view."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

_LARGE_LOGPROB, _LARGE_KL = 6.0, 3.0
"""Nats that have the strongest colour."""
LEVELS = 4
"""Strength of the strongest colour."""


@dataclass(frozen=True)
class Measure:
    """What the tokens of a response can be coloured by."""

    name: str
    meaning: str
    values: list[float]
    """(T,) of the tokens."""
    levels: list[int]
    """(T,) colours: from -LEVELS to LEVELS, 0 is none."""


@dataclass(frozen=True)
class Tokens:
    """A response as tokens."""

    pieces: list[str]
    """(T,) texts. That of a character with several tokens is at the last of them; the others are empty."""
    measures: list[Measure]

    def rows(self) -> list[tuple[str, list[tuple[int, float]]]]:
        """Return for each token its text, and a colour and a value of each measure."""
        columns = [list(zip(one.levels, one.values, strict=True)) for one in self.measures]
        return [(piece, list(values)) for piece, *values in zip(self.pieces, *columns, strict=True)]


def tokens_of(row: Mapping[str, Any], tokenizer: Any) -> Tokens:
    """Return the tokens of a response, from its row of the record and the tokenizer of its policy."""
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, token) or "" for token in row["response_ids"]]
    measures = []
    old, ref = row.get("old_logprobs"), row.get("ref_logprobs")
    if (logprobs := old or row.get("rollout_logprobs")) is not None:
        by = "the policy before the update" if old else "the engine"
        meaning = f"by {by}, in nats; the stronger, the less probable"
        measures.append(_measure("log-probability", meaning, logprobs, _LARGE_LOGPROB))
    if old and ref:
        kl = [a - b for a, b in zip(old, ref, strict=True)]
        meaning = "more (orange) or less (blue) probable than by the reference, in nats"
        measures.append(_measure("KL", meaning, kl, _LARGE_KL))
    for name, column in (("advantage", "advantages"), ("value", "values")):
        if values := row.get(column):
            meaning = "above (orange) or below (blue) 0; the strongest is the largest of this response"
            measures.append(_measure(name, meaning, values, max(map(abs, values))))
    return Tokens(pieces, measures)


def _measure(name: str, meaning: str, values: Sequence[float], large: float) -> Measure:
    return Measure(name, meaning, list(values), [_level(value, large) for value in values])


def _level(value: float, large: float) -> int:
    """Return the colour of a value. A quarter of `large` has half of the strongest colour."""
    if not large or math.isnan(value):
        return 0
    share = min(1.0, abs(value) / large)
    return round(math.copysign(LEVELS * math.sqrt(share), value))
