"""Which engine samples which model.

- models that differ in the values of their weights alone are sampled by one engine, which gets the weights of
  each
- a model with an adapter, of another configuration or with other tensors has an engine of its own
- weights that differ from those of the files end the stage, and the engine
- the progress counts the responses of all models
- several answers to each prompt are in order: the first ones to all prompts, then the second ones
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import WeightSyncError
from rlhf_core.evaluation.generate import responses_to_sets
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.testing import RecordingProgress, stage_context
from rlhf_core.testing.engines import Reply, Request, scripted_engines
from rlhf_core.testing.ranks import scripted_ranks
from rlhf_core.types import PromptExample, RewardInput
from tests.support.tiny_llama import save_tiny_llama

SETS = {
    "one": [PromptExample(f"p{i}", "", (1, 2)) for i in range(3)],
    "two": [PromptExample(f"q{i}", "", (1,)) for i in range(2)],
}


def config_of(**evaluate: int) -> PipelineConfig:
    return config_from_tree({"run": {"device": "cpu"}, "evaluate": evaluate}, "test")


def number(request: Request) -> Reply:
    """The response is the number in the name of the model."""
    return Reply((int(request.model.name[-1]),))


def sample(tmp_path: Path, models: dict[str, PolicyFiles], config: PipelineConfig | None = None) -> Any:
    context = stage_context(tmp_path / "stage")
    found = responses_to_sets(config or config_of(), models, str, SETS, device="cpu", context=context)
    assert isinstance(context.progress, RecordingProgress)
    return found, [report[1:3] for report in context.progress.reports]


def tokens(found: dict[str, dict[str, list[RewardInput]]]) -> dict[str, dict[str, list[Any]]]:
    return {
        model: {name: [response.response_ids for response in responses] for name, responses in sets.items()}
        for model, sets in found.items()
    }


EXPECTED = {model: {"one": [(i,)] * 3, "two": [(i,)] * 2} for i, model in enumerate(("sft", "ppo", "dpo"))}


def test_models_of_one_kind_are_sampled_by_one_engine(tmp_path: Path) -> None:
    models = {
        name: PolicyFiles(save_tiny_llama(tmp_path / f"m{i}", seed=i)) for i, name in enumerate(EXPECTED)
    }
    with scripted_engines(number) as engines:
        found, progress = sample(tmp_path, models)
    assert tokens(found) == EXPECTED
    assert [engine.options["weight_transfer"] for engine in engines] == ["files"]
    assert engines[0].is_shut_down
    assert progress == [(done, 15) for done in (3, 5, 8, 10, 13, 15)]


@pytest.mark.parametrize("engines", [1, 2])
def test_several_answers_begin_with_the_first_ones_to_all_prompts(tmp_path: Path, engines: int) -> None:
    models = {"sft": PolicyFiles(save_tiny_llama(tmp_path / "m0"))}
    context = stage_context(tmp_path / "stage")
    with scripted_engines(lambda request: Reply((request.sample_index,))), scripted_ranks():
        found = responses_to_sets(
            config_of(engines=engines), models, str, SETS, device="cpu", context=context, answers=2
        )
    for name, prompts in SETS.items():
        ids = [prompt.prompt_id for prompt in prompts]
        assert [response.prompt_id for response in found["sft"][name]] == ids * 2
        wanted = [(0,)] * len(ids) + [(1,)] * len(ids)
        assert [response.response_ids for response in found["sft"][name]] == wanted
    assert isinstance(context.progress, RecordingProgress)
    assert context.progress.reports[-1][1:3] == (10, 10)


def test_several_engines_sample_their_share_of_each_model(tmp_path: Path) -> None:
    models = {
        name: PolicyFiles(save_tiny_llama(tmp_path / f"m{i}", seed=i)) for i, name in enumerate(EXPECTED)
    }
    with scripted_ranks() as calls, scripted_engines(number) as engines:
        found, progress = sample(tmp_path, models, config_of(engines=2))
    assert tokens(found) == EXPECTED
    assert len(engines) == 2 and [call.what for call in calls] == ["connect", "engine", "disconnect"]
    # The second engine is taken to be as far as the first, which has one prompt more.
    assert progress[-1] == (15, 15)


def change_config(folder: Path) -> PolicyFiles:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-5}))
    return PolicyFiles(folder)


@pytest.mark.parametrize("kind", ["adapter", "config", "shape", "quantized", "no files"])
def test_other_models_have_an_engine_of_their_own(tmp_path: Path, kind: str) -> None:
    one = save_tiny_llama(tmp_path / "m0")
    other = save_tiny_llama(tmp_path / "m1", seed=1)
    files = PolicyFiles(other)
    if kind == "adapter":
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 4}')
        files = PolicyFiles(one, tmp_path / "adapter")
    elif kind == "config":
        files = change_config(other)
    elif kind == "shape":
        # The same configuration with other tensors.
        larger = save_tiny_llama(tmp_path / "larger1", intermediate_size=64)
        (larger / "config.json").write_bytes((one / "config.json").read_bytes())
        files = PolicyFiles(larger)
    elif kind == "quantized":
        for folder in (one, other):
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {}}))
    else:
        files = PolicyFiles(tmp_path / "m1" / "missing1")
    with scripted_engines(lambda request: Reply((1,))) as engines:
        sample(tmp_path, {"sft": PolicyFiles(one), "ppo": files})
    assert [engine.options["weight_transfer"] for engine in engines] == [None, None]


def test_other_weights_than_those_of_the_files_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {
        name: PolicyFiles(save_tiny_llama(tmp_path / f"m{i}", seed=i))
        for i, name in enumerate(("sft", "ppo"))
    }
    monkeypatch.setenv("RLHF_FAIL", "weight_sync.load:2:drop")
    with scripted_engines(number) as engines, pytest.raises(WeightSyncError, match="tensors differ"):
        sample(tmp_path, models)
    assert len(engines[0].requests) == 5 and engines[0].is_shut_down
