"""The JSON Schema for editors accepts what `load_config` accepts, and refuses wrong names, types and ranges.

- every shipped configuration and the short forms pass
- an unknown key, a wrong type, a number outside of its range and an unknown `type` of a reward do not
- the command prints it with the descriptions of the fields
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlhf_cli.main import main
from rlhf_core.config.messages import editor_schema
from rlhf_core.config.yaml import read
from rlhf_core.system.files import shipped

CONFIGS = sorted(shipped("deployments/configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = editor_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("file", CONFIGS, ids=[file.stem for file in CONFIGS])
def test_every_shipped_configuration_passes(file: Path, validator: Any) -> None:
    validator.validate(read(file).tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"model": "Qwen/Qwen2.5-0.5B"},
        {"data": {"sft": "a.jsonl", "preference": {"path": "b.jsonl"}, "prompts": ["c", {"path": "d"}]}},
        {"reward": {"judge": {}}, "data": {"max_prompt_tokens": None}},
        {"ppo": {"rewards": [{"type": "model"}, {"type": "repetition", "weight": 0.5}]}},
    ],
)
def test_short_forms_pass(tree: dict[str, Any], validator: Any) -> None:
    validator.validate(tree)


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"ppo": {"stpes": 3}}, ["ppo"]),
        ({"ppo": {"steps": "many"}}, ["ppo", "steps"]),
        ({"sft": {"batch_size": 10**8}}, ["sft", "batch_size"]),
        ({"data": {"max_prompt_tokens": 0}}, ["data", "max_prompt_tokens"]),
        ({"ppo": {"rewards": [{"type": "modle"}]}}, ["ppo", "rewards", 0]),
        ({"model": 3}, ["model"]),
    ],
)
def test_wrong_names_types_and_ranges_are_refused(
    tree: dict[str, Any], place: list[str | int], validator: Any
) -> None:
    places = [list(error.absolute_path) for error in validator.iter_errors(tree)]
    assert places and all(each == place for each in places)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == editor_schema()
    assert printed["$defs"]["SFTConfig"]["properties"]["enabled"]["description"], "editors show it"
