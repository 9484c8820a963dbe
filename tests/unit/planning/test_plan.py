"""What `rlhf plan` calculates and says.

- the batch algebra counts sequences, ranks, micro-batches and optimizer steps
- memory falls with checkpointing, smaller micro-batches, higher ZeRO stages, adapters and offload, and with
  adapters the reference and the reward model cost nothing more
- what does not fit is named, and the changes offered make it fit, each of them needed, pasted as they are
  printed
- an engine's KV cache holds as many tokens as have room in what it has of memory
- more, faster devices take less time; without CUDA graphs, offloaded or with checkpointing it takes more; the
  time of a rollout and of an optimizer step is the arithmetic, memory and links written out here
- `--gpus` is a count and a known device; the command exits with 2 where it does not fit; `--json` says the
  same
- on a CPU, all engines of the evaluation share its memory, and fewer of them are offered
- before a run, GPUs of this machine that are known and too small are refused; unknown ones and a cluster's
  are not judged
- every shipped profile fits the hardware that it names; a reward model of 8B on six cards of 24 GB fits with
  half the context, and with all parameters or the whole context it does not
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.errors import ConfigError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.models.shape import ModelShape
from rlhf_core.pipeline import stages_between
from rlhf_core.planning.batches import describe_batches
from rlhf_core.planning.fit import advise, check_memory, compare_memory
from rlhf_core.planning.hardware import GIB, Device, Hardware, parse_gpus, visible_hardware
from rlhf_core.planning.loads import device_loads
from rlhf_core.planning.memory import Model, engine_memory
from rlhf_core.planning.speed import PHASES, StepTime, optimizer_step_time, step_time
from rlhf_core.testing.machine import ScriptedMachine, on_machine

CONFIGS = Path(__file__).resolve().parents[3] / "deployments" / "configs"
LLAMA_8B, MISTRAL_7B = CONFIGS / "shapes" / "llama-3-8b.json", CONFIGS / "shapes" / "mistral-7b.json"
TOYS = Hardware(8, Device("toy", 80 * GIB, flops=3e14, bandwidth=2e12, link=1e11))
BFLOAT16 = {"dtype": "bfloat16", "gradient_checkpointing": True}


def eight_b() -> ModelShape:
    return base_model_shape(PipelineConfig(), LLAMA_8B)


def config(sft: dict[str, Any] | None = None, **ppo: Any) -> PipelineConfig:
    trained = {"ranks": 2, "zero_stage": 3, **BFLOAT16}
    engine = {"dtype": "bfloat16", **ppo.pop("engine", {})}
    tree = {
        "model": {"path": "an/8b-model"},
        "sft": {"deepspeed": {"ranks": 4, "zero_stage": 3, **BFLOAT16}} | (sft or {}),
        "reward": {"deepspeed": {"ranks": 4, "zero_stage": 3, **BFLOAT16}},
        "ppo": {"policy_deepspeed": trained, "critic_deepspeed": trained, "engine": engine, **ppo},
    }
    return config_from_tree(tree, "test")


def peak(
    configured: PipelineConfig, stage: str, what: str = "", gpus: str = "8xA100-80G", phase: str = ""
) -> float:
    loads = device_loads(configured, eight_b(), parse_gpus(gpus).device)
    return max(
        load.total for load in loads if load.stage == stage and what in load.what and phase in load.phase
    )


# -- batches --


def test_the_batch_sizes_are_described_in_words() -> None:
    batches = dict(
        describe_batches(
            config_from_tree(
                {
                    "data": {"max_prompt_tokens": 400, "max_response_tokens": 100, "max_text_tokens": 256},
                    "sft": {
                        "batch_size": 60,
                        "micro_batch_tokens": 1000,
                        "epochs": 2,
                        "deepspeed": {"ranks": 4},
                    },
                    "ppo": {
                        "steps": 10,
                        "prompts_per_step": 32,
                        "samples_per_prompt": 2,
                        "minibatches": 4,
                        "max_new_tokens": 100,
                        "engine": {"count": 3},
                        "policy_deepspeed": {"ranks": 4},
                    },
                    "model": {"tiny": {"max_positions": 512}},
                },
                "test",
            )
        )
    )
    # 60 / 4 = 15 sequences of 500 tokens a rank, two in 1000 tokens: 8 passes; 3600 of 4000 examples / 60 =
    # 60 steps.
    assert "60 sequences of at most 500 tokens an optimizer step, 15 on each of 4 ranks" in batches["sft"]
    assert "at most 8 micro-batches of 1000 tokens" in batches["sft"]
    assert "about 60 optimizer steps an epoch, 120 in all" in batches["sft"]
    # A pair of 2 x 500 tokens; 64 pairs on one rank, and 16384 // 500 = 16 pairs... of the default 8192: 16
    # sequences.
    assert "64 pairs of at most 2 x 500 tokens" in batches["reward"]
    assert (
        "10 steps of 32 prompts x 2 samples = 64 responses of at most 100 tokens, 22 for each of 3"
        in batches["ppo"]
    )
    assert (
        "4 minibatches of 16 responses = 4 optimizer steps of policy and critic, 40 of the policy"
        in batches["ppo"]
    )
    assert "policy: 4 on each of 4 ranks; at most 1 micro-batch of 2000 tokens" in batches["ppo"]


def test_without_data_steps_are_given_for_a_thousand_examples() -> None:
    batches = dict(describe_batches(load_config(CONFIGS / "tinystories.yaml")))
    assert "32 optimizer steps for every 1000 demonstrations (1 epoch)" in batches["sft"]


# -- memory --


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
        optimizer_step_time(Model(eight_b(), sft(offload).sft.deepspeed), 64, 1024, 8192, hardware).total
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


def test_an_engine_on_the_trainers_device_takes_its_share() -> None:
    shared = {"colocate": "all", "engine": {"gpu_memory_utilization": 0.3}}
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


# -- what fits --


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


@pytest.mark.parametrize("gpus", ["8xA100-40G", "8xL40S-48G", "16xRTX4090-24G", "4xH100-80G", "2xH200-141G"])
def test_the_changes_offered_make_it_fit_and_none_could_be_left_out(gpus: str) -> None:
    hardware, shape = parse_gpus(gpus), eight_b()
    wanted = config()
    changes = advise(wanted, lambda changed: compare_memory(changed, shape, hardware))
    assert changes
    tree = wanted.model_dump(mode="json", by_alias=True)

    def fits(overrides: list[str]) -> bool:
        return compare_memory(config_from_tree(tree, "test", overrides), shape, hardware).fits

    assert fits(list(changes))
    for change in changes:
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
    found = advise(wanted, lambda changed: compare_memory(changed, eight_b(), parse_gpus("8xA100-80G")))
    assert found == ("sft.deepspeed.gradient_checkpointing=true",)


def test_without_any_way_out_none_is_offered() -> None:
    assert (
        advise(config(), lambda changed: compare_memory(changed, eight_b(), parse_gpus("RTX4090-24G")))
        is None
    )


# -- time --


def test_time_follows_devices_and_settings() -> None:
    def step(gpus: str = "8xA100-80G", **ppo: Any) -> StepTime:
        return step_time(config(**ppo), eight_b(), parse_gpus(gpus))

    base, fast = step(), step("8xH100-80G")
    assert base.total == pytest.approx(sum(base.phase(part).total for part in PHASES))
    assert all(base.phase(part).total > fast.phase(part).total for part in PHASES)
    assert step(engine={"enforce_eager": False}).rollout.total < base.rollout.total
    assert step(engine={"count": 4}).rollout.total < base.rollout.total
    offloaded = {"ranks": 2, "zero_stage": 3, "offload": "optimizer", **BFLOAT16}
    assert step(policy_deepspeed=offloaded).training.total > base.training.total
    assert step(lora={"r": 16}).training.total < base.training.total
    assert step(lora={"r": 16}, weight_sync={"lora": "adapter"}).sync.total < base.sync.total / 50


def test_with_staleness_the_engines_sample_during_scoring_and_training() -> None:
    def step(**ppo: Any) -> StepTime:
        return step_time(config(**ppo), eight_b(), parse_gpus("8xA100-80G"))

    for tokens in (16, 2048):  # the ranks are the longer part, then the engines
        alone, overlapped = step(max_new_tokens=tokens), step(max_new_tokens=tokens, staleness=1)
        ranks = alone.scoring.total + alone.training.total
        longest = max(alone.rollout.total, ranks)
        assert overlapped.total == pytest.approx(longest + alone.sync.total)
        assert (longest == ranks) == (tokens == 16)
        several = step(max_new_tokens=tokens, staleness=4)
        assert several.total == pytest.approx(longest + alone.sync.total / 4)
        kept = step(max_new_tokens=tokens, staleness=4, weight_sync={"keep_requests": True})
        assert kept.total == pytest.approx(longest + alone.sync.total), "a sync in every step"


def test_the_split_with_staleness_has_separate_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(CONFIGS / "production.yaml")
    command = ["plan", file, "--gpus", "4xH100-80G", "--model-config", "qwen3-0.6b"]
    command += ["ppo.staleness=1", "ppo.colocate=pairs", "ppo.engine.count=1"]
    command += ["ppo.policy_deepspeed.ranks=2", "ppo.critic_deepspeed.ranks=1"]
    main([*command, "--json"])
    (found,) = (s for s in json.loads(capsys.readouterr().out)["fastest"] if s["stage"] == "ppo")
    rollout, scoring, training, sync = (sum(found["phases"][phase].values()) for phase in PHASES)
    assert found["seconds"] == pytest.approx(max(rollout, scoring + training) + sync)
    assert "ppo.colocate" not in found["changes"], "engines need devices of their own"
    main(command)
    shown = " ".join(capsys.readouterr().out.split())
    assert "s = (rollout" in shown and " during scoring " in shown
    kept = ["ppo.staleness=4", "ppo.weight_sync.keep_requests=true", "ppo.engine.dispatch=queue"]
    main([*command, *kept, "--json"])
    (found,) = (s for s in json.loads(capsys.readouterr().out)["fastest"] if s["stage"] == "ppo")
    rollout, scoring, training, sync = (sum(found["phases"][phase].values()) for phase in PHASES)
    assert found["seconds"] == pytest.approx(max(rollout, scoring + training) + sync), "a sync in every step"


def test_a_rollout_takes_the_time_to_read_weights_and_cache_for_every_token() -> None:
    engine = {"count": 2, "tensor_parallel": 2, "max_num_seqs": 4, "enforce_eager": True}
    wanted = config_from_tree(
        {
            "model": {"path": "an/8b-model"},
            "data": {"max_prompt_tokens": 128},
            "ppo": {"prompts_per_step": 16, "max_new_tokens": 64, "engine": {"dtype": "bfloat16", **engine}},
        },
        "test",
    )
    found = step_time(wanted, eight_b(), TOYS).rollout
    # Each engine has two waves of 4 responses, on two devices at 0.45 of their arithmetic and 0.6 of their
    # bandwidth.
    weights = 8_030_261_248
    prefill = 2 * weights * 8 * 128 + 2 * 8 * 128**2 * 4096 * 32
    read = 2 * weights + 4 * (128 + 64 / 2) * 131_072
    decoding = 2 * 64 * (read / (2 * 2e12 * 0.6) + 32 * 0.3e-3)
    # Two all-reduces for each of 32 layers, each of 15 us and twice half of the hidden states, 4096 x 2 bytes
    # a token, over half of the link: once for 8 x 128 tokens of prompts, and for 4 tokens at a time.
    adding = [64 * (15e-6 + 2 * tokens * 8192 / 2 / (1e11 / 2)) for tokens in (8 * 128, 4)]
    assert found.link == pytest.approx(adding[0] + 2 * 64 * adding[1], rel=1e-6)
    expected = prefill / (2 * 3e14 * 0.45) + decoding + found.link
    assert found.total == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_step_computes_on_its_ranks_share_and_sends_gradients_and_weights() -> None:
    deepspeed = config(sft={"deepspeed": {"ranks": 4, "zero_stage": 3, **BFLOAT16}}).sft.deepspeed
    found = optimizer_step_time(Model(eight_b(), deepspeed), 64, 1024, 8192, TOYS)
    weights = 8_030_261_248
    # A pass forward, two backward, and one that checkpointing computes again, at 0.35 of the arithmetic of 4
    # ranks.
    computing = 4 * (2 * weights * 64 * 1024 + 2 * 64 * 1024**2 * 4096 * 32) / (4 * 3e14 * 0.35)
    # 64 x 1024 tokens are two micro-batches of 8192 for each: each reduces gradients once and gathers weights
    # twice, of which three quarters come from others, over half of the link.
    talking = 2 * (1 + 2) * 2 * weights * 3 / 4 / (1e11 / 2)
    assert (found.arithmetic, found.link) == pytest.approx((computing, talking), rel=1e-6)
    assert found.total == pytest.approx(computing + talking, rel=1e-6)


# -- devices --


@pytest.mark.parametrize(
    ("text", "name"),
    [("8xA100-80G", "8 x A100-80G"), ("h100", "1 x H100-80G"), ("2 x rtx4090-24g", "2 x RTX4090-24G")],
)
def test_gpus_are_a_count_and_a_known_device(text: str, name: str) -> None:
    assert str(parse_gpus(text)) == name


@pytest.mark.parametrize("text", ["8", "A100", "0xH100-80G", "3xFoo", ""])
def test_other_gpus_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus: must be a count and a device.*known: A100-40G"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["NVIDIA A100-SXM4-40GB"] * 2, "2 x A100-40G"),
        (["NVIDIA A100 80GB PCIe"], "1 x A100-80G"),
        (["NVIDIA H100 80GB HBM3"] * 8, "8 x H100-80G"),
        (["NVIDIA GeForce RTX 4090"], "1 x RTX4090-24G"),
        (["NVIDIA T4"], "None"),
        (["NVIDIA H100 NVL"], "None"),
        (["NVIDIA H100 PCIe"], "None"),
        (["NVIDIA GH200 480GB"], "None"),
        (["NVIDIA H200"], "1 x H200-141G"),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], "None"),
        ([], "None"),
    ],
)
def test_the_gpus_of_this_machine_are_known_by_their_drivers_names(
    names: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with on_machine(ScriptedMachine(gpus=names, torch="cuda")):
        assert str(visible_hardware()) == found


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
        with pytest.raises(
            ConfigError, match=r"sft: policy needs 1\d\d\.\d GiB on each device(?s:.*)it fits with sft\."
        ) as refused:
            check_memory(wanted)
        changes = shlex.split(refused.value.message.rpartition("it fits with ")[2])
        check_memory(config_from_tree(wanted.model_dump(mode="json", by_alias=True), "test", changes))
        later = check_memory(wanted, stages_between("data", "data"))
        assert re.match(
            r"stages that this run has passed, or does not come to, do not fit: sft: policy needs 1\d\d\.\d",
            later,
        )
        monkeypatch.setenv("RAY_ADDRESS", "ray-head:6379")
        check_memory(wanted)
        monkeypatch.delenv("RAY_ADDRESS")
    with on_machine(ScriptedMachine(gpus=["NVIDIA T4"])):
        check_memory(wanted)


def test_on_a_cpu_the_engines_of_the_evaluation_share_its_memory() -> None:
    hardware = Hardware(2, Device("CPU", 32 * GIB, 0.15e12, 10e9, 1e9))
    tree = {"run": {"device": "cpu"}, "ppo": {"engine": {"kv_cache_gib": 4.0}}}
    wanted = config_from_tree(tree, "test", ["evaluate.engines=16"])
    shape = base_model_shape(wanted)
    verdict = compare_memory(wanted, shape, hardware)
    assert [(problem.stage, problem.what) for problem in verdict.problems] == [("evaluate", "memory")]
    [load] = [load for load in verdict.loads if (load.stage, load.phase) == ("evaluate", "sample")]
    assert (load.devices, load.engine.cache) == (16, 4 * GIB)
    assert advise(wanted, lambda changed: compare_memory(changed, shape, hardware)) == ("evaluate.engines=4",)


# -- the command --


def test_a_plan_that_does_not_fit_exits_with_2_and_changes_that_can_be_pasted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        "plan",
        str(CONFIGS / "production.yaml"),
        "--gpus",
        "8xRTX4090-24G",
        "--model-config",
        str(LLAMA_8B),
    ]
    assert main(command) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "does not fit: sft: policy needs" in printed
    changes = shlex.split(printed.rpartition("fits with: ")[2])
    assert main([*command, *changes]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("fits 8 x RTX4090-24G")


def test_doubtful_settings_are_shown_before_the_plan_and_are_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", str(CONFIGS / "demo.yaml"), "ppo.kl.estimator=k3"]
    main(command)
    assert capsys.readouterr().out.startswith("warning: ppo.kl.estimator: k3 in the reward")
    main([*command, "--json"])
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("ppo.kl.estimator: k3")


def test_json_and_table_agree(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "plan",
        str(CONFIGS / "production.yaml"),
        "--gpus",
        "8xH100-80G",
        "--model-config",
        str(LLAMA_8B),
    ]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] is True and printed["parameters"] == 8_030_261_248 and printed["changes"] is None
    sft = next(row for row in printed["memory"] if (row["stage"], row["phase"]) == ("sft", "backward"))
    assert main(command) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "backward" in line)
    assert f"{sft['total'] / GIB:.1f}*" in row


def test_a_plan_is_readable_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = [
        "plan",
        str(CONFIGS / "production.yaml"),
        "--gpus",
        "8xH100-80G",
        "--model-config",
        str(LLAMA_8B),
    ]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    # What is pasted is one line.
    assert max(len(line) for line in lines if not line.startswith("fastest with: ")) <= 80
    assert not any("…" in line for line in lines)


def test_on_the_cpu_the_demo_is_judged_by_the_memory_of_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(CONFIGS / "demo.yaml")]) == 0
    assert "MiB for each process" in capsys.readouterr().out


def test_processes_that_share_one_memory_are_added_up() -> None:
    cores = Hardware(2, parse_gpus("A100-40G").device)
    cpu = Hardware(2, type(cores.device)("CPU", 3 * GIB, 1e12, 1e10, 1e9))
    verdict = compare_memory(
        load_config(CONFIGS / "demo.yaml"), base_model_shape(load_config(CONFIGS / "demo.yaml")), cpu
    )
    assert [(p.stage, p.what) for p in verdict.problems] == [("ppo", "memory")]


PROFILES = {
    "entry.yaml": ("2xA100-40G", MISTRAL_7B),
    "production.yaml": ("8xA100-80G", LLAMA_8B),
    "budget.yaml": ("4xRTX4090-24G", MISTRAL_7B),
    "one-h100.yaml": ("1xH100-80G", MISTRAL_7B),
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_fits_the_hardware_that_it_names(name: str) -> None:
    gpus, shape = PROFILES[name]
    text = (CONFIGS / name).read_text()
    assert f"rlhf plan deployments/configs/{name} --gpus {gpus} " in text
    profile = load_config(CONFIGS / name)
    assert compare_memory(profile, base_model_shape(profile, shape), parse_gpus(gpus)).problems == ()
    assert "bfloat16" in (profile.sft.deepspeed.dtype, profile.ppo.engine.dtype)


SIX_CARDS = (
    "model.path=meta-llama/Meta-Llama-3-8B", "model.attention=flash_attention_2", "reward.lora.r=64",
    "reward.deepspeed.ranks=6",
)  # fmt: skip


@pytest.mark.parametrize(
    ("half", "changes", "gib", "fits"),
    [
        (2048, (), "21.2", True),
        (4096, (), "25.1", False),
        (4096, ("reward.lora=null",), "43.2", False),
    ],
)
def test_a_reward_model_of_8b_on_six_cards_fits_with_half_the_context_and_adapters(
    half: int, changes: tuple[str, ...], gib: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = (f"data.max_prompt_tokens={half}", f"data.max_response_tokens={half}")
    command = [
        "plan",
        str(CONFIGS / "budget.yaml"),
        "--gpus",
        "6xRTX4090-24G",
        "--model-config",
        str(LLAMA_8B),
    ]
    assert main([*command, *SIX_CARDS, *lengths, *changes, "--json"]) == (0 if fits else 2)
    printed = json.loads(capsys.readouterr().out)
    reward = [row["total"] for row in printed["memory"] if row["stage"] == "reward"]
    assert (f"{max(reward) / GIB:.1f}", printed["fits"]) == (gib, fits)
    assert all(problem.startswith("reward: ") for problem in printed["problems"])
    page = (CONFIGS.parents[1] / "docs" / "plan.md").read_text()
    assert all(word in page for word in (*SIX_CARDS, f"{gib} GiB")), "the page has the same numbers"
