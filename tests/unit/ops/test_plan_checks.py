"""`rlhf plan` and `rlhf run` make the same checks.

- what a run refuses before it starts, a plan refuses with the same message
- with `--gpus`, what only this machine lacks is no problem of the plan
- lengths that follow from the data are estimated from the first rows, and said to be
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.errors import InputError
from rlhf_core.ops.plan.plan import as_json, make_plan
from rlhf_core.run.checks import load_and_check
from tests.support.demo_data import GENERATED
from tests.support.model_folder import model_folder

pytestmark = pytest.mark.usefixtures("nothing_is_searched")

PAIR = {"prompt": "What is this? " * 4, "chosen": "It is this. " * 10, "rejected": "No."}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 256,
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NO_PPO: dict[str, Any] = {
    "ppo": {"enabled": False},
    "dpo": {"enabled": True},
    "reward": {"enabled": False},
    "register": {"policy": "dpo"},
}


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """Return a configuration that passes, with a base model of a context of 256 tokens."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(PAIR | {"prompt": f"{i} {PAIR['prompt']}"}) + "\n" for i in range(9)))
    sources = [{"path": str(rows)}]
    return {
        "run": {"device": "cpu", "home": str(tmp_path / "home")},
        "model": {"path": str(model_folder(tmp_path / "model", config__json=LLAMA))},
        "data": {"sft": sources, "preference": sources, "prompts": sources},
    }


def written(tmp_path: Path, tree: dict[str, Any]) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


MISSING_FILES = {
    "data": {**GENERATED, "sft": [{"path": "./none.jsonl"}], "prompts": [{"path": "./no.jsonl"}]}
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (MISSING_FILES | NO_PPO, ["data.sft.0.path", "data.prompts.0.path", "evaluate.judge: auto finds no"]),
        ({"data": {"max_prompt_tokens": 500}}, ["has a context of 256"]),
        (NO_PPO, ["evaluate.judge: auto finds no judge"]),
        ({"ppo": {"rewards": [{"type": "python", "file": "no.py", "function": "no:f"}]}}, ["ppo.rewards.0"]),
    ],
    ids=["files and judge", "context", "judge", "reward"],
)
def test_what_a_run_refuses_before_it_starts_a_plan_refuses_with_the_same_message(
    tmp_path: Path, tree: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    merged = {**tree, **changes, "data": {**tree["data"], **changes.get("data", {})}}
    path = written(tmp_path, merged)
    with pytest.raises(InputError) as of_run:
        load_and_check(path, [])
    with pytest.raises(InputError) as of_plan:
        make_plan(path)
    assert of_plan.value.message == of_run.value.message
    assert type(of_plan.value) is type(of_run.value)
    for word in words:
        assert word in of_plan.value.message


def test_for_other_devices_the_folders_of_this_machine_are_not_checked(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    (tmp_path / "file").write_text("")
    tree["run"] = {"home": str(tmp_path / "file" / "home")}
    path = written(tmp_path, tree)
    with pytest.raises(InputError, match=r"run\.home"):
        make_plan(path)
    assert make_plan(path, gpus="4xA100-80G").verdict.fits


def test_lengths_from_the_data_are_estimated_and_said_to_be(tmp_path: Path, tree: dict[str, Any]) -> None:
    plan = make_plan(written(tmp_path, tree))
    # 4 characters a token: 58 / 4 and 120 / 4.
    assert json.loads(as_json(plan))["limits"] == {
        "prompt": 15, "response": 30, "text": 1, "new": 30, "estimated": True
    }  # fmt: skip
    tree["data"] |= {"max_prompt_tokens": 9, "max_response_tokens": 9, "max_text_tokens": 9}
    tree["ppo"] = {"max_new_tokens": 8}
    assert json.loads(as_json(make_plan(written(tmp_path, tree))))["limits"] == {
        "prompt": 9, "response": 9, "text": 9, "new": 8, "estimated": False
    }  # fmt: skip
