"""What the SFT stage refuses of the base model that it was given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.sources import source_digests
from rlhf_core.errors import DataError
from rlhf_core.stages import sft
from tests.tiny_llama import save_tiny_llama


def test_weights_that_are_not_those_of_the_stages_key_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"first")
    config = PipelineConfig.model_validate({"model": {"path": str(model)}}, strict=False)
    key = source_digests(config)
    services: Any = SimpleNamespace(sources={"model": key["model"]})
    rank: Any = SimpleNamespace(torch_device="cpu")

    def load_policy(*_: Any, **__: Any) -> None:
        (model / "model.safetensors").write_bytes(b"other")

    monkeypatch.setattr("rlhf_core.models.policy.load_policy", load_policy)
    with pytest.raises(DataError, match=f"model: {model} was changed after the run began"):
        sft._train(rank, config, tmp_path, tmp_path, tmp_path, services)


def test_the_base_models_sampling_settings_do_not_go_into_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def engine(policy: Any, *_: Any, **__: Any) -> None:
        raise Seen(policy.lm.generation_config.to_diff_dict())

    model = save_tiny_llama(tmp_path / "model")
    (model / "generation_config.json").write_text('{"top_p": 0.5, "repetition_penalty": 1.3, "do_sample": true}')
    monkeypatch.setattr("rlhf_core.data.decoding.load_decoder", lambda _: SimpleNamespace(pad=0, eos=2, bos=1))
    monkeypatch.setattr("rlhf_core.training.engine.TrainingEngine", engine)
    config = PipelineConfig.model_validate({"model": {"path": str(model)}}, strict=False)
    services: Any = SimpleNamespace(sources={"model": source_digests(config)["model"]})
    rank: Any = SimpleNamespace(torch_device="cpu")
    with pytest.raises(Seen) as seen:
        sft._train(rank, config, tmp_path, tmp_path, tmp_path, services)
    assert not {"top_p", "repetition_penalty", "do_sample"} & set(seen.value.args[0])
    assert seen.value.args[0]["eos_token_id"] == 2
