"""Rows of five formats, checked and brought into one shape.

| format       | fields                                                                     |
|--------------|----------------------------------------------------------------------------|
| `text`       | `text`                                                                     |
| `messages`   | `messages`: system (optional), then user and assistant in turn             |
| `completion` | `prompt`, `completion`                                                     |
| `preference` | `prompt`, `chosen`, `rejected`; without `prompt`, two whole conversations  |
| `prompt`     | `prompt`                                                                   |

`prompt` is a string or a message list; `completion`, `chosen` and `rejected` are strings, or message lists
with or without the prompt's messages in front. Two conversations without `prompt` (message lists, or the
"\\n\\nHuman: ...\\n\\nAssistant: ..." transcripts of HH-RLHF) share their common beginning as the prompt. All
other fields of a row are kept as `meta`; a number `margin` of a preference row may serve the reward model's
loss.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.data import Format
from rlhf_core.data.files import json_type

ROLES = ("system", "user", "assistant")
_OWN_FIELDS = frozenset({"text", "messages", "prompt", "completion", "chosen", "rejected", "split", "meta"})
_CALLS = ("tool_calls", "function_call")
"""Fields of a message that are part of the answer, besides its content."""
_INVISIBLE = (
    string.whitespace
    + "\x1c\x1d\x1e\x1f\x85\xa0\xad\u115f\u1160\u1680\u180e\u2800\u3000\u3164\ufeff\uffa0"
    + "".join(
        chr(code)
        for start, end in ((0x2000, 0x2010), (0x2028, 0x2030), (0x205F, 0x2070))
        for code in range(start, end)
    )
)
"""All white space of Unicode, and invisible characters."""
_TRANSCRIPT_TURN = re.compile(r"\n\n(Human|Assistant):")


class RowError(ValueError):
    """This row cannot be used; the message is the reason, one sentence."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Record:
    """A checked row. Which fields are set follows from `kind`."""

    kind: Format
    """Never `auto`."""
    prompt: tuple[Message, ...] = ()
    """What comes before the response; ends with a user's message. Empty for `text`."""
    text: str | None = None
    """`text` rows."""
    messages: tuple[Message, ...] = ()
    """`messages` rows: the whole conversation; `prompt` is what comes before its last assistant turn."""
    response: str | None = None
    """`completion` rows, and the `chosen` of `preference` rows."""
    rejected: str | None = None
    """`preference` rows."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Every other field of the row: JSON."""

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text: the contents of its messages with blank lines between them.

        For `text` rows, the text.
        """
        if self.text is not None:
            return self.text
        return "\n\n".join(message.content for message in self.prompt)


def normalise(
    row: Mapping[str, Any],
    wanted: Format = "auto",
    rename: Mapping[str, str] | None = None,
    *,
    demonstration: bool = False,
) -> Record:
    """Return `row` as a checked record. Raises RowError with the reason.

    `rename` (source field -> our field) is applied first. A format other than `auto` requires its fields.
    With `demonstration`, `auto` prefers `messages` to a `prompt` alone, which has no answer.
    """
    row = _renamed(row, rename or {})
    kind = _detect(row, demonstration=demonstration) if wanted == "auto" else wanted
    meta = _meta(row)
    if kind == "text":
        return Record("text", text=_string(row, "text"), meta=meta)
    if kind == "messages":
        messages = _messages(row, "messages", "a list of messages")
        _in_turn(messages, "messages")
        if messages[-1].role != "assistant":
            raise RowError("the last of 'messages' must be the assistant's")
        return Record("messages", prompt=messages[:-1], messages=messages, meta=meta)
    if kind == "preference":
        return _preference(row, meta)
    prompt = _prompt(row)
    if kind == "prompt":
        return Record("prompt", prompt=prompt, meta=meta)
    return Record("completion", prompt=prompt, response=_response(row, "completion", prompt), meta=meta)


def field_value(row: Mapping[str, Any], name: str) -> Any | None:
    """Return the value of a field, or None without one. `a.b` is the field `b` of the field `a`, unless a
    field has this whole name.
    """
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return field_value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _renamed(row: Mapping[str, Any], rename: Mapping[str, str]) -> Mapping[str, Any]:
    if not rename:
        return row
    kept = {name: value for name, value in row.items() if name not in rename}
    return {**kept, **{ours: row[theirs] for theirs, ours in rename.items() if theirs in row}}


def _detect(row: Mapping[str, Any], *, demonstration: bool) -> Format:
    """Return the format with the most fields among those that the row has."""
    has = {name for name in row if row[name] is not None}
    if "chosen" in has or "rejected" in has:
        return "preference"
    if "completion" in has and "prompt" in has:
        return "completion"
    # Rows of UltraChat have the first of their messages as `prompt`, too.
    if "prompt" in has and not (demonstration and "messages" in has):
        return "prompt"
    if "messages" in has:
        return "messages"
    if "text" in has:
        return "text"
    fields = ", ".join(sorted(map(repr, row))[:8]) or "none"
    raise RowError(
        f"no known format: 'text', 'messages' or 'prompt' is missing (fields: {fields}); use `rename`"
    )


def _meta(row: Mapping[str, Any]) -> dict[str, Any]:
    own = row.get("meta")
    meta: dict[str, Any] = {}
    if isinstance(own, Mapping):
        meta.update(own)
    elif own is not None:
        meta["meta"] = own
    for name, value in row.items():
        if name not in _OWN_FIELDS and value is not None:
            meta[str(name)] = value
    try:
        # Read back, so that values have the types that a reader of the artifact gets: a tuple becomes a list.
        return dict(json.loads(json.dumps(meta, default=_as_text, allow_nan=False)))
    except (ValueError, RecursionError):
        # Field by field, to name the one that cannot be kept.
        converted = {name: _as_json(name, value) for name, value in meta.items()}
        return {name: value for name, value in converted.items() if value is not None}


def _as_json(name: str, value: Any) -> Any:
    """Return a field as JSON. Numbers that are not finite become null, which represents a missing value in
    tables.
    """
    try:
        return json.loads(json.dumps(value, default=_as_text), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the field {name[:40]!r} cannot be kept as JSON: {error}") from error


def _as_text(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def _checked(text: Any, name: str) -> str:
    if text is None:
        raise RowError(f"{name} is missing or null")
    if not isinstance(text, str):
        raise RowError(f"{name} must be a string; got {json_type(text)}")
    if not text.strip(_INVISIBLE):
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


def _string(row: Mapping[str, Any], name: str) -> str:
    return _checked(row.get(name), repr(name))


def _messages(
    row: Mapping[str, Any], name: str, expected: str = "a string or a list of messages"
) -> tuple[Message, ...]:
    """Return a list of messages. `expected` is what the field may have, for the reason."""
    value = row.get(name)
    if value is None:
        raise RowError(f"{name!r} is missing or null")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise RowError(f"{name!r} must be {expected}; got {json_type(value)}")
    if not value:
        raise RowError(f"{name!r} has no messages")
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{name} must be an object with 'role' and 'content'; got {json_type(item)}")
    role = item.get("role")
    if role not in ROLES:
        raise RowError(f"{name}.role must be system, user or assistant; got {str(role)[:40]!r}")
    for field_name in _CALLS:
        if item.get(field_name):
            raise RowError(
                f"{name}.{field_name}: calls of tools are not supported; write them into 'content'"
            )
    return Message(str(role), _checked(item.get("content"), f"{name}.content"))


def _in_turn(messages: Sequence[Message], name: str) -> None:
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


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if row.get("prompt") is None or isinstance(row["prompt"], str):
        return (Message("user", _string(row, "prompt")),)
    messages = _messages(row, "prompt")
    _in_turn(messages, "prompt")
    if messages[-1].role == "assistant":
        raise RowError("the last message of 'prompt' must not be the assistant's")
    return messages


def _response(row: Mapping[str, Any], name: str, prompt: tuple[Message, ...]) -> str:
    """Return the assistant's text of a string, of one message, or of a conversation that begins with
    `prompt`.
    """
    if row.get(name) is None or isinstance(row[name], str):
        return _string(row, name)
    messages = _messages(row, name)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if len(messages) != 1 or messages[0].role != "assistant":
        raise RowError(
            f"{name!r} must be one assistant message after the prompt; got {[m.role for m in messages]}"
        )
    return messages[0].content


def _preference(row: Mapping[str, Any], meta: dict[str, Any]) -> Record:
    prompt = _prompt(row) if row.get("prompt") is not None else None
    if prompt is None:
        row, prompt = _shared_prompt(row)
    chosen, rejected = _response(row, "chosen", prompt), _response(row, "rejected", prompt)
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same")
    return Record("preference", prompt=prompt, response=chosen, rejected=rejected, meta=meta)


def _shared_prompt(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Message, ...]]:
    """Return the row with `chosen` and `rejected` as lists of messages, and their common first messages."""
    lists = {name: _conversation(row, name) for name in ("chosen", "rejected")}
    chosen, rejected = lists["chosen"], lists["rejected"]
    if chosen == rejected:
        raise RowError("'chosen' and 'rejected' are the same")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    prompt = chosen[:shared]
    _in_turn(prompt, "the common beginning of 'chosen' and 'rejected'")
    if prompt[-1].role == "assistant":
        raise RowError(
            "'chosen' and 'rejected' must differ in the assistant's last message, not in the user's"
        )
    plain = {name: [{"role": m.role, "content": m.content} for m in value] for name, value in lists.items()}
    return {**row, **plain}, prompt


def _conversation(row: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    value = row.get(name)
    if not isinstance(value, str):
        return _messages(row, name)
    if not value.startswith("\n\nHuman:"):
        raise RowError(f"'prompt' is missing, and {name!r} is not a conversation that holds it")
    # The text begins with a speaker, so the part before the first one is empty.
    _, *turns = _TRANSCRIPT_TURN.split(value)
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        Message(roles[speaker], _checked(text.strip(), f"{name!r}, turn {index},"))
        for index, (speaker, text) in enumerate(zip(turns[::2], turns[1::2], strict=True))
    )
