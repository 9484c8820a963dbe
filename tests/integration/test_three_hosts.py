"""SFT on three hosts that share nothing but a bucket, with a rank of ZeRO-3 on each.

- the artifact is that of three ranks on one host, bit for bit
- a run that is stopped leaves a checkpoint with a part of each host; the next one continues from it on all of
  them
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.hosts import (
    Host,
    artifact_digests,
    missing_right,
    ray_cluster,
    rlhf,
    s3_server,
    start_hosts,
    wait_until,
)

pytestmark = [
    pytest.mark.skipif(missing_right() is not None, reason=str(missing_right())),
    pytest.mark.slow,  # three starts of SFT
    pytest.mark.timeout(3600),
]

CONFIG = """
run: {name: three, device: cpu, threads: 2, retries: 0, timeouts: {start: 400, stall: 300}}
tracking: {system_metrics: false}
model:
  tiny: {hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, vocab_size: 320, max_positions: 128}
data:
  synthetic: {sft_examples: 128, pairs: 8, prompts: 16}
  max_prompt_tokens: 48
  max_response_tokens: 64
sft: {batch_size: 16, epochs: 3, samples: 1, checkpoint_every: 1, deepspeed: {ranks: 3, zero_stage: 3}}
"""
PARTS = """
import json, boto3
bucket = boto3.resource("s3").Bucket("rlhf-test")
keys = [item.key for item in bucket.objects.filter(Prefix="three/checkpoints/")]
manifests = [key for key in keys if key.endswith("/manifest.json")]
files = [json.loads(bucket.Object(key).get()["Body"].read())["files"] for key in manifests]
print("ranks", sum("zero_pp_rank_" in entry["path"] for entry in files[-1]) // 2)
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three hosts for Ray, and one for the store."""
    with start_hosts(4) as hosts:
        for host in hosts:
            (host.home / "three.yaml").write_text(CONFIG)
        yield hosts


def command(store: str) -> list[str]:
    settings = (f"run.home=/tmp/home/{store}", f"store.url=s3://rlhf-test/{store}")
    return [*rlhf("run", "/tmp/home/three.yaml", *settings), "--until", "sft"]


def logs(host: Host, store: str) -> str:
    files = sorted((host.home / store / "logs").rglob("sft-*.log"))
    return host.output(store) + "".join(file.read_text(errors="replace") for file in files)


def test_three_hosts_compute_the_bits_of_one(hosts: list[Host]) -> None:
    first = hosts[0]
    with s3_server(hosts[3]) as store:
        with ray_cluster(hosts[:3], cpus=1, head_cpus=None, **store) as address:
            environment = {"RAY_ADDRESS": address, **store}
            stopped = first.start(*command("three"), log="three", **environment)
            wait_until(
                lambda: "checkpoint of step 3" in logs(first, "three") or stopped.poll() is not None,
                900,
                lambda: logs(first, "three"),
            )
            stopped.send_signal(signal.SIGINT)
            assert stopped.wait(200) != 0, logs(first, "three")
            _, output = first.run(sys.executable, "-c", PARTS, seconds=300.0, log="parts", **store)
            assert "ranks 3" in output.splitlines(), "the driver's own, and those of two hosts"
            code, _ = first.run(*command("three"), seconds=900, log="three", **environment)
            text = logs(first, "three")
            assert code == 0, text[-4000:]
            assert "hosts of the stage: this one, host-2, host-3" in text
            assert "sft: continues after step" in text
        code, _ = first.run(*command("one"), seconds=900, log="one", **store)
        assert code == 0, logs(first, "one")[-4000:]
        there, here = (artifact_digests(first, name, **store) for name in ("three", "one"))
    assert len(there) == 2 and there == here
