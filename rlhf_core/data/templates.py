"""From messages to tokens: the chat template applied exactly once, and which tokens the assistant wrote.

    messages, tools -> render (Jinja, sandboxed) -> text + character spans of the assistant
                    -> tokens + offsets -> ids, mask

Without {% generation %} marks, a span is what follows the rendering of the messages before an answer with the
generation prompt. Some templates render an earlier answer otherwise than the last one, for example without
its thoughts. Then each answer becomes a sequence of its own, as the policy writes it.

Text of users that spells a special token ("</s>") stays text: while rendering, one private-use character
stands for it, so that the special tokens found in the rendered text are the template's own. A conversation
without such text is tokenised in the ordinary way, as the tokenizer itself would do it.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rlhf_core.data.messages import Call, Message
from rlhf_core.data.rendering import DATE, TemplateError, chat_template, ends_within, render
from rlhf_core.errors import ModelError
from rlhf_core.system.files import read_bounded

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\+?\s*generation\s*-?%\}")
_TEMPLATE_SECONDS = 2.0
_MAX_TEMPLATE_BYTES = 2**20
_NEUTRAL = "It is noon."
_THOUGHT_FIELDS = ("reasoning_content", "thinking")
"""Fields of a message in which templates read thoughts."""
_OPENS = "<think>"
_MARK = "\uf8ff"
"""A private-use character that shows where a text is in a rendering."""
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_NEUTRALISED = ("content", *_THOUGHT_FIELDS)
TOOLS_TEMPLATE = "deployments/configs/tools-chat.jinja"
"""The template of this package that renders tools, for models whose own one does not."""
_LEFT_OUT = (
    f"set data.chat_template: {TOOLS_TEMPLATE}, which comes with this package, or another one that renders"
    " tools; rows without calls can also be used without their tools: name `tools` in `ignore`"
)
_PROBED = ("probed_tool", "probed_call", "probed_result")
"""A tool, a call and a result that no text mentions."""
_FOREIGN_MARKS = r"<[|｜][^<>|｜\s]{1,40}[|｜]>|</?(?:start|end)_of_turn>|\[/?INST\]"
"""Role marks of the chat templates of other models: <|im_start|>, [INST] and similar ones."""
_TRANSCRIPT = r"\A\n\nHuman:"
"""The beginning of a conversation as in HH-RLHF, which a chat template would render as one message."""
_KNOWN_PIECES, _LONG = 16, 2**15
"""Number of texts between special tokens whose tokens are kept, because they come again, and the most
characters of one.
"""
_CHARS_PER_TOKEN = 256
"""No token of a known vocabulary is longer; text beyond this many characters per allowed token is surely too
long.
"""


def read_chat_template(path: str) -> bytes:
    """Return the content of `data.chat_template`. Raises ModelError."""
    try:
        return read_bounded(path, _MAX_TEMPLATE_BYTES)
    except FileNotFoundError as error:
        raise ModelError(f"data.chat_template: file not found: {path}; give a Jinja file") from error
    except OSError as error:
        raise ModelError(
            f"data.chat_template: cannot read {path}: {error}; give a UTF-8 Jinja file"
        ) from error


class EncodeError(ValueError):
    """This one row cannot be encoded; the message is the reason. Callers count or quarantine the row."""


class NotContinuedError(EncodeError):
    """The template does not render a conversation as a continuation of its beginning."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template does not render a conversation as a continuation of its beginning, so the"
            " assistant's tokens cannot be recognised; put {% generation %} marks into it"
        )


@dataclass(frozen=True)
class Encoded:
    """A prompt with a response, or a whole conversation."""

    ids: tuple[int, ...]
    """(P+T,)"""
    mask: tuple[int, ...]
    """(P+T,) 1 on tokens the assistant wrote, EOS included."""


_Offsets = list[tuple[int, int]]
"""First and last character of each token, the last one exclusive."""


@dataclass(frozen=True)
class _Tokens:
    ids: list[int]
    starts: list[int]
    """First character of each piece in the rendered text."""
    pieces: list[tuple[int, _Offsets]]
    """The index of its first token, and the offsets in the piece."""

    def before(self, at: int) -> tuple[int, bool]:
        """Return the number of tokens that begin before the character `at`, and whether one ends after it."""
        number = bisect_left(self.starts, at) - 1
        if number < 0:
            return 0, False
        first, offsets = self.pieces[number]
        at -= self.starts[number]
        # Not from the first token: a long conversation has many spans.
        count = bisect_left(offsets, (at,))
        return first + count, count > 0 and offsets[count - 1][1] > at


class Encoder:
    """Encodes prompts, conversations and plain text with one tokenizer. Not thread-safe (neither is the
    tokenizer).

    Args:
        tokenizer: The tokenizer with its chat template.
        template: Whether the template is used.
        name: The model, for messages.
        known_prompts: Number of prompts whose tokens are kept, because they come again: by default for the
            second response of a pair; None for all.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Literal["chat", "plain"],
        name: str = "the model",
        *,
        known_prompts: int | None = 1,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self.eos_id: int = tokenizer.eos_token_id
        self._eos: str = tokenizer.eos_token
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json can have the truncation and padding
        # of its own training, which would silently cut rows.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._specials = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        # `re` takes the first alternative that matches, so a token must come before its own beginnings.
        # `(?!)` matches nothing.
        ordered = sorted(self._specials, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        # Without unk, which ordinary text becomes if the vocabulary does not cover it.
        self._control_ids = frozenset(self._specials.values()) - {tokenizer.unk_token_id}
        own_marks = [each for each in ordered if self._specials[each] in self._control_ids]
        marks = [*map(re.escape, own_marks), _FOREIGN_MARKS, *([_TRANSCRIPT] if template == "chat" else [])]
        self._rendered = re.compile("|".join(marks))
        self._skeletons: dict[tuple[tuple[tuple[str, ...], ...], str], list[int]] = {}
        self._header = ""
        """The part of the generation prompt that is inside the {% generation %} block and is not text of the
        assistant.
        """
        self._bos: int | None = _bos_added(tokenizer)
        self._marks = template == "chat" and bool(_GENERATION.search(chat_template(tokenizer) or ""))
        text = chat_template(tokenizer) or ""
        fields = [name for name in _THOUGHT_FIELDS if re.search(rf"[.'\"]{name}\b", text)]
        self._thought_field = fields[0] if fields else None
        # Made here: a cache of the class would keep each encoder and its prompts until the process ends.
        self._prompt_ids = lru_cache(known_prompts)(self._new_prompt_ids)
        # The prompt of a pair comes three times.
        self._known_piece = lru_cache(_KNOWN_PIECES)(self._piece)
        self._apart = _are_apart(tokenizer)
        self._last_prompt: tuple[list[dict[str, Any]], list[Any] | None, str] = ([], None, "")
        self._not_rendered: Sequence[str] | None = None
        """Those of `_PROBED` that the template leaves out; None: not tried yet."""
        self._mark_ids = self._control_ids
        """Special tokens, and other added tokens that the template itself writes."""
        if template == "chat":
            self._check_template()

    def prompt(self, messages: Sequence[Message], tools: str = "") -> tuple[int, ...]:
        """Return (P,) tokens of a prompt, ready for the response: BOS first if the model has one, and the
        generation prompt last. `tools` is the JSON text of a list of functions.
        """
        return self._prompt_ids(tuple(messages), tools)

    def response(
        self, messages: Sequence[Message], response: Message | str, tools: str = ""
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return ((P,), (T,)) prompt and response as they stand in the whole conversation. The response ends
        with EOS.
        """
        answer = Message("assistant", response) if isinstance(response, str) else response
        prompt = self._prompt_ids(tuple(messages), tools)
        if self.template == "plain":
            body = tuple(self._plain_response(messages, answer.text, list(prompt)))
        else:
            whole = self._conversation([*messages, answer], tools, last_only=True)
            if whole.ids[: len(prompt)] != prompt:
                raise EncodeError("the prompt's tokens are not the beginning of the conversation's")
            body = whole.ids[len(prompt) :]
            if not any(whole.mask[len(prompt) :]):
                raise EncodeError("the chat template leaves the assistant's text out")
        # Sampling ends at the first EOS: what a template writes after it is in no response of the policy.
        if self.eos_id in body:
            body = body[: body.index(self.eos_id)]
        if not body:
            raise EncodeError("the response has no tokens")
        return prompt, (*body, self.eos_id)

    @property
    def identity(self) -> str:
        """A text that is the same for two encoders only if they encode alike."""
        names = (self.tokenizer.chat_template, self.tokenizer.special_tokens_map, self.template, DATE)
        return f"{self._backend.to_str()}\x1f{self.eos_id}\x1f{self._bos}\x1f{names!r}"

    @property
    def response_prefix(self) -> str:
        """The blank that the chat template puts before an answer as part of the response,
        or an empty string.
        """
        if self.template == "plain":
            return ""
        _, ids = self.response([Message("user", _NEUTRAL)], _NEUTRAL)
        return " " if self._decode(list(ids)).startswith(f" {_NEUTRAL}") else ""

    @property
    def opens_thoughts(self) -> bool:
        """Whether prompts end with `<think>`, so that responses begin within the thoughts."""
        if self.template == "plain":
            return False
        prompt, _ = self._render([{"role": "user", "content": _NEUTRAL}], None, generate=True)
        return prompt.rstrip().endswith(_OPENS)

    def require_droppable_thoughts(self) -> None:
        """Raise ModelError if thoughts that the template writes have no `</think>` in the text of a response:
        other marks, or a special token.
        """
        answer = Message("assistant", _NEUTRAL, thoughts="Twelve.")
        with suppress(EncodeError):  # a template that leaves thoughts out
            _, ids = self.response([Message("user", _NEUTRAL)], answer)
            text = self._decode(list(ids))
            if _letters(answer.thoughts) in _letters(text) and "</think>" not in text:
                raise ModelError(
                    f"the responses of {self.name} have thoughts otherwise than as the text"
                    " <think>...</think>, so data.thoughts: drop cannot leave out those that the policy"
                    " samples; use keep, or another data.chat_template"
                )

    def conversation(self, messages: Sequence[Message], tools: str = "") -> Encoded:
        """Return a whole conversation; the mask marks every assistant turn that is trained, with its EOS.

        Raises NotContinuedError if it is not one sequence; see `conversations`.
        """
        if self.template == "plain":
            return self._plain_conversation(messages, tools)
        return self._conversation(messages, tools)

    def conversations(self, messages: Sequence[Message], tools: str = "") -> list[Encoded]:
        """Return a whole conversation, or a sequence for each answer that is trained, with what comes before
        it, if the template renders earlier answers otherwise than the last one.
        """
        try:
            return [self.conversation(messages, tools)]
        except NotContinuedError:
            parts = []
            for index, message in enumerate(messages):
                if message.role == "assistant" and message.trained:
                    prompt, response = self.response(messages[:index], message, tools)
                    mask = (0,) * len(prompt) + (1,) * len(response)
                    parts.append(Encoded(prompt + response, mask))
            return parts

    def rendered_mark(self, texts: Iterable[str]) -> str | None:
        """Return a special token or role mark that one of the texts spells, as text that was rendered with a
        chat template does, or None.
        """
        found = map(self._rendered.search, texts)
        return next((match.group() for match in found if match is not None), None)

    def _conversation(self, messages: Sequence[Message], tools: str, *, last_only: bool = False) -> Encoded:
        """Return a conversation with the mask of all trained answers, or of the last one only."""
        plain, own_tools, restore = self._escape(messages, tools)
        text, spans = self._render_spans(plain, own_tools, last_only)
        spans = spans[-1:] if last_only else spans
        self._require_said(text, spans, plain, own_tools)
        spans = spans if last_only else _trained_spans(spans, messages)
        tokens = self._tokenize(text, restore)
        moved = [(_moved(text, start, restore), _moved(text, end, restore)) for start, end in spans]
        # Tokens of an answer are sampled after the prompt, so none has characters of both.
        borders = [start for (start, _), (at, _) in zip(spans, moved, strict=True) if tokens.before(at)[1]]
        if borders:
            apart = self._begin(self._pieces(text, restore, template_specials=True, borders=borders))
            # Only if the text stays the same: some tokenizers put a blank before each piece.
            if self._decode(apart.ids) == self._decode(tokens.ids):
                tokens = apart
        kind: Literal["last", "whole"] = "last" if last_only else "whole"
        self._require_skeleton(tokens.ids, plain, own_tools, restore, kind)
        ids, mask = tokens.ids, self._mask(tokens, moved)
        # A template may write a line feed after the last EOS, or no EOS at all.
        if messages[-1].role == "assistant" and 1 in mask:
            end = len(mask) - mask[::-1].index(1)
            ids, mask = ids[:end], mask[:end]
            if ids[-1] != self.eos_id:
                ids, mask = [*ids, self.eos_id], [*mask, 1]
        return Encoded(tuple(ids), tuple(mask))

    def text(self, text: str, max_tokens: int) -> Encoded:
        """Return plain text cut to `max_tokens`; EOS follows only where nothing was cut.

        The mask is 1 but on BOS.
        """
        ids = self._with_bos(self._pieces(self.beginning(text, max_tokens)).ids)
        ids = [*ids, self.eos_id][:max_tokens]
        skip = int(self._bos is not None)
        return Encoded(tuple(ids), tuple([0] * skip + [1] * (len(ids) - skip)))

    def beginning(self, text: str, max_tokens: int) -> str:
        """Return the beginning of `text` that surely has its first `max_tokens` tokens."""
        return text[: max_tokens * _CHARS_PER_TOKEN]

    def surely_longer(self, text: str, max_tokens: int) -> bool:
        """Return whether `text` has more than `max_tokens` tokens, by its characters alone: cheap for huge
        rows.
        """
        return len(text) > max_tokens * _CHARS_PER_TOKEN

    # -- chat --

    def _new_prompt_ids(self, messages: tuple[Message, ...], tools: str) -> tuple[int, ...]:
        if self.template == "plain":
            return tuple(self._with_bos(self._pieces(_joined(messages, tools)).ids))
        plain, own_tools, restore = self._escape(messages, tools)
        text = self._rendered_prompt(plain, own_tools)
        self._require_said(text, [], plain, own_tools)
        ids = self._tokenize(text, restore).ids
        self._require_skeleton(ids, plain, own_tools, restore, "prompt")
        return tuple(ids)

    def _rendered_prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the rendering with the generation prompt. Both responses of a pair need the same one."""
        if self._last_prompt[:2] != (messages, tools):
            self._last_prompt = (messages, tools, self._render(messages, tools, generate=True)[0])
        return self._last_prompt[2]

    def _require_said(
        self,
        text: str,
        spans: Sequence[tuple[int, int]],
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
    ) -> None:
        """Raise EncodeError if the template leaves tools, calls or their results out, or the content or the
        thoughts of an answer in one of `spans`, which are those of the last answers. Thoughts before the last
        question may be missing, as they are when the policy answers.
        """
        tool, call, result = _PROBED
        said = [(f"the tool {name!r}", name, tool) for name in _names(tools)]
        for message in messages:
            for name in _names(message.get("tool_calls")):
                said.append((f"the call of {name!r}", name, call))
            if message["role"] == "tool":
                content = message["content"].strip()
                said.append((f"the result {content[:40]!r}", content, result))
        for what, word, kind in said:
            if not _is_in(word, text) or kind in self._left_out():
                raise EncodeError(f"the chat template leaves {what} out; {_LEFT_OUT}")
        answers = [message for message in messages if message["role"] == "assistant"]
        for (start, end), message in zip(reversed(spans), reversed(answers), strict=False):
            thoughts = message.get(self._thought_field or "", "")
            for part in (thoughts, message["content"]) if thoughts or "tool_calls" in message else ():
                if _letters(part) not in _letters(text[start:end]):
                    if message is not answers[-1]:
                        raise NotContinuedError
                    raise EncodeError(
                        f"the chat template leaves {part[:40]!r} of an answer out; use another one in"
                        " data.chat_template, or leave thoughts out with data.thoughts: drop"
                    )

    def _left_out(self) -> Sequence[str]:
        """Return those of `_PROBED` that the template does not render.

        The text of a row does not show it: the name of a tool can be in it as a word, and is that of a call.
        """
        if self._not_rendered is None:
            tool, call, result = _PROBED
            function = {"name": tool, "description": "", "parameters": {"type": "object", "properties": {}}}
            asked, answered = Message("user", _NEUTRAL), Message("assistant", _NEUTRAL)
            calling = Message("assistant", "", calls=(Call(call, "{}"),))
            messages = self._plain([asked, calling, Message("tool", result), answered])
            self._not_rendered = ()
            with suppress(EncodeError):  # a template may refuse these; rows tell why
                text, _ = self._render(messages, [{"type": "function", "function": function}], generate=False)
                self._not_rendered = [each for each in _PROBED if each not in text]
        return self._not_rendered

    def _require_skeleton(
        self,
        ids: Sequence[int],
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        restore: dict[str, str],
        kind: Literal["prompt", "last", "whole"],
    ) -> None:
        """Raise EncodeError if `ids` contains special tokens or role markers that do not come from the
        template.

        A template that deletes characters or adds text can turn normal text into a special token. Markers
        that are not declared special are recognised in any text.
        """
        forms = tuple((each["role"], *sorted(key for key in each if each[key])) for each in messages)
        # With tools, the skeleton has the functions of its own row, so it is not kept for others.
        is_plain = tools is None and not any("tool_calls" in message for message in messages)
        marks = self._skeletons.get((forms, kind)) if is_plain else None
        if marks is None:
            neutral = list(map(_neutral, messages))
            if kind == "prompt":
                text, _ = self._render(neutral, tools, generate=True)
            else:
                text, _ = self._render_spans(neutral, tools, last_only=kind == "last")
            marks = self._marks_in(self._tokenize(text, restore).ids)
            if is_plain:
                self._skeletons[forms, kind] = marks
        if self._marks_in(ids) != marks:
            raise EncodeError(
                "its text would become a special token or a role mark of the chat template; change the text"
            )

    def _marks_in(self, ids: Sequence[int]) -> list[int]:
        return list(filter(self._mark_ids.__contains__, ids))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, generate: bool, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            return render(self.tokenizer, messages, generate, marks, tools)
        except TemplateError as error:
            raise EncodeError(f"the chat template refused it: {error}") from error

    def _render_spans(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, last_only: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and the character span of each assistant turn, or of the last one."""
        if self._marks:
            text, spans = self._render(messages, tools, generate=False, marks=True)
            skip = len(self._header)
            return text, [(a + skip if text.startswith(self._header, a) else a, b) for a, b in spans]
        text, _ = self._render(messages, tools, generate=False)
        spans = []
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in answers[-1:] if last_only else answers:
            before = self._rendered_prompt(messages[:index], tools)
            is_last = index == len(messages) - 1
            after = text if is_last else self._render(messages[: index + 1], tools, generate=False)[0]
            if last_only and not after.startswith(before):
                after = text = self._continued(before, after, messages, tools)
            if not (after.startswith(before) and text.startswith(after.rstrip())):
                raise NotContinuedError
            eos = after.find(self._eos, len(before))
            spans.append((len(before), eos + len(self._eos) if eos >= 0 else len(after.rstrip())))
        return text, spans

    def _continued(
        self, prompt: str, whole: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> str:
        """Return the text of a prompt and the last answer to it, where the template's own rendering `whole`
        of both does not begin with `prompt`. Raises NotContinuedError.
        """
        header = prompt.removeprefix(self._render(messages[:-1], tools, generate=False)[0])
        last = messages[-1]
        if header not in ("", prompt):
            # The template renders what comes before the last answer otherwise, for example without thoughts.
            asked = {**messages[-2], "content": messages[-2]["content"] + _MARK}
            marked, _ = self._render([*messages[:-2], asked, last], tools, generate=False)
            start = marked.find(header, marked.rfind(_MARK)) if marked.count(_MARK) == 1 else -1
            if start >= 0:
                return prompt + marked[start + len(header) :]
        opened = prompt.rstrip()
        if not opened.endswith(_OPENS):
            raise NotContinuedError
        if whole.startswith(opened):
            return prompt + whole[len(opened) :].lstrip()
        if "tool_calls" in last:
            raise NotContinuedError
        # The template leaves the thoughts of its last answer out, but the prompt opens them.
        thoughts, content = last.get(self._thought_field or "", ""), last["content"]
        if content.startswith(_OPENS):
            thoughts, _, content = content.removeprefix(_OPENS).partition("</think>")
        return f"{prompt}{thoughts.strip()}\n</think>\n\n{content.strip()}{self._eos}"

    def _mask(self, tokens: _Tokens, spans: list[tuple[int, int]]) -> list[int]:
        mask = [0] * len(tokens.ids)
        ends = [index for index, token in enumerate(tokens.ids) if token == self.eos_id]
        for start, end in spans:
            (first, is_spanned), (last, _) = tokens.before(start), tokens.before(end)
            if is_spanned:
                raise EncodeError("a token spans the border between the prompt and the assistant's text")
            # Text after EOS inside the block, such as a line feed, is never generated.
            end_of_answer = bisect_left(ends, first)
            if end_of_answer < len(ends):
                last = min(last, ends[end_of_answer] + 1)
            mask[first:last] = [1] * (last - first)
        for index in ends:
            # A template whose marks leave EOS out would otherwise never teach the policy to stop.
            if index > 0 and mask[index - 1] and tokens.ids[index - 1] != self.eos_id:
                mask[index] = 1
        return mask

    # -- text to tokens --

    def _escape(
        self, messages: Sequence[Message], tools: str
    ) -> tuple[list[dict[str, Any]], list[Any] | None, dict[str, str]]:
        """Replace each special token's text in messages and tools by an unused private-use character.

        Returns both as templates read them, and the special token of each character.
        """
        plain = self._plain(messages)
        functions = json.loads(tools) if tools else None
        texts = "\x00".join(_texts([plain, functions]))
        found = set(self._special_pattern.findall(texts))
        if not found:
            return plain, functions, {}
        used = set(_PRIVATE.findall(texts))
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        # Sorted: the order of a set of texts differs between processes, and so would the rendered text.
        character_of = {special: next(free) for special in sorted(found)}
        plain, functions = _replaced(
            [plain, functions],
            lambda text: self._special_pattern.sub(lambda match: character_of[match.group()], text),
        )
        return plain, functions, {character: special for special, character in character_of.items()}

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as templates read them. Calls get new ids, and results those of their calls: of the
        call with the same id, else with the same name, else of the next one.
        """
        plain: list[dict[str, Any]] = []
        number = 0
        open_calls: list[tuple[str, Call]] = []
        for message in messages:
            each: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.thoughts and self._thought_field is not None:
                each[self._thought_field] = message.thoughts
            elif message.thoughts:
                each["content"] = f"{_OPENS}\n{message.thoughts}\n</think>\n\n{message.content}"
            if message.calls:
                # Nine letters and digits, which Mistral's templates demand.
                open_calls = [(f"call{number + at:05d}", call) for at, call in enumerate(message.calls)]
                number += len(open_calls)
                each["tool_calls"] = [
                    {
                        "type": "function",
                        "id": own_id,
                        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                    }
                    for own_id, call in open_calls
                ]
            if message.role == "tool":
                own_id, call = min(
                    open_calls,
                    key=lambda one: (one[1].id != message.call_id, one[1].name != message.name),
                    default=(message.call_id, Call("", "")),
                )
                open_calls = [one for one in open_calls if one[0] != own_id]
                each |= {"name": message.name or call.name, "tool_call_id": own_id}
            plain.append(each)
        return plain

    def _tokenize(self, text: str, restore: dict[str, str]) -> _Tokens:
        if not restore and not self._apart:
            self._backend.encode_special_tokens = False
            encoding = self._backend.encode(text, add_special_tokens=False)
            ids: list[int] = encoding.ids
            found = self._special_pattern.findall(text)
            expected = sum(self._specials[special] in self._control_ids for special in found)
            if sum(map(self._control_ids.__contains__, ids)) == expected:
                return self._begin(_Tokens(ids, [0], [(0, encoding.offsets)]))
        return self._begin(self._pieces(text, restore, template_specials=True))

    def _begin(self, tokens: _Tokens) -> _Tokens:
        """Return the tokens with BOS first if the tokenizer itself would put one and the template did not."""
        if self._bos is None or tokens.ids[:1] == [self._bos]:
            return tokens
        pieces = [(first + 1, offsets) for first, offsets in tokens.pieces]
        return _Tokens([self._bos, *tokens.ids], [0, *tokens.starts], [(0, [(0, 0)]), *pieces])

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._bos is None else [self._bos, *ids]

    def _pieces(
        self,
        text: str,
        restore: dict[str, str] | None = None,
        template_specials: bool = False,
        borders: Sequence[int] = (),
    ) -> _Tokens:
        """Return tokens of `text`. No special token is recognised but, on request, the template's own.

        No token has characters before and after one of `borders`.
        """
        ids: list[int] = []
        starts, pieces = [], []
        base = 0
        parts: Iterable[tuple[str, int | None]] = [(text, None)]
        if template_specials:
            parts = self._split(text, borders)
        for part, special in parts:
            for char, spelled in (restore or {}).items():
                part = part.replace(char, spelled)
            encode = self._known_piece if len(part) <= _LONG else self._piece
            new, offsets = encode(part, special)
            starts.append(base)
            pieces.append((len(ids), offsets))
            ids += new
            base += len(part)
        return _Tokens(ids, starts, pieces)

    def _piece(self, text: str, special: int | None) -> tuple[list[int], _Offsets]:
        """Return the tokens of ordinary text, or of one special token, and their offsets."""
        if special is not None:
            return [special], [(0, len(text))]
        # In spite of its name, it makes the text of a special token ordinary text.
        self._backend.encode_special_tokens = True
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = False
        return encoding.ids, encoding.offsets

    def _split(self, text: str, borders: Sequence[int]) -> Iterator[tuple[str, int | None]]:
        at = 0
        specials = [(match.start(), match.group()) for match in self._special_pattern.finditer(text)]
        for start, special in sorted([*specials, *((border, "") for border in borders), (len(text), "")]):
            if start > at:
                yield text[at:start], None
            if special:
                yield special, self._specials[special]
            at = max(at, start + len(special))

    # -- plain --

    def _plain_response(self, messages: Sequence[Message], response: str, prompt: list[int]) -> list[int]:
        """Return the response's tokens after the prompt's. If the joined text's tokens continue the prompt's
        own, they are those.
        """
        before = _joined(messages, "")
        joined = self._with_bos(self._pieces(before + response).ids)
        if joined[: len(prompt)] == prompt:
            return joined[len(prompt) :]
        whole = self._decode(joined)
        for anchor in ("", "\n", "."):
            # After an anchor, a tokenizer that puts a blank before every text leaves the response without
            # one.
            before_ids, ids = self._pieces(anchor).ids, self._pieces(anchor + response).ids
            alone = ids[len(before_ids) :]
            if ids[: len(before_ids)] == before_ids and self._decode([*prompt, *alone]) == whole:
                return alone
        raise EncodeError(
            "prompt and response cannot be tokenised apart; move the blanks at the prompt's end to the"
            " response's beginning"
        )

    def _plain_conversation(self, messages: Sequence[Message], tools: str) -> Encoded:
        _joined(messages, tools)  # refuses what has no plain form
        ids: list[int] = self._with_bos([])
        mask = [0] * len(ids)
        for message in messages:
            piece = self._pieces(message.text).ids
            is_answer = message.role == "assistant"
            ids += [*piece, self.eos_id] if is_answer else piece
            mask += [int(is_answer and message.trained)] * (len(ids) - len(mask))
        return Encoded(tuple(ids), tuple(mask))

    def _decode(self, ids: list[int]) -> str:
        # Not cleaned up, whatever tokenizer_config.json says: that removes
        # blanks before punctuation, and texts are compared here.
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # -- the template itself --

    def _check_template(self) -> None:
        """Refuse a template that is missing, broken, slow, empty or not a continuation, before any row is
        read.
        """
        fix = "give data.chat_template a Jinja file, or use data.template=plain"
        template = chat_template(self.tokenizer)
        if template is None:
            named = ' named "default"' if self.tokenizer.chat_template else ""
            raise ModelError(f"the tokenizer of {self.name} has no chat template{named}; {fix}")
        import transformers.utils.chat_template_utils  # noqa: F401  # outside the time limit: importing takes seconds

        if "strftime_now" in template:
            log.warning(
                "the chat template of %s writes today's date; %s is used instead, so that prompts stay the"
                " same",
                self.name, DATE.strftime("%d %b %Y"),
            )  # fmt: skip
        ask, answer = Message("user", "Is it late?"), Message("assistant", "It is noon.")
        # Two turns, because a template can render an earlier answer otherwise than the last one.
        plain = [{"role": m.role, "content": m.content} for m in (ask, answer, ask, answer)]
        if not ends_within(_TEMPLATE_SECONDS, lambda: self._try_template(plain)):
            raise ModelError(
                f"the chat template of {self.name} needs over {_TEMPLATE_SECONDS:g} s for two messages; {fix}"
            )
        try:
            text, _ = self._render(plain[:1], None, generate=True)
            if ask.content not in text:
                raise EncodeError("it does not render the user's message")
            self._learn_marks(text, plain)
            _, response = self.response([ask], answer.content)
            whole = self.conversations([ask, answer, ask, answer])
        except EncodeError as error:
            raise ModelError(f"the chat template of {self.name} cannot be used: {error}; {fix}") from error
        if _letters(answer.content) not in _letters(self._decode(list(response))) or not all(
            any(each.mask) for each in whole
        ):
            raise ModelError(
                f"the chat template of {self.name} does not render the assistant's message; {fix}"
            )

    def _try_template(self, messages: list[dict[str, str]]) -> None:
        """Render everything that the check renders. Errors are ignored here and reported by the second
        rendering.
        """
        with suppress(EncodeError):
            self._render(messages[:1], None, generate=True)
            self._render(messages, None, generate=False, marks=self._marks)

    def _learn_marks(self, prompt: str, messages: list[dict[str, str]]) -> None:
        """Find the markers of the template, and the part of the generation prompt inside {% generation %}."""
        # Some tokenizers also add plain text, such as Gemma's line feed. It is not a marker, neither here nor
        # in messages.
        plain = set(self._tokenize(messages[0]["content"], {}).ids) | {self.tokenizer.unk_token_id}
        entries = self.tokenizer.added_tokens_decoder.items()
        added = {token for token, entry in entries if str(entry).strip()} - plain
        self._mark_ids = self._control_ids | (added & set(self._tokenize(prompt, {}).ids))
        if self._marks:
            text, spans = self._render(messages[:2], None, generate=False, marks=True)
            if spans and spans[0][0] < len(prompt) and text.startswith(prompt):
                self._header = prompt[spans[0][0] :]


def _letters(text: str) -> str:
    """Normalize text for comparison, because some tokenizers change case and blanks."""
    return "".join(text.casefold().split())


def _trained_spans(spans: list[tuple[int, int]], messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the spans of the answers that are trained."""
    trained = [message.trained for message in messages if message.role == "assistant"]
    if all(trained):
        return spans
    if len(spans) != len(trained):
        raise EncodeError(
            f"the chat template marks {len(spans)} of {len(trained)} answers, so `weight` and `train` cannot"
            " be followed; correct its {% generation %} marks"
        )
    return [span for span, is_trained in zip(spans, trained, strict=True) if is_trained]


def _joined(messages: Sequence[Message], tools: str) -> str:
    if tools or any(message.calls or message.role == "tool" for message in messages):
        raise EncodeError("tools and their calls need the chat template of a model: data.template: chat")
    return "".join(message.text for message in messages)


def _is_in(said: str, text: str) -> bool:
    """Return whether a rendering has a text, as it is or inside of a JSON text."""
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def _names(functions: list[Any] | None) -> list[str]:
    """Return the names of tools or of calls."""
    return [each["function"]["name"] for each in functions or ()]


def _neutral(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the same form with neutral texts."""
    neutral = {key: value and _NEUTRAL if key in _NEUTRALISED else value for key, value in message.items()}
    if "tool_calls" in message:
        calls = []
        for call in message["tool_calls"]:
            calls.append({**call, "function": {**call["function"], "arguments": _without_texts(call)}})
        neutral["tool_calls"] = calls
    return neutral


def _without_texts(call: dict[str, Any]) -> Any:
    return _replaced(call["function"]["arguments"], lambda text: text and _NEUTRAL, keys=False)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in messages and tools, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _replaced(value: Any, change: Callable[[str], str], *, keys: bool = True) -> Any:
    """Return messages and tools with all texts changed, with `keys` also the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            change(key) if keys else key: _replaced(each, change, keys=keys) for key, each in value.items()
        }
    return [_replaced(each, change, keys=keys) for each in value] if isinstance(value, list) else value


def _moved(text: str, at: int, restore: dict[str, str]) -> int:
    """Return the position of character `at` of the escaped text after the stand-ins are replaced."""
    return at + sum(text.count(char, 0, at) * (len(special) - 1) for char, special in restore.items())


def _bos_added(tokenizer: Any) -> int | None:
    """Return the BOS that the tokenizer puts before plain text by itself, or None."""
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return int(ids[0]) if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else None


def _are_apart(tokenizer: Any) -> bool:
    """Return whether the text between two special tokens has the same tokens as without what is around it."""
    backend = tokenizer.backend_tokenizer
    for token in tokenizer.added_tokens_decoder.values():
        if token.single_word or (token.special and (token.normalized or token.lstrip or token.rstrip)):
            return False
    # Some put a blank before the first text only, or count with one there in their offsets.
    states = [part.__getstate__() for part in (backend.pre_tokenizer, backend.post_processor) if part]
    return not re.search(rb'"prepend_scheme":"first"|"add_prefix_space":true', b"".join(states))
