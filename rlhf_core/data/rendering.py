"""One conversation through a tokenizer's chat template: a program that somebody else wrote, in transformers' sandbox."""

from __future__ import annotations

import traceback
from datetime import datetime
from typing import Any

from rlhf_core.config.redact import printable
from rlhf_core.data.limits import memory_limit

_TEMPLATE_BYTES = 2**29
"""What rendering one conversation may allocate."""
DATE = datetime(2024, 7, 26)
"""What templates take for today (`strftime_now`): the date that Llama 3.2's own has where it knows none."""


class TemplateError(ValueError):
    """The template raised; the message says what and where."""


def render(
    tokenizer: Any, messages: list[dict[str, str]], generate: bool, marks: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text, with the generation prompt on request, and with `marks` the spans of its {% generation %} blocks.

    Raises TemplateError, or TimeoutError within `time_limit`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with memory_limit(_TEMPLATE_BYTES):
            texts, spans = render_jinja_template(
                [messages],
                chat_template=tokenizer.chat_template,
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marks,
                strftime_now=DATE.strftime,
                **tokenizer.special_tokens_map,
            )
    except TimeoutError:
        raise
    except Exception as error:  # a template is a program: it can raise anything
        raise TemplateError(_reason(error)) from error
    return texts[0], [tuple(span) for span in spans[0]] if marks else []


def uses_power(template: str) -> bool:
    """Whether `**` is in it: one such operation can take hours in C code, where no time limit reaches it."""
    import jinja2

    try:
        return any(kind == "operator" and word == "**" for _, kind, word in jinja2.Environment().lex(template))
    except jinja2.TemplateSyntaxError:
        return False  # rendering says what is wrong with it


def _reason(error: Exception) -> str:
    """What a template raised, and in which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    where = f" in its line {line}" if line else ""
    return printable(f"{type(error).__name__}{where}: {str(error)[:200]}").rstrip(": ")
