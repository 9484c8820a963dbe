"""What `rlhf plan` calculates of memory, and what it offers.

- memory falls with checkpointing, smaller micro-batches, higher ZeRO stages, adapters and offload, and with
  adapters the reference and the reward model cost nothing more
- what does not fit is named, and the changes offered make it fit, each of them needed, pasted as they are
  printed
- an engine's KV cache holds as many tokens as have room in what it has of memory
- on a CPU, all engines of the evaluation share its memory, and fewer of them are offered
- before a run, GPUs of this machine that are known and too small are refused; unknown ones and a cluster's
  are not judged
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.errors import ConfigError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.ops.plan.speed import optimizer_step_time
from rlhf_core.pipeline import stages_between
from rlhf_core.planning.check import check_memory
from rlhf_core.planning.hardware import GIB, Device, Hardware, parse_gpus
from rlhf_core.planning.loads import device_loads
from rlhf_core.planning.memory import Model, engine_memory
from rlhf_core.planning.search import advise, compare_memory
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.planned_models import BFLOAT16, CONFIGS, LLAMA_8B, config, eight_b, peak
from tests.support.sampled import share
from tests.support.scripted_machine import ScriptedMachine, on_machine


@pytest.mark.parametrize(
    "better",
    [
        {"deepspeed": {"ranks": 8, "zero_stage": 3, **BFLOAT16}},
        {"deepspeed": {"ranks": 4, "zero_stage": 3, "offload": "optimizer", **BFLOAT16}},
        {"lora": {"r": 16}},
        {"micro_batch_tokens": 1024},
    ],
    ids=["ranks", "offload", "lora", "tokens"],
)
def test_settings_that_save_memory_lower_the_peak(better: dict[str, Any]) -> None:
    assert peak(config(sft=better), "sft") < peak(config(), "sft") - 0.5 * GIB


def test_weights_in_host_memory_leave_the_device_and_cost_time() -> None:
    def sft(offload: str, **more: Any) -> PipelineConfig:
        return config(
            sft={"deepspeed": {"ranks": 4, "zero_stage": 3, "offload": offload, **BFLOAT16, **more}}
        )

    assert peak(sft("optimizer"), "sft", phase="step") - peak(
        sft("all"), "sft", phase="step"
    ) == pytest.approx(1.05 * 2 * eight_b().parameters / 4)
    hardware = parse_gpus("8xA100-80G")
    optimizer, everything = (
        optimizer_step_time(Model(eight_b(), sft(offload).sft.deepspeed), 64, 1024, 8192, hardware)
        for offload in ("optimizer", "all")
    )
    assert everything > optimizer


def test_a_second_copy_of_the_weights_is_counted() -> None:
    def sft(hpz: int) -> float:
        return peak(
            config(sft={"deepspeed": {"ranks": 8, "zero_stage": 3, "hpz": hpz, **BFLOAT16}}),
            "sft",
            phase="step",
        )

    assert sft(4) - sft(1) == pytest.approx(1.05 * 2 * eight_b().parameters / 4)


def test_each_zero_stage_and_checkpointing_need_less() -> None:
    def sft(**deepspeed: Any) -> float:
        return peak(config(sft={"deepspeed": {"ranks": 8, "dtype": "bfloat16", **deepspeed}}), "sft")

    stages = [sft(zero_stage=stage, gradient_checkpointing=True) for stage in range(4)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4
    assert sft(zero_stage=3) > sft(zero_stage=3, gradient_checkpointing=True) + 10 * GIB


def test_float32_sums_and_heads_are_counted() -> None:
    def sft(head: str = "model", **deepspeed: Any) -> float:
        wanted = config(sft={"deepspeed": {"ranks": 2, "zero_stage": 2, **BFLOAT16, **deepspeed}})
        model = wanted.model.model_copy(update={"head_dtype": head})
        return peak(wanted.model_copy(update={"model": model}), "sft", phase="backward")

    # A shard of half the gradients, 4 bytes each in place of 2.
    sums = sft(grad_accum_dtype="float32") - sft()
    assert sums == pytest.approx(1.05 * 2 * eight_b().parameters / 2)
    assert sft("float32") > sft()


def test_with_adapters_reference_and_reward_model_are_no_second_copy() -> None:
    sharded = {"ranks": 2, "zero_stage": 2, **BFLOAT16}
    for what in ("policy+reference", "critic+reward"):
        both = device_loads(
            config(policy_deepspeed=sharded, critic_deepspeed=sharded, lora={"r": 16}),
            eight_b(),
            parse_gpus("H100").device,
        )
        weights = next(load.bytes.weights for load in both if load.what == what and load.phase == "step")
        assert weights == pytest.approx(2 * eight_b().parameters, rel=0.1)
    alone = config(policy_deepspeed=sharded, critic_deepspeed=sharded, lora={"r": 16}, colocate="none")
    assert peak(alone, "ppo", "reference") > 2 * eight_b().parameters


def test_weights_in_4_bits_take_little_more_than_half_a_byte_each() -> None:
    def weights(**lora: Any) -> float:
        alone = {"deepspeed": {"ranks": 1, "zero_stage": 2, **BFLOAT16}, "lora": {"r": 16, **lora}}
        loads = device_loads(config(alone), eight_b(), parse_gpus("8xA100-80G").device)
        return next(load.trainer.weights for load in loads if load.stage == "sft" and load.phase == "step")

    layers = eight_b().linear_parameters
    assert weights() - weights(quantize="nf4") == pytest.approx(layers * (2 - 0.516), rel=1e-3)


def test_an_average_of_the_weights_is_counted() -> None:
    averaged, plain = (
        peak(made, "ppo", "policy", phase="backward") for made in (config(ema_decay=0.99), config())
    )
    extra = averaged - plain
    assert extra == pytest.approx(1.05 * 4 * eight_b().parameters / 2)


def test_an_average_of_an_adapter_has_its_size() -> None:
    def backward(**ppo: Any) -> float:
        return peak(config(lora={"r": 8}, **ppo), "ppo", "policy", phase="backward")

    adapter = eight_b().adapter_parameters(8, None)
    assert backward(ema_decay=0.99) - backward() == pytest.approx(1.05 * 4 * adapter / 2)


def test_an_engine_on_the_trainers_device_takes_its_share() -> None:
    shared: dict[str, Any] = {"colocate": "all", "engine": {"gpu_memory_utilization": 0.3}}
    both = peak(config(**shared), "ppo", "policy", "8xH100-80G")
    assert both > 0.3 * parse_gpus("H100").device.memory + peak(config(), "ppo", "policy")
    assert (
        both - peak(config(colocate="all", engine={"gpu_memory_utilization": 0.25}), "ppo", "policy", "H100")
        > GIB
    )


@pytest.mark.parametrize(
    ("engine", "per_token"),
    # Keys and values of 32 layers and 8 heads of 128 numbers, 2 or 4 bytes each; half of them on each of two
    # GPUs.
    [({}, 131_072), ({"tensor_parallel": 2}, 65_536), ({"dtype": "float32"}, 262_144)],
)
def test_an_engine_holds_as_many_tokens_as_its_cache_has_room_for(
    engine: dict[str, Any], per_token: int
) -> None:
    found = engine_memory(eight_b(), config(engine=engine).ppo.engine, parse_gpus("H100").device)
    assert found.tokens == found.bytes.cache // per_token > 1000


def problems(configured: PipelineConfig, gpus: str) -> list[str]:
    return [problem.text for problem in compare_memory(configured, eight_b(), parse_gpus(gpus)).problems]


def test_too_little_memory_too_few_devices_and_no_room_for_one_sequence_are_named() -> None:
    assert problems(config(), "8xA100-80G") == []
    assert re.search(
        r"sft: policy needs [\d.]+ GiB on each device \(backward\); RTX4090-24G has 23.5",
        "\n".join(problems(config(), "8xRTX4090-24G")),
    )
    assert "sft: needs 4 devices; there are 2" in problems(config(), "2xH100-80G")
    few = next(text for text in problems(config(), "2xH100-80G") if text.startswith("ppo: needs"))
    assert (
        few
        == "ppo: needs 5 devices (2 policy + reference, 2 critic + reward model, 1 engines = 5); there are 2"
    )
    cramped = config(engine={"gpu_memory_utilization": 0.6})
    assert any("an engine's KV cache holds 0 tokens" in text for text in problems(cramped, "8xRTX4090-24G"))


OTHERS = ["8xA100-40G", "8xL40S-48G", "16xRTX4090-24G", "4xH100-80G", "2xH200-141G"]


@pytest.mark.sampled
@pytest.mark.parametrize("gpus", share(OTHERS, 2))
def test_the_changes_offered_make_it_fit_and_none_could_be_left_out(gpus: str) -> None:
    hardware, shape = parse_gpus(gpus), eight_b()
    wanted = config()
    changes = advise(wanted, shape, hardware)
    assert changes
    tree = wanted.model_dump(mode="json", by_alias=True)

    def fits(overrides: list[str]) -> bool:
        return compare_memory(config_from_tree(tree, "test", overrides), shape, hardware).fits

    assert fits(list(changes))
    rates = [change for change in changes if "learning_rate=" in change]
    # Adapters need other learning rates, which do not change the memory: ten times those of the
    # configuration.
    adapters = any(change.startswith("ppo.lora=") for change in changes)
    assert (
        ("ppo.policy.learning_rate=1e-05" in rates) == ("ppo.critic.learning_rate=5e-05" in rates) == adapters
    )
    for change in set(changes) - set(rates):
        assert not _fits_or_invalid(fits, [other for other in changes if other != change])


def _fits_or_invalid(fits: Any, overrides: list[str]) -> bool:
    try:
        return bool(fits(overrides))
    except ConfigError:
        return False


def test_a_small_change_is_enough_for_a_small_problem() -> None:
    wanted = config(
        sft={"deepspeed": {"ranks": 4, "zero_stage": 3, "dtype": "bfloat16"}, "micro_batch_tokens": 16384}
    )
    wanted = wanted.model_copy(update={"ppo": load_config(CONFIGS / "production.yaml").ppo})
    found = advise(wanted, eight_b(), parse_gpus("8xA100-80G"))
    assert found == ("sft.deepspeed.gradient_checkpointing=true",)


def test_without_any_way_out_none_is_offered() -> None:
    assert advise(config(), eight_b(), parse_gpus("RTX4090-24G", host_memory_gib=0)) is None


def test_before_a_run_gpus_that_are_too_small_are_refused_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(LLAMA_8B.read_text())
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    tree = {
        "run": {"device": "cuda"},
        "model": {"path": str(tmp_path)},
        "sft": {"deepspeed": {"dtype": "bfloat16"}},
    }
    wanted = config_from_tree(tree, "test")
    with on_machine(ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"] * 8)):
        [refused] = check_memory(wanted)
        assert isinstance(refused, ConfigError)
        assert re.match(
            r"sft: policy needs 1\d\d\.\d GiB on each device(?s:.*)it fits with sft\.", refused.message
        )
        changes = shlex.split(refused.message.rpartition("it fits with ")[2])
        tree = wanted.model_dump(mode="json", by_alias=True)
        assert list(check_memory(config_from_tree(tree, "test", changes))) == []
        [later] = check_memory(wanted, stages_between("data", "data"))
        assert isinstance(later, str)
        assert re.match(
            r"stages that this run has passed, or does not come to, do not fit: sft: policy needs 1\d\d\.\d",
            later,
        )
        monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
        assert list(check_memory(wanted)) == []
        monkeypatch.delenv("RAY_ADDRESS")
    with on_machine(ScriptedMachine(gpus=["NVIDIA T4"])):
        assert list(check_memory(wanted)) == []


def test_on_a_cpu_the_engines_of_the_evaluation_share_its_memory() -> None:
    hardware = Hardware(2, Device("CPU", 32 * GIB, 0.15e12, 10e9, 1e9))
    tree = {"run": {"device": "cpu"}, "ppo": {"engine": {"kv_cache_gib": 4.0}}}
    wanted = config_from_tree(tree, "test", ["evaluate.engines=16"])
    shape = base_model_shape(wanted)
    verdict = compare_memory(wanted, shape, hardware)
    assert [(problem.stage, problem.what) for problem in verdict.problems] == [("evaluate", "memory")]
    [load] = [load for load in verdict.loads if (load.stage, load.phase) == ("evaluate", "sample")]
    assert (load.devices, load.engine.cache) == (16, 4 * GIB)
    assert advise(wanted, shape, hardware) == ("evaluate.engines=4",)


def test_processes_that_share_one_memory_are_added_up() -> None:
    cores = Hardware(2, parse_gpus("A100-40G").device)
    cpu = Hardware(2, type(cores.device)("CPU", 3 * GIB, 1e12, 1e10, 1e9))
    verdict = compare_memory(
        load_config(CONFIGS / "demo.yaml"), base_model_shape(load_config(CONFIGS / "demo.yaml")), cpu
    )
    assert [(p.stage, p.what) for p in verdict.problems] == [("ppo", "memory")]
