"""Renders a conversation with a tokenizer's chat template, which is untrusted code, in the sandbox of
transformers with a limit of memory. `ends_within` tries a new template with a limit of time.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from rlhf_core.config.redact import printable

_TEMPLATE_BYTES = 2**29
"""Memory limit for rendering one conversation."""
_OWN_CHARS = 2**16
"""Number of characters that a template may add to a conversation, such as a default system prompt. It may
also repeat each message once. Tokenizing a text without a limit would take minutes and gigabytes.
"""
_OWN_CHARS_OF_A_MESSAGE = 2**10
_INDENTED = 8
"""Growth of tools that a template writes as indented JSON."""
DATE = datetime(2024, 7, 26)
"""The date that `strftime_now` returns in templates. It is the default date of Llama 3.2's template."""


class TemplateError(ValueError):
    """The template raised an exception. The message describes the exception and its location."""


def chat_template(tokenizer: Any, tools: bool = False) -> str | None:
    """Return the tokenizer's template; of several with names, the one that is used with or without tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    return template if isinstance(template, str) else None


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    generate: bool,
    marks: bool,
    tools: list[Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text, and with `marks` the spans of its {% generation %} blocks.

    Args:
        tokenizer: The tokenizer with its template.
        messages: Messages as templates read them.
        generate: Whether to add the generation prompt.
        marks: Whether to return the spans.
        tools: Functions as templates read them; None without any.

    Raises TemplateError.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with memory_limit(_TEMPLATE_BYTES):
            # The tokenizer's `apply_chat_template` calls this function, but returns no spans.
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=chat_template(tokenizer, tools is not None),
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marks,
                strftime_now=DATE.strftime,
                **tokenizer.special_tokens_map,
            )
    except Exception as error:  # a template is a program and can raise any exception
        raise TemplateError(_reason(error)) from error
    limit = _OWN_CHARS + sum(2 * characters(each) + _OWN_CHARS_OF_A_MESSAGE for each in messages)
    limit += _INDENTED * characters(tools)
    if len(texts[0]) > limit:
        raise TemplateError(f"it renders {len(texts[0]):,} characters, more than the {limit:,} that it may")
    return texts[0], [tuple(span) for span in spans[0]] if marks else []


def characters(value: Any) -> int:
    """Return the number of characters of all texts in messages or tools, names of fields included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(characters(key) + characters(each) for key, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else 0


@lru_cache(maxsize=1)  # opening it takes as long as rendering a short conversation
def _memory_statistics(process: int) -> int | None:
    """Return the open file with the memory of this process, which a fork must open again."""
    try:
        return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


@contextmanager
def memory_limit(spare: int) -> Iterator[None]:
    """Raise MemoryError if this process grows by more than `spare` bytes in this context. Linux only.

    Otherwise the kernel would kill the process.
    """
    statistics = _memory_statistics(os.getpid())
    if statistics is None:
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # At offset 0, where each read makes the content anew. A read further on would find the end of the file.
    used = int(os.pread(statistics, 64, 0).split()[0]) * resource.getpagesize()
    if limits[0] != resource.RLIM_INFINITY:
        # A limit that the process already has is not raised.
        spare = min(spare, limits[0] - used)
    # It is the limit of the whole process: memory that other threads need in the meantime counts as well.
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def ends_within(seconds: float, function: Callable[[], object], *, wall: int = 60) -> bool:
    """Return whether `function` ends within the given processor time (whole seconds), tested in a forked
    process.

    The kernel also ends the fork after `wall` seconds of real time, because it may wait forever for a lock
    that another thread held at the time of the fork. Results and exceptions of `function` do not reach this
    process. A time limit in this process could not end a long operation inside C code.
    """
    child = os.fork()
    if child == 0:
        try:
            limit = math.ceil(seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            # SIGXCPU, which ends the fork at its limit, would write a core file as large as this process.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # A handler of this process would only run when a long operation in C returns.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(wall)
            with suppress(Exception):
                function()
        finally:
            # Not `sys.exit`: exit handlers and unwritten buffers are copies of those of the parent.
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _reason(error: Exception) -> str:
    """Return the exception of a template and the line in which it was raised."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
    ]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    where = f" in its line {line}" if line else ""
    return printable(f"{type(error).__name__}{where}: {str(error)[:200]}").rstrip(": ")
