"""Models that are sharded while they are loaded (ZeRO-3, two ranks of the real DeepSpeed).

- weights, buffers, the self-test's answer, outputs, random numbers, one training step and the saved files
  have the bits of a model that was loaded whole: tied embeddings, adapters in bfloat16, experts whose tensors
  are merged, a frozen reference, critics from a reward model and from a policy
- no rank holds a whole model while it is loaded
- models that are refused when they are loaded whole are refused with the same message
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_core.system.processes import free_port
from tests.integration import sharded_loading
from tests.integration.limited_memory import make_model
from tests.integration.sharded_loading import CASES
from tests.support.prepared_ranks import spawn
from tests.support.tiny_llama import save_tiny_llama


def make_models(folder: Path) -> None:
    from transformers import LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

    from rlhf_core.models.score import ScoreStatistics

    save_tiny_llama(folder / "untied")
    save_tiny_llama(folder / "tied", tie_word_embeddings=True)
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(folder / "experts")
    scorer = LlamaForSequenceClassification.from_pretrained(folder / "untied", num_labels=1)
    scorer.save_pretrained(folder / "score")
    ScoreStatistics(0.5, 3.0).save(folder / "score")
    make_model(folder / "larger", layers=8, hidden=384, file_size="10MB")
    for name in ("bad-missing", "bad-misnamed", "bad-shape", "bad-values", "bad-overflow", "bad-integers"):
        shutil.copytree(folder / "untied", folder / name)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        up = "model.layers.1.mlp.up_proj.weight"
        match name:
            case "bad-missing":
                del weights[up]
            case "bad-misnamed":
                weights[f"other.{up}"] = weights.pop(up)
            case "bad-shape":
                weights[up] = torch.zeros(64, 64)
            case "bad-values":
                weights[up][3, 5] = float("nan")
                weights["model.norm.weight"][0] = float("inf")
            case "bad-overflow":
                weights[up][3, 5] = 1e6
            case "bad-integers":
                weights[up] = weights[up].to(torch.int8)
        save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_models(folder)
    spawn(sharded_loading.work, (2, free_port(), folder), 2)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_has_the_bits_of_a_whole_one(folder: Path, name: str) -> None:
    for rank in range(2):
        whole, sharded = (
            torch.load(folder / f"{name}-{how}-{rank}.pt", weights_only=True) for how in ("whole", "sharded")
        )
        assert list(whole) == list(sharded)
        different = [key for key, value in whole.items() if not torch.equal(value, sharded[key])]
        assert not different
    assert whole["packs"] and "buffer.model.rotary_emb.inv_freq" in whole
    if CASES[name][3]:
        changed = [key for key in whole if key.startswith("trained.")
                   and not torch.equal(whole[key], whole[key.replace("trained.", "loaded.")])]  # fmt: skip
        assert changed


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_is_saved_with_the_same_files(folder: Path, name: str) -> None:
    whole, sharded = (folder / f"saved-{name}-{how}" for how in ("whole", "sharded"))
    files = sorted(file.name for file in whole.iterdir())
    assert "model.safetensors" in files and "config.json" in files
    assert files == sorted(file.name for file in sharded.iterdir())
    assert [file for file in files if (whole / file).read_bytes() != (sharded / file).read_bytes()] == []


def test_a_model_is_refused_with_the_same_message(folder: Path) -> None:
    for rank in range(2):
        messages = json.loads((folder / f"refusals-{rank}.json").read_text())
        assert len(messages) == 6
        for whole, sharded in messages.values():
            assert whole == sharded
        assert "model.layers.1.mlp.up_proj.weight, model.norm.weight" in messages["bad-values"][0]


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_no_rank_holds_a_whole_model_while_it_is_loaded(folder: Path) -> None:
    weights = sum(file.stat().st_size for file in (folder / "larger" / "base").glob("*.safetensors"))
    for rank in range(2):
        assert 0.5 < int((folder / f"peak-{rank}").read_text()) / weights < 0.85
