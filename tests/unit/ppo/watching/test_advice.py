"""Advice on settings of PPO: a planted bottleneck each, and steps without one.

- three slow steps in a row give one sentence with the field and the value to set, once in an attempt
- two slow steps in a row, a balanced step, and a setting that would not help give none
- the stored steps of real runs give none; the same steps with a planted bottleneck give theirs
- docs/tuning.md has a row for each rule
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree, load_config
from rlhf_core.config.placement import plan
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.fleet.fleet import ENGINES
from rlhf_core.ppo.watching.advice import PATIENCE, RULES, Advice
from rlhf_core.ppo.watching.utilisation import data_wait, engine_metrics, idle_shares, token_rates
from tests.benchmarks.ppo_iteration import iteration_tree
from tests.unit.ppo.watching.test_utilisation import batch_of

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "tuning.md"


def step(ppo: dict[str, Any], **changed: float) -> dict[str, float]:
    """Return the metrics of a step of scripted processes.

    Args:
        ppo: Section `ppo`.
        changed: Seconds of the phases: `rollout`, `scoring`, `policy` and `critic` (their updates), `sync`,
            `rewards` (after all models have scored); or `padding`, `checkpoints` (shares of the time),
            `gb_per_s`, `gpu` (utilisation
            in the training), `memory` (share of the policy's).
    """
    config = config_from_tree({"ppo": ppo}, "test").ppo
    numbers = {
        "rollout": 4.2, "scoring": 1.5, "policy": 3.0, "critic": 2.9, "sync": 0.1, "rewards": 0.0,
        "padding": 0.05, "checkpoints": 0.02, "gb_per_s": 5.0,
        "gpu": 0.9, "memory": 0.8, **changed,
    }  # fmt: skip
    training = max(numbers["policy"], numbers["critic"])
    phases = {"scoring": numbers["scoring"] + numbers["rewards"], "training": training}
    others = sum(phases.values()) if config.staleness else 0.0
    phases |= {"rollout": max(0.0, numbers["rollout"] - others), "sync": numbers["sync"]}
    seconds = sum(phases.values())
    timings = {f"timing/{phase}": value for phase, value in phases.items()}
    timings |= {"timing/step": seconds, "timing/rewards": numbers["rewards"]}
    batch = batch_of([60] * config.rollout_batch_size, prompt=40)
    engine = {"seconds/sample": numbers["rollout"], "decode_steps": 60.0}
    processes = {ENGINES: [engine] * config.engine.count}
    groups = plan(config).groups
    for group in groups:
        counters = {"seconds/scores": numbers["scoring"]}
        for role in set(group.roles) & {"policy", "critic"}:
            counters[f"seconds/update_{role}"] = numbers[role]
        if "policy" in group.roles:
            counters["seconds/send_weights"] = numbers["sync"]
        processes[group.name] = [counters] * group.ranks
    return {
        **timings,
        **idle_shares(processes, groups, seconds),
        **token_rates(processes, groups, [batch], [batch], config.epochs),
        **engine_metrics(processes[ENGINES]),
        "utilisation/data_wait": data_wait(processes, timings, overlapped=config.staleness > 0) / seconds,
        "utilisation/padding": numbers["padding"],
        "sync/share": numbers["sync"] / seconds,
        "sync/gb_per_s": numbers["gb_per_s"],
        "utilisation/checkpoint": numbers["checkpoints"],
        "sync/bytes": 15e9,
        "gpu/utilisation/training": numbers["gpu"],
        "gpu/memory/policy": numbers["memory"],
        "utilisation/tokens_per_minibatch": 20000.0,
    }


SYNCHRONOUS = {"engine": {"enforce_eager": False}}
GPU = SYNCHRONOUS | {"staleness": 1}
REMOTE = {"type": "remote", "urls": ["http://rewards.test/"]}
# Rule, section `ppo`, the bottleneck that was planted, and what the sentence must contain.
PLANTED: list[tuple[str, dict[str, Any], dict[str, float], list[str]]] = [
    (
        "idle_engines",
        SYNCHRONOUS,
        {"policy": 10.0, "critic": 10.0},
        ["idle 73% of a step", "ppo.staleness=1", "12 s a step instead of 16 s"],
    ),
    (
        "many_engines",
        {"engine": {"enforce_eager": False, "count": 3}, "staleness": 1},
        {"rollout": 1.5},
        ["idle 67% of a step", "ppo.engine.count=2 would do"],
    ),
    ("few_engines", GPU, {"rollout": 20.0}, ["idles 77% of a step", "ppo.engine.count=2"]),
    ("slow_critic", GPU, {"critic": 9.0}, ["the policy idles", "ppo.critic_deepspeed.ranks=3"]),
    ("slow_policy", GPU, {"policy": 6.0}, ["the critic idles", "ppo.policy_deepspeed.ranks=2"]),
    ("padding", GPU | {"pack": False}, {"padding": 0.4}, ["40% of the tokens", "ppo.pack=auto"]),
    ("padding", GPU, {"padding": 0.4}, ["40% of the tokens", "ppo.micro_batch_tokens=8192"]),
    (
        "sync",
        GPU | {"weight_sync": {"backend": "gloo"}},
        {"sync": 3.0, "gb_per_s": 0.4},
        ["takes 40% of a step, 0.4 GB/s", "ppo.weight_sync.backend=auto"],
    ),
    (
        "idle_gpu",
        GPU | {"micro_batch_tokens": 4096},
        {"gpu": 0.16, "memory": 0.3},
        ["16% of the training", "30% of the memory", "ppo.micro_batch_tokens=8192"],
    ),
    ("full_gpu", GPU, {"memory": 0.98}, ["98% of the GPU memory", "ppo.micro_batch_tokens=8192"]),
    (
        "full_gpu",
        SYNCHRONOUS | {"colocate": "all"},
        {"memory": 0.98},
        ["98% of the GPU memory", "ppo.engine.gpu_memory_utilization="],
    ),
    (
        "rewards",
        GPU | {"rewards": [REMOTE]},
        {"rewards": 6.0},
        ["wait 57% of", "ppo.rewards.0.concurrency=8"],
    ),
    (
        "few_sequences",
        {"engine": {"enforce_eager": False, "max_num_seqs": 16}, "staleness": 1},
        {"rollout": 20.0},
        ["decodes 16 of its 64 sequences", "ppo.engine.max_num_seqs=64"],
    ),
    ("eager", {"staleness": 1}, {"rollout": 9.0}, ["a token 150.0 ms", "ppo.engine.enforce_eager=false"]),
    (
        "checkpoints",
        GPU,
        {"checkpoints": 0.25},
        ["checkpoints take 25% of the time", "ppo.checkpoint_every=50"],
    ),
]


def given(
    caplog: pytest.LogCaptureFixture, ppo: dict[str, Any], steps: list[dict[str, float]], device: str = "cuda"
) -> list[tuple[str, str]]:
    """Return (rule, sentence) of the advice for these steps."""
    return given_for(caplog, config_from_tree({"ppo": ppo}, "test").ppo, steps, device)


def given_for(
    caplog: pytest.LogCaptureFixture, ppo: PPOConfig, steps: list[dict[str, float]], device: str
) -> list[tuple[str, str]]:
    caplog.clear()
    advice = Advice(ppo, device)
    with caplog.at_level(logging.WARNING):
        for number, metrics in enumerate(steps, start=1):
            advice.check(metrics, number)
    return [(record.advice, record.getMessage()) for record in caplog.records if hasattr(record, "advice")]


@pytest.mark.parametrize(("name", "ppo", "planted", "parts"), PLANTED, ids=[f[0] for f in PLANTED])
def test_a_planted_bottleneck_is_named_once_with_its_field(
    name: str,
    ppo: dict[str, Any],
    planted: dict[str, float],
    parts: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    balanced = step(ppo, rollout=100.0) if name == "idle_engines" else step(ppo)
    slow = step(ppo, **planted)
    ((rule, sentence),) = given(
        caplog, ppo, [slow, slow, balanced, *[slow] * 5, balanced, *[slow] * 5], "cuda"
    )
    assert rule == name and sentence.startswith(f"advice, step {3 + PATIENCE}: ")
    assert all(part in sentence for part in parts), sentence
    field = sentence.split(": ")[-1].split("=")[0]
    assert field.startswith("ppo."), sentence


def test_every_rule_is_planted() -> None:
    assert {name for name, *_ in PLANTED} == {rule.name for rule in RULES}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_balanced_step_gives_no_advice(device: str, caplog: pytest.LogCaptureFixture) -> None:
    assert given(caplog, GPU, [step(GPU)] * 5, device) == []
    assert given(caplog, GPU, [{"timing/step": 1.0, "timing/rollout": 1.0}] * 5, device) == []
    short = step(SYNCHRONOUS, rollout=0.6)  # staleness would make a step 12 % shorter
    assert given(caplog, SYNCHRONOUS, [short] * 5, device) == []


def test_processes_that_share_cores_or_gpus_are_not_idle(caplog: pytest.LogCaptureFixture) -> None:
    slow = step(GPU, rollout=20.0, critic=9.0)
    assert given(caplog, GPU, [slow] * 5, "cpu") == []
    together = SYNCHRONOUS | {"colocate": "all"}
    assert given(caplog, together, [step(together, rollout=20.0)] * 5) == []


@pytest.mark.parametrize(
    ("ppo", "changed"),
    [
        ({"micro_batch_tokens": 32768}, {"gpu": 0.16, "memory": 0.3}),  # one micro-batch already
        ({"micro_batch_tokens": 4096}, {"gpu": 0.16, "memory": 0.7}),  # two could be too many
        ({"micro_batch_tokens": 4096}, {"gpu": 0.7, "memory": 0.3}),
    ],
)
def test_settings_that_would_not_help_a_gpu_are_not_advised(
    ppo: dict[str, Any], changed: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    assert given(caplog, GPU | ppo, [step(GPU | ppo, **changed)] * 5) == []


def test_rewards_that_are_computed_during_the_scoring_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ppo = GPU | {"rewards": [REMOTE]}
    hidden = step(ppo, scoring=6.0) | {"timing/rewards": 5.0}
    assert given(caplog, ppo, [hidden] * 5) == []


@pytest.mark.parametrize(
    ("ppo", "field"),
    [
        (
            {
                "engine": {"enforce_eager": False, "dtype": "float32"},
                "policy_deepspeed": {"dtype": "bfloat16"},
            },
            "ppo.engine.dtype=bf",
        ),
        (
            {
                "engine": {"dtype": "bfloat16", "enforce_eager": False},
                "policy_deepspeed": {"dtype": "bfloat16"},
                "lora": {"r": 8},
                "weight_sync": {"lora": "merged"},
            },
            "ppo.weight_sync.lora=adapter",
        ),
    ],
)
def test_fewer_bytes_make_a_sync_shorter(
    ppo: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    ppo = {"staleness": 1, **ppo}
    ((rule, sentence),) = given(caplog, ppo, [step(ppo, sync=3.0)] * 5)
    assert rule == "sync" and field in sentence


def test_an_adapter_that_engines_do_not_serve_is_not_advised(caplog: pytest.LogCaptureFixture) -> None:
    base = {"engine": {"dtype": "bfloat16", "enforce_eager": False}, "staleness": 1}
    for lora in ({"r": 8, "quantize": "nf4"}, {"r": 1024}):
        ppo = base | {"policy_deepspeed": {"dtype": "bfloat16"}, "lora": lora}
        assert given(caplog, ppo, [step(ppo, sync=3.0)] * 5) == []


def test_the_page_lists_every_rule() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## Rules")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [rule.name for rule in RULES]


def real_run(name: str) -> tuple[PPOConfig, list[dict[str, float]]]:
    """Return section `ppo` and the metrics of the steps of a run on two cores with AVX-512.

    The first step has the metrics of the controller only.
    """
    columns = json.loads((ROOT / "tests" / "assets" / "step_metrics.json").read_text())[name]
    count = len(columns["timing/step"])
    steps = [
        {metric: values[i] for metric, values in columns.items() if values[i] is not None}
        for i in range(count)
    ]
    if name == "demo":
        return load_config(ROOT / "deployments" / "configs" / "demo.yaml").ppo, steps
    return config_from_tree(iteration_tree("model"), "benchmark").ppo, steps


@pytest.mark.parametrize("name", ["demo", "benchmark"])
def test_steps_of_real_runs_give_no_advice(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ppo, steps = real_run(name)
    assert {rule.metric for rule in RULES} - steps[-1].keys() == {
        "gpu/utilisation/training", "gpu/memory/policy"
    }  # of GPUs  # fmt: skip
    assert given_for(caplog, ppo, steps, "cpu") == []


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("padding", {"utilisation/padding": 0.3}),
        ("checkpoints", {"utilisation/checkpoint": 0.3}),
    ],
)
@pytest.mark.parametrize("name", ["demo", "benchmark"])
def test_a_bottleneck_in_the_steps_of_real_runs_is_named(
    name: str, rule: str, changed: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    ppo, steps = real_run(name)
    found = given_for(caplog, ppo, [metrics | changed for metrics in steps], "cpu")
    assert [rule for rule, _ in found] == [rule]
