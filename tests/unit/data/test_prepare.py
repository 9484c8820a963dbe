"""The data artifact as a whole.

Rules:
- a prompt held out in one set is in no training set, whatever the seed; tiny sets keep a row on either side;
- every row is accounted for: read = bad + dropped + train + eval; one that the chat template refuses is bad;
- `eval_fraction` and `max_eval` hold out the prompts of the lowest split positions, wherever they stand in
  the file, and in that order, so that the first n are of all sources; the same prompts for every `run.seed`;
- duplicates, contradictions, lengths and `max_eval` drop rows under their reason; bad rows are quarantined;
- of equal prompts whose answers differ, the first is kept; the others are counted and said;
- too many bad rows, or too few usable ones, stop the run with a message that says what to do;
- the demo's artifact holds the tokenizer, the model's config, and sequences that fit it; the same seed, the
  same bytes;
- a number `margin` of a pair is kept; where the reward model needs it, rows without one stop the run at once,
  as do prompts without the answer that a reward looks for;
- there is a warning if a step takes more prompts than there are;
- a weight uses the training rows of a source exactly that many times, and never the held-out ones;
- the stage logs its card; the card shows text that cannot become markup.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import NEW, PROMPT, RESPONSE, TEXT, GivenLimits, Limits, Source, fitted_limits
from rlhf_core.config.keys import stage_key
from rlhf_core.data import examples
from rlhf_core.data.card import Facts, card_markdown, limits_of, sources_of_models
from rlhf_core.data.card import _sources as card_sources
from rlhf_core.data.dataset import load_pairs, load_prompts, load_sft
from rlhf_core.data.examples import EncodedRecord, held_out, split_key, split_position
from rlhf_core.data.lengths import Lengths
from rlhf_core.data.prepare import _too_few_held_out, prepare
from rlhf_core.data.sources import source_digests
from rlhf_core.data.tokenizer import TINY_TEMPLATE, load_decoder
from rlhf_core.errors import DataError, InputError, ModelError
from rlhf_core.stages.data import run
from rlhf_core.testing import RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.types import SFTExample
from tests.support.demo_data import GENERATED, with_demo_data
from tests.unit.data.data_samples import write_jsonl

SMALL = {"sft_examples": 60, "pairs": 60, "prompts": 40}


def configure(**sections: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(sections, strict=False)


def demo(run: dict[str, Any] | None = None, **data: Any) -> PipelineConfig:
    return configure(data={"synthetic": SMALL, **GENERATED, **data}, run=run or {})


def files(
    folder: Path, rows: list[dict[str, Any]], *, reward: dict[str, Any] | None = None, **data: Any
) -> PipelineConfig:
    """Pairs from a file in all three sets, a tokenizer trained on them."""
    source = [{"path": str(write_jsonl(folder / "pairs.jsonl", rows))}]
    return configure(
        data={"sft": source, "preference": source, "prompts": source, **data}, reward=reward or {}
    )


def pairs(number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}", "answer": i}
        for i in range(number)
    ]


def prepared(config: PipelineConfig, out: Path) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return prepare(config, out, lambda done, total: None)


def row_of(card: dict[str, Any], name: str, field: str) -> dict[str, Any]:
    """Return the row of the limits of a card for a set and a field."""
    [row] = [row for row in card["limits"]["rows"] if (row["set"], row["field"]) == (name, field)]
    return dict(row)


@pytest.fixture(scope="module")
def demo_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    prepared(demo(), out)
    return out


def test_the_demo_artifact_fits_its_model(demo_out: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    model = AutoConfig.from_pretrained(demo_out / "model")
    tokenizer = AutoTokenizer.from_pretrained(demo_out / "tokenizer")
    assert model.model_type == "llama" and model.architectures == ["LlamaForCausalLM"]
    assert model.vocab_size % 8 == 0 and len(tokenizer) <= model.vocab_size < len(tokenizer) + 8
    assert (model.eos_token_id, model.pad_token_id, model.bos_token_id) == (
        tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id,
    )  # fmt: skip
    for example in load_sft(demo_out, "train"):
        assert len(example.input_ids) == len(example.loss_mask) <= 128
        assert max(example.input_ids) < model.vocab_size
        learned = [
            token for token, marked in zip(example.input_ids, example.loss_mask, strict=True) if marked
        ]
        assert learned[-1] == tokenizer.eos_token_id and example.input_ids[0] == tokenizer.bos_token_id
    for pair in load_pairs(demo_out, "train"):
        assert pair.chosen_ids != pair.rejected_ids
        assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == tokenizer.eos_token_id
    prompt = load_prompts(demo_out, "eval")[0]
    assert tokenizer.decode(prompt.input_ids) == f"<bos><|user|>{prompt.prompt}<|assistant|>"
    assert prompt.meta["id"].startswith("synthetic-prompt-")


def test_no_training_row_has_a_held_out_prompt(demo_out: Path) -> None:
    held = {prompt.prompt for prompt in load_prompts(demo_out, "eval")} | {
        pair.prompt for pair in load_pairs(demo_out, "eval")
    }
    assert held
    assert not held & {prompt.prompt for prompt in load_prompts(demo_out, "train")}
    assert not held & {pair.prompt for pair in load_pairs(demo_out, "train")}
    texts = json.loads((demo_out / "data_card.json").read_text())["overlap"]
    assert texts["exact"] == 0


def test_the_same_seed_gives_the_same_bytes(demo_out: Path, tmp_path: Path) -> None:
    prepared(demo(), tmp_path)
    names = sorted(str(file.relative_to(demo_out)) for file in demo_out.rglob("*") if file.is_file())
    assert (
        "sft_train.parquet" in names and "model/config.json" in names and "tokenizer/tokenizer.json" in names
    )
    assert [name for name in names if (demo_out / name).read_bytes() != (tmp_path / name).read_bytes()] == []


KEYS = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=3, max_size=20)


@given(
    st.integers(0, 99),
    st.dictionaries(st.sampled_from(["sft", "preference", "prompts"]), KEYS, min_size=1),
    st.floats(0, 1),
)
def test_every_set_keeps_prompts_on_both_sides_or_gives_the_reason(
    seed: int, keys: dict[str, list[str]], fraction: float
) -> None:
    positions: dict[Any, list[float]] = {}
    for name, some in keys.items():
        positions[name] = [split_position(seed, key) for key in some]
    try:
        held = held_out(positions, fraction)
    except DataError as error:
        assert "group" in error.message
        assert min(len(set(some)) for some in keys.values()) < 4
        return
    for each in positions.values():
        assert set(each) & held and set(each) - held


def test_the_share_held_out_is_the_one_asked_for() -> None:
    positions, others = ([split_position(seed, f"prompt {i}") for i in range(5000)] for seed in (0, 1))
    held = held_out({"sft": positions}, 0.1)
    assert 0.08 < len(held) / len(positions) < 0.12
    assert held_out({"sft": positions[:100], "prompts": positions}, 0.1) == held
    assert held_out({"sft": others}, 0.1) != held


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    rows = pairs(60)
    rows += [rows[3], rows[4]]  # duplicates
    rows += [{"prompt": "question 9", "chosen": "bad 9", "rejected": "good 9"}]  # contradicts row 9
    rows += [{"prompt": "long", "chosen": "x " * 500, "rejected": "y"}]
    rows += [{"prompt": "word " * 5000, "chosen": "x", "rejected": "y"}]
    rows += [{"prompt": "broken", "chosen": None, "rejected": "y"}]
    card = prepared(files(tmp_path, rows, max_prompt_tokens=32, max_eval=2), tmp_path / "out")
    for counts in card["counts"].values():
        assert counts["read"] == 66
        assert (
            counts["read"]
            == counts["bad"] + sum(counts["dropped"].values()) + counts["train"] + counts["eval"]
        )
        assert counts["eval"] == 2
    dropped = card["counts"]["preference"]["dropped"]
    assert dropped["duplicate"] == 2
    assert dropped["contradictory pair"] == 2
    assert dropped["response longer than data.max_response_tokens"] == 1
    assert dropped["prompt longer than data.max_prompt_tokens"] == 1
    assert dropped["held out beyond data.max_eval"] > 0
    quarantine = [
        json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert {(row["line"], row["reason"]) for row in quarantine} == {(66, "'chosen' is missing or null")}
    assert '"broken"' in quarantine[0]["row"]
    assert load_prompts(tmp_path / "out", "train")[0].meta == {"answer": 0}


def test_equal_prompts_with_other_answers_are_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(20)]
    rows += [{"prompt": "question 1", "answer": "1.0"}, {"prompt": "question 2", "answer": 5}]
    rows += [{"prompt": "question 3"}, {"prompt": "question 4", "answer": "4", "id": 9}]
    source = [{"path": str(write_jsonl(tmp_path / "rows.jsonl", pairs(20)))}]
    prompts = [{"path": str(write_jsonl(tmp_path / "prompts.jsonl", rows))}]
    data = {"sft": source, "preference": source, "prompts": prompts}
    card = prepared(configure(data=data, ppo={"rewards": [{"type": "answer"}]}), tmp_path / "out")
    dropped = {"duplicate": 2, "duplicate prompt with another answer": 2}
    assert card["counts"]["prompts"]["dropped"] == dropped
    assert "data.prompts: 2 rows repeat a prompt with another answer; the first counts" in caplog.text
    assert "2 duplicate prompt with another answer" in card_markdown(card)
    card = prepared(configure(data=data, ppo={"rewards": [{"type": "repetition"}]}), tmp_path / "other")
    assert card["counts"]["prompts"]["dropped"] == {"duplicate": 4}, "no reward reads the answers"


def test_a_response_that_is_chosen_in_several_pairs_is_one_demonstration(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i} {k}"}
        for i in range(10)
        for k in range(3)
    ]
    counts = prepared(files(tmp_path, rows), tmp_path / "out")["counts"]
    assert counts["sft"]["dropped"] == {"duplicate": 20}
    assert counts["preference"]["dropped"] == {}
    all_rows = prepared(files(tmp_path, rows, deduplicate=False), tmp_path / "all")["counts"]
    assert all_rows["sft"]["dropped"] == {}


def test_a_row_that_the_template_refuses_is_quarantined_and_counted(tmp_path: Path) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "strict.jinja").write_text(refusing + TINY_TEMPLATE)
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    rows = [
        {"messages": [{**turn, "content": f"{turn['role']} {i}"} for turn in talk[1:]]} for i in range(29)
    ]
    source = [{"path": str(write_jsonl(tmp_path / "talks.jsonl", [*rows, {"messages": talk}]))}]
    card = prepared(demo(sft=source, chat_template=str(tmp_path / "strict.jinja")), tmp_path / "out")
    counts = card["counts"]["sft"]
    assert (counts["read"], counts["bad"], counts["train"] + counts["eval"]) == (30, 1, 29)
    [row] = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert row["line"] == 30 and "no system" in row["reason"]


def test_pairs_that_differ_only_in_dropped_thoughts_are_counted_and_not_malformed(tmp_path: Path) -> None:
    rows = pairs(40)
    for index, row in enumerate(rows[:20]):
        row |= {"chosen": f"<think>yes</think>same {index}", "rejected": f"<think>no</think>same {index}"}
    card = prepared(files(tmp_path, rows, thoughts="drop"), tmp_path / "out")
    counts = card["counts"]["preference"]
    assert (counts["bad"], counts["train"] + counts["eval"]) == (0, 20)
    assert counts["dropped"] == {"chosen and rejected have the same tokens": 20}


def test_a_template_whose_thoughts_cannot_be_dropped_from_responses_is_refused(tmp_path: Path) -> None:
    said = "message['content'] | trim + eos_token"
    thought = f"('Thought: ' + message['thinking'] if message['thinking'] else '') + {said}"
    assert said in TINY_TEMPLATE
    (tmp_path / "other.jinja").write_text(TINY_TEMPLATE.replace(said, thought))
    config = files(tmp_path, pairs(40), chat_template=str(tmp_path / "other.jinja"), thoughts="drop")
    with pytest.raises(
        ModelError, match=r"thoughts otherwise than as the text <think>.*data\.thoughts: drop"
    ):
        prepared(config, tmp_path / "out")


def test_a_response_is_read_as_begun_thoughts_if_the_prompt_opens_them(tmp_path: Path) -> None:
    opening = TINY_TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>\n{% endif")
    opening = opening.replace(
        "message['content'] | trim + eos", "'<think>\n</think>' + message['content'] + eos"
    )
    (tmp_path / "opening.jinja").write_text(opening)
    config = files(tmp_path, pairs(40), chat_template=str(tmp_path / "opening.jinja"), thoughts="drop")
    prepared(config, tmp_path / "out")
    decoder = load_decoder(tmp_path / "out")
    ids = decoder.tokenizer.encode("good", add_special_tokens=False).ids
    assert (decoder(ids), decoder.response(ids)) == ("good", "")


@pytest.mark.parametrize(("fraction", "most"), [(0.4, 512), (0.1, 512), (0.4, 3), (0.4, 6)])
def test_held_out_are_the_prompts_of_the_lowest_split_positions(
    fraction: float, most: int, tmp_path: Path
) -> None:
    rows = pairs(60)
    prepared(files(tmp_path, rows, eval_fraction=fraction, max_eval=most), tmp_path / "out")
    position = {row["prompt"]: split_position(0, row["prompt"]) for row in rows}
    low = sorted((prompt for prompt in position if position[prompt] < fraction), key=position.__getitem__)
    found = [prompt.prompt for prompt in load_prompts(tmp_path / "out", "eval")]
    assert found == low[:most]
    trained = {prompt.prompt for prompt in load_prompts(tmp_path / "out", "train")}
    assert trained == set(position) - set(low)


def test_the_first_held_out_prompts_are_of_all_sources(tmp_path: Path) -> None:
    sources = []
    for folder, file in (("first", "a"), ("second", "train"), ("third", "train")):
        (tmp_path / folder).mkdir()
        rows = [{"prompt": f"{folder} {i}"} for i in range(600)]
        sources.append({"path": str(write_jsonl(tmp_path / folder / f"{file}.jsonl", rows))})
    prepared(demo(prompts=sources), tmp_path / "out")
    asked = load_prompts(tmp_path / "out", "eval")[:60]
    counts = Counter((prompt.source, prompt.prompt.split()[0]) for prompt in asked)
    assert set(counts) == {("a.jsonl", "first"), ("train.jsonl 1", "second"), ("train.jsonl 2", "third")}
    # 60 draws, a third each: 20 with a standard deviation of 3.7.
    assert min(counts.values()) >= 9


def test_the_held_out_prompts_are_the_same_for_every_seed_of_the_run(tmp_path: Path) -> None:
    held = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        prepared(
            demo(run={"seed": seed}, prompts=[{"path": str(write_jsonl(folder / "p.jsonl", pairs(200)))}]),
            folder,
        )
        held.append([prompt.prompt_id for prompt in load_prompts(folder, "eval")])
    assert held[0] == held[1] and held[0]


def test_prompts_of_schema_2_are_read_without_their_source(tmp_path: Path) -> None:
    prepared(demo(), tmp_path)
    file = tmp_path / "prompts_eval.parquet"
    pq.write_table(pq.read_table(file).drop_columns("source"), file)
    assert {prompt.source for prompt in load_prompts(tmp_path, "eval")} == {""}


def test_too_many_bad_rows_stop_the_run_with_the_first_three_reasons(tmp_path: Path) -> None:
    rows: list[Any] = [*pairs(20), {"prompt": ""}, {"prompt": 5}, {"nothing": 1}, {"prompt": "a"}]
    with pytest.raises(DataError) as caught:
        prepared(files(tmp_path, rows), tmp_path / "out")
    message = caught.value.message
    assert "data.sft[0]: 4 of 24 rows" in message and "data.max_bad_rows=0.05" in message
    for line in (21, 22, 23):
        assert f"pairs.jsonl:{line}: " in message
    assert "pairs.jsonl:24" not in message


def test_nothing_left_after_filtering_names_the_limit_to_raise(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.sft: 0 of 12 rows left after filtering \(12 prompt longer than"
    ) as caught:
        prepared(files(tmp_path, pairs(12), max_prompt_tokens=2), tmp_path / "out")
    assert caught.value.message.endswith(
        "data.max_prompt_tokens: raise it: 5 keeps 99 % of the rows, 5 all; the model's context is 256"
    )


def test_one_row_that_is_left_is_too_few_and_names_the_limit_that_took_the_others(tmp_path: Path) -> None:
    rows = [{**pair, "prompt": pair["prompt"] + " and more" * 30} for pair in pairs(12)]
    with pytest.raises(DataError, match=r"data\.sft: 1 of 12 rows left .*11 prompt longer than.*at least 2"):
        prepared(files(tmp_path, [*rows[:11], *pairs(1)], max_prompt_tokens=20, min_rows=0), tmp_path / "out")


def test_a_given_limit_that_takes_the_context_is_the_one_to_lower(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        config = files(tmp_path, pairs(12))
        ppo = config.ppo.model_copy(update={"max_new_tokens": 252})
        prepared(config.model_copy(update={"ppo": ppo}), tmp_path / "out")
    assert "leaves no more beside ppo.max_new_tokens=252; lower ppo.max_new_tokens:" in caught.value.message


@pytest.mark.parametrize(("rows", "is_warned"), [(50, True), (200, False)])
def test_from_one_percent_on_rows_that_a_limit_drops_are_a_warning_with_the_value_that_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: int, is_warned: bool
) -> None:
    caplog.set_level("INFO")
    made = pairs(rows)
    made[0]["chosen"] += " and more" * 30
    card = prepared(files(tmp_path, made, max_response_tokens=20), tmp_path / "out")
    [found] = [
        record for record in caplog.records if f"1 of {rows} rows of data.preference (" in record.getMessage()
    ]
    assert (found.levelname == "WARNING") == is_warned
    row = row_of(card, "preference", RESPONSE)
    longest = row["longest"]
    assert longest > 20 and row["from"] == RESPONSE
    assert "longer than data.max_response_tokens=20 and are left out; raise it: " in found.getMessage()
    assert f"keeps 99 % of the rows, {longest} all" in found.getMessage()
    assert "data.prompts" not in found.getMessage(), "their responses are not read"


def test_one_warning_of_a_limit_has_all_sets_and_says_that_the_context_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = pairs(40)
    for pair in made[:8]:
        pair["chosen"] += " and more" * 400
    card = prepared(files(tmp_path, made), tmp_path / "out")
    row = row_of(card, "preference", RESPONSE)
    assert row["rows"] == 40 and row["p50"] < row["tokens"] < row["p99"]
    assert row["from"] == "the context"
    [found] = [text for text in caplog.messages if "have a response longer" in text]
    assert "8 of 40 rows of data.sft (20.0%), 8 of 40 rows of data.preference (20.0%)" in found
    assert "the model's context of 256 tokens leaves no more; use a model with a longer one: " in found


def test_without_limits_every_row_within_the_context_is_kept(tmp_path: Path) -> None:
    made = pairs(30)
    made[0]["chosen"] += " and more" * 50  # more than the 64 tokens of the demo
    card = prepared(files(tmp_path, made), tmp_path / "out")
    response = row_of(card, "preference", RESPONSE)
    assert response["from"] == "the data"
    assert response["tokens"] == response["longest"] > 64
    assert [row["longer"] for row in card["limits"]["rows"]] == [0, 0, 0, 0, 0, None]
    assert card["limits"]["new"] == response["tokens"], "ppo.max_new_tokens follows"
    assert limits_of(tmp_path / "out")._asdict() == {
        name: card["limits"][name] for name in ("prompt", "response", "text", "new")
    }
    assert "response longer than" not in str(card["counts"])


def test_one_row_that_is_far_longer_than_all_others_does_not_decide_the_limit(tmp_path: Path) -> None:
    made = pairs(300)
    made[0]["chosen"] += " and more" * 40
    card = prepared(files(tmp_path, made), tmp_path / "out")
    row = row_of(card, "preference", RESPONSE)
    assert row["tokens"] == 2 * row["p99"] < row["longest"]
    assert card["counts"]["preference"]["dropped"] == {"response longer than data.max_response_tokens": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "1 of 1 rows left"),
        (
            [{"prompt": "a", "chosen": f"b{i}", "rejected": "c"} for i in range(9)],
            r"data\.prompts: 1 of 9 rows left.*8 duplicate",
        ),
        (
            [{"prompt": f"{i}", "completion": "b"} for i in range(9)],
            "`completion` row; a pair needs 'chosen'",
        ),
    ],
)
def test_unusable_sets_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(files(tmp_path, rows), tmp_path / "out")


def test_a_single_prompt_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"data\.sft: only 1 group of prompts left"):
        held_out({"sft": [0.2, 0.2, 0.2]}, 0.1)


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"data\.sft\[0\]: .*blank\.jsonl has 0 rows"):
        prepared(demo(sft=[{"path": str(tmp_path / "blank.jsonl")}]), tmp_path / "out")


def test_no_preference_source_gives_empty_pair_files(tmp_path: Path) -> None:
    config = configure(
        data={"synthetic": SMALL, "preference": []},
        reward={"enabled": False},
        ppo={"rewards": [{"type": "well_formed"}]},
    )
    prepared(config, tmp_path)
    assert load_pairs(tmp_path, "train") == load_pairs(tmp_path, "eval") == []


@pytest.fixture
def model_folder(sp_tokenizer: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    sp_tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": len(sp_tokenizer), "max_position_embeddings": 128})
    )
    return folder


def test_a_given_model_brings_its_own_tokenizer_and_template(model_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text((model_folder / "chat_template.jinja").read_text().replace("User:", "Human:"))
    tree = {
        "model": {"path": str(model_folder)},
        "data": {"synthetic": SMALL, "chat_template": str(template)},
    }
    config = configure(**with_demo_data(tree))
    prepared(config, tmp_path / "out")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.decode(load_prompts(tmp_path / "out", "train")[0].input_ids).startswith("<s> Human: ")
    assert "Human:" in tokenizer.chat_template
    assert not (tmp_path / "out" / "model").exists()


def test_the_artifact_does_not_depend_on_the_folder_of_the_chat_template(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.jinja").write_text(TINY_TEMPLATE)
        prepared(demo(chat_template=str(tmp_path / name / "mine.jinja")), tmp_path / name / "out")
    written = [
        {file.name: file.read_bytes() for file in (tmp_path / name / "out").iterdir() if file.is_file()}
        for name in ("a", "b")
    ]
    assert b"mine.jinja" in written[0]["data_card.md"] and written[0] == written[1]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"vocab_size": 100, "max_position_embeddings": 128}, "but config.json says vocab_size 100"),
        (
            {"vocab_size": 9999, "max_position_embeddings": 64},
            r"are 128 tokens, but .* has a context of 64",
        ),
    ],
)
def test_a_tokenizer_or_length_that_does_not_fit_the_model_is_refused(
    model_folder: Path, tmp_path: Path, facts: dict[str, int], message: str
) -> None:
    (model_folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=message):
        tree = {"model": {"path": str(model_folder)}, "data": {"synthetic": SMALL}}
        prepared(configure(**with_demo_data(tree)), tmp_path / "out")


def test_a_demonstration_that_begins_with_a_held_out_prompt_is_counted(tmp_path: Path) -> None:
    rows = pairs(40)
    stories = [{"text": f"{row['prompt']} and so on."} for row in rows]
    config = files(tmp_path, rows).model_copy()
    sources = [{"path": str(write_jsonl(tmp_path / "stories.jsonl", stories))}]
    pair_source = [source.model_dump() for source in config.data.preference]
    card = prepared(
        configure(data={"sft": sources, "preference": pair_source, "prompts": pair_source}), tmp_path / "out"
    )
    assert card["overlap"]["exact"] == 0
    assert card["overlap"]["near"] > 0


def test_a_leak_between_the_splits_would_be_counted() -> None:
    def made(key: str, text: str) -> EncodedRecord:
        return EncodedRecord(SFTExample((1,), (1,)), key, text, key)

    rows = {
        "the same": "Is it late?",
        "case and marks": "is it LATE",
        "width": "Ｉｓ　ｉｔ　late？",
        "another": "Was it late?",
    }
    train = [made(split_key(text), text) for text in rows.values()]
    train += [
        made("x", "Is it late? It is noon."),
        made("y", "A talk.\n\nIs it late?\n\nNo."),
        made("z", "So: is it late?"),
        made("h", "His dog slept."),
        made("c", "你好吗,先生"),
    ]
    splits: Any = {
        "sft": {"train": train, "eval": []},
        "preference": {
            "train": [
                made("is it late", "Is it late"),
                made("x", "Is it late? No."),
                made("continued", "Is it\nlate?\n\nNo.\n\nWhy?\n\nThe sun is up."),
                made("a later turn", "A talk.\n\nAll right.\n\nIs it late?\n\nNo."),
            ],
            "eval": [],
        },
        "prompts": {
            "train": [made("...", "..."), made("continued", "Is it late?\n\nNo.\n\nWhy?")],
            "eval": [made(text, text) for text in ("Is it late?", "???", "Hi", "你好")],
        },
    }
    # Near are, of demonstrations: case and marks, width, two beginnings and a paragraph; of pairs: the words
    # of the prompt, a continued prompt and a later turn; of prompts: a continued one. Marks alone have no
    # words to share. A part of a word is no beginning; of pairs and prompts, a part of a paragraph neither.
    near = {"sft": 5, "preference": 3, "prompts": 1}
    assert Facts.of(splits).to_json()["overlap"] == {"exact": 1, "near": 9, "near_by_set": near}


def test_a_training_row_of_a_held_out_group_is_counted() -> None:
    train, held = (
        EncodedRecord(SFTExample((1,), (1,)), text, text, "group") for text in ("Is it late?", "Why?")
    )
    splits: Any = {"sft": {"train": [train], "eval": []}, "prompts": {"train": [], "eval": [held]}}
    assert Facts.of(splits).to_json()["overlap"]["exact"] == 1


def test_rows_near_a_held_out_prompt_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = pairs(40)
    prepared(
        files(tmp_path, rows + [{**row, "prompt": row["prompt"].upper() + "!"} for row in rows]),
        tmp_path / "out",
    )
    [message] = [record.getMessage() for record in caplog.records if "held-out" in record.getMessage()]
    assert "training rows are nearly held-out prompts" in message and "data_card.md" in message
    assert re.search(r"\(sft \d+, preference \d+, prompts \d+\)", message)


def test_the_card_shows_which_tokens_are_learned_up_to_eos(demo_out: Path) -> None:
    card = json.loads((demo_out / "data_card.json").read_text())
    for sample in card["samples"]["preference"]:
        for prompt, response in sample["tokens"]:
            assert prompt[0] == 0 and prompt[1][0] == "<bos>" and prompt[1][-1] == "<|assistant|>"
            assert response[0] == 1 and response[1][-1] == "<eos>"
    assert "|<eos>⟧" in (demo_out / "data_card.md").read_text()


def test_the_card_names_the_sources_of_pairs_that_a_model_has_labelled(tmp_path: Path) -> None:
    config = files(tmp_path, pairs(30))
    marked = [source.model_copy(update={"labelled_by": "reward"}) for source in config.data.preference]
    data = config.data.model_copy(update={"preference": (*config.data.preference, *marked)})
    prepared(config.model_copy(update={"data": data}), tmp_path / "out")
    [name] = sources_of_models(tmp_path / "out")
    assert name.endswith(" 1")  # both sources are the same file
    prepared(config, tmp_path / "other")
    assert not sources_of_models(tmp_path / "other")


def test_the_card_computes_the_name_of_each_of_many_sources_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: Counter[str] = Counter()

    def short_name(source: Source) -> str:
        computed[source.path] += 1
        return source.path

    monkeypatch.setattr(examples, "short_name", short_name)
    sources = [{"path": f"./{i}.jsonl", "labelled_by": "reward"} for i in range(300)]
    rows = card_sources(demo(preference=sources), {})
    assert [row["name"] for row in rows if "labelled_by" in row] == [source["path"] for source in sources]
    assert all(computed[source["path"]] == 1 for source in sources)


def test_the_card_cannot_become_markup(tmp_path: Path) -> None:
    rows = pairs(30)
    for row in rows:
        row["prompt"] += "\n```\n# title <script>alert(1)</script>\n````\n\u202eevil\x1b[31m"
    card = prepared(files(tmp_path, rows), tmp_path / "out")
    text = (tmp_path / "out" / "data_card.md").read_text()
    assert text == card_markdown(card)
    assert "\u202e" not in text and "\x1b" not in text
    fences = list(_outside_fences(text.splitlines()))
    assert any("# Data card" in line for line in fences)
    assert not any("script" in line or "title" in line for line in fences)


def _outside_fences(lines: list[str]) -> Iterator[str]:
    """Lines that a Markdown reader takes as markup."""
    fence = ""
    for line in lines:
        ticks = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            if line == ticks and len(ticks) >= len(fence):
                fence = ""
        elif len(ticks) >= 3:
            fence = ticks
        else:
            yield line


def test_stage_reports_progress_counts_and_card(tmp_path: Path) -> None:
    metrics, progress = RecordingMetrics(), RecordingProgress()
    result = run(demo(), stage_context(tmp_path, metrics=metrics, progress=progress))
    assert result.metrics["data/sft_train"] + result.metrics["data/sft_eval"] == 60
    assert result.metrics == metrics.last
    assert metrics.files == ["data/data_card.md", "data/data_card.json"] and metrics.flushes > 0
    assert progress.reports[-1] == ("data", 160, 160, "rows")
    assert result.attributes["data.sft[0].digest"].startswith("synthetic@")


def test_prompts_that_differ_in_white_space_are_held_out_together() -> None:
    assert split_key(" a\n b ") == split_key("a b") != split_key("ab")


def test_a_pairs_margin_is_kept_and_other_values_count_as_none(tmp_path: Path) -> None:
    margins: list[Any] = [0.5, 2, -1.5, "big", True, None, 10**400, "nan", "inf"]
    rows = [{**row, "margin": margins[i % 9]} for i, row in enumerate(pairs(18))]
    prepared(files(tmp_path, rows), tmp_path / "out")
    kept = [*load_pairs(tmp_path / "out", "train"), *load_pairs(tmp_path / "out", "eval")]
    wanted = {f"question {i}": (0.5, 2.0, -1.5, *[None] * 6)[i % 9] for i in range(18)}
    assert {pair.prompt: pair.margin for pair in kept} == wanted


def test_the_margins_of_a_csv_file_and_decimals_of_a_parquet_file_are_numbers(tmp_path: Path) -> None:
    import pyarrow as pa

    number = 20
    rows = [{**row, "margin": Decimal(i) / 4} for i, row in enumerate(pairs(number))]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    (tmp_path / "a.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        source = [{"path": str(tmp_path / name)}]
        data = {"sft": source, "preference": source, "prompts": source}
        prepared(configure(data=data, reward={"margin": "field"}), tmp_path / f"{name}-out")
        found = load_pairs(tmp_path / f"{name}-out", "train") + load_pairs(tmp_path / f"{name}-out", "eval")
        assert {pair.prompt: pair.margin for pair in found} == {f"question {i}": i / 4 for i in range(number)}


def test_a_reward_model_with_margins_of_rows_needs_one_in_every_row(tmp_path: Path) -> None:
    rows = [{**row, "margin": 1.0} for row in pairs(20)]
    config = files(tmp_path, rows, reward={"margin": "field"})
    prepared(config, tmp_path / "all")
    del rows[7]["margin"]
    with pytest.raises(DataError, match=r"reward.margin: field needs .* 1 of 20 have none .*question 7"):
        prepared(files(tmp_path, rows, reward={"margin": "field"}), tmp_path / "one without")


def test_an_answer_that_a_reward_looks_for_must_be_in_the_prompts(tmp_path: Path) -> None:
    def config(rows: list[dict[str, Any]]) -> PipelineConfig:
        rewards = {"rewards": [{"type": "answer", "field": "answer"}]}
        return files(tmp_path, rows).model_copy(update={"ppo": configure(ppo=rewards).ppo})

    rows = pairs(20)
    prepared(config(rows), tmp_path / "all")
    for row in rows[7:9]:  # one is as many as data.max_bad_rows allows
        row["result"] = row.pop("answer")
    with pytest.raises(
        DataError,
        match=r"type answer needs the field 'answer' .* 2 of 20 have none .*question 7.* fields are result",
    ):
        prepared(config(rows), tmp_path / "two without")


def test_answers_that_no_response_can_reach_are_reported_or_end_the_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def config(bad: int) -> PipelineConfig:
        rows = pairs(40)
        for row in rows[:bad]:
            row["answer"] = ["2", "3"]
        rewards = {"rewards": [{"type": "answer", "field": "answer"}]}
        return files(tmp_path, rows).model_copy(update={"ppo": configure(ppo=rewards).ppo})

    prepared(config(2), tmp_path / "two")
    assert "no response can get the reward for 2 of 40 prompts (5.0%)" in caplog.text
    with pytest.raises(DataError, match=r"3 of 40 prompts .*\['2', '3'\].*data\.max_bad_rows=0\.05"):
        prepared(config(3), tmp_path / "three")


def test_fewer_prompts_than_a_step_takes_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(files(tmp_path, pairs(20)), tmp_path / "out")
    assert re.search(r"there are \d+ prompts to train on, fewer than ppo.prompts_per_step=", caplog.text)


def test_a_difficulty_that_leaves_few_prompts_is_reported_and_one_that_leaves_none_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row | {"pass_rate": 0.25 * (index % 2)} for index, row in enumerate(pairs(60))]

    def config(**difficulty: float) -> PipelineConfig:
        ppo = configure(ppo={"prompts_per_step": 32, "difficulty": difficulty}).ppo
        return files(tmp_path, rows).model_copy(update={"ppo": ppo})

    prepared(config(min=0.125), tmp_path / "few")
    assert re.search(r"there are 2\d prompts to train on, fewer than ppo.prompts_per_step=32", caplog.text)
    with pytest.raises(
        DataError, match=r"ppo\.difficulty: none of 5\d training prompts .*correct the limits"
    ):
        prepared(config(min=0.5), tmp_path / "none")


def test_few_steps_of_sft_are_reported_with_the_epochs_that_are_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = files(tmp_path, pairs(40))
    few = config.model_copy(update={"sft": configure(sft={"epochs": 3}).sft})
    prepared(few, tmp_path / "few")
    assert re.search(r"3\d demonstrations are only 3 steps of SFT .*; sft.epochs=20 gives 20", caplog.text)
    caplog.clear()
    prepared(config.model_copy(update={"sft": configure(sft={"epochs": 20}).sft}), tmp_path / "enough")
    assert "steps of SFT" not in caplog.text


def test_too_few_held_out_prompts_are_reported_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(rows: int, **register: int) -> bool:
        caplog.clear()
        config = files(tmp_path, pairs(rows))
        changed = configure(register=register).register_
        prepared(config.model_copy(update={"register_": changed}), tmp_path / f"{rows}-{register}")
        return bool(re.search(r"data.prompts: \d+ prompts are held out .*register.min_prompts", caplog.text))

    assert warned(20)
    assert not warned(20, min_prompts=1)


@pytest.mark.parametrize(
    ("ppo", "least", "words"),
    [
        (
            {"evaluate_prompts": 71},
            50,
            (
                "so at least 71 of them both choose",
                "199 held-out prompts",
                "enough: data.eval_fraction=0.23 is enough",
            ),
        ),
        (
            {"evaluate_prompts": 64},
            57,
            (
                "64 of 120 held-out prompts",
                "so 56 judge it",
                "hold out 121 (data.eval_fraction=0.15 is enough)",
            ),
        ),
    ],
)
def test_prompts_that_choose_the_policy_and_judge_it_are_reported(
    ppo: dict[str, int], least: int, words: tuple[str, ...]
) -> None:
    config = configure(ppo={"stop_patience": 3, **ppo}, register={"min_prompts": least})
    (warning,) = _too_few_held_out(config, 120, 1000)
    assert all(word in warning for word in words), warning


def test_more_prompts_are_needed_if_half_of_them_are_not_enough() -> None:
    config = configure(register={"min_prompts": 50})
    few, many = (next(iter(_too_few_held_out(config, 6, total))) for total in (60, 200))
    assert "champion; give more prompts, or lower" in few
    # 50, and 2 sqrt(50) = 14.1 as a reserve
    assert "champion; data.eval_fraction=0.33 is enough, or lower" in many


def test_a_limit_of_held_out_prompts_is_named_with_the_fraction() -> None:
    config = configure(data={"max_eval": 64}, ppo={"stop_patience": 3, "evaluate_prompts": 64})
    (warning,) = _too_few_held_out(config, 1000, 10_000)
    assert "192 held-out prompts are enough: data.eval_fraction=0.1 with data.max_eval=192 is" in warning


def test_nothing_is_made_of_data_that_are_not_those_of_the_stages_key(tmp_path: Path) -> None:
    config = files(tmp_path, pairs(30))
    key = source_digests(config)
    write_jsonl(tmp_path / "pairs.jsonl", pairs(31))
    context = stage_context(tmp_path, sources=key)
    out = context.output
    with pytest.raises(
        DataError, match=r"data.sft\[0\]: .*pairs.jsonl was changed after the run began.*nothing was stored"
    ):
        run(config, context)
    assert list(out.iterdir()) == []


def test_questions_alone_leave_room_for_answers() -> None:
    lengths, nothing = Lengths(512), GivenLimits(None, None, None, None)
    lengths.add("prompts", {PROMPT: 100})
    limits = fitted_limits(nothing, lengths.needed(nothing), 512)
    assert limits == Limits(100, 412, 1, 412)
    prompts, sampled = lengths.table(nothing, limits)
    assert (prompts["set"], prompts["from"]) == ("prompts", "the data")
    assert (sampled["field"], sampled["tokens"], sampled["from"]) == (NEW, 412, "the context")
    roomy = fitted_limits(nothing, lengths.needed(nothing), 4096)
    assert lengths.table(nothing, roomy)[-1]["from"] == "the default"
    assert lengths.table(nothing._replace(new=64), limits)[-1]["from"] == NEW
    assert lengths.needed(nothing._replace(new=64)).response == 64
    lengths.add("sft", {TEXT: 200})
    assert lengths.needed(nothing).response == 200, "as long as the texts"


def weighted(folder: Path, *weights: float) -> tuple[dict[str, Any], list[list[str]]]:
    """Prepare two files of 40 and 20 pairs with these weights. Return the card and, for each file, the
    prompts of its training pairs in their order.
    """
    made = pairs(60)
    for name, rows in (("a", made[:40]), ("b", made[40:])):
        write_jsonl(folder / f"{name}.jsonl", rows)
    sources: list[dict[str, Any]] = [{"path": str(folder / "a.jsonl")}, {"path": str(folder / "b.jsonl")}]
    for source, weight in zip(sources, weights, strict=False):
        source["weight"] = weight
    data = {"sft": sources[:1], "preference": sources, "prompts": sources[:1]}
    out = folder / "-".join(map(str, ("out", *weights)))
    card = prepared(configure(data=data), out)
    found = list(load_pairs(out, "train"))
    return card, [[pair.prompt for pair in found if pair.source == f"{name}.jsonl"] for name in ("a", "b")]


def test_a_weight_uses_training_rows_a_whole_number_of_times_and_a_fixed_sample_of_the_rest(
    tmp_path: Path,
) -> None:
    plain, (once, other) = weighted(tmp_path)
    card, (first, second) = weighted(tmp_path, 2.5, 0.5)
    assert len(first) == round(2.5 * len(once)) and len(second) == round(0.5 * len(other))
    times = Counter(first)
    assert set(times.values()) == {2, 3} and times.keys() == set(once)
    assert len(set(second)) == len(second) and set(second) < set(other)
    assert first[: len(once)] == once, "the copies follow all rows"
    a, b = (row for row in card["weights"] if row["field"].startswith("data.preference"))
    assert (a["rows"], a["used"], b["used"]) == (len(once), len(first), len(second))
    assert a["share"] == len(first) / (len(first) + len(second))
    assert card["counts"]["preference"]["train"] == len(first) + len(second)
    assert card["counts"]["preference"]["eval"] == plain["counts"]["preference"]["eval"]
    assert f"| data.preference[0] | 2.5 | {len(once)} | {len(first)} |" in card_markdown(card)


def test_copies_of_a_weight_are_no_further_prompts_of_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = [{"path": str(write_jsonl(tmp_path / "rows.jsonl", pairs(60)))}]
    data = {"sft": source, "preference": source, "prompts": [{**source[0], "weight": 4}]}
    prepared(configure(data=data, ppo={"prompts_per_step": 64}), tmp_path / "out")
    assert len(load_prompts(tmp_path / "out", "train")) > 64
    assert re.search(r"there are 5\d prompts to train on, fewer than ppo.prompts_per_step=64", caplog.text)


def test_a_weight_of_one_changes_no_file_and_no_key(tmp_path: Path) -> None:
    plain, _ = weighted(tmp_path)
    ones, _ = weighted(tmp_path, 1.0, 1.0)
    assert plain["weights"] == ones["weights"] == []
    names = [file.name for file in (tmp_path / "out").iterdir() if file.suffix == ".parquet"]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "out-1.0-1.0" / name).read_bytes()
    keys = []
    for weight in ({}, {"weight": 1}, {"weight": 2}):
        config = configure(data={**GENERATED, "sft": [{"path": "synthetic", **weight}]})
        keys.append(stage_key(config, "data", {}, {}))
    assert keys[0] == keys[1] != keys[2]
