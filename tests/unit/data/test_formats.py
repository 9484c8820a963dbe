"""Rows become records, or are refused with a reason.

Rules:
- five formats are recognised by their fields; strings and message lists mean the same;
- conversations without `prompt` (message lists, and HH-RLHF transcripts) share their common beginning as the
  prompt;
- every malformed row is refused with a reason that names the field; a text of white space and invisible
  characters is blank;
- tools, calls and thoughts are read from all layouts that people use;
- what a row or a message says is done, or the row is refused with the name of the field: weights, labels,
  `system`, thoughts, tools; descriptions such as names and dates are no reason, and `ignore` leaves fields
  out;
- other fields are kept as JSON in `meta`;
- a dotted name is that field if the row has it, and otherwise a path into nested objects.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rlhf_core.data.formats import field_value, normalise, other_fields
from rlhf_core.data.messages import Call, Message, RowError, without_thoughts

U, A, S = "user", "assistant", "system"


def said(answer: Message | None) -> str:
    assert answer is not None
    return answer.content


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "text"),
        ({"messages": chat((U, "a"), (A, "b"))}, "messages"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": "a"}, "prompt"),
        ({"prompt": "a", "completion": None}, "prompt"),
    ],
)
def test_the_format_follows_from_the_fields(row: dict[str, Any], kind: str) -> None:
    assert normalise(row).kind == kind


def test_a_conversation_with_its_first_message_as_prompt_is_a_demonstration_and_a_prompt() -> None:
    row = {"prompt": "q1", "messages": chat((U, "q1"), (A, "a1"), (U, "q2"), (A, "a2"))}
    assert normalise(row).prompt_text == "q1"
    assert normalise(row, demonstration=True) == normalise({"messages": row["messages"]})
    assert normalise({**row, "messages": None}, demonstration=True).kind == "prompt"
    assert normalise({**row, "completion": "a1"}, demonstration=True).kind == "completion"


def test_strings_and_message_lists_give_the_same_record() -> None:
    plain = normalise({"prompt": "q", "chosen": "good", "rejected": "bad"})
    lists = normalise(
        {"prompt": chat((U, "q")), "chosen": chat((A, "good")), "rejected": chat((U, "q"), (A, "bad"))}
    )
    assert lists == plain
    assert plain.prompt == (Message(U, "q"),)
    assert (said(plain.response), said(plain.rejected), plain.prompt_text) == ("good", "bad", "q")


def test_conversations_without_a_prompt_share_their_common_beginning() -> None:
    start = ((U, "q1"), (A, "a1"), (U, "q2"))
    record = normalise({"chosen": chat(*start, (A, "good")), "rejected": chat(*start, (A, "bad"))})
    assert record.prompt == tuple(Message(*turn) for turn in start)
    assert (said(record.response), said(record.rejected)) == ("good", "bad")


def test_transcripts_of_hh_rlhf_are_conversations() -> None:
    start = "\n\nHuman: Why is\nit so?\n\nAssistant: Say more.\n\nHuman: The sky."
    record = normalise({"chosen": f"{start}\n\nAssistant: Light.", "rejected": f"{start}\n\nAssistant: No."})
    assert [m.role for m in record.prompt] == [U, A, U]
    assert record.prompt[0].content == "Why is\nit so?"
    assert (said(record.response), said(record.rejected)) == ("Light.", "No.")


@pytest.mark.parametrize("field", ["function_call", "loss", "train_detail", "tool_call_chunks"])
def test_an_answer_with_fields_that_are_not_read_is_refused_and_not_cut_to_its_content(field: str) -> None:
    answer: dict[str, Any] = {"role": A, "content": "Let me look."}
    row = {"messages": [*chat((U, "q")), answer]}
    nothing: list[Any] = [None, [], {}, " ", {"name": None, "arguments": []}]
    for value in nothing:
        answer[field] = value
        assert normalise(row).messages[1].content == "Let me look."
    answer[field] = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    with pytest.raises(RowError, match=rf"messages\[1\]\.{field} is not supported.*'content'.*`ignore`"):
        normalise(row)


def test_the_prompt_of_a_conversation_is_what_comes_before_its_last_answer() -> None:
    record = normalise({"messages": chat((S, "be brief"), (U, "q1"), (A, "a1"), (U, "q2"), (A, "a2"))})
    assert record.prompt_text == "be brief\n\nq1\n\na1\n\nq2"


def test_fields_are_renamed_first_and_the_others_kept() -> None:
    row = {"question": "q", "answer": "18", "id": 7, "meta": {"level": 2}, "split": "train", "empty": None}
    record = normalise(row, rename={"question": "prompt"})
    assert record.prompt_text == "q"
    assert record.meta == {"answer": "18", "id": 7, "level": 2}
    nested = {"prompt": "q", "reward_model": {"ground_truth": "18"}}
    answer = normalise(nested, rename={"reward_model.ground_truth": "answer"}).meta["answer"]
    assert answer == "18"
    openai = {"input": {"messages": chat((U, "q"))}, "good": chat((A, "a")), "bad": chat((A, "b"))}
    record = normalise(openai, rename={"input.messages": "prompt", "good": "chosen", "bad": "rejected"})
    assert (record.prompt_text, said(record.response), said(record.rejected)) == ("q", "a", "b")


def test_messages_that_end_with_the_users_are_a_prompt_and_no_demonstration() -> None:
    row = {"messages": chat((U, "q1"), (A, "a1"), (U, "q2")), "ground_truth": "5"}
    record = normalise(row)
    assert (record.kind, [m.content for m in record.prompt]) == ("prompt", ["q1", "a1", "q2"])
    assert record.meta == {"ground_truth": "5"}
    with pytest.raises(RowError, match="the last of 'messages' must be the assistant's"):
        normalise(row, demonstration=True)


def talk(**fields: Any) -> dict[str, Any]:
    """A conversation whose first answer has other fields."""
    return {
        "messages": [*chat((U, "q1")), {"role": A, "content": "a1", **fields}, *chat((U, "q2"), (A, "a2"))]
    }


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": False}, False),
        ({"weight": 1}, True),
        ({"weight": 1.0, "train": True}, True),
        ({"weight": None}, True),
    ],
)
def test_weight_and_train_say_which_answers_a_demonstration_trains(
    fields: dict[str, Any], trained: bool
) -> None:
    messages = normalise(talk(**fields), demonstration=True).messages
    assert [m.trained for m in messages] == [True, trained, True, True]
    assert normalise(talk(**fields), demonstration=True, ignore=["weight", "train"]) == normalise(talk())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk(weight=0.5), r"messages\[1\]\.weight must be 0 or false.*got 0.5"),
        (talk(train="no"), r"messages\[1\]\.train must be 0 or false.*got no"),
        (
            {"messages": [{"role": U, "content": "q", "weight": 1}, *chat((A, "a"))]},
            r"messages\[0\]\.weight must be 0 or false: only the assistant's messages are trained",
        ),
        (
            {"messages": [*chat((U, "q")), {"role": A, "content": "a", "weight": 0}]},
            "'messages' has no answer that is trained",
        ),
        (
            {"prompt": "q", "completion": [{"role": A, "content": "a", "train": False}]},
            "the answer of 'completion' is marked as not trained",
        ),
    ],
)
def test_a_weight_that_a_loss_mask_cannot_follow_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        normalise(row, demonstration=True)


def test_fields_that_describe_a_message_are_no_reason_to_refuse_it() -> None:
    # Names of WildChat and of OASST.
    described = {
        "name": "Ann", "message_id": "7", "timestamp": "2024-01-01", "created_date": "2024", "lang": "en",
        "hashed_ip": "00ff", "header": {"user-agent": "x"}, "country": "DE", "toxic": False, "state": None,
        "redacted": True, "turn_identifier": 7, "openai_id": "a", "language": "English", "top_p": 0.9,
    }  # fmt: skip
    assert normalise(talk(**described)) == normalise(talk())


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": chat((U, "q"), (A, "a")), "rejected": chat((U, "q"), (A, "b"))},
        {"messages": chat((U, "q"), (A, "a"))},
        {"prompt": "q"},
    ],
    ids=["completion", "preference", "two conversations", "messages", "prompt"],
)
def test_the_system_of_a_row_is_the_first_message(row: dict[str, Any]) -> None:
    system = {"system": "be brief"}
    record = normalise({**row, **system})
    assert record.prompt == (Message(S, "be brief"), Message(U, "q"))
    assert record.messages[:1] == record.prompt[: len(record.messages[:1])]
    assert normalise({**row, "system": " "}).prompt == (Message(U, "q"),)
    assert normalise({**row, **system}, ignore=["system"]).prompt == (Message(U, "q"),)


def test_a_system_message_that_differs_from_the_rows_is_refused() -> None:
    row = {"messages": chat((S, "be brief"), (U, "q"), (A, "a"))}
    assert normalise({**row, "system": "be brief"}).messages == normalise(row).messages
    with pytest.raises(RowError, match="'system' differs from the system message"):
        normalise({**row, "system": "be loud"})


@pytest.mark.parametrize(
    ("label", "is_bad"), [(True, False), (False, True), (" False", True), ("good", False), ("", False)]
)
def test_a_false_label_marks_a_bad_answer(label: Any, is_bad: bool) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "q", "completion": "a"}, {"messages": chat((U, "q"), (A, "a"))}]
    for row in rows:
        assert normalise({**row, "label": label}, demonstration=True).marked_bad == is_bad
        assert not normalise({**row, "label": label}).marked_bad
        assert not normalise({**row, "label": label}, demonstration=True, ignore=["label"]).marked_bad
        for number in (0, 1, "0", "0.0", -1):
            with pytest.raises(
                RowError, match=r"'label' must be true \(the answer is trained\) or false; got"
            ):
                normalise({**row, "label": number}, demonstration=True)
    assert not normalise({"text": "a film", "label": 0}, demonstration=True).marked_bad


@pytest.mark.parametrize(
    ("name", "values"), [("weight", (0, 1)), ("train", (False, True)), ("train", ("0", "1"))]
)
def test_a_row_that_is_not_trained_is_no_demonstration(name: str, values: tuple[Any, Any]) -> None:
    for row in (
        {"text": "a film"},
        {"prompt": "q", "completion": "a"},
        {"messages": chat((U, "q"), (A, "a"))},
    ):
        for value, is_bad in zip(values, (True, False), strict=True):
            assert normalise({**row, name: value}, demonstration=True).marked_bad == is_bad
        with pytest.raises(RowError, match=rf"'{name}' must be true .*; got 0.5"):
            normalise({**row, name: 0.5}, demonstration=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "weather"}]),
        ("input", "Paris"),
        ("history", [["q", "a"]]),
        ("system_prompt", "be brief"),
        ("thinking", "two and four"),
        ("completions", ["one", "two"]),
        ("images", [b"x"]),
    ],
)
def test_a_field_that_changes_what_a_row_means_is_refused_unless_it_is_empty_or_ignored(
    name: str, value: Any
) -> None:
    row = {"prompt": "q", "completion": "a"}
    with pytest.raises(RowError, match=rf"'{name}' .*`ignore`"):
        normalise({**row, name: value})
    assert normalise({**row, name: None}) == normalise(row)
    assert normalise({**row, name: value}, ignore=[name]).prompt_text == "q"
    assert normalise({"text": "a", name: value}).text == "a"


def test_other_fields_are_those_that_no_text_is_made_of_with_those_that_are_long_texts() -> None:
    context = "The moon is a rock that turns around the earth."
    row = {"q": "What is the moon?", "completion": "A rock.", "context": context, "id": 7, "note": ""}
    rename = {"q": "prompt"}
    record = normalise(row, rename=rename)
    assert other_fields(row, rename, record) == {"context": True, "id": False}
    inside = {"text": f"Below is a task. {context}", "instruction": context}
    assert other_fields(inside, {}, normalise(inside)) == {"instruction": False}


def test_a_demanded_format_wins_over_the_fields() -> None:
    assert normalise({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt").kind == "prompt"
    with pytest.raises(RowError, match="'completion' is missing or null"):
        normalise({"prompt": "q"}, "completion")


WHITE_SPACE = "".join(filter(str.isspace, map(chr, range(0x110000))))
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no known format.*fields: none"),
    ({"query": "x"}, "no known format.*'query'.*rename"),
    ({"text": ""}, "'text' is empty"),
    ({"text": " \n\t"}, "'text' is blank"),
    ({"text": 5}, "'text' must be a string; got int"),
    ({"text": "a\x00b"}, "'text' has a NUL character"),
    ({"text": "a\ud800b"}, "'text' has a lone surrogate.*position 1"),
    ({"prompt": "", "completion": "b"}, "'prompt' is empty"),
    ({"prompt": 3}, "'prompt' must be a string or a list of messages; got int"),
    ({"prompt": {"role": U}}, "'prompt' must be a string or a list of messages; got dict"),
    ({"prompt": []}, "'prompt' has no messages"),
    ({"prompt": chat((U, "a"), (A, "b"))}, "last message of 'prompt' must not be the assistant's"),
    ({"prompt": chat((S, "a"))}, "prompt has no user's message"),
    ({**PAIR, "rejected": "a"}, "'chosen' and 'rejected' are the same"),
    ({**PAIR, "rejected": None}, "'rejected' is missing or null"),
    ({**PAIR, "chosen": chat((A, "x"), (U, "y"), (A, "z"))}, "'chosen' must be one assistant message"),
    ({"chosen": "a", "rejected": "b"}, "'prompt' is missing, and 'chosen' is not a conversation"),
    (
        {"chosen": chat((U, "p"), (A, "x")), "rejected": chat((U, "q"), (A, "x"))},
        "common beginning.*no user's message",
    ),
    ({"chosen": chat((U, "p"), (A, "x")), "rejected": chat((U, "p"), (A, "x"))}, "are the same"),
    ({"messages": "hello"}, "'messages' must be a list of messages; got str"),
    ({"messages": ["hello"]}, r"messages\[0\] must be an object with 'role' and 'content'; got str"),
    (
        {"messages": chat((U, "a"), (U, "b"), (A, "c"))},
        r"messages\[1\].role must be assistant \(roles take turns\)",
    ),
    ({"messages": chat((A, "a"))}, r"messages\[0\].role must be user"),
    ({"messages": chat((U, "a"), (A, "b"), (S, "c"))}, r"messages\[2\].role must be user"),
    (
        {"messages": chat((U, "a"), ("bot", "b"))},
        r"messages\[1\].role must be system, user, assistant or tool; got 'bot'",
    ),
    (
        {"messages": chat((U, "a"), ("tool", "b"))},
        r"messages\[1\].role must be assistant \(roles take turns\); got 'tool'",
    ),
    ({"messages": [{"content": "a"}]}, r"messages\[0\].role must be"),
    (
        {"messages": [{"role": U, "content": None}, {"role": A, "content": "b"}]},
        r"messages\[0\].content is missing or null",
    ),
    ({"text": b"a"}, "'text' must be a string; got binary data; save the column as text"),
    ({"prompt": b"a"}, "'prompt' must be a string or a list of messages; got binary data"),
    ({"prompt": "\u200b"}, "'prompt' is blank"),
    ({"prompt": "a", "completion": "\ufeff \u2060\u3164"}, "'completion' is blank"),
    ({"text": f"{WHITE_SPACE}\u200b"}, "'text' is blank"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_a_malformed_row_is_refused_with_its_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        normalise(row)


def test_numbers_that_are_not_finite_and_bytes_in_other_fields_do_not_cost_the_row() -> None:
    row = {"text": "a", "score": float("nan"), "parts": {"a": [float("inf"), 1.5]}, "image": b"1234", "n": 2}
    assert normalise(row).meta == {"parts": {"a": [None, 1.5]}, "image": "4 bytes", "n": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_model.ground_truth", "72"),
        ("a.b", 1),
        ("a", {"b": 2}),
        ("reward_model.style.name", None),
        ("reward_model.missing", None),
        ("missing.ground_truth", None),
    ],
)
def test_a_dotted_name_is_the_field_itself_or_a_path_into_nested_objects(name: str, value: Any) -> None:
    row = {"reward_model": {"style": "rule", "ground_truth": "72"}, "a.b": 1, "a": {"b": 2}}
    assert field_value(row, name) == value


def test_a_field_is_not_renamed_over_another_one() -> None:
    row = {"question": "q", "prompt": "old", "completion": "a"}
    with pytest.raises(RowError, match="the row has 'prompt' already, so 'question' cannot be renamed to it"):
        normalise(row, rename={"question": "prompt"})
    both = {"question": "prompt", "prompt": "first"}
    assert normalise(row, rename=both).prompt_text == "q"
    assert normalise({**row, "prompt": ""}, rename={"question": "prompt"}).prompt_text == "q"
    assert normalise({"prompt": {"text": "q"}}, rename={"prompt.text": "prompt"}).prompt_text == "q"


def test_a_pair_whose_prompt_is_named_input_is_told_the_rename() -> None:
    row = {"system": "be brief", "input": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(RowError, match=r"use `rename: \{input: prompt\}`"):
        normalise(row)
    assert normalise(row, rename={"input": "prompt"}).prompt_text == "be brief\n\nq"


def test_a_pair_that_is_not_trained_is_no_demonstration() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0}
    assert normalise(row, demonstration=True).marked_bad
    assert not normalise(row).marked_bad


CALLS = [{"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}]
CALLED = (Call("clock", '{"city": "Rome"}', "c1"),)


@pytest.mark.parametrize(
    "calls",
    [
        CALLS,
        json.dumps(CALLS),
        [{"id": "c1", "name": "clock", "arguments": '{"city": "Rome"}'}],
        # A column of Parquet has the fields of all rows.
        [{"id": "c1", "function": {"name": "clock", "arguments": {"city": "Rome", "day": None}}}],
    ],
)
def test_calls_of_tools_are_objects_or_json_text_and_their_results_follow(calls: Any) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "strict": None}}]
    rows = [
        *chat((U, "q")),
        {"role": A, "content": None, "tool_calls": calls},
        *chat(("tool", "12"), (A, "a")),
    ]
    record = normalise({"messages": rows, "tools": tools}, demonstration=True)
    assert record.messages[1] == Message(A, "", calls=CALLED)
    assert json.loads(record.tools) == [{"type": "function", "function": {"name": "clock"}}]
    assert normalise({"messages": rows, "tools": json.dumps(tools[0:1])}).tools
    assert record.prompt_text == f'{record.tools}\n\nq\n\nclock({{"city": "Rome"}})\n\n12'
    prompt = normalise({"prompt": rows[:3], "tools": tools})
    assert (prompt.prompt, prompt.tools) == (record.messages[:3], record.tools)
    pair = {"prompt": rows[:1], "chosen": rows[1:2], "rejected": chat((A, "no")), "tools": tools}
    assert normalise(pair).response == Message(A, "", calls=CALLED)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": "no JSON"}, "'tools' is not valid JSON"),
        ({"tools": {"a": 1}}, "'tools' must be a list of functions, or its JSON text; got dict"),
        ({"tools": [{"description": "x"}]}, r"'tools'\[0\] must be a function with a 'name'"),
        (
            {"calls": [{"name": "f", "arguments": "[1]"}]},
            r"tool_calls\[0\].arguments must be an object; got list",
        ),
        ({"calls": [{"arguments": {"a": 1}}]}, r"tool_calls\[0\] must have the 'name' of a function"),
    ],
)
def test_tools_and_calls_that_cannot_be_read_are_refused(row: dict[str, Any], reason: str) -> None:
    answer = {"role": A, "content": "", "tool_calls": row.get("calls", CALLS)}
    with pytest.raises(RowError, match=reason):
        normalise({"messages": [*chat((U, "q")), answer], "tools": row.get("tools")})


THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": THOUGHT},
        {"prompt": "q", "completion": THOUGHT.removeprefix("<think>\n")},
        {"prompt": "q", "completion": [{"role": A, "content": "Four.", "reasoning_content": "Two and two."}]},
        {"prompt": "q", "completion": [{"role": A, "content": "Four.", "thinking": " Two and two.\n"}]},
        {"prompt": "q", "chosen": THOUGHT, "rejected": "Five."},
        {"chosen": f"\n\nHuman: q\n\nAssistant: {THOUGHT}", "rejected": "\n\nHuman: q\n\nAssistant: Five."},
    ],
)
def test_thoughts_are_kept_or_dropped_as_data_thoughts_says_and_else_refused(row: dict[str, Any]) -> None:
    assert normalise(row, thoughts="keep").response == Message(A, "Four.", thoughts="Two and two.")
    assert normalise(row, thoughts="drop").response == Message(A, "Four.")
    with pytest.raises(RowError, match=r"has thoughts of the assistant; set data\.thoughts to keep or drop"):
        normalise(row)


def test_thoughts_that_are_not_one_closed_block_at_the_beginning_are_refused() -> None:
    for text in ("<think>Two", "Four. <think>Two</think>", "<think>a</think>b<think>c</think>d"):
        for setting in (None, "keep", "drop"):
            with pytest.raises(RowError, match="'<think>' that is not one closed block at its beginning"):
                normalise({"prompt": "q", "completion": text}, thoughts=setting)
    assert normalise({"prompt": "<think>", "completion": "a"}).prompt_text == "<think>"
    assert without_thoughts(THOUGHT) == "Four." == without_thoughts("Four.")
    assert without_thoughts("<think>\nTwo and") == ""


def test_blank_lines_before_an_answer_do_not_cost_a_search_of_the_whole_text_each() -> None:
    text = "\n" * 3000 + "x" * 100_000
    began = time.process_time()
    assert without_thoughts(text) == text
    assert said(normalise({"prompt": "q", "completion": text}).response) == text
    assert time.process_time() - began < 1


def test_a_response_to_a_prompt_that_opens_the_thoughts_is_empty_until_it_closes_them() -> None:
    assert without_thoughts("Two and", opened=True) == ""
    assert without_thoughts("Two and two.\n</think>\n\nFour.", opened=True) == "Four."


def test_thoughts_in_two_places_of_a_message_must_be_the_same() -> None:
    def row(**fields: str) -> dict[str, Any]:
        return {"prompt": "q", "completion": [{"role": A, "content": THOUGHT, **fields}]}

    for fields in ({"reasoning_content": "Three."}, {"reasoning": "Two and two.", "thinking": "Three."}):
        with pytest.raises(RowError, match="differs from other thoughts of the message; keep one of them"):
            normalise(row(**fields), thoughts="keep")
        assert normalise(row(**fields), thoughts="drop").response == Message(A, "Four.")
    same = normalise(row(reasoning_content="Two and two."), thoughts="keep")
    assert same.response == Message(A, "Four.", thoughts="Two and two.")


@pytest.mark.parametrize("content", ["", None])
def test_the_result_of_a_function_that_returns_nothing_is_empty(content: str | None) -> None:
    called = {"role": A, "content": None, "tool_calls": CALLS}
    result = {"role": "tool", "content": content, "tool_call_id": "c1"}
    messages = normalise({"messages": [*chat((U, "q")), called, result, *chat((A, "Done."))]}).messages
    assert messages[2] == Message("tool", "", call_id="c1")


@pytest.mark.parametrize(
    "layout",
    [
        lambda answer: answer,
        lambda answer: chat((U, "q"), (A, answer)),
        lambda answer: f"\n\nHuman: q\n\nAssistant: {answer}",
    ],
    ids=["answers", "conversations", "transcripts"],
)
def test_a_pair_that_differs_only_in_dropped_thoughts_is_well_formed(layout: Any) -> None:
    """The stage counts it with the pairs that have the same tokens."""
    row = {"chosen": layout(THOUGHT), "rejected": layout(THOUGHT.replace("two", "three"))}
    if row["chosen"] == THOUGHT:
        row["prompt"] = "q"
    record = normalise(row, thoughts="drop")
    assert record.prompt == (Message(U, "q"),)
    assert record.response == record.rejected == Message(A, "Four.")
    assert normalise(row, thoughts="keep").response != normalise(row, thoughts="keep").rejected
