"""What later stages need of an architecture is known before the first stage, without importing a library.

- the tables are those of the installed versions of transformers and vLLM
- each class has the backend that a vLLM engine chooses, and support of adapters is found through base classes
- positions and masks that let sequences of a batch influence each other limit the length of sequences
- an architecture whose parts have other names than the training calls is refused
- a hub model is checked in the data stage
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models import architectures
from rlhf_core.models.architectures import (
    architecture_problems,
    causal_class,
    engine_backend,
    engine_changes_classes,
    has_model_and_head,
    has_score_model,
    serves_adapters,
)
from rlhf_core.models.check import length_problems
from rlhf_core.testing import stage_context
from tests.support import library_architectures
from tests.support.demo_data import config_with_demo_data as config_from_tree

NO_SCORE = {
    "reward": {"enabled": False},
    "ppo": {"algorithm": "reinforce_pp", "rewards": [{"type": "repetition"}]},
}


def found(model_type: str, **tree: Any) -> list[Any]:
    config = config_from_tree({"run": {"device": "cpu"}, "model": {"path": "o/m"}, **tree}, "test")
    return list(architecture_problems("o/m", {"model_type": model_type}, config))


def test_the_tables_are_those_of_the_installed_versions() -> None:
    """After a change: python -m tests.support.library_architectures > rlhf_core/models/architectures.json."""
    assert architectures._tables()["versions"] == library_architectures.versions()
    assert causal_class("smollm3") == "SmolLM3ForCausalLM"
    assert causal_class("unknown") is None
    assert has_score_model("llama")
    assert not has_score_model("granite")


@pytest.mark.slow
def test_the_tables_are_what_the_sources_of_the_libraries_say() -> None:
    assert architectures._tables() == library_architectures.tables()


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from rlhf_core.models.architectures import *;"
        "engine_backend(causal_class('rwkv'), 'rwkv'); serves_adapters('MixtralForCausalLM');"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("llama", "vllm"),
        ("mixtral", "vllm"),
        ("smollm3", "transformers"),
        ("helium", "untested"),
        ("rwkv", None),
    ],
)
def test_the_class_that_an_engine_runs(model_type: str, backend: str | None, tmp_path: Path) -> None:
    name = str(causal_class(model_type))
    assert engine_backend(name, model_type) == backend
    for text in (f'{{"architectures": ["{name}"]}}', f'{{"model_type": "{model_type}"}}'):
        (tmp_path / "config.json").write_text(text)
        assert engine_changes_classes(tmp_path) == (backend != "vllm")


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("MixtralForCausalLM", True),
        ("MistralForCausalLM", True),  # its class inherits from that of Llama, in another module
        ("SmolLM3ForCausalLM", True),
        ("StableLmForCausalLM", False),
        ("GPT2LMHeadModel", False),
    ],
)
def test_whether_engines_serve_adapters_depends_on_the_architecture(name: str, served: bool) -> None:
    assert serves_adapters(name) == served


def test_a_model_without_a_score_is_refused_only_if_one_is_needed() -> None:
    [problem] = found("granite")
    assert isinstance(problem, ModelError)
    assert found("granite", **NO_SCORE) == []
    [problem] = found("granite", reward={"enabled": False}, ppo={"rewards": [{"type": "repetition"}]})
    assert "but ppo.algorithm=ppo needs one" in problem.message
    assert found("llama") == []
    assert found("unknown") == []


def test_without_ppo_only_a_reward_model_needs_a_score() -> None:
    alone = {"ppo": {"enabled": False}, "dpo": {"enabled": True}, "register": {"policy": "dpo"}}
    [problem] = found("granite", **alone)
    assert "but reward.enabled=true needs one" in problem.message
    assert problem.message.endswith("or set reward.enabled=false")
    assert found("granite", reward={"enabled": False}, **alone) == []


def test_an_adapter_of_dpo_needs_an_architecture_with_adapters_only_outside_float32() -> None:
    dpo = {"enabled": True, "lora": {"r": 8}}
    assert found("stablelm", dpo=dpo, **NO_SCORE) == []
    bfloat16 = {"dtype": "bfloat16", "zero_stage": 1}
    [problem] = found("stablelm", dpo=dpo | {"deepspeed": bfloat16}, **NO_SCORE)
    assert problem.message.startswith("dpo.lora: vLLM has no adapters for StableLmForCausalLM")
    assert found("llama", dpo=dpo | {"deepspeed": bfloat16}, **NO_SCORE) == []
    assert found("stablelm", dpo=dpo | {"enabled": False, "deepspeed": bfloat16}, **NO_SCORE) == []


def test_an_architecture_without_a_class_of_vllm() -> None:
    [warning] = found("helium")
    assert "HeliumForCausalLM, which is not in vLLM's registry" in warning
    [problem] = found("xglm", **NO_SCORE)
    assert isinstance(problem, ModelError)
    assert "vLLM cannot sample from" in problem.message


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "bloom", "rwkv"])
def test_an_architecture_whose_parts_have_other_names_is_refused(model_type: str) -> None:
    for tree in ({}, NO_SCORE):
        [problem] = found(model_type, **tree)
        assert isinstance(problem, ModelError)
        assert "has no `model` and `lm_head`" in problem.message


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "olmoe", "gpt_oss", "unknown"])
def test_an_architecture_that_trains_is_not_refused_for_its_parts(model_type: str) -> None:
    assert has_model_and_head(str(causal_class(model_type)))


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rope_parameters": LONGROPE}, "longrope"),
        ({"rope_parameters": {**LONGROPE, "rope_type": "yarn"}}, None),
        ({"rope_parameters": {**LONGROPE, "rope_type": "dynamic"}}, None),
        ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 65}, None),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"attention_chunk_size": 65}, None),
        ({"sliding_window": 64}, "sliding_window"),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
    ],
)
def test_sequences_that_are_too_long(settings: dict[str, Any], word: str | None) -> None:
    problems = [problem.message for problem in length_problems("m", settings, 65, "sdpa")]
    assert [str(word) in message for message in problems] == ([] if word is None else [True])
    masked = [problem.message for problem in length_problems("m", settings, 65, "eager")]
    assert masked == (problems if word == "longrope" else [])


def test_a_hub_model_is_checked_before_its_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_core.stages import data

    monkeypatch.setattr(data, "base_model_config", lambda config: {"model_type": "granite"})
    config = config_from_tree({"run": {"device": "cpu"}, "model": {"path": "o/m"}}, "test")
    with pytest.raises(ModelError, match="no model with a score"):
        data.run(config, stage_context(tmp_path))


def test_a_hub_model_with_positions_that_change_is_refused() -> None:
    from rlhf_core.data import prepare

    settings = {"model_type": "llama", "max_position_embeddings": 4096, "attention_chunk_size": 32}
    config = config_from_tree({"run": {"device": "cpu"}, "model": {"path": "o/m"}}, "test")
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        prepare._context_length(config, settings, 10)
