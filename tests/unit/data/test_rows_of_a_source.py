"""What a whole source says about its rows.

Rules:
- rows whose `label` is false are no demonstrations: they are counted, and said with their share;
- good and bad answers to one prompt are pairs, by their `label`; without any pair the source is an error,
  which says so if only its first rows were read;
- fields that no text is made of are counted in the data card; those that are mostly long texts are said;
- a field of `rename` that no row has is an error;
- of a huge last answer, only the beginning is tokenized;
- a source of rows that are already rendered is an error, a few of them are said, single ones are not.
"""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Limits, SetName
from rlhf_core.data.card import _other_fields, card_markdown
from rlhf_core.data.examples import (
    JOINED,
    MARKED_BAD,
    UNPAIRED,
    Quarantine,
    SetCounts,
    SourceRecord,
    check_rendered,
    read_records,
    tokens_of,
    training_texts,
    with_tokens,
    within,
)
from rlhf_core.data.formats import normalise
from rlhf_core.data.messages import Message
from rlhf_core.data.prepare import prepare
from rlhf_core.data.sources import source_contents
from rlhf_core.data.templates import Encoder
from rlhf_core.errors import DataError
from tests.unit.data.data_samples import write_jsonl

PROSE = "The moon is a rock that turns around the earth."


def configure(
    folder: Path, rows: list[dict[str, Any]], ppo: dict[str, Any] | None = None, **source: Any
) -> PipelineConfig:
    sources = [{"path": str(write_jsonl(folder / "rows.jsonl", rows)), **source}]
    data = dict.fromkeys(("sft", "preference", "prompts"), sources)
    return PipelineConfig.model_validate({"data": data, "ppo": ppo or {}}, strict=False)


def records_of(config: PipelineConfig, folder: Path, name: SetName) -> tuple[list[SourceRecord], SetCounts]:
    counts = SetCounts()
    quarantine = Quarantine(folder / "quarantine.jsonl")
    found = list(read_records(config, name, quarantine, counts, source_contents(config), folder))
    quarantine.close()
    return found, counts


def test_a_reason_of_bad_rows_is_said_once(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": ""}] * 3 + [{"prompt": "", "completion": "a"}]
    with pytest.raises(DataError) as caught:
        records_of(configure(tmp_path, rows), tmp_path, "sft")
    assert caught.value.message.count("'completion' is empty") == 1
    assert "rows.jsonl:1: " in caught.value.message and "rows.jsonl:4: " in caught.value.message


def test_answers_that_are_marked_as_bad_are_no_demonstrations_and_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 4 > 0} for i in range(8)]
    config = configure(tmp_path, rows)
    found, counts = records_of(config, tmp_path, "sft")
    assert [item.record.response and item.record.response.content for item in found] == [
        "a1",
        "a2",
        "a3",
        "a5",
        "a6",
        "a7",
    ]
    assert counts.dropped == {MARKED_BAD: 2} and counts.bad == 0
    assert "data.sft[0]: 2 of 8 rows (25 %) are no demonstrations, because their `label`," in caplog.text
    assert len(records_of(config, tmp_path, "prompts")[0]) == 8
    every = configure(tmp_path, rows, ignore=["label"])
    assert len(records_of(every, tmp_path, "sft")[0]) == 8


def test_fields_that_no_text_is_made_of_are_counted_and_long_texts_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": f"b{i}", "id": i, "margin": 1} for i in range(4)]
    rows[1]["context"] = rows[2]["context"] = PROSE
    config = configure(tmp_path, rows)
    _, counts = records_of(config, tmp_path, "preference")
    fields = {(row["field"], row["rows"], row["texts"]) for row in _other_fields({"preference": counts})}
    assert fields == {("id", 4, 0), ("context", 2, 2)}
    text = "data.preference[0]: fields with texts are not used ('context' in 50 % of the rows)"
    assert text in caplog.text
    caplog.clear()
    records_of(configure(tmp_path, rows, ignore=["context"]), tmp_path, "preference")
    by_rewards: list[dict[str, Any]] = [
        {"type": "answer", "field": "context"},
        {"type": "python", "function": "rules.py:score"},
    ]
    for reward in by_rewards:
        records_of(configure(tmp_path, rows, {"rewards": [reward]}), tmp_path, "prompts")
    assert caplog.text == ""


def test_the_number_of_fields_that_are_counted_is_limited(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", **{f"field {i} {j}": 1 for j in range(50)}} for i in range(9)]
    _, counts = records_of(configure(tmp_path, rows), tmp_path, "sft")
    assert len(_other_fields({"sft": counts})) == 200


def test_the_data_card_lists_the_other_fields(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}", "level|": i} for i in range(20)]
    (tmp_path / "out").mkdir()
    card = prepare(configure(tmp_path, rows), tmp_path / "out", lambda done, total: None)
    assert {"source": "data.sft[0]", "field": "level|", "rows": 20, "texts": 0} in card["other_fields"]
    assert r"| data.prompts[0] | level\| | 20 | 0 |" in card_markdown(card)
    assert json.loads((tmp_path / "out" / "data_card.json").read_text())["other_fields"]


def test_a_field_of_rename_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "extra": {"level": 1}} for i in range(4)]
    rows[1]["topic"] = "moon"
    present = configure(tmp_path, rows, rename={"topic": "subject", "extra.level": "level"})
    found, _ = records_of(present, tmp_path, "prompts")
    assert [item.record.meta.get("level") for item in found] == [1] * 4
    with pytest.raises(DataError, match=r"data\.prompts\[0\]\.rename: no row .* has the field 'sytem'"):
        records_of(configure(tmp_path, rows, rename={"sytem": "system"}), tmp_path, "prompts")


def test_of_a_huge_last_answer_only_the_beginning_is_tokenized(
    sp_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder(sp_tokenizer, "chat")
    rendered = []
    conversation = encoder.conversation

    def recorded(messages: Sequence[Message], tools: str) -> Any:
        rendered.append(sum(len(message.content) for message in messages))
        return conversation(messages, tools)

    monkeypatch.setattr(encoder, "conversation", recorded)
    monkeypatch.setattr("rlhf_core.data.examples._MEASURED_TEXT", 100)

    def example(answer: str) -> Any:
        talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
        item = SourceRecord(normalise(talk, demonstration=True), "rows", "rows.jsonl", 1, "q")
        bounds = Limits(prompt=50, response=50, text=50, new=50)
        [tokens] = tokens_of(item.record, "sft", encoder, bounds)
        return with_tokens(item, "sft", within(tokens, bounds)).example

    assert example("fox " * 300_000) == example("fox " * 3000)
    assert len(example("fox " * 300_000).input_ids) == 50
    assert max(rendered) < 30_000


@pytest.mark.parametrize(("rendered", "outcome"), [(1, "nothing"), (5, "warning"), (30, "error")])
def test_a_source_of_rendered_rows_is_an_error_and_single_ones_are_no_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sp_tokenizer: Any, rendered: int, outcome: str
) -> None:
    rows = [{"text": f"{i} is a number"} for i in range(200)]
    for row in rows[-rendered:]:
        row["text"] = f"<s> User: {row['text']}</s>"
    found, _ = records_of(configure(tmp_path, rows), tmp_path, "sft")
    assert sum("</s>" in text for item in found for text in training_texts(item.record)) == rendered
    encoder = Encoder(sp_tokenizer, "chat")
    text = (
        f"data.sft: {rendered} of 200 rows of rows.jsonl spell special tokens or role marks, the first '<s>'"
    )
    with caplog.at_level(logging.WARNING):
        if outcome == "error":
            with pytest.raises(DataError, match=text) as caught:
                check_rendered("data.sft", found, encoder, 0.05)
            assert "rows.jsonl:171" in caught.value.message and "data.max_bad_rows" in caught.value.message
        else:
            check_rendered("data.sft", found, encoder, 0.05)
    assert (text in caplog.text) == (outcome == "warning")
    check_rendered("data.sft", found, encoder, 1.0)


def test_good_and_bad_answers_to_one_prompt_are_pairs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"q{i % 3}", "completion": f"a{i}", "label": i < 3} for i in range(6)]
    rows += [
        {"prompt": "alone", "completion": "a", "label": True},
        {"prompt": "q0", "completion": "a9", "label": False},
    ]
    found, counts = records_of(configure(tmp_path, rows), tmp_path, "preference")
    said = [(each.record.prompt_text, each.record.response, each.record.rejected) for each in found]
    assert [(q, good and good.content, bad and bad.content) for q, good, bad in said] == [
        ("q0", "a0", "a3"), ("q1", "a1", "a4"), ("q2", "a2", "a5"),
    ]  # fmt: skip
    assert counts.read == 8 and counts.dropped == {JOINED: 3, UNPAIRED: 2}
    assert (
        "data.preference[0]: 2 of 8 rows with a `label` (25 %) have no answer with the other" in caplog.text
    )


def test_few_of_the_answers_with_labels_are_in_memory(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i // 2}", "completion": f"{i}" + 10_000 * "a", "label": i % 2 > 0} for i in range(1000)
    ]
    config = configure(tmp_path, rows)
    contents, quarantine = source_contents(config), Quarantine(tmp_path / "quarantine.jsonl")
    del rows
    tracemalloc.start()
    try:
        for _ in read_records(config, "preference", quarantine, SetCounts(), contents, tmp_path):
            pass
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        quarantine.close()
    # All texts together have 10 MB.
    assert most < 5e6


def test_labels_that_make_no_pair_are_refused_with_their_share(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 2 > 0} for i in range(6)]
    with pytest.raises(DataError, match=r"6 of 6 rows with a `label` \(100 %\) have no answer"):
        records_of(configure(tmp_path, rows), tmp_path, "preference")


def test_first_rows_of_a_file_sorted_by_label_are_said_to_be_the_first_ones(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 3}", "completion": f"a{i}", "label": i < 3} for i in range(6)]
    with pytest.raises(DataError, match=r"if they come later, read more rows \(--rows, `limit`\), or mix"):
        records_of(configure(tmp_path, rows, limit=3), tmp_path, "preference")
    found, _ = records_of(configure(tmp_path, rows, limit=6), tmp_path, "preference")
    assert len(found) == 3


def test_choices_that_are_not_in_the_prompt_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"Which {i}?", "choices": ["a", "b"], "answer": 0} for i in range(4)]
    records_of(configure(tmp_path, rows), tmp_path, "prompts")
    assert "are not used ('choices' in 100 % of the rows)" in caplog.text
    caplog.clear()
    records_of(configure(tmp_path, rows, ignore=["choices"]), tmp_path, "prompts")
    for row in rows:
        row["prompt"] = f"{row['prompt']} a or b"
    records_of(configure(tmp_path, rows), tmp_path, "prompts")
    assert "are not used" not in caplog.text


def test_a_question_without_its_choices_is_read_with_ignore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"Which {i}?", "choices": {"text": ["a", "b"]}, "answer": "a"} for i in range(4)]
    found, _ = records_of(configure(tmp_path, rows, ignore=["choices"]), tmp_path, "prompts")
    assert [each.record.prompt_text for each in found] == [f"Which {i}?" for i in range(4)]
    assert "are not used" not in caplog.text
