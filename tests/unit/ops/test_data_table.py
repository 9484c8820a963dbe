"""`rlhf data` reads the first rows as the stage `data` reads all of them, and says what becomes of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from rlhf_core.config.load import load_config
from rlhf_core.config.ppo_sections import PTXConfig
from rlhf_core.data.check import check_data
from rlhf_core.data.tokenizer import TINY_TEMPLATE
from rlhf_core.errors import DataError
from rlhf_core.ops.data_table import data_table, read_data, show

PAIRS = [
    {"prompt": f"Name bird {number}.", "chosen": f"A robin {number}.", "rejected": "Bird bird."}
    for number in range(40)
]


def config_of(folder: Path, rows: list[dict[str, str]]) -> Path:
    """Write the rows and a configuration that reads them as all three sets, with a model from scratch."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = [{"path": str(pairs)}]
    config = folder / "my.yaml"
    config.write_text(yaml.safe_dump({"data": {"sft": source, "preference": source, "prompts": source}}))
    return config


def test_rows_are_counted_by_set_with_what_is_left_out(tmp_path: Path) -> None:
    table = read_data(config_of(tmp_path, [*PAIRS, PAIRS[0], {"prompt": "no answer"}]))
    counts = table.card["counts"]["preference"]
    assert counts["read"] == 42
    assert counts["bad"] == 1
    assert counts["dropped"] == {"duplicate": 1}
    assert counts["train"] + counts["eval"] == 40
    assert table.formats["preference"] == ["preference"]


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    table = read_data(config_of(tmp_path, PAIRS), rows=10)
    assert table.card["counts"]["preference"]["read"] == 10


def test_a_sample_shows_which_part_is_learned(tmp_path: Path) -> None:
    [[prompt, response]] = read_data(config_of(tmp_path, PAIRS)).samples["sft"]
    assert "Name bird" in prompt.text and not prompt.learned
    assert "A robin" in response.text and response.learned


def test_the_sample_of_pairs_has_both_responses_and_no_prompt_is_shown_twice(tmp_path: Path) -> None:
    table = read_data(config_of(tmp_path, PAIRS))
    chosen, rejected = table.samples["preference"]
    assert chosen[0] == rejected[0]
    assert "A robin" in chosen[1].text and "Bird bird." in rejected[1].text
    assert len({views[0][0].text for views in table.samples.values()}) == 3
    out = io.StringIO()
    show(table, Console(file=out, width=120))
    assert "rejected:\n⟦Bird bird." in out.getvalue()


def test_what_the_stage_warns_of_is_said_if_all_rows_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAIRS)
    whole, beginning = read_data(config), read_data(config, rows=20)
    assert whole.is_whole and not beginning.is_whole
    warning = "fewer than register.min_prompts"
    assert any(warning in each for each in whole.warnings)
    assert not any(warning in each for each in beginning.warnings), "more of the file may be held out"


def test_what_the_check_of_sources_warns_of_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAIRS)
    folder = tmp_path / "rows"
    folder.mkdir()
    (tmp_path / "pairs.jsonl").rename(folder / "train.jsonl")
    (folder / "test.jsonl").write_text(json.dumps(PAIRS[0]) + "\n")
    config.write_text(config.read_text().replace("pairs.jsonl", "rows"))
    assert any("1 of 2 files" in each for each in read_data(config).warnings)


def test_lengths_have_a_line_for_each_set_with_the_origin_of_the_limit(tmp_path: Path) -> None:
    out = io.StringIO()
    show(read_data(config_of(tmp_path, PAIRS), ["data.max_response_tokens=5"]), Console(file=out, width=140))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if "│" in line}
    assert {"sft: prompt", "preference: prompt", "prompts: prompt", "sampled responses"} <= set(lines)
    assert "the data" in lines["sft: prompt"]
    assert "data.max_response_tokens" in lines["preference: response"]


def test_demonstrations_that_are_not_trained_are_in_no_table(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, PAIRS))
    # Without its validation, which wants a model to start from.
    off = config.model_copy(update={"sft": config.sft.model_copy(update={"enabled": False})})
    assert any("data.sft: its rows are not trained" in str(each) for each in check_data(off))
    out = io.StringIO()
    show(data_table(off, rows=30), Console(file=out, width=140))
    assert "sft" not in out.getvalue() and "preference: prompt" in out.getvalue()
    ptx = off.model_copy(update={"ppo": off.ppo.model_copy(update={"ptx": PTXConfig(coef=1.0)})})
    assert not any("its rows are not trained" in str(each) for each in check_data(ptx))
    assert "sft" in data_table(ptx, rows=30).shown


@pytest.mark.parametrize(("rows", "share"), [(1000, "used as 72, 100.0% of the set"), (20, "used as 38")])
def test_what_a_weight_does_is_said(tmp_path: Path, rows: int, share: str) -> None:
    out = io.StringIO()
    show(read_data(config_of(tmp_path, PAIRS), ["data.sft.0.weight=2"], rows), Console(file=out, width=400))
    [line] = [line for line in out.getvalue().splitlines() if "weight 2" in line]
    assert line.startswith("data.sft[0] (") and line.endswith(f"rows are {share}")


def test_all_rows_are_read_if_no_source_has_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAIRS)
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "pairs.jsonl").read_text().replace("bird", "fish"))
    more = [f"data.{name}.1={{path: {other}}}" for name in ("sft", "preference", "prompts")]
    assert read_data(config, more, rows=60).is_whole, "40 of each source"
    assert not read_data(config, more, rows=40).is_whole


def test_a_problem_is_said_once(tmp_path: Path) -> None:
    rows = [{**row, "answer": str(at) if at else "a lake or a river"} for at, row in enumerate(PAIRS)]
    config = config_of(tmp_path, rows)
    rewards = "ppo.rewards=[{type: answer, extract: final_number}]"
    found = read_data(config, [rewards, "reward.enabled=false"]).warnings
    assert sum("no response can get the reward for 1 of 40" in each for each in found) == 1


def test_signs_of_markup_in_the_name_of_a_template_are_printed(tmp_path: Path) -> None:
    template = tmp_path / "a[b].jinja"
    template.write_text(TINY_TEMPLATE)
    out = io.StringIO()
    table = read_data(config_of(tmp_path, PAIRS), [f"data.chat_template={json.dumps(str(template))}"])
    show(table, Console(file=out, width=120))
    assert "with the chat template a[b].jinja:" in out.getvalue()


def test_the_chat_template_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAIRS)
    assert read_data(config, rows=20).card["template_from"] == "of models from scratch"
    ours = "deployments/configs/tools-chat.jinja"
    found = read_data(config, [f"data.chat_template={ours}"], rows=20).card["template_from"]
    assert found == "tools-chat.jinja"
    assert "data.template: plain" in read_data(config, ["data.template=plain"], 20).card["template_from"]


def test_what_would_end_the_stage_ends_the_command_with_the_same_message(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"question": "What?"}] * 20)
    with pytest.raises(DataError, match=r"data.sft\[0\]: 20 of 20 rows"):
        read_data(config)


def test_the_tables_name_sets_lengths_and_warnings(tmp_path: Path) -> None:
    out = io.StringIO()
    rows = [
        *PAIRS,
        {"prompt": "Name BIRD 0!", "chosen": "A robin.", "rejected": "Bird."},
        {"prompt": "no answer"},
    ]
    show(read_data(config_of(tmp_path, rows)), Console(file=out, width=120))
    text = out.getvalue()
    assert "pairs (preference)" in text and "held out" in text
    assert "response" in text and "longest" in text
    assert "⟦A robin" in text.replace("\n", "")
    assert "cannot be read: " in text and "pairs.jsonl:42: " in text
