"""Messages of rows: roles, contents and their order, checked."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.files import json_type

ROLES = ("system", "user", "assistant")
TRAINED = ("weight", "train")
"""Fields of a message, or of a whole row, that say whether it is trained."""
_DESCRIPTION = re.compile(
    r"(.*_)?(id|name|date|time|timestamp|created|lang|language|model|ip)|created_at|updated_at|header|country"
    r"|state|toxic|redacted|temperature|top_p|usage|token_counter|turn_identifier|system_fingerprint"
)
"""Fields of a message that describe it: names, numbers and dates, and those of WildChat."""
INVISIBLE = (
    string.whitespace
    + "\x1c\x1d\x1e\x1f\x85\xa0\xad\u115f\u1160\u1680\u180e\u2800\u3000\u3164\ufeff\uffa0"
    + "".join(
        chr(code)
        for start, end in ((0x2000, 0x2010), (0x2028, 0x2030), (0x205F, 0x2070))
        for code in range(start, end)
    )
)
"""All white space of Unicode, and invisible characters."""


class RowError(ValueError):
    """This row cannot be used; the message is the reason, one sentence."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    trained: bool = True
    """Whether a demonstration trains the message, if it is the assistant's."""


def messages_of(
    row: Mapping[str, Any],
    name: str,
    expected: str = "a string or a list of messages",
    *,
    weights: bool = False,
) -> tuple[Message, ...]:
    """Return a list of messages.

    Args:
        row: The row.
        name: The field.
        expected: What the field may have, for the reason.
        weights: Whether each message says if it is trained. Otherwise this depends on the set, and the last
            one must not say that it is not.
    """
    value = row.get(name)
    if value is None:
        raise RowError(f"{name!r} is missing or null")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise RowError(f"{name!r} must be {expected}; got {json_type(value)}")
    if not value:
        raise RowError(f"{name!r} has no messages")
    messages = tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))
    if weights:
        return messages
    if not messages[-1].trained and messages[-1].role == "assistant" and name != "messages":
        raise RowError(f"the answer of {name!r} is marked as not trained (`weight` is 0, or `train` false)")
    return tuple(Message(message.role, message.content) for message in messages)


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{name} must be an object with 'role' and 'content'; got {json_type(item)}")
    role = item.get("role")
    if role == "developer":  # the name of the system message in the API of newer models
        role = "system"
    if role not in ROLES:
        fields = ", ".join(sorted(map(repr, item))[:8])
        got = repr(str(role)[:40]) if "role" in item else f"no role (fields: {fields})"
        raise RowError(f"{name}.role must be system, user or assistant; got {got}")
    for key, value in item.items():
        if key in ("role", "content", *TRAINED) or _DESCRIPTION.fullmatch(str(key)) or is_empty(value):
            continue
        raise RowError(
            f"{name}.{str(key)[:40]} is not supported: only 'role', 'content', 'weight' and 'train' of a"
            " message are; write it into 'content', or name it in `ignore`"
        )
    trained = all(_says_trained(item, key, str(role), name) for key in TRAINED)
    content = checked_text(_joined_parts(item.get("content"), name), f"{name}.content")
    return Message(str(role), content, trained or role != "assistant")


def _joined_parts(content: Any, name: str) -> Any:
    """Return the text of a content that is a list of parts of the type `text`."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else json_type(part)
            raise RowError(
                f"{name}.content has a part of the type {str(kind)[:40]!r}: only text is read; leave it out"
            )
        texts.append(checked_text(part.get("text"), f"{name}.content"))
    return "".join(texts)


def _says_trained(item: Mapping[str, Any], key: str, role: str, name: str) -> bool:
    value = item.get(key)
    if value is None:
        return True
    if value not in (0, 1):
        raise RowError(
            f"{name}.{key} must be 0 or false (not trained), or 1 or true (trained); got {str(value)[:40]};"
            f" correct it, or name {key} in `ignore`"
        )
    if value and role != "assistant":
        raise RowError(
            f"{name}.{key} must be 0 or false: only the assistant's messages are trained; got {value} for the"
            f" {role}'s; correct it, or name {key} in `ignore`"
        )
    return bool(value)


def in_turn(messages: Sequence[Message], name: str) -> None:
    """Check that the roles are system at most once and first, and then user, assistant, user, ..."""
    first = int(bool(messages) and messages[0].role == "system")
    for index, message in enumerate(messages[first:]):
        expected = "assistant" if index % 2 else "user"
        if message.role != expected:
            raise RowError(
                f"{name}[{first + index}].role must be {expected} (roles take turns); got {message.role!r}"
            )
    if len(messages) == first:
        raise RowError(f"{name} has no user's message")


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, blank, or a list or object of such values only."""
    values = [value]
    while values:  # no recursion: rows can be nested deeply
        each = values.pop()
        if isinstance(each, Mapping):
            values += each.values()
        elif isinstance(each, list | tuple):
            values += each
        elif each is not None and not (isinstance(each, str) and not each.strip(INVISIBLE)):
            return False
    return True


def checked_text(text: Any, name: str) -> str:
    if text is None:
        raise RowError(f"{name} is missing or null")
    if not isinstance(text, str):
        raise RowError(f"{name} must be a string; got {json_type(text)}")
    if not text.strip(INVISIBLE):
        raise RowError(f"{name} is {'blank' if text else 'empty'}")
    if "\x00" in text:
        raise RowError(f"{name} has a NUL character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{name} has a lone surrogate (half a character) at position {error.start}"
            ) from error
    return text
