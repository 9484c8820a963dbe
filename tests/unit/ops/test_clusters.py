"""Plans for several hosts, and the search for the fastest settings.

- `--gpus 2x8xH100-80G` are hosts, devices and a kind; several hosts need `--link`
- an engine is inside one host
- between hosts, ZeRO-3 is as slow as the network, hpZ gathers the backward pass inside a host, and a weight
  sync uses one network adapter
- a faster link is never slower; more ranks or hosts never need more memory on a device
- the fastest settings found fit, and have the time that the plan gives for them
- checkpoints have 14 bytes for each parameter
- known shapes have as many parameters as the published weights
- the largest models of the page of the plan are the largest ones that fit
"""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.config.placement import plan as plan_placement
from rlhf_core.errors import ConfigError
from rlhf_core.models.shape import ModelShape, known_shape
from rlhf_core.ops.plan.plan import fastest_settings, make_plan
from rlhf_core.ops.plan.speed import optimizer_step_time, step_time, sync_time
from rlhf_core.planning.hardware import GIB, Device, Hardware, Network, parse_gpus, parse_link
from rlhf_core.planning.loads import checkpoint_sizes, device_loads
from rlhf_core.planning.memory import Model
from rlhf_core.planning.search import advise, compare_memory, room_for_engines, with_changes
from tests.support.sampled import share

PRODUCTION = Path(__file__).resolve().parents[3] / "deployments" / "configs" / "production.yaml"
LINKS = ("1gbit", "10gbit", "100gbit", "400gbit", "2x400gbit", "8x400gbit")


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


APART = (
    "ppo.colocate=pairs", "ppo.policy_deepspeed.ranks=3", "ppo.critic_deepspeed.ranks=3",
    "ppo.policy_deepspeed.gradient_checkpointing=true", "ppo.critic_deepspeed.gradient_checkpointing=true",
    "ppo.micro_batch_tokens=8192", "ppo.engine.sleep_level=0",
    "ppo.engine.count=2", "ppo.engine.gpu_memory_utilization=0.9", "ppo.weight_sync.backend=nccl",
)  # fmt: skip


def production(*overrides: str) -> PipelineConfig:
    """Return the profile with devices of their own for policy, critic and engines."""
    return load_config(PRODUCTION, (*APART, *overrides))


# -- hosts and links --


def test_hosts_devices_and_links_are_parsed() -> None:
    found = parse_gpus("2x8xH100", "8x400gbit", 1024)
    assert (found.hosts, found.count, found.per_host, found.device.name) == (2, 16, 8, "H100-80G")
    assert found.network == Network(8, 50e9) and found.network.total == 400e9
    assert found.host_memory == 1024 * GIB
    assert str(found) == "2 hosts of 8 x H100-80G, 8 x 400 Gbit/s between them"
    assert parse_gpus("1x8xH100") == parse_gpus("8xH100", "400gbit") == Hardware(8, found.device)
    assert parse_link("200mbit").total == 25e6


@pytest.mark.parametrize("text", ["2x0xH100", "2x8x8xH100", "x8xH100"])
def test_other_numbers_of_hosts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--gpus: must be .* 2x8xH100-80G; got"):
        parse_gpus(text, "400gbit")


@pytest.mark.parametrize("text", ["400", "0x400gbit", "0gbit", "fast", "1.2.3gbit"])
def test_other_links_are_refused_and_several_hosts_need_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--link: must be the speed of a host's network"):
        parse_gpus("2x8xH100", text)
    with pytest.raises(ConfigError, match=r"--link: --gpus 2x8xH100 has several hosts"):
        parse_gpus("2x8xH100")


@pytest.mark.parametrize("memory", [-3.0, float("nan"), float("inf")])
def test_other_memory_of_hosts_is_refused(memory: float) -> None:
    with pytest.raises(
        ConfigError, match=f"--host-memory: must be a number of GiB, 0 or more; got {memory:g}"
    ):
        parse_gpus("8xH100", host_memory_gib=memory)


@pytest.mark.parametrize(
    ("option", "value"), [("link", "400gbit"), ("host_memory_gib", 2000.0), ("host_memory_gib", 0.0)]
)
def test_options_about_hosts_are_refused_without_gpus(option: str, value: Any) -> None:
    name = {"link": "--link", "host_memory_gib": "--host-memory"}[option]
    with pytest.raises(ConfigError, match=rf"{name}: describes the hosts of --gpus; got no --gpus; add it"):
        make_plan(PRODUCTION.with_name("demo.yaml"), **{option: value})


def test_engines_of_several_devices_have_room_inside_one_host() -> None:
    def room(policy: int, critic: int, ways: int) -> int:
        overrides = (f"ppo.policy_deepspeed.ranks={policy}", f"ppo.critic_deepspeed.ranks={critic}")
        placement = plan_placement(production(*overrides, f"ppo.engine.tensor_parallel={ways}").ppo)
        return room_for_engines(placement, parse_gpus("2x8xH100", "1gbit"))

    assert room(4, 4, 1) == 8
    assert room(6, 6, 4) == 1
    assert room(5, 5, 8) == 0, "6 devices are left on the second host"
    assert room(8, 4, 4) == 1


def test_an_engine_that_would_span_hosts_is_refused() -> None:
    wanted = production("ppo.engine.count=1", "ppo.engine.tensor_parallel=16")
    [problem] = compare_memory(wanted, shape("llama-3-8b"), parse_gpus("4x8xH200", "400gbit")).problems
    assert problem.text.startswith("ppo: the 16 GPUs of an engine must be in one host of 8;")


# -- time --

TOY = Device("toy", 80 * GIB, flops=3e14, bandwidth=2e12, link=1e11)
WEIGHTS = 8_030_261_248


@pytest.mark.parametrize("hpz", [1, 4])
def test_sharding_over_hosts_is_as_slow_as_the_network(hpz: int) -> None:
    hosts = Hardware(8, TOY, 2, Network(2, 1.25e9))
    deepspeed = production("sft.deepspeed.ranks=8", f"sft.deepspeed.hpz={hpz}").sft.deepspeed
    found = optimizer_step_time(Model(shape("llama-3-8b"), deepspeed), 64, 1024, 8192, hosts)
    # 64 x 1024 tokens are one micro-batch of 8192 for each of 8 ranks: gradients are reduced once, weights
    # are gathered twice, 7/8 of them from others, over 0.8 of both adapters. With hpZ, 3/4 of them come from
    # the 4 ranks of the host in the second pass, over half of its link.
    network, inside = 2 * WEIGHTS * 7 / 8 / (0.8 * 2.5e9), 2 * WEIGHTS * 3 / 4 / (1e11 / 2)
    one = Hardware(8, TOY)
    alone = optimizer_step_time(Model(shape("llama-3-8b"), deepspeed), 64, 1024, 8192, one)
    computing = alone - (3 if hpz == 1 else 2) * 2 * WEIGHTS * 7 / 8 / (1e11 / 2) - (hpz > 1) * inside
    talking = 3 * network if hpz == 1 else 2 * network + inside
    assert found == pytest.approx(computing + talking)


def test_a_sync_between_hosts_uses_one_adapter() -> None:
    model, hosts = shape("llama-3-8b"), Hardware(16, TOY, 2, Network(8, 1.25e9))
    whole = production("ppo.policy_deepspeed.zero_stage=2")
    assert sync_time(whole, model, Hardware(8, TOY)) == pytest.approx(2 * WEIGHTS / 5e10)
    assert sync_time(whole, model, hosts) == pytest.approx(2 * WEIGHTS / (0.8 * 1.25e9))
    gathering = 2 * WEIGHTS * 2 / 3 / 5e10  # ZeRO-3 on three ranks of one host
    assert sync_time(production(), model, hosts) == pytest.approx(gathering + sync_time(whole, model, hosts))


def test_offloaded_adam_takes_the_time_of_the_hosts_cpus() -> None:
    def seconds(offload: str) -> float:
        deepspeed = production(f"sft.deepspeed.offload={offload}").sft.deepspeed
        hardware = Hardware(8, TOY)
        return optimizer_step_time(Model(shape("llama-3-8b"), deepspeed), 64, 1024, 8192, hardware)

    # Two copies of 4 bytes for each of an eighth of the parameters, and 4e9 parameters a second on one host.
    expected = pytest.approx(2 * 4 * WEIGHTS / 8 / 12e9 + WEIGHTS / 4e9)
    assert seconds("optimizer") - seconds("none") == expected


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_a_faster_link_is_never_slower(model: str) -> None:
    generator, faster = random.Random(0), 0
    for _ in range(12):
        overrides = [
            f"ppo.policy_deepspeed.ranks={generator.choice([4, 8, 12, 16])}",
            f"ppo.critic_deepspeed.ranks={generator.choice([4, 8, 12, 16])}",
            f"ppo.policy_deepspeed.zero_stage={generator.choice([0, 2, 3])}",
            f"ppo.engine.count={generator.choice([1, 4, 8])}",
            f"ppo.weight_sync.backend={generator.choice(['nccl', 'gloo'])}",
        ]
        wanted = production(*overrides)
        times = [step_time(wanted, shape(model), parse_gpus("4x8xH100", link)).total for link in LINKS]
        assert times == sorted(times, reverse=True), overrides
        faster += times[0] > times[-1]
    assert faster > 3


# -- memory --


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_more_hosts_never_need_more_memory_on_a_device(zero: int) -> None:
    peaks = []
    for hosts in (1, 2, 4, 8):
        ranks = [f"{field}.ranks={4 * hosts}" for field in ("ppo.policy_deepspeed", "ppo.critic_deepspeed")]
        ranks += [f"{field}.ranks={8 * hosts}" for field in ("sft.deepspeed", "reward.deepspeed")]
        stages = [name.replace("ranks", "zero_stage").partition("=")[0] + f"={zero}" for name in ranks]
        loads = device_loads(production(*ranks, *stages), shape("qwen2.5-32b"), parse_gpus("H100").device)
        peaks.append([load.total for load in loads])
    for fewer, more in pairwise(peaks):
        assert all(after <= before for before, after in zip(fewer, more, strict=True))


def test_zero_3_loads_shards_and_two_tensors() -> None:
    loads = device_loads(production(), shape("llama-3-70b"), parse_gpus("H100").device)
    load = next(load for load in loads if (load.stage, load.phase) == ("sft", "load"))
    assert load.bytes.total == pytest.approx(2 * 70_553_706_496 / 8 + 2 * 2 * 8192 * 128256)


def test_a_model_too_large_for_one_device_is_evaluated_on_several() -> None:
    model, hardware = shape("llama-3-70b"), parse_gpus("4x8xH200", "400gbit")

    def evaluation(*overrides: str) -> list[str]:
        found = compare_memory(production(*overrides), model, hardware).problems
        return [problem.text for problem in found if problem.stage == "evaluate"]

    [alone] = evaluation()
    assert alone.startswith("evaluate: policy needs ") and "on each device (score)" in alone
    assert evaluation("evaluate.ranks=2") == []
    whole = ("ppo.policy_deepspeed.zero_stage=2", "reward.deepspeed.zero_stage=2")
    assert evaluation("evaluate.ranks=2", *whole) == [alone], "each rank has a copy"
    assert evaluation("evaluate.ranks=33")[-1] == "evaluate: needs 33 devices; there are 32"
    engines = ("evaluate.ranks=2", "evaluate.engines=9", "ppo.engine.tensor_parallel=4")
    assert evaluation(*engines) == ["evaluate: needs 36 devices; there are 32"]


def test_state_that_is_offloaded_must_fit_the_memory_of_a_host() -> None:
    wanted = production("sft.deepspeed.offload=optimizer")
    texts = [
        [
            problem.text
            for problem in compare_memory(
                wanted, shape("llama-3-8b"), parse_gpus("8xH100", None, gib)
            ).problems
        ]
        for gib in (None, 64, 512)
    ]
    # 12 bytes of state, a gradient of 4 and weights of 2 for each parameter.
    needed = 18 * WEIGHTS / GIB
    assert texts[1] == [f"sft: offloaded state needs {needed:.0f} GiB of memory on each host; it has 64"]
    assert texts[0] == texts[2] == []


def test_a_checkpoint_has_14_bytes_for_each_parameter() -> None:
    sizes = checkpoint_sizes(production(), shape("llama-3-8b"))
    critic = shape("llama-3-8b").score_parameters
    assert sizes["sft"] == 14 * WEIGHTS
    # With `publish: best`, 2 more for each parameter of the policy: the best weights so far.
    assert sizes["ppo"] == 16 * WEIGHTS + 14 * critic
    adapters = checkpoint_sizes(production("ppo.lora={r: 16}"), shape("llama-3-8b"))
    assert adapters["ppo"] < sizes["ppo"] / 50


# -- the fastest settings --


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "gpus"), share([("llama-3-8b", "1x8xH100-80G"), ("llama-3-70b", "4x8xH200-141G")], 2)
)
def test_the_settings_found_fit_in_the_time_that_they_state(model: str, gpus: str) -> None:
    # No memory for offload: what fits does so on the devices alone.
    wanted, hardware = production(), parse_gpus(gpus, "8x400gbit", 0)
    started = time.process_time()
    changes = advise(wanted, shape(model), hardware)
    assert changes is not None
    found = fastest_settings(wanted, changes, shape(model), hardware)
    assert time.process_time() - started < 20, "seconds, also on a busy machine"
    assert set(found) == {"sft", "reward", "ppo"} and len(found["ppo"]) == 3
    for number in range(3):
        seconds, ppo = found["ppo"][number]
        pasted = with_changes(wanted, {**found["sft"][0][1], **found["reward"][0][1], **ppo})
        assert pasted is not None
        assert compare_memory(pasted, shape(model), hardware).problems == ()
        assert step_time(pasted, shape(model), hardware).total == pytest.approx(seconds)
    times = [seconds for seconds, _ in found["ppo"]]
    assert times == sorted(times) and times[0] < 1.01 * step_time(wanted, shape(model), hardware).total


# -- shapes --


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_known_shapes_have_the_parameters_of_the_published_weights(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


def test_other_names_are_not_known() -> None:
    assert known_shape("qwen/qwen2.5-33b") is None and known_shape("70b") is None


# -- the command --


def test_the_command_shows_settings_that_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(PRODUCTION), "--gpus", "2x4xH100-80G", "--link", "8x400gbit"]
    command += ["--host-memory", "2000", "model.path=Qwen/Qwen2.5-14B"]
    assert main(command) == 2
    printed = capsys.readouterr().out
    assert "took 4 times as long as estimated" in " ".join(printed.split())
    [line] = [line for line in printed.splitlines() if line.startswith("estimated to be faster with: ")]
    pasted = shlex.split(line.removeprefix("estimated to be faster with: "))
    assert main([*command, *pasted, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["hardware"] == {
        "count": 8, "device": "H100-80G", "hosts": 2, "network": {"adapters": 8, "rate": 5e10}
    }  # fmt: skip
    assert known["step_seconds"]["ppo"] == pytest.approx(sum(known["ppo_step_seconds"].values()))
    for stage, fastest in known["fastest"].items():
        assert fastest["seconds"] > known["step_seconds"][stage] / 1.25, "nothing is much faster"


def test_an_unknown_model_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PRODUCTION), "--gpus", "8xH100", "--model-config", "llama-9"]) == 2
    assert "--model-config: must be a readable config.json or a known model" in capsys.readouterr().err


# -- the page --

LARGEST = re.findall(
    r"^\| (\d x 8 x \d+ GB) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$",
    (PRODUCTION.parents[2] / "docs" / "plan.md").read_text(),
    re.MULTILINE,
)
SIZES = {"8B": "llama-3-8b", "14B": "qwen2.5-14b", "32B": "qwen2.5-32b", "70B": "llama-3-70b"}


def largest(hosts: str) -> tuple[str, ...]:
    """Return a row of the table of the largest models: without offload and with it, SFT and PPO."""
    count, _, gigabytes = re.findall(r"\d+", hosts)
    gpus = f"{count}x8x" + {"80": "H100-80G", "141": "H200-141G"}[gigabytes]
    cells = []
    for memory in (0, 2000):
        hardware, fitting = parse_gpus(gpus, "8x400gbit", memory), {"sft": "", "reward": "", "ppo": ""}
        for size, name in SIZES.items():
            for stage in ("sft", "reward", "ppo"):
                changes = advise(production(), shape(name), hardware, (stage,))
                if changes is not None and not any(".lora=" in change for change in changes):
                    fitting[stage] = size
        assert fitting["sft"] == fitting["reward"]
        cells.append((fitting["sft"], fitting["ppo"]))
    return hosts, cells[0][0], cells[1][0], cells[0][1], cells[1][1]


def test_the_page_has_a_row_of_the_largest_models_for_each_number_of_hosts() -> None:
    assert [row[0] for row in LARGEST] == [f"{h} x 8 x {gib} GB" for gib in (80, 141) for h in (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("row", LARGEST, ids=lambda row: row[0])
def test_the_largest_models_on_the_page_are_the_largest_that_fit(row: tuple[str, ...]) -> None:
    assert largest(row[0]) == row
