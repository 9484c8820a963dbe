"""What the SFT stage takes of the base model that it was given, and what it refuses.

- weights that changed since the run began are not trained
- on a cluster the driver, which may have no GPU, loads no model for the samples
- the base model's own sampling settings are not in the model that the stage saves
- responses of a batch are those of each prompt alone, and end with the EOS token
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf_core.config import PipelineConfig
from rlhf_core.data.sources import source_digests
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import DataError, ModelError
from rlhf_core.stages import sft
from rlhf_core.stages.training import Folders
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, scripted_engines
from rlhf_core.testing.ranks import RayCall, scripted_ranks
from rlhf_core.testing.trainer import scripted_trainers, single_rank
from rlhf_core.types import PromptExample, SFTExample
from tests.support.demo_data import with_demo_data
from tests.support.tiny_llama import save_tiny_llama


def test_changed_base_weights_are_not_trained(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model")
    config = PipelineConfig.model_validate(
        with_demo_data({"model": {"path": str(model)}, "run": {"device": "cpu"}}), strict=False
    )
    key = source_digests(config)
    context = stage_context(tmp_path, sources={"model": key["model"]}, inputs={"data": tmp_path})
    save_tiny_llama(model, seed=1)
    changed = f"model: {model} was changed after the run began"
    with scripted_trainers() as trainers, pytest.raises(DataError, match=changed):
        sft.run(config, context)
    assert not trainers


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_targets_of_later_adapters_are_checked_before_training(tmp_path: Path, stage: str) -> None:
    model = save_tiny_llama(tmp_path / "model")
    tree = with_demo_data({"model": {"path": str(model)}, "run": {"device": "cpu"}})
    config = PipelineConfig.model_validate(
        {**tree, stage: {"lora": {"targets": ["input_layernorm"]}}}, strict=False
    )
    words = rf"{stage}.lora.targets: .* no linear layer input_layernorm .* use some of down_proj"
    with scripted_trainers() as trainers, pytest.raises(ModelError, match=words):
        folders = Folders({"data": tmp_path}, tmp_path, tmp_path)
        sft._train(Rank(), config, folders, stage_context(tmp_path))
    assert not trainers


def test_sampling_settings_of_base_model_are_removed(tmp_path: Path) -> None:
    base = save_tiny_llama(tmp_path / "base")
    GenerationConfig(do_sample=True, top_p=0.5, repetition_penalty=1.3, eos_token_id=5).save_pretrained(base)
    rows = [SFTExample((1, 5, 2), (0, 1, 1))]
    data = write_data_artifact(tmp_path / "data", sft=rows, eval_sft=rows)
    config = PipelineConfig.model_validate(
        with_demo_data({"model": {"path": str(base)}, "run": {"device": "cpu"}}), strict=False
    )
    with single_rank(), scripted_trainers():
        folders = Folders({"data": data}, tmp_path, tmp_path / "out")
        sft._train(Rank(), config, folders, stage_context(tmp_path))
    saved = GenerationConfig.from_pretrained(tmp_path / "out" / "model")
    assert saved.top_p in (None, 1) and saved.repetition_penalty in (None, 1)
    assert (saved.eos_token_id, saved.pad_token_id) == (2, 0)


def test_driver_of_a_cluster_loads_no_model_for_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    tokenizer = train_tokenizer([], 0)
    prompts = [PromptExample("p", "a question", (1, 5))]
    data = write_data_artifact(tmp_path / "data", eval_prompts=prompts, tokenizer=tokenizer)
    config = PipelineConfig.model_validate({"sft": {"deepspeed": {"zero_stage": 2}}}, strict=False)
    assert config.sft.deepspeed.ranks == 1
    context = stage_context(tmp_path, inputs={"data": data})
    assert not (context.output / "model").exists()
    answer = Reply(tokenizer.encode("an answer", add_special_tokens=False))
    with scripted_ranks() as calls, scripted_engines(lambda request: answer):
        rows = sft._samples(config, context, "cpu")
    assert rows == [{"prompt": "a question", "response": "an answer", "finished": True}]
    assert calls == [RayCall("connect", 1), RayCall("engine", 1), RayCall("disconnect")]


def test_responses_of_a_batch_are_those_of_each_prompt_alone(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path, eos_token_id=2)).eval()
    prompts = [PromptExample(str(n), "", tuple(range(3, 3 + n))) for n in (1, 4, 9)]
    # A temperature near 0 takes the most likely token, so that the seed does not matter.
    config = PipelineConfig.model_validate({"ppo": {"temperature": 1e-9, "max_new_tokens": 12}}, strict=False)
    together = sft._sampled(model, prompts, config, "cpu")
    alone = [sft._sampled(model, [prompt], config, "cpu")[0] for prompt in prompts]
    assert together == alone and {(len(row), ends) for row, ends in alone} == {(12, False)}
    [_, (row, _), _] = alone
    model.generation_config.eos_token_id = row[3]
    ended = sft._sampled(model, prompts, config, "cpu")
    assert ended[1] == (row[: row.index(row[3]) + 1], True)
