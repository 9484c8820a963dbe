"""A multimodal model of the hub is trained and served as the text model that it contains.

- its text part has the class, the names and the logits of a text model, and is saved as one
- a missing tensor of the text part is refused; other tensors of the files are left out and can be listed
- a family without a text class in transformers, or whose class in vLLM cannot be imported, is refused before
  the run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.architectures import architecture_problems, package_problems
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.policy import load_policy
from rlhf_core.models.weights import check_headers, left_out
from rlhf_core.system.machine import Machine
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.multimodal_models import FAMILIES, save_multimodal

TEXT_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
IDS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_part_is_a_text_model_with_the_same_logits(family: str, tmp_path: Path) -> None:
    whole = save_multimodal(family, tmp_path / "hub")
    check_headers(tmp_path / "hub", attention="eager")
    policy = load_policy(tmp_path / "hub", dtype="float32", attention="eager", device="cpu")
    assert type(policy.lm).__name__ == TEXT_CLASSES[family]
    with torch.no_grad():
        expected = whole(input_ids=IDS).logits
        torch.testing.assert_close(policy.lm(input_ids=IDS).logits, expected)
    policy.save(tmp_path / "text")
    saved = ModelFolder(tmp_path / "text")
    assert saved.config["architectures"] == [TEXT_CLASSES[family]]
    assert not [name for name in saved.config if name in ("text_config", "vision_config")]
    assert saved.left_out == {}
    assert left_out(tmp_path / "text") == {}
    again = load_policy(tmp_path / "text", dtype="float32", attention="eager", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(again.lm(input_ids=IDS).logits, expected)


def test_a_head_that_is_tied_in_the_whole_model_is_tied(tmp_path: Path) -> None:
    whole = save_multimodal("qwen3_5", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    policy = load_policy(tmp_path, dtype="float32", attention="eager", device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(input_ids=IDS).logits, whole(input_ids=IDS).logits)


def test_what_is_left_out_is_the_rest_of_the_files(tmp_path: Path) -> None:
    save_multimodal("gemma3", tmp_path)
    folder = ModelFolder(tmp_path)
    assert {name.partition(".")[0] for name in folder.left_out} == {"vision_tower", "multi_modal_projector"}
    assert len(folder.left_out) + len(folder.tensors) == len(load_file(tmp_path / "model.safetensors"))
    assert "q_proj" in folder.layer_names
    assert "fc1" not in folder.layer_names
    found = left_out(tmp_path)
    assert found["left_out_tensors"] == len(folder.left_out)
    assert found["left_out_mib"] * 2**20 == sum(
        tensor.nbytes
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if name in folder.left_out
    )


def test_a_missing_tensor_of_the_text_part_is_refused(tmp_path: Path) -> None:
    save_multimodal("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights lack model\.norm\.weight"):
        check_headers(tmp_path, attention="eager")
    with pytest.raises(ModelError, match=r"the weights lack model\.norm\.weight"):
        load_policy(tmp_path, dtype="float32", attention="eager", device="cpu")


NO_SCORE = {
    "reward": {"enabled": False},
    "ppo": {"algorithm": "reinforce_pp", "rewards": [{"type": "repetition"}]},
}


def found(outer: str, text: str, **tree: Any) -> list[Any]:
    config = config_from_tree({"run": {"device": "cpu"}, "model": {"path": "o/m"}, **tree}, "test")
    settings = {"model_type": outer, "text_config": {"model_type": text}}
    return list(architecture_problems("o/m", settings, config))


def test_the_text_part_decides_what_can_run() -> None:
    assert found("gemma3", "gemma3_text") == []
    assert found("mistral3", "mistral") == []
    assert found("llama4", "llama4_text", **NO_SCORE) == []
    [problem] = found("gemma4", "gemma4_text")
    assert "gemma4_text, for which transformers has no model with a score" in problem.message
    [problem] = found("qwen2_5_vl", "qwen2_5_vl_text")
    assert "transformers has no class for its text part alone (qwen2_5_vl_text)" in problem.message


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_class_of_vllm_that_imports_torchvision_needs_it(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "has_package", lambda self, name: is_installed)
    settings = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    problems = [str(finding) for finding in package_problems("o/m", settings, PipelineConfig())]
    assert ["imports torchvision" in message for message in problems] == ([] if is_installed else [True])
    assert list(package_problems("o/m", {"model_type": "gemma3_text"}, PipelineConfig())) == []
    # The engines are on the nodes of the cluster, whose packages this machine does not know.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(package_problems("o/m", settings, PipelineConfig())) == []
