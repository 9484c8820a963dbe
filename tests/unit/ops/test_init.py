"""`rlhf init` writes a configuration that can be loaded, for the goals and the files that a user has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhf_cli import before
from rlhf_cli.main import main
from rlhf_core.config.consistency import check_consistency
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ops.init import PAIRS_OF_TWO, Given, configuration, rates_of
from tests.support.model_folder import model_folder


def loaded(tmp_path: Path, given: Given) -> PipelineConfig:
    """Return the configuration that is written."""
    file = tmp_path / "my.yaml"
    file.write_text(configuration(given, "my"))
    return load_config(file)


def write(folder: Path, name: str, *rows: dict[str, object]) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the working folder."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "pairs.jsonl", {"prompt": "Hi", "chosen": "Hello.", "rejected": "No."})
    write(tmp_path, "texts.jsonl", {"text": "Hello."})
    write(tmp_path, "answers.jsonl", {"prompt": "1 + 1?", "answer": "2"})


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A model without a chat template."""
    return str(model_folder(tmp_path / "base", tokenizer_config__json={}))


@pytest.fixture
def instruct(tmp_path: Path) -> str:
    """A model with a chat template."""
    return str(model_folder(tmp_path / "instruct"))


def test_pairs_alone_are_demonstrations_pairs_and_prompts(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", pairs="pairs.jsonl"))
    for sources in (config.data.sft, config.data.preference, config.data.prompts):
        assert [source.path for source in sources] == [str(tmp_path / "pairs.jsonl")]


def test_each_file_is_read_as_what_it_was_given_for(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", "texts.jsonl", "pairs.jsonl", "s3://b/prompts.jsonl"))
    found = [config.data.sft[0].path, config.data.preference[0].path, config.data.prompts[0].path]
    assert found == [str(tmp_path / "texts.jsonl"), str(tmp_path / "pairs.jsonl"), "s3://b/prompts.jsonl"]


def test_a_judge_is_trained_with_half_of_the_pairs_where_these_are_enough(tmp_path: Path, base: str) -> None:
    row: dict[str, object] = {"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}
    for count, expected in ((PAIRS_OF_TWO - 1, False), (PAIRS_OF_TWO, True)):
        write(tmp_path, "pairs.jsonl", *[row] * count)
        config = loaded(tmp_path, Given(base, "ppo", pairs="pairs.jsonl"))
        assert (config.reward.judge is not None) == expected
    assert "# Half of the 4,000 pairs train a second reward model" in configuration(
        Given(base, "ppo", pairs="pairs.jsonl"), "my"
    )
    assert loaded(tmp_path, Given(base, "dpo", pairs="pairs.jsonl")).reward.judge is None


def test_prompts_with_answers_are_rewarded_by_them(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "grpo", "texts.jsonl", prompts="answers.jsonl"))
    assert config.ppo.algorithm == "grpo"
    assert [reward.type for reward in config.ppo.rewards] == ["answer"]
    assert not config.reward.enabled
    with_pairs = loaded(tmp_path, Given(base, "grpo", pairs="pairs.jsonl", prompts="answers.jsonl"))
    assert [reward.type for reward in with_pairs.ppo.rewards] == ["answer", "model"]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "2 + 3?", "ground_truth": "5"}, "ground_truth"),
        (
            {"prompt": "2 + 3?", "reward_model": {"style": "rule", "ground_truth": "5"}},
            "reward_model.ground_truth",
        ),
    ],
)
def test_answers_of_other_names_are_renamed(
    tmp_path: Path, base: str, row: dict[str, Any], field: str
) -> None:
    (tmp_path / "named.jsonl").write_text(json.dumps(row) + "\n")
    config = loaded(tmp_path, Given(base, "grpo", "texts.jsonl", prompts="named.jsonl"))
    assert [reward.type for reward in config.ppo.rewards] == ["answer"]
    assert config.data.prompts[0].rename == {field: "answer"}


def test_dpo_trains_no_policy_by_ppo_and_registers_its_own(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "dpo", pairs="pairs.jsonl"))
    assert config.dpo.enabled and not config.ppo.enabled
    assert config.register_.policy == "dpo"
    assert [str(each) for each in check_consistency(config)] == [], "its own file has nothing to warn of"


def test_a_model_that_follows_instructions_is_not_trained_first(tmp_path: Path, instruct: str) -> None:
    assert not loaded(tmp_path, Given(instruct, "dpo", pairs="pairs.jsonl")).sft.enabled


@pytest.mark.parametrize(
    ("model", "is_start"),
    [
        ("google/gemma-3-1b-it", True),
        ("google/gemma-3-27b-it-qat", True),
        ("GroNLP/gpt2-small-italian", False),
    ],
)
def test_the_name_of_a_model_says_it_as_a_word(model: str, is_start: bool) -> None:
    text = configuration(Given(model, "ppo", pairs="pairs.jsonl"), "my")
    assert ("sft: {enabled: false}" in text) == is_start


def test_a_chat_template_alone_does_not_make_a_model_the_start(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "qwen"))
    assert loaded(tmp_path, Given(model, "dpo", pairs="pairs.jsonl")).sft.enabled
    assert not loaded(tmp_path, Given(model, "grpo", prompts="answers.jsonl")).sft.enabled


def test_a_path_with_signs_of_yaml_is_quoted(tmp_path: Path, base: str) -> None:
    (tmp_path / "d,1").mkdir()
    (tmp_path / "pairs.jsonl").rename("d,1/a b: c.jsonl")
    config = loaded(tmp_path, Given(base, "ppo", pairs="d,1/a b: c.jsonl"))
    assert config.data.preference[0].path.endswith("d,1/a b: c.jsonl")


def test_a_name_that_is_a_date_or_a_number_is_a_text(base: str) -> None:
    for name in ("2026-11-29", "1", "my", "no", "null", ".5", "v1:"):
        assert (
            yaml.safe_load(configuration(Given(base, "ppo", pairs="pairs.jsonl"), name))["run"]["name"]
            == name
        )


def test_learning_rates_follow_the_size_of_the_model(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", pairs="pairs.jsonl"))
    assert config.sft.optimizer.learning_rate == 1e-3
    assert rates_of("Qwen/Qwen2.5-0.5B") is None


@pytest.mark.parametrize(("rows", "epochs"), [(1, 20), (300, 4), (1500, 1)])
def test_few_demonstrations_are_trained_on_until_responses_end(
    tmp_path: Path, base: str, rows: int, epochs: int
) -> None:
    write(tmp_path, "rows.jsonl", *[dict[str, object](text=f"row {number}") for number in range(rows)])
    assert loaded(tmp_path, Given(base, "ppo", "rows.jsonl", "pairs.jsonl")).sft.epochs == epochs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Given("M", "dpo", sft="texts.jsonl"), "needs pairs"),
        (Given("M", "ppo", sft="texts.jsonl"), "needs a reward"),
        (Given("M", "grpo"), "needs a reward"),
    ],
)
def test_what_is_missing_is_named(given: Given, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configuration(given, "my")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            Given("M", "ppo", pairs="answers.jsonl"),
            r"--pairs answers.jsonl: none of the first 1 rows can be used: this is a `prompt` row; a pair",
        ),
        (Given("M", "ppo", sft="none.jsonl", pairs="pairs.jsonl"), "--sft: file not found: none.jsonl"),
    ],
)
def test_a_file_without_rows_for_its_option_is_named_with_the_option(given: Given, message: str) -> None:
    with pytest.raises(DataError, match=message):
        configuration(given, "my")


CALLED = {
    "tools": [{"name": "clock", "parameters": {}}],
    "messages": [
        {"role": "user", "content": "Is it late?"},
        {"role": "assistant", "reasoning_content": "I look.", "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "It is noon."},
    ],
}


def test_rows_with_tools_and_thoughts_are_read_with_a_template_that_renders_them(
    tmp_path: Path, base: str, instruct: str
) -> None:
    write(tmp_path, "chats.jsonl", CALLED)
    for model in (base, instruct):
        config = loaded(tmp_path, Given(model, "dpo", "chats.jsonl", "pairs.jsonl"))
        assert config.data.thoughts == "keep"
        assert config.data.chat_template is not None and config.data.template == "chat"
        assert "tool_calls" in Path(config.data.chat_template).read_text()
    own = str(model_folder(tmp_path / "own", tokenizer_config__json={"chat_template": "{{ tools }}"}))
    assert loaded(tmp_path, Given(own, "dpo", "chats.jsonl", "pairs.jsonl")).data.chat_template is None


def test_a_start_that_has_not_learned_the_template_is_named(tmp_path: Path, instruct: str) -> None:
    asked = {"prompt": "1 + 1?", "answer": "2", "tools": CALLED["tools"]}
    write(tmp_path, "asked.jsonl", asked)
    note = "the model as it is, which has not learned data.chat_template\n"
    assert note in configuration(Given(instruct, "grpo", prompts="asked.jsonl"), "my")
    assert note not in configuration(Given(instruct, "grpo", prompts="answers.jsonl"), "my")


def test_the_file_is_yaml_of_few_lines(base: str) -> None:
    text = configuration(Given(base, "ppo", pairs="pairs.jsonl"), "my")
    assert yaml.safe_load(text)["run"]["name"] == "my"
    assert len(text.splitlines()) < 25


def test_the_schema_for_editors_is_beside_the_file_that_names_it(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before, "_show", lambda *arguments: None)  # the table, which needs a tokenizer
    out = tmp_path / "new" / "my.yaml"
    assert main(["init", "--model", base, "--pairs", "pairs.jsonl", "--out", str(out)]) == 0
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", out.read_text())
    assert named is not None
    schema = json.loads((out.parent / named[1]).read_text())
    jsonschema.validate(yaml.safe_load(out.read_text()), schema)


def test_prompts_of_which_some_have_no_answer_are_named(tmp_path: Path, base: str) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1) if i else None} for i in range(4)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="; 1 of the first 4 prompts have no 'answer': give it or remove"):
        configuration(Given(base, "grpo", prompts="some.jsonl"), "my")


def test_a_refused_file_is_not_written_and_says_so(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise DataError("data.sft[0]: 8 of 51 rows cannot be used")

    monkeypatch.setattr(before, "_show", refuse)
    out = tmp_path / "my.yaml"
    assert main(["init", "--model", base, "--pairs", "pairs.jsonl", "--out", str(out)]) == 2
    assert f"{out} was not written; to change these lines, save them" in capsys.readouterr().out
    assert not out.exists()
