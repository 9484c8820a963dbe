"""What the SFT stage takes of the base model that it was given, and what it refuses.

- weights that changed since the run began are not trained
- a copy on another host must have the digest of the key
- on a cluster the driver, which may have no GPU, loads no model for the samples
- the base model's own sampling settings are not in the model that the stage saves
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from rlhf_core.config import PipelineConfig
from rlhf_core.data.sources import ModelState, model_state, require_same_state, source_digests
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import DataError
from rlhf_core.stages import sft
from rlhf_core.testing.trainer import ScriptedTrainer
from tests.support.tiny_llama import save_tiny_llama


def test_changed_base_weights_are_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    config = PipelineConfig.model_validate({"model": {"path": str(model)}}, strict=False)
    key, state = source_digests(config), model_state(config)
    context: Any = SimpleNamespace(sources={"model": key["model"]})
    rank: Any = SimpleNamespace(torch_device="cpu")

    def load_policy(*_: Any, **__: Any) -> None:
        (model / "model.safetensors").write_bytes(b"the second")

    monkeypatch.setattr("rlhf_core.stages.sft.load_policy", load_policy)
    with pytest.raises(DataError, match=f"model: {model} was changed after its digest was taken"):
        sft._train(rank, config, tmp_path, tmp_path, tmp_path, state, context)
    monkeypatch.setattr("rlhf_core.cluster.ranks.run_ranks", lambda *_, **__: pytest.fail("it was trained"))
    with pytest.raises(DataError, match=f"model: {model} was changed after the run began"):
        sft.run(config, context)


def test_a_copy_on_another_host_is_compared_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"first")
    config = PipelineConfig.model_validate({"model": {"path": str(tmp_path)}}, strict=False)
    key = source_digests(config)
    elsewhere = ModelState("another-host", (("model.safetensors", 1, 2, 3),))
    require_same_state(elsewhere, config, key)
    (tmp_path / "model.safetensors").write_bytes(b"second")
    with pytest.raises(DataError, match=f"model: {tmp_path} was changed after the run began"):
        require_same_state(elsewhere, config, key)


def test_sampling_settings_of_base_model_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny_llama(tmp_path / "base")
    GenerationConfig(do_sample=True, top_p=0.5, repetition_penalty=1.3, eos_token_id=5).save_pretrained(base)
    monkeypatch.setattr("rlhf_core.stages.sft.TrainingEngine", ScriptedTrainer)
    monkeypatch.setattr("rlhf_core.stages.sft.all_ranks_pack", lambda policy, *_: policy.packs)
    monkeypatch.setattr("rlhf_core.stages.sft.train_sft", lambda *_, **__: {})
    monkeypatch.setattr("rlhf_core.stages.sft.load_sft", lambda *_: [])
    monkeypatch.setattr("rlhf_core.stages.sft.load_decoder", lambda _: SimpleNamespace(pad=0, eos=2, bos=1))
    config = PipelineConfig.model_validate(
        {"model": {"path": str(base)}, "run": {"device": "cpu"}}, strict=False
    )
    state = model_state(config)
    sft._train(Rank(), config, tmp_path, tmp_path, tmp_path / "out", state, None)
    saved = GenerationConfig.from_pretrained(tmp_path / "out" / "model")
    assert saved.top_p in (None, 1) and saved.repetition_penalty in (None, 1)
    assert (saved.eos_token_id, saved.pad_token_id) == (2, 0)


def test_driver_of_a_cluster_loads_no_model_for_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(sft, "load_decoder", lambda _: str)
    monkeypatch.setattr(sft, "load_prompts", lambda *_: [SimpleNamespace(prompt="a question")])
    monkeypatch.setattr(sft, "AutoModelForCausalLM", SimpleNamespace())
    monkeypatch.setattr(
        "rlhf_core.evaluation.generate.responses_of",
        lambda *_, **__: {"sft": [SimpleNamespace(response="an answer")]},
    )
    config = PipelineConfig.model_validate({"sft": {"deepspeed": {"zero_stage": 2}}}, strict=False)
    assert config.sft.deepspeed.ranks == 1
    context: Any = SimpleNamespace(inputs={"data": tmp_path}, output=tmp_path)
    rows = sft._samples(config, context, "cuda")
    assert rows == [{"prompt": "a question", "response": "an answer"}]
