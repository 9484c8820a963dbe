"""The little Markdown of a data card as HTML: headings, tables, lists, fenced code, `code` and **bold**.

All text is escaped before any tag is added, links and raw HTML stay text: a data card quotes untrusted
samples.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_RULE = re.compile(r"\|?[\s:|-]*-[\s:|-]*")
_FENCE = re.compile(r"(`{3,}|~{3,})")


def to_html(text: str, escape: Callable[[str], str]) -> str:
    """`escape` makes any text safe inside an element."""
    lines = text.splitlines()
    parts: list[str] = []
    at = 0
    while at < len(lines):
        at = _block(lines, at, parts, escape)
    return "".join(parts)


def _block(lines: list[str], at: int, parts: list[str], escape: Callable[[str], str]) -> int:
    """Adds the block that begins at line `at`; the line after it."""
    line = lines[at].strip()
    if not line:
        return at + 1
    if fence := _FENCE.match(line):
        end = _while(lines, at + 1, lambda text: not text.strip().startswith(fence.group(1)))
        parts.append(f"<pre>{escape(chr(10).join(lines[at + 1 : end]))}</pre>")
        return end + 1
    if line.startswith("#"):
        parts.append(f"<h3>{_inline(line.lstrip('#').strip(), escape)}</h3>")
        return at + 1
    if line.startswith("|"):
        end = _while(lines, at, lambda text: text.strip().startswith("|"))
        parts.append(_table([row.strip() for row in lines[at:end]], escape))
        return end
    if line.startswith(("- ", "* ")):
        end = _while(lines, at, lambda text: text.strip().startswith(("- ", "* ")))
        items = "".join(f"<li>{_inline(row.strip()[2:], escape)}</li>" for row in lines[at:end])
        parts.append(f"<ul>{items}</ul>")
        return end
    end = _while(lines, at + 1, lambda text: text.strip() != "" and text.strip()[0] not in "#|`~-*")
    parts.append(f"<p>{_inline(' '.join(row.strip() for row in lines[at:end]), escape)}</p>")
    return end


def _while(lines: list[str], at: int, holds: Callable[[str], bool]) -> int:
    while at < len(lines) and holds(lines[at]):
        at += 1
    return at


def _table(rows: list[str], escape: Callable[[str], str]) -> str:
    head = len(rows) > 1 and _RULE.fullmatch(rows[1]) is not None
    body: list[str] = []
    for index, row in enumerate(rows):
        if head and index == 1:
            continue
        tag = "th" if head and index == 0 else "td"
        cells = re.split(r"(?<!\\)\|", row.strip("|"))
        body.append(
            "<tr>" + "".join(f"<{tag}>{_inline(cell.strip(), escape)}</{tag}>" for cell in cells) + "</tr>"
        )
    return f"<table class=left>{''.join(body)}</table>"


def _inline(text: str, escape: Callable[[str], str]) -> str:
    plain = html.unescape(re.sub(r"\\([\\`*_\[\]()#|<>~-])", r"\1", text))
    safe = escape(plain)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", safe)
