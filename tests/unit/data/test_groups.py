"""Groups of related prompts, which are on one side of the split.

- the group of a row is its field `group`, or else its first user message; system messages and later turns do
  not matter
- groups with the same prompt are one, and so are all those of a first user message that a row without a group
  has; neither the order of rows nor that of sets matters
- what is held out stays held out when rows are added
- prompts that look the same are the same prompt
- artifacts of earlier versions have no groups
- the card has the sizes of groups, and warns of large ones
"""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.data import SetName, Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.card import card_warnings
from rlhf_core.data.dataset import load_pairs, load_prompts, load_sft, read_pair_groups, write
from rlhf_core.data.examples import (
    SourceRecord,
    prompt_id,
    split_key,
    split_position,
    to_record,
)
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.prepare import prepare
from rlhf_core.data.repeats import join_groups
from rlhf_core.types import PairExample, PromptExample, SFTExample
from tests.support.sampled import examples
from tests.unit.data.data_samples import write_jsonl


def turn(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a prompt of messages: those of user and assistant in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, text in enumerate(texts):
        messages.append({"role": "assistant" if index % 2 else "user", "content": text})
    return messages


def record(prompt: Any, group: Any = None, **source: Any) -> SourceRecord:
    row = {"prompt": prompt} if group is None else {"prompt": prompt, "group": group}
    found = to_record(Row("rows.jsonl", 1, row), Source(path="rows.jsonl", **source), "prompts", "rows")
    assert isinstance(found, SourceRecord), found
    return found


def joined(*records: SourceRecord) -> list[str]:
    return [item.group for item in join_groups({"prompts": records})["prompts"]]


def configure(folder: Path, sets: dict[SetName, list[dict[str, Any]]], **data: Any) -> PipelineConfig:
    for name, rows in sets.items():
        data[name] = [{"path": str(write_jsonl(folder / f"{name}.jsonl", rows))}]
    return PipelineConfig.model_validate({"data": data}, strict=False)


def prepared(config: PipelineConfig, out: Path) -> dict[str, Any]:
    out.mkdir()
    return prepare(config, out, lambda done, total: None)


def pair(prompt: Any, number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": f"good {number}", "rejected": f"bad {number}", **fields}


def test_the_turns_of_a_conversation_are_on_one_side_in_all_sets(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(80):
        texts = [f"{kind} {number}" for kind in ("ask", "said", "again", "so", "more")]
        for turns in range(1, chance.choice((2, 4, 6)), 2):
            system = chance.choice((None, "Be brief."))
            rows.append(pair(turn(*texts[:turns], system=system), len(rows)))
    chance.shuffle(rows)
    config = configure(tmp_path, dict.fromkeys(("sft", "preference", "prompts"), rows), eval_fraction=0.2)
    card = prepared(config, tmp_path / "out")
    question = {"\n\n".join(m["content"] for m in row["prompt"]): ask(row["prompt"]) for row in rows}
    for load in (load_prompts, load_pairs):
        train, held = (
            {question[example.prompt] for example in load(tmp_path / "out", split)}
            for split in ("train", "eval")
        )
        assert train and held and not train & held
        assert held == {text for text in train | held if split_position(0, text) < 0.2}
    assert card["overlap"] == {
        "exact": 0, "near": 0, "near_by_set": {"sft": 0, "preference": 0, "prompts": 0}
    }  # fmt: skip
    groups = {example.group for example in load_sft(tmp_path / "out", "train")}
    assert groups == {example.group for example in load_pairs(tmp_path / "out", "train")}
    assert groups == {prompt_id(text) for text in train}
    assert groups == {group for _, _, group in read_pair_groups(tmp_path / "out", "train")}


def ask(messages: list[dict[str, str]]) -> str:
    return next(message["content"] for message in messages if message["role"] == "user")


def test_a_prompt_of_one_message_is_a_group_of_its_own() -> None:
    assert joined(record("Is it late?"), record(turn("Is it late?", "No.", "Why?"))) == ["Is it late?"] * 2
    assert PromptExample("id", "Is it late?", (1,)).group == "id"
    assert PairExample("id", "Is it late?", (1,), (2,), (3,)).group == "id"


def test_rows_that_name_a_group_are_together() -> None:
    named = [record(f"Question {i}", group) for i, group in enumerate((7, 7.0, "7", " 7\n", "8", 7.5))]
    found = joined(*named, record("Question 9", "x", rename={"group": "origin"}))
    assert len(set(found[:4])) == 1 and len(set(found)) == 4
    assert found[-1] == "Question 9", "the field has another name"
    nested = to_record(
        Row("rows.jsonl", 1, {"prompt": "Question 9", "meta": {"group": "x"}}),
        Source(path="rows.jsonl"),
        "prompts",
        "rows",
    )
    assert isinstance(nested, SourceRecord) and nested.group == "Question 9"


@pytest.mark.parametrize(
    ("row", "rename", "group"),
    [
        ({"meta": {"group": "x"}}, {}, None),
        ({"meta": {"group": "x"}}, {"meta.group": "group"}, "x"),
        ({"meta": {"group": "x"}, "doc": {"id": 3}}, {"doc.id": "group"}, 3),
        ({"meta": {"group": "x"}, "group": "y"}, {}, "y"),
        ({"meta": {"group": "x"}, "group": "y"}, {"group": "topic"}, None),
    ],
)
def test_the_group_that_a_sampled_answer_gets_is_that_of_its_row(
    row: dict[str, Any], rename: dict[str, str], group: Any
) -> None:
    """The stage `sample` writes `meta["group"]` as the field `group` of its rows."""
    source = Source(path="rows.jsonl", rename=rename)
    found = to_record(Row("rows.jsonl", 1, {"prompt": "Question 9", **row}), source, "prompts", "rows")
    assert isinstance(found, SourceRecord) and found.record.meta.get("group") == group
    assert found.group == record("Question 9", group).group


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, " "])
def test_a_group_that_is_neither_text_nor_number_makes_a_row_malformed(value: Any) -> None:
    row = Row("rows.jsonl", 1, {"prompt": "Is it late?", "group": value})
    found = to_record(row, Source(path="rows.jsonl"), "prompts", "rows")
    assert isinstance(found, BadRow) and "'group' must be a text or a number; got" in found.reason


def test_a_row_without_a_group_is_of_all_groups_with_its_first_message() -> None:
    named = [record(turn("Hello", system=f"You are number {i}."), i) for i in range(2)]
    alone = record(turn("Hello", "Yes?", "Is it late?"))
    assert len(set(joined(*named))) == 2
    assert len(set(joined(*named, record("Is it late?")))) == 3
    assert set(joined(*named, alone)) == {min(item.group for item in named)}


def test_rows_that_name_groups_are_apart_whatever_their_first_message() -> None:
    """A constant message of the user, after a document or before examples, is no relation, if rows say so."""
    first, second = (record(turn("Sum it up.", system=f"Document {i}"), i) for i in range(2))
    assert len(set(joined(first, second))) == 2
    later = record(turn("Sum it up.", "Done.", "Shorter!", system="Document 0"), "later")
    assert len(set(joined(first, second, later))) == 3
    plain = [record(turn("Sum it up.", *more), name) for name, more in (("a", ()), ("b", ("Done.", "More!")))]
    assert len(set(joined(*plain))) == 2
    same = [record(turn("Sum it up.", "Done.", "More!"), name) for name in "ab"]
    assert len(set(joined(*same))) == 1
    without = [record(turn("Sum it up.", system=f"Document {i}")) for i in range(2)]
    assert set(joined(*without)) == {"Sum it up."}


def test_the_same_text_is_one_group_whatever_its_structure() -> None:
    text = "Be brief.\n\nHello\n\nYes?\n\nIs it late?"
    found = joined(record(turn("Hello", "Yes?", "Is it late?", system="Be brief.")), record(text))
    assert len(set(found)) == 1


ROWS = st.lists(
    st.tuples(
        st.sampled_from((None, "S", "T")),
        st.sampled_from("abcd"),
        st.booleans(),
        st.sampled_from((None, None, "1", "2", "3")),
    ),
    min_size=1,
    max_size=12,
)


@examples(100, 3)
@given(ROWS, st.randoms(use_true_random=False))
def test_neither_the_order_of_rows_nor_the_sets_they_are_in_matter(rows: Any, chance: random.Random) -> None:
    records = [
        record(turn(text, *(("yes", f"so {text}") if more else ()), system=system), group)
        for system, text, more, group in rows
    ]
    found = dict(zip(map(id, records), joined(*records), strict=True))
    for _ in range(3):
        chance.shuffle(records)
        half = chance.randint(0, len(records))
        sets: dict[SetName, list[SourceRecord]] = {"prompts": records[:half], "sft": records[half:]}
        again = join_groups(sets)
        assert [item.group for item in (*again["prompts"], *again["sft"])] == [found[id(r)] for r in records]
    for first, second in itertools.combinations(records, 2):
        one_is_unnamed = "group" not in first.record.meta or "group" not in second.record.meta
        if first.record.prompt_text == second.record.prompt_text or (
            one_is_unnamed and first_message(first) == first_message(second)
        ):
            assert found[id(first)] == found[id(second)]


def first_message(item: SourceRecord) -> str:
    return next(message.content for message in item.record.prompt if message.role == "user")


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), min_size=1, max_size=10))
def test_added_rows_leave_the_keys_of_the_others(rows: Any) -> None:
    """Answers to a prompt and further turns of its conversation, as rounds and larger data have them."""
    records = [record(turn(text), f"group of {text}" if named else None) for text, named in rows]
    added = [record(turn(text, "Yes.", "And then?")) for text, _ in rows] + [record("Another one")]
    before, after = joined(*records), joined(*added, *records)
    assert after[len(added) :] == before


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (" a\n b ", "a b", True),
        ("a b", "ab", False),
        ("caf\u00e9", "cafe\u0301", True),
        ("\ufeffIs it\u200b la\u00adte?", "Is it late?", True),
        ("می\u200cخواهم", "میخواهم", True),
        ("a polish word", "a Polish word", False),
        ("2+2", "2-2", False),
        ("x²", "x2", False),
        ("Is it late?", "Is it late", False),
    ],
)
def test_prompts_that_look_the_same_are_the_same(first: str, second: str, same: bool) -> None:
    assert (split_key(first) == split_key(second)) is same


@given(st.text())
def test_the_key_of_a_key_is_itself(text: str) -> None:
    key = split_key(text)
    assert split_key(key) == key
    assert not text.isascii() or key == " ".join(text.split())
    assert split_key(unicodedata.normalize("NFD", text)) == key


def test_groups_of_earlier_artifacts_are_the_prompts(tmp_path: Path) -> None:
    examples: dict[str, Any] = {
        "prompts": PromptExample("p", "Why?", (1, 7), {}, "a", "g"),
        "pairs": PairExample("p", "Why?", (1, 7), (8, 2), (9, 2), "a", None, "g"),
        "sft": SFTExample((1, 7), (0, 1), "a", "g"),
    }
    for name, example in examples.items():
        write(tmp_path, name, "train", [example])
    assert [load_prompts(tmp_path, "train"), load_pairs(tmp_path, "train"), load_sft(tmp_path, "train")] == [
        [example] for example in examples.values()
    ]
    for name in examples:
        file = tmp_path / f"{name}_train.parquet"
        pq.write_table(pq.read_table(file).drop_columns("group"), file)
    assert load_prompts(tmp_path, "train")[0].group == load_pairs(tmp_path, "train")[0].group == "p"
    assert list(read_pair_groups(tmp_path, "train")) == [("a", "p", "p")]
    assert load_sft(tmp_path, "train")[0].group == ""


def test_the_card_has_the_sizes_of_groups_and_warns_of_large_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 40 prompts, 20 are of groups of five, and 6 are the first message alone or with further turns."""
    rows = [pair(f"question {i}", i, group=f"document {i // 5}") for i in range(20)]
    rows += [pair(f"question {i}", i) for i in range(20, 34)]
    rows += [pair(turn("Hello", *("yes", "no") * i), 40 + i) for i in range(6)]
    config = configure(tmp_path, dict.fromkeys(("sft", "preference", "prompts"), rows), eval_fraction=0.14)
    card = prepared(config, tmp_path / "out")
    found = card["groups"]["prompts"]
    assert found["train"]["prompts"] + found["eval"]["prompts"] == 40
    assert found["train"]["groups"] + found["eval"]["groups"] == 4 + 14 + 1
    assert max(found["train"]["largest"], found["eval"]["largest"]) == 6
    held = json.loads((tmp_path / "out" / "data_card.json").read_text())["groups"]["prompts"]["eval"]
    assert held == found["eval"]
    messages = [message for message in caplog.messages if "have the same first user" in message]
    assert [message.split(", and stay")[0] for message in messages] == [
        f"data.{name}: 6 of 40 prompts have the same first user message or `group`"
        for name in ("sft", "preference", "prompts")
    ]
    assert all("data.eval_fraction=0.14. If they are not related" in message for message in messages)


def test_the_effective_number_of_prompts_is_that_of_the_mean_of_groups() -> None:
    """Sizes 6, 1, 1, equal outcomes in a group: the mean has the variance (36 + 1 + 1) / 64 = 1 / 1.68."""
    alone = {"prompts": 8, "groups": 8, "largest": 1, "effective": 8.0}
    held = {"prompts": 8, "groups": 3, "largest": 6, "effective": 1.7}
    train = alone | {"prompts": 100}
    card: dict[str, Any] = {"counts": {"prompts": {"dropped": {}}}, "overlap": {"near": 0}}
    card["groups"] = {"prompts": {"train": train, "eval": held}}
    [message] = card_warnings(card, 0.1)
    assert "the 8 held-out prompts are 3 groups (" in message and "the largest with 6 prompts." in message
    assert "an effective number of 2 prompts" in message
    card["groups"] = {"prompts": {"train": train, "eval": alone}}
    assert list(card_warnings(card, 0.1)) == []
