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
