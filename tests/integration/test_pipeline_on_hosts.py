"""The whole pipeline on two hosts that share nothing but a bucket.

- three ranks of ZeRO-3 on two hosts in SFT, reward and PPO give the artifacts of one host, bit for bit, also
  over a link of 20 Mbit/s
- the engine of PPO is on a host of the policy's ranks
- a driver on a host without ranks commits the artifacts of one host, registers the policy and has a match
  with a champion, without a copy of any weights
"""

from __future__ import annotations

import re

import pytest

from tests.support.hosts import (
    Host,
    artifact_digests,
    missing_right,
    ray_cluster,
    rlhf,
    s3_server,
    start_hosts,
)

pytestmark = [
    pytest.mark.skipif(missing_right() is not None, reason=str(missing_right())),
    pytest.mark.slow,
]

CONFIG = """
run: {name: hosts, device: cpu, threads: 2, retries: 1, timeouts: {start: 400, stall: 300}}
tracking: {system_metrics: false}
model:
  tiny: {hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, vocab_size: 320, max_positions: 128}
data:
  synthetic: {sft_examples: 64, pairs: 64, prompts: 40}
  max_prompt_tokens: 48
  max_response_tokens: 64
sft: {batch_size: 32, epochs: 1, samples: 1, deepspeed: {ranks: 3, zero_stage: 3}}
reward: {batch_size: 32, epochs: 1, min_accuracy: 0, deepspeed: {ranks: 3, zero_stage: 3}}
ppo:
  algorithm: grpo
  samples_per_prompt: 2
  steps: 2
  prompts_per_step: 4
  minibatches: 1
  max_new_tokens: 16
  max_kl: 100
  checkpoint_every: 1
  colocate: all
  policy_deepspeed: {ranks: 3, zero_stage: 3}
  critic_deepspeed: {ranks: 3, zero_stage: 3}
  engine: {count: 1}
evaluate: {prompts: 4, bootstrap: 20, samples: 1}
"""
STAGES = ("data", "sft", "reward", "ppo")


def _run(host: Host, home: str, store: str, *arguments: str, **environment: str) -> dict[str, str]:
    """Run the pipeline, and return the digests of its artifacts."""
    (host.home / "hosts.yaml").write_text(CONFIG)
    settings = (f"run.home=/tmp/home/{home}", f"store.url=s3://rlhf-test/{store}")
    code, output = host.run(
        *rlhf("run", "/tmp/home/hosts.yaml", *settings, *arguments), seconds=1500, log=home, **environment
    )
    logs = sorted((host.home / home / "logs").rglob("*.log"))
    assert code == 0, output[-3000:] + "".join(log.read_text(errors="replace")[-2000:] for log in logs)
    return artifact_digests(host, store, **environment)


@pytest.mark.timeout(3600)
def test_pipeline_on_two_hosts_computes_the_bits_of_one() -> None:
    with start_hosts(3, "20mbit") as hosts, s3_server(hosts[2]) as store:
        with ray_cluster(hosts[:2], cpus=2, head_cpus=None, **store) as address:
            there = _run(hosts[0], "two", "two", RAY_ADDRESS=address, **store)
            text = "".join(log.read_text() for log in (hosts[0].home / "two" / "logs").rglob("ppo-*.log"))
        here = _run(hosts[0], "one", "one", **store)
    placed = re.search(r"policy on (.+); engines on (.+)", text)
    assert placed is not None, text
    policy = placed[1].split(", ")
    assert len(policy) == 2 and placed[2] in policy
    made = [name.partition("/")[0] for name in there]
    assert sorted(made) == sorted([*STAGES, "evaluate", "register"])
    for name, stage in zip(there, made, strict=True):
        if stage in STAGES:
            assert there[name] == here[name], stage


def _logs(host: Host, home: str, stage: str) -> str:
    return "".join(log.read_text() for log in (host.home / home / "logs").rglob(f"{stage}-*"))


@pytest.mark.timeout(3600)
def test_weights_of_other_hosts_do_not_pass_through_the_driver() -> None:
    judge = ("evaluate.judge=reward_model", "register.min_prompts=1")
    with start_hosts(3) as hosts, s3_server(hosts[2]) as store:
        driver = hosts[0]
        with ray_cluster(hosts[:2], cpus=4, head_cpus=0, **store) as address:
            cluster = {"RAY_ADDRESS": address, **store}
            there = _run(driver, "two", "two", *judge, **cluster)
            logs = {stage: _logs(driver, "two", stage) for stage in STAGES}
            champion = ("hosts-policy", "1", "--reason", "for a match", "--home", "/tmp/home/two")
            code, output = driver.run(*rlhf("promote", *champion), seconds=300.0, log="promote", **store)
            assert code == 0, output
            # Another policy of the same SFT model and reward model.
            _run(driver, "two", "two", *judge, "ppo.steps=1", **cluster)
        weights = list((driver.home / "two" / "cache").rglob("*.safetensors"))
        summaries = [file.read_text() for file in (driver.home / "two" / "runs").rglob("summary.json")]
        here = _run(driver, "one", "one", *judge, "--until", "ppo", **store)
    assert {name: digest for name, digest in there.items() if name in here} == here
    assert len(here) == len(STAGES)
    uploaded = {
        stage: "host-2 has put 1 files with weights into the store" in logs[stage] for stage in STAGES
    }
    assert uploaded == {"data": False, "sft": True, "reward": True, "ppo": True}
    assert any("win_rate_over_champion" in summary for summary in summaries), "a match was run"
    assert not weights
