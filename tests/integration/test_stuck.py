"""Engines and ranks that die or are suspended in PPO, with real Ray, vLLM and DeepSpeed and two ZeRO-3 policy
ranks that both send the weights.

- an engine that is killed in a rollout or in a weight sync is replaced without a restart of the stage; its
  calls are repeated with the same seeds, and the weights are bit-identical to those of an undisturbed run
- a suspended policy rank, critic rank, or engine without restarts is named in the error within its timeout
  and 10 s; the stacks of the others are saved, and no process is left 10 s after the end
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_core.errors import WorkerDied, WorkerStuck
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet import fleet
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.system.heartbeat import Monitor
from tests.chaos.harness import processes
from tests.support.small_ppo import save_small_model, small_config, small_ppo, small_prompts

pytestmark = pytest.mark.slow  # several starts of a fleet, and suspensions that are waited for

STALL = 30.0
"""Long enough for a busy machine to load an engine in between."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


@contextmanager
def _running(model: Path, folder: Path, faults: str, patch: pytest.MonkeyPatch) -> Iterator[PPOController]:
    """A started fleet in whose processes `faults` happen, each once."""
    trace = folder / "trace"
    trace.mkdir()
    patch.setenv("RLHF_FAIL", faults)
    patch.setenv("RLHF_FAIL_TRACE", str(trace))
    patch.setenv("DS_ACCELERATOR", "cpu")
    patch.setattr(fleet, "MAX_RESTARTS", 1)
    config = small_config(
        model,
        {
            "steps": 9,
            "prompts_per_step": 8,
            "max_new_tokens": 8,
            "minibatches": 2,
            "colocate": "none",
            "policy_deepspeed": {"ranks": 2, "zero_stage": 3},
            "engine": {"count": 2},
        },
        timeouts={"stall": STALL, "sync": STALL},
    )
    with (
        Monitor(folder / "stacks") as monitor,
        small_ppo(config, model, folder, small_prompts(), monitor) as controller,
    ):
        yield controller


def _two_steps(controller: PPOController, folder: Path) -> str:
    """Digest of the policy after them."""
    controller.iterate()
    controller.iterate()
    controller.save_policy(folder / "policy")
    return weights_sha256(folder / "policy")


def _nobody_is_left(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while list(processes(folder / "trace")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not list(processes(folder / "trace"))


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two undisturbed steps and then one in which a policy rank and the critic's are suspended: digest, what
    was printed.
    """
    folder = tmp_path_factory.mktemp("golden")
    suspensions = "policy.update:3:stop,critic.update:3:stop"
    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(WorkerStuck) as caught, _running(model, folder, suspensions, patch) as controller:
            digest = _two_steps(controller, folder)
            started = time.monotonic()
            controller.iterate()
        assert time.monotonic() - started < STALL + 10
    assert _nobody_is_left(folder)
    stacks = {file.name: file.read_text() for file in (folder / "stacks").iterdir()}
    assert "in iterate" in stacks["controller.stacks"]
    assert "in update_policy" in "".join(text for name, text in stacks.items() if name.startswith("policy"))
    return digest, caught.value.message


def test_suspended_ranks_are_named_and_none_is_left(golden: tuple[str, str]) -> None:
    assert "while waiting for the policy's update of step 3 (run.timeouts: " in golden[1]
    for who in (r"policy rank \d", "critic rank 0"):
        assert re.search(rf"{who} \(process \d+\) has been suspended \(SIGSTOP\) for \d+ s", golden[1])


def test_lost_engines_are_replaced_bit_identically(
    golden: tuple[str, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One engine in the rollout of step 1; one in the sync after it, its third with the sync that confirms the
    # replacement. Each has answered in between, so that one restart in a row is enough. In the end one is
    # killed that is suspended when it has been started again: what was asked of it twice has had no answer.
    lost = ("engine.generate:1:kill", "engine.receive:3:kill")
    last = ("engine.generate:3:kill", "engine.generate:1:stop")
    with (
        pytest.raises(
            WorkerDied, match=r"engine \d is lost after 1 restarts: 1 of 2 remain, 2 are needed; at last: "
        ) as caught,
        _running(model, tmp_path, ",".join(lost + last), monkeypatch) as controller,
    ):
        trace = tmp_path / "trace"
        done = trace / last[1]
        done.touch()  # not yet: all engines come by there
        assert _two_steps(controller, tmp_path) == golden[0]
        assert set(lost) <= {file.name for file in trace.iterdir()}
        done.unlink()
        while True:
            controller.iterate()
    assert time.time() - float(done.read_text().split()[0]) < STALL + 10
    assert "has been suspended (SIGSTOP)" in caught.value.message
    assert _nobody_is_left(tmp_path)
