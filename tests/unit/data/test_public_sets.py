"""Rows of much used public data sets, in the layout of each and in words of our own.

Rules:
- each layout gives the tokens that it means, or is refused with the name of the field and a fix;
- no field that changes what a row means is left out without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlhf_core.config.data import Limits, SetName, Source
from rlhf_core.data.examples import encode_record, to_record
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import field_value
from rlhf_core.data.templates import Encoder
from rlhf_core.types import PairExample, PromptExample, SFTExample

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
TOOLS = {"messages": [ASK, {**ANSWER, "tool_calls": [{"name": "clock"}]}], "tools": [{"name": "clock"}]}
THOUGHTS = {"messages": [ASK, {**ANSWER, "thinking": "The sun is high."}]}
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
        "a question with choices", "prompts", {"question": "Is it late?", "choices": ["a"]}, "no known format"
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
    Layout("ShareGPT, calls of tools", "sft", {"conversations": [CALL]}, "role must be.*got 'function_call'"),
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
        "KTO as pairs", "preference", KTO, "this is a `completion` row; a pair needs 'chosen' and 'rejected'"
    ),
    Layout("KTO as prompts", "prompts", KTO, PROMPT),
    Layout("steps of a solution", "sft", PRM, "'completions' has several answers or steps"),
    Layout("RLVR of allenai", "prompts", RLVR, PROMPT, {"rename": {"ground_truth": "answer"}}, answer="2"),
    Layout("RLVR as demonstrations", "sft", RLVR, "the last of 'messages' must be the assistant's"),
    Layout("WildChat", "sft", WILDCHAT, NOON, {"rename": {"conversation": "messages"}}),
    Layout("calls of tools", "sft", TOOLS, "'tools' is part of the prompt.*`ignore`"),
    Layout("thoughts", "sft", THOUGHTS, r"messages\[1\]\.thinking is not supported"),
    Layout("thoughts left out", "sft", THOUGHTS, NOON, {"ignore": ("thinking",)}),
]


def outcome(layout: Layout, tokenizer: Any) -> str:
    source = Source(path="./rows.jsonl", **layout.options)
    item = to_record(Row("rows.jsonl", 1, layout.row), source, layout.name, "rows")
    if isinstance(item, BadRow):
        return item.reason
    if item.record.marked_bad:
        return "marked as bad"
    if layout.answer is not None:
        assert field_value(item.record.meta, "answer") == layout.answer
    bounds = Limits(prompt=500, response=500, text=500, new=500)
    example = encode_record(item, layout.name, Encoder(tokenizer, "chat"), bounds).example
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
    return text + "]" * mask[-1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.title for layout in LAYOUTS])
def test_a_row_of_a_public_set_becomes_what_it_says_or_is_refused_by_name(
    sp_tokenizer: Any, layout: Layout
) -> None:
    found = outcome(layout, sp_tokenizer)
    if found.startswith("<s>"):
        assert found == layout.becomes
    else:
        assert re.search(layout.becomes, found)
