"""Rows of much used public data sets, in the layout of each and in words of our own.

Rules:
- each layout gives the tokens that it means, or is refused with the name of the field and a fix;
- no field that changes what a row means is left out without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf_core.config.data import Limits, SetName, Source, Thoughts
from rlhf_core.data.examples import to_record, tokens_of, with_tokens
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import field_value
from rlhf_core.data.templates import Encoder
from rlhf_core.types import PairExample, PromptExample, SFTExample
from tests.unit.data.data_samples import SENTENCEPIECE_TEMPLATE

ROME = '{"city": "Rome"}'
ASK, ANSWER = {"role": "user", "content": "Is it late?"}, {"role": "assistant", "content": "It is noon."}
AGAIN, LATER = {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "It is one."}
BAD = {"role": "assistant", "content": "No idea."}
PROMPT = "<s> User: Is it late? Assistant:"
SYSTEM = "<s> Be brief. User: Is it late? Assistant:"
TALK = f"{PROMPT}[ It is noon.</s>] User: And now? Assistant:"


@dataclass(frozen=True)
class Layout:
    """A row of a public data set, and what becomes of it."""

    title: str
    name: SetName
    row: dict[str, Any]
    becomes: str
    """The text of all tokens with the trained ones in brackets, of pairs both responses; or a part of the
    reason why the row is refused.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the source."""
    thoughts: Thoughts | None = None
    """`data.thoughts`."""
    answer: str | None = None
    """What a reward finds in the field `answer`."""


ULTRACHAT = {"prompt": "Is it late?", "prompt_id": "9f", "messages": [ASK, ANSWER, AGAIN, LATER]}
HH = {
    "chosen": "\n\nHuman: Is it late?\n\nAssistant: It is noon.",
    "rejected": "\n\nHuman: Is it late?\n\nAssistant: No idea.",
}
ULTRAFEEDBACK = {
    "prompt": "Is it late?",
    "prompt_id": "9f",
    "chosen": [ASK, ANSWER],
    "rejected": [ASK, BAD],
    "messages": [ASK, ANSWER],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}
ORCA = {"system": "Be brief.", "question": "Is it late?", "chosen": "It is noon.", "rejected": "No idea."}
GSM8K = {"question": "Is it late?", "answer": "Two hours.\n#### 2"}
OASST = {
    "messages": [
        {**ASK, "message_id": "a", "parent_id": None, "lang": "en", "created_date": "2023-02-05"},
        {**ANSWER, "message_id": "b", "parent_id": "a", "lang": "en", "created_date": "2023-02-05"},
    ]
}
ALPACA = {"instruction": "Is it late?", "input": "", "output": "It is noon."}
CALL = {"from": "function_call", "value": "{}"}
PARTS = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "late?"}]
SHAREGPT = {"conversations": [{"from": "human", "value": "Is it late?"}, {"from": "gpt", "value": "It is."}]}
SLIMORCA = {"messages": [{**ASK, "weight": 0.0}, {**ANSWER, "weight": 0.0}, AGAIN, {**LATER, "weight": 1.0}]}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASK],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
KTO = {"prompt": [ASK], "completion": [ANSWER], "label": True}
PRM = {"prompt": "Is it late?", "completions": ["It is noon.", "So no."], "labels": [True, False]}
RLVR = {"messages": [ASK], "ground_truth": "2", "dataset": "gsm8k"}
WILDCHAT = {
    "conversation": [
        {**ASK, "country": "DE", "hashed_ip": "0f", "toxic": False, "redacted": False, "turn_identifier": 7},
        {**ANSWER, "openai_id": "c", "role": "assistant", "timestamp": "2023", "token_counter": 5},
    ],
    "model": "m",
    "toxic": False,
}
CAPYBARA = {"source": "Airoboros", "messages": [ASK, ANSWER, AGAIN, LATER], "num_turns": 2}
OPENHERMES = {
    "conversations": [
        {"from": "system", "value": "Be brief.", "weight": None},
        {"from": "human", "value": "Is it late?", "weight": None},
        {"from": "gpt", "value": "It is noon.", "weight": None},
    ],
    "source": "airoboros2.2",
    "category": "orca",
    "skip_prompt_formatting": False,
    "system_prompt": None,
    "model_name": None,
}
TULU = {"id": "a_1", "messages": [ASK, ANSWER], "source": "ai2-adapt-dev/flan_v2_converted"}
DOLLY = {"instruction": "Is it late?", "context": "", "response": "It is noon.", "category": "open_qa"}
MATH = {
    "problem": "Is it late?",
    "level": "Level 5",
    "type": "Algebra",
    "solution": "Two hours, so $\\boxed{2}$.",
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
XLAM = {
    "id": 0,
    "query": "Is it late?",
    "answers": '[{"name": "clock", "arguments": {"city": "Rome"}}]',
    "tools": '[{"name": "clock", "description": "", "parameters": {"city": {"type": "str"}}}]',
}
GLAIVE = {
    "conversations": [
        {"from": "human", "value": "Is it late?"},
        {"from": "function_call", "value": '{"name": "clock", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "12:00"},
        {"from": "gpt", "value": "It is noon."},
    ],
    "tools": '[{"name": "clock", "description": "", "parameters": {}}]',
}
HERMES_TOOLS = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "Call <tools> clock </tools>."},
        {"from": "human", "value": "Is it late?"},
        {"from": "gpt", "value": "<tool_call> clock </tool_call>"},
        {"from": "tool", "value": "<tool_response> 12 </tool_response>"},
        {"from": "gpt", "value": "It is noon."},
    ],
    "tools": '[{"type": "function", "function": {"name": "clock"}}]',
    "category": "Time",
}
APIGEN = {
    "messages": [
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "clock", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "clock", "content": "12:00"},
        ANSWER,
    ],
    "tools": [CLOCK],
}
OPEN_THOUGHTS = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Is it late?"},
        {"from": "gpt", "value": "<think>\nThe sun is high.\n</think>\n\nIt is noon."},
    ],
}
THOUGHTS = {"messages": [ASK, {**ANSWER, "thinking": "The sun is high."}]}
WITH_CLOCK = "<s> Tools: clock. User: Is it late? Assistant:"
CALLED = f"{WITH_CLOCK}[ clock {ROME}</s>] Result: 12:00 Assistant:[ It is noon.</s>]"
THOUGHT = "<think><0x0A>The sun is high.<0x0A></think><0x0A><0x0A>It is noon."
RENAMED_ALPACA = {"rename": {"instruction": "prompt", "output": "completion"}}
NOON, PAIR = f"{PROMPT}[ It is noon.</s>]", f"{PROMPT}[ It is noon.</s>][ No idea.</s>]"

LAYOUTS = [
    Layout("UltraChat", "sft", ULTRACHAT, f"{TALK}[ It is one.</s>]"),
    Layout("UltraChat as prompts", "prompts", ULTRACHAT, PROMPT),
    Layout("HH-RLHF", "preference", HH, PAIR),
    Layout("HH-RLHF as demonstrations", "sft", HH, NOON),
    Layout("UltraFeedback binarized", "preference", ULTRAFEEDBACK, PAIR),
    Layout(
        "orca_dpo_pairs",
        "preference",
        ORCA,
        PAIR.replace(PROMPT, SYSTEM),
        {"rename": {"question": "prompt"}},
    ),
    Layout("GSM8K", "prompts", GSM8K, PROMPT, answer="Two hours.\n#### 2"),
    Layout("orca_dpo_pairs as it is", "preference", ORCA, PAIR.replace(PROMPT, SYSTEM)),
    Layout(
        "GSM8K with new names",
        "prompts",
        GSM8K,
        PROMPT,
        {"rename": {"question": "prompt"}},
        answer="Two hours.\n#### 2",
    ),
    Layout("OASST", "sft", OASST, NOON),
    Layout("Alpaca", "sft", ALPACA, NOON),
    Layout(
        "Alpaca with input",
        "sft",
        {**ALPACA, "input": "it is"},
        NOON.replace("late?", "late?<0x0A><0x0A>it is"),
    ),
    Layout("Alpaca without its input", "sft", {**ALPACA, "input": "it is"}, NOON, {"ignore": ("input",)}),
    Layout("Alpaca, an input that is no text", "sft", {**ALPACA, "input": [1]}, "no known format"),
    Layout(
        "a question with choices",
        "prompts",
        {"question": "Is it late?", "choices": ["a"]},
        "'choices' is part of the prompt; write it into 'prompt', or name it in `ignore`",
    ),
    Layout(
        "a question without its choices",
        "prompts",
        {"question": "Is it late?", "choices": ["a"]},
        PROMPT,
        {"ignore": ("choices",)},
    ),
    Layout("HH-RLHF with a question", "preference", {**HH, "question": "Which?"}, PAIR),
    Layout("Alpaca with new names", "sft", ALPACA, NOON, RENAMED_ALPACA),
    Layout(
        "Alpaca with new names and input",
        "sft",
        {**ALPACA, "input": "In Rome."},
        "'input' is part of the prompt; write it into 'prompt'",
        RENAMED_ALPACA,
    ),
    Layout("ShareGPT", "sft", SHAREGPT, NOON.replace(" noon", "")),
    Layout("ShareGPT, a call without a name", "sft", {"conversations": [CALL]}, "must have the 'name' of a"),
    Layout("parts of a content", "sft", {"messages": [{**ASK, "content": PARTS}, ANSWER]}, NOON),
    Layout("an image", "sft", {"messages": [{**ASK, "content": [{"type": "image"}]}]}, "of the type 'image'"),
    Layout(
        "a developer's message",
        "prompts",
        {"messages": [{"role": "developer", "content": "Be brief."}, ASK]},
        SYSTEM,
    ),
    Layout(
        "SlimOrca with roles", "sft", SLIMORCA, f"{TALK.replace('[', '').replace(']', '')}[ It is one.</s>]"
    ),
    Layout("verl", "prompts", VERL, PROMPT, {"rename": {"reward_model.ground_truth": "answer"}}, answer="2"),
    Layout("KTO, a good answer", "sft", KTO, NOON),
    Layout("KTO, a bad answer", "sft", {**KTO, "label": False}, "marked as bad"),
    Layout(
        "KTO without labels as pairs",
        "preference",
        {**KTO, "label": None},
        "this is a `completion` row; a pair needs 'chosen' and 'rejected'",
    ),
    Layout("KTO with numbers", "preference", {**KTO, "label": 0}, "or false; got 0; convert it"),
    Layout("KTO as prompts", "prompts", KTO, PROMPT),
    Layout("steps of a solution", "sft", PRM, "'completions' has several answers or steps"),
    Layout("RLVR of allenai", "prompts", RLVR, PROMPT, {"rename": {"ground_truth": "answer"}}, answer="2"),
    Layout("RLVR as demonstrations", "sft", RLVR, "the last of 'messages' must be the assistant's"),
    Layout("WildChat", "sft", WILDCHAT, NOON, {"rename": {"conversation": "messages"}}),
    Layout("Capybara", "sft", CAPYBARA, f"{TALK}[ It is one.</s>]"),
    Layout("OpenHermes", "sft", OPENHERMES, NOON.replace(PROMPT, SYSTEM)),
    Layout("Tulu 3", "sft", TULU, NOON),
    Layout("Dolly", "sft", DOLLY, NOON),
    Layout(
        "Dolly with context",
        "sft",
        {**DOLLY, "context": "it is"},
        NOON.replace("late?", "late?<0x0A><0x0A>it is"),
    ),
    Layout("MATH", "prompts", MATH, PROMPT, {"rename": {"solution": "answer"}}, answer=str(MATH["solution"])),
    Layout("xLAM", "sft", XLAM, f"{WITH_CLOCK}[ clock {ROME}</s>]"),
    Layout("xLAM as prompts", "prompts", XLAM, WITH_CLOCK),
    Layout(
        "Glaive in ShareGPT",
        "sft",
        GLAIVE,
        f"{WITH_CLOCK}[ clock {ROME}</s>] Result: 12:00 Assistant:[ It is noon.</s>]",
    ),
    Layout(
        "APIGen", "sft", APIGEN, f"{WITH_CLOCK}[ clock {ROME}</s>] Result: 12:00 Assistant:[ It is noon.</s>]"
    ),
    Layout(
        "Hermes function calling",
        "sft",
        HERMES_TOOLS,
        "<s> Call <tools> clock </tools>. User: Is it late? Assistant:[ <tool_call> clock </tool_call></s>]"
        " Result: <tool_response> 12 </tool_response> Assistant:[ It is noon.</s>]",
        {"ignore": ("tools",)},
    ),
    Layout(
        "OpenThoughts",
        "sft",
        OPEN_THOUGHTS,
        "has thoughts of the assistant; set data.thoughts to keep or drop",
    ),
    Layout(
        "OpenThoughts with thoughts",
        "sft",
        OPEN_THOUGHTS,
        f"{SYSTEM}[ {THOUGHT}</s>]",
        thoughts="keep",
    ),
    Layout(
        "OpenThoughts without thoughts", "sft", OPEN_THOUGHTS, NOON.replace(PROMPT, SYSTEM), thoughts="drop"
    ),
    Layout("thoughts", "sft", THOUGHTS, r"messages\[1\]\.thinking has thoughts .*data.thoughts"),
    Layout(
        "thoughts kept",
        "sft",
        THOUGHTS,
        f"{PROMPT}[ {THOUGHT}</s>]",
        thoughts="keep",
    ),
    Layout("thoughts dropped", "sft", THOUGHTS, NOON, thoughts="drop"),
    Layout("thoughts left out", "sft", THOUGHTS, NOON, {"ignore": ("thinking",)}),
]


TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ 'Tools: ' + tools[0].function.name + '. ' }}{% endif %}"
    + SENTENCEPIECE_TEMPLATE.removeprefix("{{ bos_token }}")
    .replace(
        "{% generation %}{{ ' ' + m['content'] | trim + eos_token }}",
        "{% generation %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "{{ ' ' + f.name + ' ' + f.arguments | tojson + eos_token }}{% else %}"
        "{{ ' ' + m['content'] | trim + eos_token }}{% endif %}",
    )
    .replace(
        "{% else %}{{ m['content'] | trim + ' ' }}",
        "{% elif m['role'] == 'tool' %}{{ 'Result: ' + m['content'] + ' Assistant:' }}"
        "{% else %}{{ m['content'] | trim + ' ' }}",
    )
)


def outcome(layout: Layout, tokenizer: Any) -> str:
    source = Source(path="./rows.jsonl", **layout.options)
    item = to_record(Row("rows.jsonl", 1, layout.row), source, layout.name, "rows", layout.thoughts)
    if isinstance(item, BadRow):
        return item.reason
    if item.record.marked_bad:
        return "marked as bad"
    if layout.answer is not None:
        assert field_value(item.record.meta, "answer") == layout.answer
    bounds = Limits(prompt=500, response=500, text=500, new=500)
    [tokens] = tokens_of(item.record, layout.name, Encoder(tokenizer, "chat"), bounds)
    example = with_tokens(item, layout.name, tokens).example
    if isinstance(example, SFTExample):
        return shown(tokenizer, example.input_ids, example.loss_mask)
    if isinstance(example, PromptExample):
        return str(tokenizer.decode(example.input_ids))
    assert isinstance(example, PairExample)
    responses = [f"[ {tokenizer.decode(ids)}]" for ids in (example.chosen_ids, example.rejected_ids)]
    return str(tokenizer.decode(example.prompt_ids)) + "".join(responses)


def shown(tokenizer: Any, ids: tuple[int, ...], mask: tuple[int, ...]) -> str:
    """Return the text of the tokens, with the trained ones in brackets."""
    text = ""
    for index, token in enumerate(ids):
        before = mask[index - 1] if index else 0
        text += "[" * (mask[index] > before) + "]" * (mask[index] < before)
        text += tokenizer.convert_ids_to_tokens(token).replace("▁", " ")
    # Printable characters without a token of their own.
    return re.sub("<0x([2-7].)>", lambda found: chr(int(found[1], 16)), text + "]" * mask[-1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.title for layout in LAYOUTS])
def test_a_row_of_a_public_set_becomes_what_it_says_or_is_refused_by_name(
    make_tokenizer: Callable[..., Any], layout: Layout
) -> None:
    found = outcome(layout, make_tokenizer(TOOL_TEMPLATE))
    if found.startswith("<s>"):
        assert found == layout.becomes
    else:
        assert re.search(layout.becomes, found)
