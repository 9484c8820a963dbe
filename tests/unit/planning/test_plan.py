"""What `rlhf plan` calculates.

- the shape of a model gives its number of parameters, as transformers counts them
- memory of weights, gradients and optimizer state follows ZeRO's arithmetic
- what does not fit is named, and the changes offered make it fit
- `--gpus` is a count and a known device; the command exits with 2 where it does not fit
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.planning.fit import judge
from rlhf_core.planning.hardware import parse_gpus
from rlhf_core.planning.memory import state_bytes
from rlhf_core.planning.shape import ModelShape, shape_of
from rlhf_core.planning.speed import step_time

LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
HH = "deployments/configs/hh-rlhf-llama3-8b.yaml"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA3_8B))
    return file


def _shape(llama: Path) -> ModelShape:
    return shape_of(config_from_tree({}, "test"), llama)


def test_llama_3_8b_has_its_published_number_of_parameters(llama: Path) -> None:
    assert _shape(llama).parameters == 8_030_261_248


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_parameters_are_counted_as_transformers_does(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, **settings)
    config.save_pretrained(tmp_path)
    extra = 2 * 64 if settings.get("attention_bias") else 0  # Llama's output projection has a bias too; Qwen's has none
    counted = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert shape_of(config_from_tree({"model": {"path": str(tmp_path)}}, "test")).parameters == counted - extra


@pytest.mark.parametrize(
    ("settings", "weights", "gradients", "optimizer"),
    [
        ({}, 4, 4, 8),
        ({"zero_stage": 1}, 4, 4, 12 / 4),
        ({"zero_stage": 2}, 4, 4 / 4, 12 / 4),
        ({"zero_stage": 3}, 4 / 4, 4 / 4, 12 / 4),
        ({"dtype": "bfloat16", "zero_stage": 1}, 2, 2, 12 / 4),
        ({"dtype": "bfloat16", "zero_stage": 2}, 2, 2 / 4, 12 / 4),
        ({"dtype": "bfloat16", "zero_stage": 3}, 2 / 4, 2 / 4, 12 / 4),
        ({"dtype": "bfloat16", "zero_stage": 3, "offload": "optimizer"}, 2 / 4, 0, 0),
    ],
)
def test_state_follows_zeros_arithmetic(
    settings: dict[str, Any], weights: float, gradients: float, optimizer: float
) -> None:
    deepspeed = DeepSpeedConfig.model_validate({"ranks": 4, **settings})
    kinds, host = state_bytes(1000, deepspeed, trained=True)
    assert kinds == {"weights": 1000 * weights, "gradients": 1000 * gradients, "optimizer": 1000 * optimizer}
    assert (host > 0) == ("offload" in settings)


def test_more_checkpointing_and_smaller_micro_batches_need_less(llama: Path) -> None:
    def sft_bytes(**settings: Any) -> float:
        deepspeed = {"ranks": 8, "zero_stage": 3, "dtype": "bfloat16", **settings.pop("deepspeed", {})}
        config = config_from_tree({"sft": {"deepspeed": deepspeed, **settings}}, "test")
        return judge(config, _shape(llama), 8, parse_gpus("A100-80G")[1]).loads[0].total

    plain = sft_bytes()
    assert sft_bytes(deepspeed={"gradient_checkpointing": True}) < plain
    assert sft_bytes(micro_batch_tokens=1024) < plain
    assert sft_bytes(deepspeed={"zero_stage": 1}) > plain


def test_a_step_takes_longer_on_fewer_and_slower_devices(llama: Path) -> None:
    config = config_from_tree({"ppo": {"engine": {"count": 2}}}, "test")
    slow, fast = (step_time(config, _shape(llama), parse_gpus(name)[1]) for name in ("A100-80G", "H100-80G"))
    assert slow.rollout > fast.rollout and slow.training > fast.training and slow.sync > fast.sync
    assert slow.total == pytest.approx(slow.rollout + slow.scoring + slow.training + slow.sync)


@pytest.mark.parametrize(("text", "count"), [("8xA100-80G", 8), ("h100", 1), ("2 x rtx4090-24g", 2)])
def test_gpus_are_a_count_and_a_known_device(text: str, count: int) -> None:
    assert parse_gpus(text)[0] == count


@pytest.mark.parametrize("text", ["8", "A100", "0xH100-80G", "3xFoo", ""])
def test_other_gpus_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus: must be a count and a device.*known: A100-40G"):
        parse_gpus(text)


def test_a_config_json_without_a_decoder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"d_model": 512}')
    with pytest.raises(ModelError, match=r"hidden_size"):
        shape_of(config_from_tree({}, "test"), file)


def test_the_shipped_configuration_fits_the_hardware_it_names(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", HH, "--gpus", "8xA100-80G", "--model-config", str(llama)]) == 0
    assert "fits 8 x A100-80G" in capsys.readouterr().out


def test_the_changes_offered_make_it_fit(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", HH, "--gpus", "8xA100-40G", "--model-config", str(llama), "ppo.policy_deepspeed.offload=none"]
    assert main(command) == 2
    said = capsys.readouterr().out
    assert "does not fit: ppo: policy+reference needs" in said.replace("\n", " ")
    changes = said.rpartition("fits with: ")[2].split()
    assert main([*command[:-1], "ppo.policy_deepspeed.offload=none", *changes]) == 0


def test_on_the_cpu_the_demo_shows_bytes_of_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deployments/configs/demo.yaml"]) == 0
    assert "MiB in host memory" in capsys.readouterr().out
