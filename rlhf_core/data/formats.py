"""Rows of five formats, checked and brought into one shape.

| format       | fields                                                                     |
|--------------|----------------------------------------------------------------------------|
| `text`       | `text`                                                                     |
| `messages`   | `messages`: system (optional), then user, assistant and tools in turn      |
| `completion` | `prompt`, `completion`                                                     |
| `preference` | `prompt`, `chosen`, `rejected`; without `prompt`, two whole conversations  |
| `prompt`     | `prompt`                                                                   |

`prompt` is a string or a message list; `completion`, `chosen` and `rejected` are strings, or message lists
with or without the prompt's messages in front. Two conversations without `prompt` (message lists, or the
"\\n\\nHuman: ...\\n\\nAssistant: ..." transcripts of HH-RLHF) share their common beginning as the prompt. A
field `system` of a row is the first message of its prompt or conversation, and a field `tools` is part of
the prompt. A content can be a list of parts of the type `text`, and the role `developer` is `system`. With
`auto`, rows of ShareGPT (`conversations`) and xLAM (`query`, `answers`, `tools`) are `messages`, and rows of
Alpaca (`instruction`, `input`, `output`) and Dolly (`instruction`, `context`, `response`) are `completion`.
Without another field for it, `question` and `problem` are the prompt.

A row may not say something that is then not done. Fields of messages that are neither used nor known as
descriptions are refused, as are fields of rows that are known to change what is trained (`_REFUSED`). All
other fields of a row are kept as `meta`; a number `margin` of a preference row may serve the reward model's
loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from rlhf_core.config.data import Format, Thoughts
from rlhf_core.data.messages import (
    TRAINED,
    Message,
    RowError,
    answer,
    checked_text,
    in_turn,
    is_empty,
    messages_of,
    tools_of,
)

_SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT that have other names here."""
_INSTRUCTIONS = (("instruction", "input", "output"), ("instruction", "context", "response"))
"""Names of instruction, context and answer in Alpaca and Dolly."""
_PROMPT_NAMES = ("question", "problem")
"""Names of the prompt in sets of problems, such as GSM8K and MATH."""
_BESIDE_QUESTION = ("choices", "options", "context")
"""With one of these, the question alone is not the prompt."""
_OWN_FIELDS = frozenset({"text", "messages", "prompt", "completion", "chosen", "rejected", "split", "meta"})
_USED: dict[str, frozenset[str]] = {
    "text": frozenset({"text", "label", "weight", "train"}),
    "messages": frozenset({"messages", "system", "tools", "label", "weight", "train"}),
    "completion": frozenset({"prompt", "completion", "system", "tools", "label", "weight", "train"}),
    "preference": frozenset({"prompt", "chosen", "rejected", "system", "tools", "margin"}),
    "prompt": frozenset({"prompt", "messages", "system", "tools"}),
}
"""Fields that each format uses."""
_PART_OF_PROMPT = "is part of the prompt; write it into 'prompt'"
_PART_OF_ANSWER = "is part of the answer; write it into the answer as <think>...</think>"
_REFUSED = {
    "system_prompt": "must be named 'system'; use `rename`",
    "instruction": _PART_OF_PROMPT,
    "input": _PART_OF_PROMPT,
    "history": _PART_OF_PROMPT,
    "functions": "must be named 'tools'; use `rename`",
    "chat_template_kwargs": "changes how the row is rendered, which is not supported; leave it out",
    "image": "is not supported: models read text only; leave it out",
    "images": "is not supported: models read text only; leave it out",
    "reasoning_content": _PART_OF_ANSWER,
    "thinking": _PART_OF_ANSWER,
    "completions": "has several answers or steps, which is not supported; write one into 'completion'",
}
"""Fields of rows that change what a row means and that no format uses, with the rule and the fix."""
_NUMBER = re.compile(r"\s*[-+]?[\d.]+\s*")
_CELLS = {"": None, "true": True, "false": False, "1": 1, "0": 0}
_LONG_TEXT = 40
"""Number of characters from which a text with blanks is none of the short values of tables, such as a
category.
"""
_TRANSCRIPT_TURN = re.compile(r"\n\n(Human|Assistant):")


def field_value(row: Mapping[str, Any], name: str) -> Any | None:
    """Return the value of a field; None if it is absent.

    A field with exactly this name comes first. Otherwise the dots of `name` lead into nested objects:
    `reward_model.ground_truth`.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


class Record(NamedTuple):
    """A checked row. Which fields are set follows from `kind`."""

    kind: Format
    """Never `auto`."""
    prompt: tuple[Message, ...] = ()
    """What comes before the response; ends with a user's message. Empty for `text`."""
    text: str | None = None
    """`text` rows."""
    messages: tuple[Message, ...] = ()
    """`messages` rows: the whole conversation; `prompt` is what comes before its last assistant turn."""
    response: Message | None = None
    """`completion` rows, and the `chosen` of `preference` rows."""
    rejected: Message | None = None
    """`preference` rows."""
    tools: str = ""
    """Functions that the assistant can call: JSON text of a list, or empty."""
    meta: Mapping[str, Any] = {}
    """Every other field of the row: JSON."""
    marked_bad: bool = False
    """Whether `label`, `train` or `weight` of the row says that its answer is not trained."""

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text: the tools and its messages with blank lines between them.

        For `text` rows, the text.
        """
        if self.text is not None:
            return self.text
        tools = [self.tools] if self.tools else []
        return "\n\n".join([*tools, *(message.text for message in self.prompt)])

    @property
    def texts(self) -> Iterator[str]:
        """All texts of the record."""
        if self.text is not None:
            yield self.text
        answers = [each for each in (self.response, self.rejected) if each is not None]
        for message in (*(self.messages or self.prompt), *answers):
            yield message.content
            if message.thoughts:
                yield message.thoughts
            for call in message.calls:
                yield call.arguments


def normalise(
    row: Mapping[str, Any],
    wanted: Format = "auto",
    rename: Mapping[str, str] | None = None,
    *,
    demonstration: bool = False,
    ignore: Collection[str] = (),
    thoughts: Thoughts | None = None,
) -> Record:
    """Return `row` as a checked record. Raises RowError with the reason.

    Args:
        row: The row.
        wanted: Its format. Others than `auto` require their fields.
        rename: New names of fields. It is applied first.
        demonstration: Whether the answer is to be trained. `auto` then prefers `messages` to a `prompt`
            alone, which has no answer. Otherwise `messages` may end with the user's, and are a prompt.
        ignore: Fields of the row and of its messages that are not read. `meta` has those of the row.
        thoughts: `data.thoughts`.
    """
    row = _renamed(row, rename or {})
    meta = _meta(row)
    row = _without(row, ignore) if ignore else row
    if wanted == "auto":
        before, row = row, _from_other_layout(row)
        meta = {name: value for name, value in meta.items() if name in row or name not in before}
    kind = _detect(row, demonstration=demonstration) if wanted == "auto" else wanted
    bad = demonstration and _is_marked_bad(row, kind)
    if kind == "text":
        return Record("text", text=_string(row, "text"), meta=meta, marked_bad=bad)
    read_inside = {theirs.split(".")[0] for theirs in rename or {}}
    for name, rule in _REFUSED.items():
        if name not in read_inside and not is_empty(row.get(name)):
            if name in ("instruction", "input") and kind != "messages" and row.get("prompt") is None:
                rule = f"may be the prompt, which is missing: use `rename: {{{name}: prompt}}`"
            raise RowError(f"{name!r} {rule}, or name it in `ignore`")
    tools = tools_of(row.get("tools"))
    if kind == "messages":
        messages = messages_of(
            row, "messages", "a list of messages", weights=demonstration, thoughts=thoughts
        )
        messages = _with_system(row, messages)
        in_turn(messages, "messages")
        if messages[-1].role == "assistant":
            if not any(message.trained for message in messages if message.role == "assistant"):
                raise RowError("'messages' has no answer that is trained (`weight` is 0, or `train` false)")
            return Record(
                "messages", messages[:-1], messages=messages, tools=tools, meta=meta, marked_bad=bad
            )
        if demonstration:
            raise RowError("the last of 'messages' must be the assistant's")
        return Record("prompt", messages, tools=tools, meta=meta)
    if kind == "preference":
        return _preference(row, thoughts)._replace(tools=tools, meta=meta, marked_bad=bad)
    prompt = _prompt(row, thoughts)
    record = Record(kind, _with_system(row, prompt), tools=tools, meta=meta, marked_bad=bad)
    if kind == "prompt":
        return record
    return record._replace(response=_response(row, "completion", prompt, thoughts))


def _from_other_layout(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of ShareGPT, Alpaca, Dolly, xLAM or a set of problems with the fields of one of the five
    formats.
    """
    has = {name for name, value in row.items() if value is not None}
    conversation = row.get("conversations")
    if isinstance(conversation, list) and "messages" not in has:
        messages = list(map(_from_share_gpt, conversation))
        return {**_without(row, ("conversations",)), "messages": messages}
    if not has & {"prompt", "completion", "messages", "chosen"}:
        for question, context, output in _INSTRUCTIONS:
            parts = [part for part in (row.get(question), row.get(context)) if not is_empty(part)]
            texts = [part for part in parts if isinstance(part, str)]
            if {question, output} <= has and texts and len(texts) == len(parts):
                kept = _without(row, (question, context, output))
                return {**kept, "prompt": "\n\n".join(texts), "completion": row[output]}
        if {"query", "answers", "tools"} <= has:
            called = {"role": "assistant", "content": None, "tool_calls": row["answers"]}
            kept = _without(row, ("query", "answers"))
            return {**kept, "messages": [{"role": "user", "content": row["query"]}, called]}
    chosen = row.get("chosen")
    is_conversation = isinstance(chosen, list) or (isinstance(chosen, str) and _is_transcript(chosen))
    if not is_conversation and not has & {"prompt", "messages", "text", *_BESIDE_QUESTION}:
        for name in _PROMPT_NAMES:
            if name in has:
                return {**_without(row, (name,)), "prompt": row[name]}
    return row


def _is_transcript(text: str) -> bool:
    """Return whether a text is a conversation as in HH-RLHF."""
    return text.startswith("\n\nHuman:")


def _from_share_gpt(item: Any) -> Any:
    if not isinstance(item, Mapping) or "from" not in item:
        return item
    if item["from"] == "function_call":
        kept = _without(item, ("from", "value"))
        return {**kept, "role": "assistant", "content": None, "tool_calls": item.get("value")}
    role = _SPEAKERS.get(str(item["from"]), item["from"])
    return {**_without(item, ("from", "value")), "role": role, "content": item.get("value")}


def other_fields(row: Mapping[str, Any], rename: Mapping[str, str], record: Record) -> dict[str, bool]:
    """Return the fields of a row that its record's texts are not made of, and whether each is a long text, or
    what belongs to a question, and not part of another text.
    """
    found = {}
    for name, value in _from_other_layout(_renamed(row, rename)).items():
        if name not in _USED[record.kind] | {"group"} and not is_empty(value):
            is_text = name in _BESIDE_QUESTION or (name not in _OWN_FIELDS and _is_long_text(value))
            parts = map(str, value if isinstance(value, list) else [value])
            found[str(name)] = is_text and any(
                all(part not in text for text in record.texts) for part in parts
            )
    return found


def _is_long_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= _LONG_TEXT and (" " in value or not value.isascii())


def _is_marked_bad(row: Mapping[str, Any], kind: Format) -> bool:
    """Return whether the row says that its answer is not trained: by `label`, as in rows of KTO, by `train`
    or by `weight`.
    """
    for name in ("label", *TRAINED):
        value = row.get(name)
        if isinstance(value, str):  # a cell of a CSV file
            value = _CELLS.get(value.strip().lower(), value)
        is_class = isinstance(value, str) and not _NUMBER.fullmatch(value)
        if name == "label" and (kind == "preference" or is_class):
            continue
        if name == "label" and kind == "text" and not isinstance(value, bool):
            continue  # the number of a class
        if value is None or (isinstance(value, bool) and value):
            continue
        if not isinstance(value, bool) and (name == "label" or value not in (0, 1)):
            raise RowError(
                f"{name!r} must be true (the answer is trained) or false; got {str(value)[:40]}; convert it,"
                " or name it in `ignore`"
            )
        if not value:
            return True
    return False


def _without(row: Mapping[str, Any], ignore: Collection[str]) -> Mapping[str, Any]:
    """Return the row without the fields `ignore`, also in its messages."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        if name in ignore:
            continue
        if name in _OWN_FIELDS and isinstance(value, list):
            value = [_without(item, ignore) if isinstance(item, Mapping) else item for item in value]
        kept[name] = value
    return kept


def _with_system(row: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages with the row's `system` as the first one."""
    if is_empty(row.get("system")):
        return messages
    system = Message("system", _string(row, "system"))
    if messages[0].role != "system":
        return (system, *messages)
    if messages[0].content != system.content:
        raise RowError("'system' differs from the system message of the conversation; keep one of them")
    return messages


def _renamed(row: Mapping[str, Any], rename: Mapping[str, str]) -> Mapping[str, Any]:
    if not rename:
        return row
    kept = {name: value for name, value in row.items() if name not in rename}
    new = dict(kept)
    for theirs, ours in rename.items():
        value = field_value(row, theirs)
        if value is None:
            continue
        # `rename: {answer.text: answer}` may replace the object that the value comes from.
        if theirs.split(".")[0] != ours and not is_empty(kept.get(ours)):
            raise RowError(
                f"the row has {ours!r} already, so {theirs!r} cannot be renamed to it; take it out of"
                f" `rename`, or rename {ours!r} as well"
            )
        new[ours] = value
    return new


def _detect(row: Mapping[str, Any], *, demonstration: bool) -> Format:
    """Return the format with the most fields among those that the row has."""
    # Null counts as absent: a row of a Parquet file has all columns of the file.
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
    beside = sorted(has.intersection(_BESIDE_QUESTION))
    if beside and has.intersection(_PROMPT_NAMES):
        raise RowError(f"{beside[0]!r} {_PART_OF_PROMPT}, or name it in `ignore`")
    fields = ", ".join(sorted(map(repr, row))[:8]) or "none"
    raise RowError(
        f"no known format: 'text', 'messages' or 'prompt' is missing (fields: {fields}); use `rename`"
    )


def _meta(row: Mapping[str, Any]) -> dict[str, Any]:
    own = row.get("meta")
    meta: dict[str, Any] = {}
    if isinstance(own, Mapping):
        meta.update(own)
        meta.pop("group", None)  # only a field of the row names its group
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


def _string(row: Mapping[str, Any], name: str) -> str:
    return checked_text(row.get(name), repr(name))


def _prompt(row: Mapping[str, Any], thoughts: Thoughts | None) -> tuple[Message, ...]:
    if row.get("prompt") is None or isinstance(row["prompt"], str):
        return (Message("user", _string(row, "prompt")),)
    messages = messages_of(row, "prompt", thoughts=thoughts)
    in_turn(messages, "prompt")
    if messages[-1].role == "assistant":
        raise RowError("the last message of 'prompt' must not be the assistant's")
    return messages


def _response(
    row: Mapping[str, Any], name: str, prompt: tuple[Message, ...], thoughts: Thoughts | None
) -> Message:
    """Return the assistant's message of a string, of one message, or of a conversation that begins with
    `prompt`.
    """
    if row.get(name) is None or isinstance(row[name], str):
        return answer(_string(row, name), repr(name), thoughts)
    return _only_answer(messages_of(row, name, thoughts=thoughts), name, prompt)


def _only_answer(messages: tuple[Message, ...], name: str, prompt: tuple[Message, ...]) -> Message:
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if len(messages) != 1 or messages[0].role != "assistant":
        raise RowError(
            f"{name!r} must be one assistant message after the prompt; got {[m.role for m in messages]}"
        )
    return messages[0]


def _preference(row: Mapping[str, Any], thoughts: Thoughts | None) -> Record:
    if row.get("prompt") is None:
        prompt, chosen, rejected = _shared_prompt(row, thoughts)
    else:
        prompt = _prompt(row, thoughts)
        chosen = _response(row, "chosen", prompt, thoughts)
        rejected = _response(row, "rejected", prompt, thoughts)
    # Answers that differ in dropped thoughts only have the same tokens, and are counted as such.
    if chosen == rejected and thoughts != "drop":
        raise RowError("'chosen' and 'rejected' are the same")
    return Record("preference", _with_system(row, prompt), response=chosen, rejected=rejected)


def _shared_prompt(
    row: Mapping[str, Any], thoughts: Thoughts | None
) -> tuple[tuple[Message, ...], Message, Message]:
    """Return the common first messages of `chosen` and `rejected`, and the two answers."""
    chosen, rejected = (_conversation(row, name, thoughts) for name in ("chosen", "rejected"))
    shared = 0
    # The last message of the shorter one is its answer, also if the other conversation goes on with it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    prompt = chosen[:shared]
    in_turn(prompt, "the common beginning of 'chosen' and 'rejected'")
    if prompt[-1].role == "assistant":
        raise RowError(
            "'chosen' and 'rejected' must differ in the assistant's last message, not in the user's"
        )
    return prompt, _only_answer(chosen, "chosen", prompt), _only_answer(rejected, "rejected", prompt)


def _conversation(row: Mapping[str, Any], name: str, thoughts: Thoughts | None) -> tuple[Message, ...]:
    value = row.get(name)
    if not isinstance(value, str):
        return messages_of(row, name, thoughts=thoughts)
    if not _is_transcript(value):
        raise RowError(f"'prompt' is missing, and {name!r} is not a conversation that holds it")
    # The text begins with a speaker, so the part before the first one is empty.
    _, *turns = _TRANSCRIPT_TURN.split(value)
    messages = []
    for index, (speaker, text) in enumerate(zip(turns[::2], turns[1::2], strict=True)):
        field = f"{name!r}, turn {index},"
        text = checked_text(text.strip(), field)
        messages.append(answer(text, field, thoughts) if speaker == "Assistant" else Message("user", text))
    return tuple(messages)
