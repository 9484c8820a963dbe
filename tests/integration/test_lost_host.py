"""The power of a host is cut in the middle of each stage.

The host of ranks, in SFT, reward model, PPO and evaluation:

- the lost host is named within `SECONDS`, and the run ends with the exit code of a fault
- SFT continues from its last checkpoint with fewer ranks on the host that is left, at once, while Ray still
  takes the other one for alive; the others continue with all ranks after it has returned

The host of the stage's own process, in data and register, which have no ranks:

- another host with the same command makes the data, once the lease of the lost host is over, and names it
- after the host has returned, the same command registers the policy, once
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator

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
    pytest.mark.slow,  # eight starts of stages on two hosts
    pytest.mark.timeout(3600),
]

SECONDS = 90.0
"""30 s of silence after which a host is lost, up to 15 s each to save stacks and to end processes, and the
end of the run.
"""
LOST = re.compile(r"\b(on|host)\s+host-2\b.{0,200}?\b(lost|died)\b", re.DOTALL)
"""Messages of the agents' silence, of a process on the lost host, and of Ray: `host host-2 is lost`,
`rank 1 (process 47 on host host-2) is lost`, `rank 1 of sft on host-2 (10.77.0.2) died`.
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
  steps: 30
  prompts_per_step: 4
  minibatches: 1
  max_new_tokens: 16
  max_kl: 100
  checkpoint_every: 1
  colocate: all
  policy_deepspeed: {ranks: 3, zero_stage: 3}
  critic_deepspeed: {ranks: 3, zero_stage: 3}
  engine: {count: 1}
evaluate: {prompts: 8, bootstrap: 20, samples: 1, ranks: 3}
"""


class Lost:
    """Two hosts with Ray, and the store on a third."""

    def __init__(self, hosts: list[Host], store: dict[str, str], address: str) -> None:
        self.first, self.second = hosts
        self.store = store
        self._environment = {**store, "RAY_ADDRESS": address}
        (self.first.home / "lost.yaml").write_text(CONFIG)

    def command(self, stage: str, *overrides: str) -> list[str]:
        return [*rlhf("run", "/tmp/home/lost.yaml", *overrides), "--until", stage]

    def lose(self, stage: str) -> str:
        """Cut the power of the second host in the middle of a stage, and return the output."""
        run = self.first.start(*self.command(stage), log=f"{stage}-lost", **self._environment)
        in_the_middle = self._trains if stage in ("sft", "reward", "ppo") else self._has_rank
        deadline = time.monotonic() + 900
        while not in_the_middle(stage):
            assert run.poll() is None and time.monotonic() < deadline, self._said(f"{stage}-lost")[-3000:]
            time.sleep(0.2)
        if in_the_middle == self._trains:
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

    def _trains(self, stage: str) -> bool:
        """Return whether a step has ended."""
        return re.search(rf"{stage}: [1-9]\d*/\d+ steps", self._said(f"{stage}-lost")) is not None

    def _has_rank(self, stage: str) -> bool:
        """Return whether a rank of the stage runs on the second host."""
        return any((self.second.home / "run" / "stacks").glob(f"{stage}-*/*rank*"))

    def go_on(self, stage: str, *overrides: str) -> str:
        """Run the same command again, and return its output."""
        code, output = self.first.run(
            *self.command(stage, *overrides), seconds=900, log=f"{stage}-again", **self._environment
        )
        logs = sorted((self.first.home / "run" / "logs").rglob(f"{stage}-*.log"))
        text = output + "".join(log.read_text(errors="replace") for log in logs)
        assert code == 0, text[-4000:]
        return text

    def restore(self) -> None:
        """Power the second host on, and start Ray there."""
        started = self.second.output("ray").count("Ray runtime started")
        self.second.power_on()
        start_node(self.second, f"{self.first.address}:{RAY_PORT}", 2, **self.store)
        wait_until(lambda: self.second.output("ray").count("Ray runtime started") > started, 120)

    def _said(self, log: str) -> str:
        return self.first.output(log)


@pytest.fixture(scope="module")
def lost() -> Iterator[Lost]:
    with (
        start_hosts(3, "20mbit") as hosts,
        s3_server(hosts[2]) as store,
        ray_cluster(hosts[:2], cpus=2, head_cpus=None, **store) as address,
    ):
        yield Lost(hosts[:2], store, address)


def test_a_host_lost_in_data_is_named_by_the_one_that_takes_over() -> None:
    with start_hosts(3) as hosts, s3_server(hosts[2]) as store:
        for host in hosts[:2]:
            (host.home / "lost.yaml").write_text(CONFIG)
        command = [*rlhf("run", "/tmp/home/lost.yaml", "run.timeouts.stall=900"), "--until", "data"]
        first = hosts[0].start(*command, **store, **_suspended_at(hosts[0], "data.encoded"))
        wait_until(_is_suspended(hosts[0]), 400, hosts[0].output)
        hosts[0].cut_power()
        assert first.wait(60) != 0
        code, output = hosts[1].run(*command, seconds=600, **store)
        logs = "".join(log.read_text() for log in (hosts[1].home / "run" / "logs").rglob("data-*.log"))
        assert code == 0, output + logs
        assert re.search(r"stage data is held by process \d+ of host host-1", logs), logs


def _suspended_at(host: Host, point: str) -> dict[str, str]:
    """Return the environment in which the stage is suspended at a failpoint."""
    (host.home / "trace").mkdir()
    return {"RLHF_FAIL": f"{point}:1:stop", "RLHF_FAIL_TRACE": "/tmp/home/trace"}


def _is_suspended(host: Host) -> Callable[[], bool]:
    return lambda: any((host.home / "trace").glob("*:stop"))


def test_a_host_lost_in_sft_is_named_and_fewer_ranks_continue(lost: Lost) -> None:
    assert LOST.search(lost.lose("sft"))
    assert "sft: continues after step" in lost.go_on("sft", "sft.deepspeed.ranks=2")
    lost.restore()


@pytest.mark.parametrize("stage", ["reward", "ppo"])
def test_a_host_lost_in_a_stage_is_named_and_all_ranks_continue_when_it_returns(
    lost: Lost, stage: str
) -> None:
    assert LOST.search(lost.lose(stage))
    lost.restore()
    assert f"{stage}: continues after step" in lost.go_on(stage)


def test_a_host_lost_in_the_evaluation_is_named_and_it_is_made_when_it_returns(lost: Lost) -> None:
    assert LOST.search(lost.lose("evaluate"))
    lost.restore()
    lost.go_on("evaluate")


def test_a_host_lost_in_register_registers_the_policy_once_when_it_returns(lost: Lost) -> None:
    """The last test of this module: the head of the cluster is lost, too."""
    settings = ("run.timeouts.stall=900",)
    environment = _suspended_at(lost.first, "register.created")
    lost.first.start(*lost.command("register", *settings), log="register-lost", **lost.store, **environment)
    wait_until(_is_suspended(lost.first), 600, lambda: lost.first.output("register-lost"))
    lost.first.cut_power()
    lost.first.power_on()
    code, output = lost.first.run(
        *lost.command("register", *settings), seconds=900, log="register-again", **lost.store
    )
    assert code == 0, output
    found = json.loads(next((lost.first.home / "run" / "runs").glob("*/summary.json")).read_text())
    assert found["stages"]["register"]["metrics"]["version"] == 1
