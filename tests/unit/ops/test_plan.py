"""What `rlhf plan` calculates and says.

- the batch algebra counts rows, ranks and micro-batches
- more, faster devices take less time; without CUDA graphs, offloaded or with checkpointing it takes more; the
  time of a rollout and of an optimizer step is the arithmetic, memory and links written out here
- `--gpus` is a count and a known device; the command exits with 2 where it does not fit; `--json` says the
  same
- every shipped profile fits the hardware that it names; a reward model of 8B on six cards of 24 GB fits with
  half the context, and with all parameters or the whole context it does not
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.config.load import load_config
from rlhf_core.errors import ConfigError
from rlhf_core.models.folder import base_model_shape
from rlhf_core.ops.plan.plan import make_plan
from rlhf_core.ops.plan.rows import Batch, batches, describe_ppo
from rlhf_core.ops.plan.speed import StepTime, optimizer_step_time, step_time
from rlhf_core.planning.hardware import GIB, Device, Hardware, parse_gpus, visible_hardware
from rlhf_core.planning.memory import Model
from rlhf_core.planning.search import compare_memory, with_changes
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.planned_models import BFLOAT16, CONFIGS, LLAMA_8B, MISTRAL_7B, config, eight_b
from tests.support.scripted_machine import ScriptedMachine, on_machine

TOYS = Hardware(8, Device("toy", 80 * GIB, flops=3e14, bandwidth=2e12, link=1e11))


# -- batches --


def test_the_batch_of_each_model_is_counted() -> None:
    settings = config_from_tree(
        {
            "data": {"max_prompt_tokens": 400, "max_response_tokens": 100, "max_text_tokens": 256},
            "sft": {"batch_size": 60, "micro_batch_tokens": 1000, "epochs": 2, "deepspeed": {"ranks": 4}},
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
    found = {batch.model: batch for batch in batches(settings)}
    # 60 / 4 = 15 sequences of 500 tokens a rank, two in 1000 tokens: 8 passes.
    assert found["sft"] == Batch("sft", 60, 15, 500, 8, 1000)
    # A pair of 2 x 500 tokens; 64 pairs on one rank, and 8192 // 500 = 16 sequences in a pass.
    assert found["reward"] == Batch("reward", 64, 64, 1000, 8, 8192)
    assert found["ppo policy"] == Batch("ppo policy", 16, 4, 500, 1, 2000)
    assert found["ppo critic"] == Batch("ppo critic", 16, 16, 500, 4, 2000)
    [rollouts, _] = describe_ppo(settings)
    samples, steps = rollouts.split(", and makes ")
    assert samples == "ppo: each of 10 steps samples 32 prompts x 2 = 64 responses, 22 for each engine"
    assert steps == "4 optimizer steps"


def test_the_questions_of_a_reward_are_given() -> None:
    reward = {"type": "language_model", "url": "http://one/v1", "model": "m", "max_tokens": 256}
    ppo: dict[str, Any] = {"algorithm": "grpo", "prompts_per_step": 16, "samples_per_prompt": 8, "steps": 10}

    def described(more: dict[str, Any] | None = None, **fields: Any) -> str:
        return describe_ppo(config(**ppo, **(more or {}), rewards=[reward | fields]))[-1]

    assert "reward language_model: at most 128 questions to m a step" in described()
    assert "at most 896 questions" in described(compare="pairs")
    # If two of 8 responses are equal, each of the 7 needs 4 opponents: 16 prompts, 14 pairs, both orders.
    assert "at most 448 questions" in described(compare="pairs", opponents=3)
    text = "at most 32 questions to m a step, with replies of at most 256 tokens; 320 questions in all"
    assert text in described(compare="ranking")
    assert "at most 192 questions" in described({"dynamic_filtering": {"max_rounds": 5}}, compare="ranking")


# -- time --


def test_time_follows_devices_and_settings() -> None:
    def step(gpus: str = "8xA100-80G", **ppo: Any) -> StepTime:
        return step_time(config(**ppo), eight_b(), parse_gpus(gpus))

    base, fast = step(), step("8xH100-80G")
    assert base.total == pytest.approx(sum(base.phases.values()))
    assert all(base.phases[part] > fast.phases[part] for part in base.phases)
    assert step(engine={"enforce_eager": False}).rollout < base.rollout
    assert step(engine={"count": 4}).rollout < base.rollout
    offloaded = {"ranks": 2, "zero_stage": 3, "offload": "optimizer", **BFLOAT16}
    assert step(policy_deepspeed=offloaded).training > base.training
    assert step(lora={"r": 16}).training < base.training
    assert step(lora={"r": 16}, weight_sync={"lora": "adapter"}).sync < base.sync / 50


def test_with_staleness_the_engines_sample_during_scoring_and_training() -> None:
    def step(**ppo: Any) -> StepTime:
        return step_time(config(**ppo), eight_b(), parse_gpus("8xA100-80G"))

    for tokens in (16, 2048):  # the ranks are the longer part, then the engines
        alone, overlapped = step(max_new_tokens=tokens), step(max_new_tokens=tokens, staleness=1)
        ranks = alone.scoring + alone.training
        longest = max(alone.rollout, ranks)
        assert overlapped.total == pytest.approx(longest + alone.sync)
        assert (longest == ranks) == (tokens == 16)
        several = step(max_new_tokens=tokens, staleness=4)
        assert several.total == pytest.approx(longest + alone.sync / 4)


def test_settings_with_staleness_have_separate_engines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(CONFIGS / "production.yaml")
    command = ["plan", file, "--gpus", "4xH100-80G", "--model-config", "qwen3-0.6b"]
    command += ["ppo.staleness=1", "ppo.colocate=pairs", "ppo.engine.count=1"]
    command += ["ppo.policy_deepspeed.ranks=2", "ppo.critic_deepspeed.ranks=1"]
    main([*command, "--json"])
    printed = json.loads(capsys.readouterr().out)
    rollout, scoring, training, sync = printed["ppo_step_seconds"].values()
    assert printed["step_seconds"]["ppo"] == pytest.approx(max(rollout, scoring + training) + sync)
    changes = printed["fastest"]["ppo"]["changes"]
    assert changes and "ppo.colocate" not in changes, "engines need devices of their own"
    main([*command, "--details"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "a step of ppo = (rollout" in shown and " during scoring " in shown


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
    expected = prefill / (2 * 3e14 * 0.45) + decoding + adding[0] + 2 * 64 * adding[1]
    assert found == pytest.approx(expected, rel=1e-6)


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
    assert found == pytest.approx(computing + talking, rel=1e-6)


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


def test_large_changes_are_found_where_no_small_change_makes_it_fit() -> None:
    plan = make_plan(CONFIGS / "production.yaml", gpus="8xH100-80G", model_config="llama-3-70b")
    assert not plan.verdict.fits
    assert plan.changes is not None and "ppo.policy_deepspeed.offload=all" in plan.changes
    changed = with_changes(plan.config, dict(change.split("=") for change in plan.changes))
    assert changed is not None
    assert compare_memory(changed, plan.shape, plan.hardware).fits


def test_doubtful_settings_are_shown_before_the_plan_and_are_in_the_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = "data.synthetic={sft_examples: 100, pairs: 100, prompts: 200}"
    command = ["plan", str(CONFIGS / "demo.yaml"), rows, "ppo.kl.estimator=k3"]
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
    assert main([*command, "--details"]) == 0
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
    assert main([*command, "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # What is pasted is one line.
    assert max(len(line) for line in lines if not line.startswith("estimated to be faster with: ")) <= 80
    assert not any("…" in line for line in lines)


def test_on_the_cpu_the_demo_is_judged_by_the_memory_of_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(CONFIGS / "demo.yaml"), "--details"]) == 0
    assert "MiB for each process" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_searched")
def test_memory_is_shown_by_process_only_if_it_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(CONFIGS / "production.yaml"), "--model-config", str(LLAMA_8B), "--gpus"]
    assert main([*command, "8xH200-141G"]) == 0
    shown = capsys.readouterr().out
    assert "GiB on each device" not in shown and "to spare" in shown
    utilisation = "ppo.engine.gpu_memory_utilization=0.95"
    apart = ["ppo.colocate=pairs", "ppo.policy_deepspeed.ranks=3", "ppo.critic_deepspeed.ranks=3"]
    main([*command, "8xH200-141G", *apart, "ppo.engine.count=2", utilisation])
    assert "GiB on each device" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_searched")
def test_a_source_that_is_not_on_this_machine_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(CONFIGS / "production.yaml"), "--gpus", "8xH200-141G"]
    assert main([*command, "--model-config", str(LLAMA_8B), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] is None and printed["work"] == []
    assert printed["unread"].startswith("data.sft.0.path (")


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


@pytest.mark.usefixtures("nothing_is_searched")
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
