"""`rlhf init` writes a configuration that can be loaded, for the goals and the files that a user has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from rlhf_cli import init
from rlhf_cli.main import main
from rlhf_core.config.load import load_config
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.ops.init import Given, configuration, rates_of
from tests.support.model_folder import model_folder


def loaded(tmp_path: Path, given: Given) -> PipelineConfig:
    """Return the configuration that is written."""
    file = tmp_path / "my.yaml"
    file.write_text(configuration(given, "my"))
    return load_config(file)


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
        assert [source.path for source in sources] == ["pairs.jsonl"]


def test_each_file_is_read_as_what_it_was_given_for(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", "texts.jsonl", "pairs.jsonl", "s3://b/prompts.jsonl"))
    found = [config.data.sft[0].path, config.data.preference[0].path, config.data.prompts[0].path]
    assert found == ["texts.jsonl", "pairs.jsonl", "s3://b/prompts.jsonl"]


def test_prompts_with_answers_are_rewarded_by_them(tmp_path: Path, base: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    config = loaded(tmp_path, Given(base, "grpo", "texts.jsonl", prompts=str(prompts)))
    assert config.ppo.algorithm == "grpo"
    assert [reward.type for reward in config.ppo.rewards] == ["answer"]
    assert not config.reward.enabled


def test_dpo_trains_no_policy_by_ppo_and_registers_its_own(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "dpo", pairs="pairs.jsonl"))
    assert config.dpo.enabled and not config.ppo.enabled
    assert config.register_.policy == "dpo"


def test_a_model_that_follows_instructions_is_not_trained_first(tmp_path: Path, instruct: str) -> None:
    assert not loaded(tmp_path, Given(instruct, "dpo", pairs="pairs.jsonl")).sft.enabled


def test_a_chat_template_alone_does_not_make_a_model_the_start(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "qwen"))
    assert loaded(tmp_path, Given(model, "dpo", pairs="pairs.jsonl")).sft.enabled
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    assert not loaded(tmp_path, Given(model, "grpo", prompts=str(tmp_path / "prompts.jsonl"))).sft.enabled


def test_a_path_with_signs_of_yaml_is_quoted(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", pairs="d,1/a b: c.jsonl"))
    assert config.data.preference[0].path == "d,1/a b: c.jsonl"


def test_learning_rates_follow_the_size_of_the_model(tmp_path: Path, base: str) -> None:
    config = loaded(tmp_path, Given(base, "ppo", pairs="pairs.jsonl"))
    assert config.sft.optimizer.learning_rate == 1e-3
    assert rates_of("Qwen/Qwen2.5-0.5B") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Given("M", "dpo", sft="a.jsonl"), "needs pairs"),
        (Given("M", "ppo", sft="a.jsonl"), "needs a reward"),
        (Given("M", "grpo"), "needs a reward"),
    ],
)
def test_what_is_missing_is_named(given: Given, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configuration(given, "my")


def test_the_file_is_yaml_of_few_lines(base: str) -> None:
    text = configuration(Given(base, "ppo", pairs="pairs.jsonl"), "my")
    assert yaml.safe_load(text)["run"]["name"] == "my"
    assert len(text.splitlines()) < 25


def test_the_schema_for_editors_is_beside_the_file_that_names_it(
    tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "_show", lambda *arguments: None)  # the table, which needs a tokenizer
    out = tmp_path / "new" / "my.yaml"
    assert main(["init", "--model", base, "--pairs", "pairs.jsonl", "--out", str(out)]) == 0
    named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", out.read_text())
    assert named is not None
    schema = json.loads((out.parent / named[1]).read_text())
    jsonschema.validate(yaml.safe_load(out.read_text()), schema)
