"""Messages of rows: roles, contents, thoughts, tools and their order, checked."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_core.config.data import Thoughts
from rlhf_core.data.files import json_type

ROLES = ("system", "user", "assistant", "tool")
_FOLLOWS = {
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Roles that may follow each role; None: the beginning, or the system message."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with the thoughts of the assistant."""
_THOUGHT = re.compile(r"\s*+(?:<think>)?((?:(?!<think>).)*?)</think>\s*", re.DOTALL)
r"""Thoughts at the beginning of an answer. Some templates write `<think>` as the end of the prompt.

`\s*+` gives no blank back: each would mean another search of the whole text.
"""
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


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    trained: bool = True
    """Whether a demonstration trains the message, if it is the assistant's."""
    thoughts: str = ""
    """What the assistant thought before its answer."""
    calls: tuple[Call, ...] = ()
    """Calls of tools by the assistant."""
    name: str = ""
    """Tool whose result a message of the role `tool` is."""
    call_id: str = ""
    """Id of the call that it answers."""

    @property
    def text(self) -> str:
        """The message as plain text: thoughts, content and calls."""
        parts = [f"<think>\n{self.thoughts}\n</think>"] if self.thoughts else []
        parts += [self.content] if self.content else []
        parts += [f"{call.name}({call.arguments})" for call in self.calls]
        return "\n\n".join(parts)


def answer(text: str, name: str, thoughts: Thoughts | None, calls: tuple[Call, ...] = ()) -> Message:
    """Return a text of the assistant as a message.

    Args:
        text: The text, which may begin with `<think>...</think>`. Beside calls it may be empty.
        name: Its field, for the reason.
        thoughts: `data.thoughts`.
        calls: Calls of tools after it.

    Raises RowError.
    """
    found = _THOUGHT.match(text)
    content = text[found.end() :] if found else text
    if not (calls and is_empty(content)):
        checked_text(content, name)
    if "<think>" in content or "</think>" in content:
        raise RowError(f"{name} has a '<think>' that is not one closed block at its beginning; correct it")
    message = Message("assistant", content, calls=calls)
    return _thought(message, found[1].strip() if found else "", name, thoughts)


def without_thoughts(text: str, opened: bool = False) -> str:
    """Return a response without the thoughts at its beginning; "" if it was cut within them.

    `opened` says that the prompt ends with `<think>`.
    """
    found = _THOUGHT.match(text)
    if found is not None:
        return text[found.end() :]
    return "" if opened or text.lstrip().startswith("<think>") else text


def _thought(message: Message, said: str, name: str, thoughts: Thoughts | None) -> Message:
    """Return an answer with the thoughts `said`, as `data.thoughts` wants it."""
    if not said or thoughts == "drop":
        return message
    if thoughts is None:
        raise RowError(f"{name} has thoughts of the assistant; set data.thoughts to keep or drop them")
    return message._replace(thoughts=said)


def tools_of(value: Any, name: str = "'tools'") -> str:
    """Return a list of tools, or its JSON text, as JSON text of functions; "" without any. Raises RowError.

    Null fields are left out: Parquet files have them where another row has a value.
    """
    if is_empty(value):
        return ""
    tools = _from_json(value, name)
    if not isinstance(tools, list):
        raise RowError(f"{name} must be a list of functions, or its JSON text; got {json_type(tools)}")
    functions = []
    for index, tool in enumerate(tools):
        # xLAM has the functions alone, without the object around each that chat templates read.
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{index}] must be a function with a 'name'")
        functions.append({"type": "function", "function": function})
    return json.dumps(functions, ensure_ascii=False) if functions else ""


def _calls(value: Any, name: str) -> tuple[Call, ...]:
    if is_empty(value):
        return ()
    calls = _from_json(value, name)
    found = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{index}] must have the 'name' of a function and its 'arguments'")
        arguments = _from_json(function.get("arguments") or {}, f"{name}[{index}].arguments")
        if not isinstance(arguments, Mapping):
            raise RowError(f"{name}[{index}].arguments must be an object; got {json_type(arguments)}")
        text = json.dumps(arguments, ensure_ascii=False)
        found.append(Call(function["name"], text, str(call.get("id") or "")))
    return tuple(found)


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(f"{name} is not valid JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return list(map(_without_nulls, value))
    return value


def messages_of(
    row: Mapping[str, Any],
    name: str,
    expected: str = "a string or a list of messages",
    *,
    weights: bool = False,
    thoughts: Thoughts | None = None,
) -> tuple[Message, ...]:
    """Return a list of messages.

    Args:
        row: The row.
        name: The field.
        expected: What the field may have, for the reason.
        weights: Whether each message says if it is trained. Otherwise this depends on the set, and the last
            one must not say that it is not.
        thoughts: `data.thoughts`.
    """
    value = row.get(name)
    if value is None:
        raise RowError(f"{name!r} is missing or null")
    # A text is a sequence as well, whose characters would be the messages.
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise RowError(f"{name!r} must be {expected}; got {json_type(value)}")
    if not value:
        raise RowError(f"{name!r} has no messages")
    messages = tuple(_message(item, f"{name}[{index}]", thoughts) for index, item in enumerate(value))
    if weights:
        return messages
    if not messages[-1].trained and messages[-1].role == "assistant" and name != "messages":
        raise RowError(f"the answer of {name!r} is marked as not trained (`weight` is 0, or `train` false)")
    return tuple(message._replace(trained=True) for message in messages)


def _message(item: Any, name: str, thoughts: Thoughts | None) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{name} must be an object with 'role' and 'content'; got {json_type(item)}")
    role = item.get("role")
    if role == "developer":  # the name of the system message in the API of newer models
        role = "system"
    if role not in ROLES:
        fields = ", ".join(sorted(map(repr, item))[:8])
        got = repr(str(role)[:40]) if "role" in item else f"no role (fields: {fields})"
        raise RowError(f"{name}.role must be system, user, assistant or tool; got {got}")
    used = ("role", "content", *TRAINED, *(("tool_calls", *_THOUGHTS) if role == "assistant" else ()))
    for key, value in item.items():
        if key in used or _DESCRIPTION.fullmatch(str(key)) or is_empty(value):
            continue
        raise RowError(
            f"{name}.{str(key)[:40]} is not supported: only 'role', 'content', 'weight' and 'train' of a"
            " message are, and 'tool_calls' and 'reasoning_content' of the assistant's; write it into"
            " 'content', or name it in `ignore`"
        )
    trained = all(_says_trained(item, key, str(role), name) for key in TRAINED)
    content = _joined_parts(item.get("content"), name)
    if role == "tool":
        text = "" if is_empty(content) else checked_text(content, f"{name}.content")
        return Message("tool", text, True, name=_text(item, "name"), call_id=_text(item, "tool_call_id"))
    if role != "assistant":
        return Message(str(role), checked_text(content, f"{name}.content"))
    calls = _calls(item.get("tool_calls"), f"{name}.tool_calls")
    text = "" if calls and is_empty(content) else checked_text(content, f"{name}.content")
    found = answer(text, f"{name}.content", thoughts, calls)._replace(trained=trained)
    for key in _THOUGHTS:
        if is_empty(item.get(key)):
            continue
        said = checked_text(item[key], f"{name}.{key}").strip()
        if found.thoughts not in ("", said):
            raise RowError(f"{name}.{key} differs from other thoughts of the message; keep one of them")
        found = _thought(found, said, f"{name}.{key}", thoughts)
    return found


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


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
    # By equality: 1.0, as a column with gaps has it, and true are 1 as well.
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
    """Check that the roles are system at most once and first, and then user, assistant, user, ...; results of
    tools and another answer may follow an answer.
    """
    first = int(bool(messages) and messages[0].role == "system")
    before: str | None = None
    for index, message in enumerate(messages[first:]):
        if message.role not in _FOLLOWS[before]:
            raise RowError(
                f"{name}[{first + index}].role must be {' or '.join(_FOLLOWS[before])} (roles take turns);"
                f" got {message.role!r}"
            )
        before = message.role
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
    # Asked first, because CPython knows it without reading the text, and most texts need no encoding then.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                f"{name} has a lone surrogate (half a character) at position {error.start}"
            ) from error
    return text
