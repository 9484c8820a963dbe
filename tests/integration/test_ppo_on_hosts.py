"""PPO on two hosts that share nothing but a bucket, with real Ray, vLLM and DeepSpeed.

- three ranks of ZeRO-3 on two hosts give the same policy as on one host, bit for bit, also if one of them was
  suspended in between: it is named with its host, its stacks are on the driver's host, and the next attempt
  continues from the checkpoint of both hosts
- a checkpoint of two hosts is continued on one
- the second of two hosts with the same command waits for the first and uses its artifact
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import (
    RAY_PORT,
    Host,
    artifact_digests,
    missing_right,
    rlhf,
    s3_server,
    start_hosts,
    start_node,
    wait_until,
)

pytestmark = [
    pytest.mark.skipif(missing_right() is not None, reason=str(missing_right())),
    pytest.mark.slow,  # five starts of PPO
    pytest.mark.timeout(3600),
]

CONFIG = """
run: {name: hosts, device: cpu, threads: 2, timeouts: {start: 400, stall: 90, sync: 90}}
store: {url: s3://rlhf-test/x}
tracking: {system_metrics: false}
model:
  tiny: {hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, vocab_size: 320, max_positions: 128}
data:
  synthetic: {sft_examples: 64, pairs: 8, prompts: 40}
  max_prompt_tokens: 48
  max_response_tokens: 64
sft: {batch_size: 32, epochs: 1, samples: 1}
reward: {enabled: false}
ppo:
  algorithm: grpo  # no critic: the first host has two ranks, the second a rank and the engine
  samples_per_prompt: 2
  steps: 3
  prompts_per_step: 4
  max_new_tokens: 16
  minibatches: 2
  rewards: [{type: token_share, below: 50}]
  max_kl: 100
  checkpoint_every: 1
  policy_deepspeed: {ranks: 3, zero_stage: 3}
  engine: {count: 1}
"""
CLEAR = """
import boto3
bucket = boto3.resource("s3", endpoint_url="{endpoint}").Bucket("rlhf-test")
for prefix in ("x/artifacts/ppo", "x/checkpoints"):
    bucket.objects.filter(Prefix=prefix).delete()
"""
FAULT = {"RLHF_FAIL": "policy.update:2:stop", "RLHF_FAIL_TRACE": "/tmp/home/trace"}


class Hosts:
    """Two hosts and a store."""

    def __init__(self, hosts: list[Host], store: dict[str, str]) -> None:
        self.hosts = hosts
        self.store = store
        for host in hosts:
            (host.home / "trace").mkdir()
            (host.home / "hosts.yaml").write_text(CONFIG)

    def start(self, host: int, home: str, *overrides: str, until: str = "ppo", **environment: str) -> Any:
        command = rlhf("run", "/tmp/home/hosts.yaml", f"run.home=/tmp/home/{home}", *overrides)
        return self.hosts[host].start(*command, "--until", until, log=home, **self.store, **environment)

    def run(self, host: int, home: str, *overrides: str, **environment: str) -> tuple[int, str]:
        process = self.start(host, home, *overrides, **environment)
        try:
            code = process.wait(1200)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.explain(host, home)) from None
        return code, self.explain(host, home)

    def explain(self, host: int, home: str) -> str:
        logs = sorted((self.hosts[host].home / home / "logs").rglob("ppo*.log"))
        return self.hosts[host].output(home) + "".join(log.read_text()[-3000:] for log in logs)

    def digest(self, host: int, home: str) -> str:
        """Return the digest of the policy that a run has made."""
        (summary,) = (self.hosts[host].home / home / "runs").glob("*/summary.json")
        uri: str = json.loads(summary.read_text())["stages"]["ppo"]["artifact"]
        (name,) = re.findall(r"/artifacts/(ppo/\w+)/", uri)
        return artifact_digests(self.hosts[host], "x", **self.store)[name]

    def forget_ppo(self) -> None:
        """Remove the policy and its checkpoints from the store."""
        script = CLEAR.format(endpoint=self.store["AWS_ENDPOINT_URL_S3"])
        command = (sys.executable, "-c", script)
        code, output = self.hosts[0].run(*command, seconds=300.0, log="clear", **self.store)
        assert code == 0, output

    def cluster(self, **second: str) -> dict[str, str]:
        """Start Ray on both hosts, the second with this environment; return the environment of drivers."""
        address = f"{self.hosts[0].address}:{RAY_PORT}"
        environment = {**self.store, "DS_ACCELERATOR": "cpu"}
        start_node(self.hosts[0], None, 2, **environment)
        start_node(self.hosts[1], address, 2, **environment, **second)
        count = f"import ray; ray.init(address={address!r}); print('nodes', len(ray.nodes()))"
        wait_until(lambda: "nodes 2" in self.hosts[0].run(sys.executable, "-c", count, log="nodes")[1], 120)
        return {"RAY_ADDRESS": address}

    def end_ray(self) -> None:
        for host in self.hosts:
            host.kill_processes()


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with start_hosts(3) as hosts, s3_server(hosts[2]) as store:
        yield Hosts(hosts[:2], store)


@pytest.fixture(scope="module")
def on_one_host(two: Hosts) -> str:
    code, output = two.run(0, "one")
    assert code == 0, output
    return two.digest(0, "one")


def stacks(two: Hosts, home: str) -> list[Path]:
    return list((two.hosts[0].home / home / "stacks").rglob("*.stacks"))


def test_suspended_rank_of_another_host_is_named_and_the_next_attempt_gives_the_same_bits(
    two: Hosts, on_one_host: str
) -> None:
    two.forget_ppo()
    environment = two.cluster(**FAULT)
    try:
        code, output = two.run(0, "resumed", **environment)
    finally:
        two.end_ray()
    assert code == 0, output
    assert "on host host-2) has been suspended (SIGSTOP)" in output, output
    assert any("rank_0" in path.name and path.stat().st_size for path in stacks(two, "resumed"))
    assert "ppo: continues after step 1" in output
    assert two.digest(0, "resumed") == on_one_host


def test_checkpoint_of_two_hosts_is_continued_on_one(two: Hosts, on_one_host: str) -> None:
    two.forget_ppo()
    (two.hosts[1].home / "trace" / FAULT["RLHF_FAIL"]).unlink(missing_ok=True)
    environment = two.cluster(**FAULT)
    try:
        code, output = two.run(0, "broken", "run.retries=0", **environment)
    finally:
        two.end_ray()
    assert code != 0 and "on host host-2) has been suspended (SIGSTOP)" in output, output
    code, output = two.run(0, "continued")
    assert code == 0, output
    assert "ppo: continues after step 1" in output
    assert two.digest(0, "continued") == on_one_host


def test_second_host_with_the_same_command_waits_and_reuses(two: Hosts) -> None:
    fault = {"RLHF_FAIL": "data.encoded:1:stop", "RLHF_FAIL_TRACE": "/tmp/home/trace"}
    # The first one is suspended until the second one waits for it; its reaper must not kill it before.
    settings = ("store.url=s3://rlhf-test/same", "run.timeouts.stall=600")
    first = two.start(0, "first", *settings, until="data", **fault)
    marker = two.hosts[0].home / "trace" / fault["RLHF_FAIL"]
    wait_until(lambda: marker.exists() and marker.read_text(), 400, lambda: two.explain(0, "first"))
    second = two.start(1, "second", *settings, until="data")
    logs = two.hosts[1].home / "second" / "logs"
    wait_until(
        lambda: any("is held by" in log.read_text() for log in logs.rglob("data*.log")),
        400,
        lambda: two.explain(1, "second"),
    )
    (held,) = [log.read_text() for log in logs.rglob("data*.log")]
    assert f"process {marker.read_text().split()[1]} of host host-1, running since" in held
    os.kill(int(marker.read_text().split()[1]), signal.SIGCONT)
    assert first.wait(400) == 0, two.hosts[0].output("first")
    assert second.wait(400) == 0, two.hosts[1].output("second")
    made, reused = (
        json.loads(next((host.home / home / "runs").glob("*/summary.json")).read_text())["stages"]["data"]
        for host, home in zip(two.hosts, ("first", "second"), strict=True)
    )
    assert (made["reused"], reused["reused"]) == (False, True)
    assert made["artifact"] == reused["artifact"]
