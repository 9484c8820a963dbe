"""Length limits: those of the configuration, and those that follow from the data.

`data.max_prompt_tokens`, `data.max_response_tokens`, `data.max_text_tokens` and `ppo.max_new_tokens` may be
null. The stage `data` then chooses them with `fitted_limits` and writes all four into its artifact. A later
stage reads them from there and gets a configuration without nulls (`PipelineConfig.with_limits`).
"""

from __future__ import annotations

from typing import NamedTuple

PROMPT = "data.max_prompt_tokens"
RESPONSE = "data.max_response_tokens"
TEXT = "data.max_text_tokens"
NEW = "ppo.max_new_tokens"


class Limits(NamedTuple):
    """Tokens of the longest sequences, by the fields that limit them."""

    prompt: int
    response: int
    text: int
    new: int


class GivenLimits(NamedTuple):
    """The same fields as a configuration has them. None: from the data."""

    prompt: int | None
    response: int | None
    text: int | None
    new: int | None


DEMO_LIMITS = Limits(prompt=64, response=64, text=512, new=64)
"""Limits of the demo: a model from scratch that is trained on the generated task."""


_ENDLESS_RATE = 0.05


def never_ends(eos_rate: float, model: str) -> str | None:
    """Return a sentence if the responses of a model do not end but are cut at the length limit, or None.

    Args:
        eos_rate: Share of its responses that end with EOS.
        model: Its name in the sentence.
    """
    if eos_rate >= _ENDLESS_RATE:
        return None
    return (
        f"{eos_rate:.1%} of the responses of {model} end with EOS; the others are cut at {NEW}, so scores,"
        f" lengths and win rates are those of cut texts. Raise {NEW}, or train SFT longer on rows that end"
        f" within {TEXT} and {RESPONSE}"
    )


def fitted_limits(given: GivenLimits, needed: Limits, context: int) -> Limits:
    """Return the limits that are given, and for the others what is needed as far as the context has room.

    A prompt and its response share the context. If both need more than half of it, each gets half; otherwise
    the one that needs less gets all that it needs, and the other one the rest.

    Args:
        given: Limits of the configuration.
        needed: What the data need. `new` is not used: it follows the limit of responses.
        context: Context length of the model in tokens.
    """
    prompt, response = given.prompt, given.response
    if prompt is None:
        kept_free = response
        if kept_free is None:
            kept_free = min(needed.response, context - context // 2)
        kept_free = max(kept_free, given.new or 0)
        prompt = max(1, min(needed.prompt, context - kept_free))
    if response is None:
        response = max(1, min(needed.response, context - prompt))
    text = given.text
    if text is None:
        text = max(1, min(needed.text, context))
    new = response if given.new is None else given.new
    return Limits(prompt, response, text, new)
