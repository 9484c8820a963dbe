"""What a short configuration means: forms for one path, paths beside the file, what follows from a goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.load import load_config
from rlhf_core.errors import ConfigError

OWN = "data: {sft: a.jsonl, preference: a.jsonl, prompts: a.jsonl}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the working folder."""
    (tmp_path / "work").mkdir()
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "beside"


def written(folder: Path, text: str) -> Path:
    file = folder / "my.yaml"
    file.write_text(text)
    return file


def test_a_name_is_a_model_and_a_file_is_a_source(folder: Path) -> None:
    config = load_config(written(folder, "model: Qwen/Qwen2.5-0.5B\n" + OWN))
    assert config.model.path == "Qwen/Qwen2.5-0.5B"
    assert [source.path for source in config.data.sft] == ["a.jsonl"]
    several = load_config(written(folder, OWN.replace("sft: a.jsonl", "sft: [a.jsonl, {path: b.jsonl}]")))
    assert [source.path for source in several.data.sft] == ["a.jsonl", "b.jsonl"]


def test_an_override_has_the_same_forms(folder: Path) -> None:
    file = written(folder, OWN)
    assert load_config(file, ["data.sft=b.jsonl"]).data.sft[0].path == "b.jsonl"
    assert load_config(file, ["data.sft.0.limit=3"]).data.sft[0].limit == 3


def test_relative_inputs_are_those_beside_the_file(folder: Path) -> None:
    (folder / "a.jsonl").touch()
    (folder / "base").mkdir()
    (folder / "score.py").touch()
    reward = "ppo: {rewards: [{type: python, file: score.py, function: 'score:f'}]}\n"
    config = load_config(written(folder, "model: base\nreward: {enabled: false}\n" + OWN + reward))
    assert config.data.prompts[0].path == str(folder / "a.jsonl")
    assert config.model.path == str(folder / "base")
    assert config.ppo.rewards[0].file == str(folder / "score.py")  # type: ignore[union-attr]


def test_only_addresses_of_inputs_are_looked_up(folder: Path) -> None:
    for name in ("synthetic", "main", "v.jsonl", "f.py"):
        (folder / name).mkdir()
    text = (
        "model: {path: A/B, revision: main}\nregister: {votes: [v.jsonl]}\nreward: {enabled: false}\n"
        "data: {sft: synthetic, prompts: synthetic, preference: []}\n"
        "ppo: {algorithm: grpo, rewards: [{type: repetition}],"
        " advantages: {type: python, file: f.py, function: 'f:f'}}\n"
    )
    config = load_config(written(folder, text))
    assert config.model.revision == "main" and config.data.sft[0].path == "synthetic"
    assert config.register_.votes == (str(folder / "v.jsonl"),)
    assert config.ppo.advantages is not None and config.ppo.advantages.file == str(folder / "f.py")


def test_what_is_not_beside_the_file_starts_at_the_working_folder(folder: Path) -> None:
    Path("a.jsonl").touch()
    assert load_config(written(folder, OWN)).data.sft[0].path == "a.jsonl"


def test_overrides_and_outputs_start_at_the_working_folder(folder: Path) -> None:
    (folder / "b.jsonl").touch()
    (folder / "home").mkdir()
    config = load_config(written(folder, "run: {home: home}\n" + OWN), ["data.sft=b.jsonl"])
    assert config.data.sft[0].path == "b.jsonl"
    assert config.run.home == "home"


def test_shipped_configurations_are_found_from_any_folder(folder: Path) -> None:
    assert load_config("deployments/configs/demo.yaml").run.name == "demo"


def test_an_algorithm_that_compares_samples_has_several(folder: Path) -> None:
    grpo = load_config(written(folder, OWN + "run: {device: cpu}\nppo: {algorithm: grpo}\n")).ppo
    assert (grpo.samples_per_prompt, grpo.prompts_per_step) == (8, 8)
    assert load_config(written(folder, OWN + "run: {device: cpu}\n")).ppo.prompts_per_step == 64
    given = load_config(
        written(folder, OWN + "run: {device: cpu}\nppo: {algorithm: grpo, samples_per_prompt: 8}\n")
    )
    assert given.ppo.prompts_per_step == 64


def test_dpo_alone_registers_its_policy(folder: Path) -> None:
    alone = load_config(written(folder, OWN + "ppo: {enabled: false}\ndpo: {enabled: true}\n"))
    assert alone.register_.policy == "dpo"
    both = load_config(written(folder, OWN + "dpo: {enabled: true}\n"))
    assert both.register_.policy == "ppo"


def test_a_model_that_follows_instructions_needs_no_demonstrations(folder: Path) -> None:
    text = "model: Qwen/Qwen2.5-0.5B-Instruct\nsft: {enabled: false}\n" + OWN.replace("sft: a.jsonl, ", "")
    config = load_config(written(folder, text))
    assert config.data.sft == ()
    assert "sft" not in config.training_sections


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN + "sft: {enabled: false}\n", "sft.enabled=false needs model.path"),
        (OWN.replace("sft: a.jsonl", "sft: []"), "data.sft must have a source"),
        ("model: M\n" + OWN.replace("sft: a.jsonl, ", ""), "data.sft: missing.*or set sft.enabled=false"),
        (
            "model: M\nsft: {enabled: false}\nppo: {ptx: {coef: 0.1}}\n" + OWN.replace("sft: a.jsonl, ", ""),
            "ppo.ptx needs demonstrations",
        ),
    ],
)
def test_a_start_without_data_or_model_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(written(folder, text))
