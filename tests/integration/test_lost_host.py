"""The power of one of two hosts is cut in the middle of SFT, reward model and PPO.

- each time, the lost host is named within `SECONDS`, and the run ends with the exit code of a fault
- SFT continues from its last checkpoint with fewer ranks on the host that is left, at once, while Ray still
  takes the other one for alive; reward model and PPO continue with all ranks after it has returned
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator

import pytest

from tests.support.hosts import (
    RAY_PORT,
    Host,
    missing_right,
    ray_cluster,
    rlhf,
    s3_server,
    start_hosts,
    start_node,
    wait_until,
)

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.skipif(missing_right() is not None, reason=str(missing_right())),
    pytest.mark.slow,  # six starts of stages on two hosts
]

SECONDS = 90.0
"""30 s of silence after which a host is lost, up to 15 s each to save stacks and to end processes, and the
end of the run.
"""
_UPLOAD_SECONDS = 8.0
"""After the first step, until a checkpoint is in the store."""
CONFIG = """
run:
  name: lost
  home: /tmp/home/run
  device: cpu
  threads: 2
  retries: 0
  timeouts: {start: 400, stall: 300}
store: {url: s3://rlhf-test/lost}
tracking: {system_metrics: false}
model:
  tiny: {hidden_size: 64, intermediate_size: 128, layers: 1, heads: 2, vocab_size: 320, max_positions: 128}
data:
  synthetic: {sft_examples: 256, pairs: 128, prompts: 40}
  max_prompt_tokens: 48
  max_response_tokens: 64
sft: {batch_size: 16, epochs: 3, samples: 1, checkpoint_every: 1, deepspeed: {ranks: 3, zero_stage: 3}}
reward:
  batch_size: 16
  epochs: 6
  min_accuracy: 0
  checkpoint_every: 1
  deepspeed: {ranks: 3, zero_stage: 3}
ppo:
  algorithm: grpo
  samples_per_prompt: 2
  steps: 8
  prompts_per_step: 4
  minibatches: 1
  max_new_tokens: 16
  max_kl: 100
  checkpoint_every: 1
  colocate: all
  policy_deepspeed: {ranks: 3, zero_stage: 3}
  critic_deepspeed: {ranks: 3, zero_stage: 3}
  engine: {count: 1}
"""


class Lost:
    """Two hosts with Ray, and the store on a third."""

    def __init__(self, hosts: list[Host], store: dict[str, str], address: str) -> None:
        self.first, self.second = hosts
        self._store = store
        self._environment = {**store, "RAY_ADDRESS": address}
        (self.first.home / "lost.yaml").write_text(CONFIG)

    def command(self, stage: str, *overrides: str) -> list[str]:
        return [*rlhf("run", "/tmp/home/lost.yaml", *overrides), "--until", stage]

    def lose(self, stage: str) -> str:
        """Cut the power of the second host in the middle of a stage, and return what was said."""
        run = self.first.start(*self.command(stage), log=f"{stage}-lost", **self._environment)
        deadline = time.monotonic() + 600
        while not re.search(rf"{stage}: [1-9]\d*/\d+ steps", self._said(f"{stage}-lost")):
            assert run.poll() is None and time.monotonic() < deadline, self._said(f"{stage}-lost")[-3000:]
            time.sleep(0.2)
        time.sleep(_UPLOAD_SECONDS)
        assert run.poll() is None, self._said(f"{stage}-lost")[-3000:]
        self.second.cut_power()
        cut = time.monotonic()
        code = run.wait(600)
        seconds = time.monotonic() - cut
        log.info("%s: the run ended %.0f s after the power was cut", stage, seconds)
        assert code == 3, self._said(f"{stage}-lost")[-3000:]
        assert seconds < SECONDS
        return self._said(f"{stage}-lost")

    def go_on(self, stage: str, *overrides: str) -> str:
        """Run the same command again, and return what it said."""
        code, output = self.first.run(
            *self.command(stage, *overrides), seconds=900, log=f"{stage}-again", **self._environment
        )
        logs = sorted((self.first.home / "run" / "logs").rglob(f"{stage}-*.log"))
        said = output + "".join(log.read_text(errors="replace") for log in logs)
        assert code == 0, said[-4000:]
        return said

    def restore(self) -> None:
        """Power the second host on, and start Ray there."""
        started = self.second.output("ray").count("Ray runtime started")
        self.second.power_on()
        start_node(self.second, f"{self.first.address}:{RAY_PORT}", 2, **self._store)
        wait_until(lambda: self.second.output("ray").count("Ray runtime started") > started, 120)

    def _said(self, log: str) -> str:
        return self.first.output(log)


@pytest.fixture(scope="module")
def lost() -> Iterator[Lost]:
    with (
        start_hosts(3, "20mbit") as hosts,
        s3_server(hosts[2]) as store,
        ray_cluster(hosts[:2], cpus=2, **store) as address,
    ):
        yield Lost(hosts[:2], store, address)


@pytest.mark.timeout(3600)
def test_a_host_lost_in_sft_is_named_and_fewer_ranks_continue(lost: Lost) -> None:
    assert "host-2" in lost.lose("sft")
    fewer = ("sft.deepspeed.ranks=2", "sft.deepspeed.allow_other_ranks=true")
    assert "sft: continues after step" in lost.go_on("sft", *fewer)
    lost.restore()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_a_host_lost_in_a_stage_is_named_and_all_ranks_continue_when_it_returns(
    lost: Lost, stage: str
) -> None:
    assert "host-2" in lost.lose(stage)
    lost.restore()
    assert f"{stage}: continues after step" in lost.go_on(stage)
