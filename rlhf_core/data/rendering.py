"""Renders a conversation with a tokenizer's chat template, which is untrusted code, in the sandbox of
transformers.
"""

from __future__ import annotations

import traceback
from datetime import datetime
from typing import Any

from rlhf_core.config.redact import printable
from rlhf_core.data.limits import memory_limit

_TEMPLATE_BYTES = 2**29
"""Memory limit for rendering one conversation."""
_OWN_CHARS = 2**16
"""Number of characters that a template may add to a conversation, such as a default system prompt. It may
also repeat each message once. Tokenizing a text without a limit would take minutes and gigabytes.
"""
_OWN_CHARS_OF_A_MESSAGE = 2**10
DATE = datetime(2024, 7, 26)
"""The date that `strftime_now` returns in templates. It is the default date of Llama 3.2's template."""


class TemplateError(ValueError):
    """The template raised an exception. The message describes the exception and its location."""


def chat_template(tokenizer: Any) -> str | None:
    """Return the tokenizer's template; of several with names, the one that is used without tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def render(
    tokenizer: Any, messages: list[dict[str, str]], generate: bool, marks: bool
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text, and with `marks` the spans of its {% generation %} blocks.

    `generate` adds the generation prompt. Raises TemplateError, or TimeoutError within `time_limit`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with memory_limit(_TEMPLATE_BYTES):
            # The tokenizer's `apply_chat_template` calls this function, but returns no spans.
            texts, spans = render_jinja_template(
                [messages],
                chat_template=chat_template(tokenizer),
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marks,
                strftime_now=DATE.strftime,
                **tokenizer.special_tokens_map,
            )
    except TimeoutError:
        raise  # of `time_limit`
    except Exception as error:  # a template is a program and can raise any exception
        raise TemplateError(_reason(error)) from error
    limit = _OWN_CHARS + sum(2 * len(each["content"]) + _OWN_CHARS_OF_A_MESSAGE for each in messages)
    if len(texts[0]) > limit:
        raise TemplateError(f"it renders {len(texts[0]):,} characters, more than the {limit:,} that it may")
    return texts[0], [tuple(span) for span in spans[0]] if marks else []


def uses_power(template: str) -> bool:
    """Return whether the template uses `**`. One such operation can take hours in C code, where time limits
    have no effect.
    """
    import jinja2

    try:
        return any(
            kind == "operator" and word == "**" for _, kind, word in jinja2.Environment().lex(template)
        )
    except jinja2.TemplateSyntaxError:
        return False  # rendering the template reports the error


def _reason(error: Exception) -> str:
    """Return the exception of a template and the line in which it was raised."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
    ]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    where = f" in its line {line}" if line else ""
    return printable(f"{type(error).__name__}{where}: {str(error)[:200]}").rstrip(": ")
