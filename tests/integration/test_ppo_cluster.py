"""PPO over several ranks and engines: Ray, vLLM and DeepSpeed for real.

- two policy ranks under ZeRO-3 and two engines, at a temperature other than 1:
  after each sync, engines and trainer give the same tokens the same log-probabilities, to 1e-4 in float32
- every rollout carries the version that was acknowledged last
- beyond loopback only Ray's own sockets listen, and who comes without the token of this run is refused
- a tensor altered on the way to the engines stops the run with a message that names it
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlhf_core.errors import WeightSyncError
from tests.support.listening_sockets import beyond_loopback, listeners
from tests.support.small_ppo import TENSORS, save_small_model, small_config, small_ppo, small_prompts


def connect_with_a_wrong_token() -> subprocess.Popen[str]:
    import ray

    address = ray.get_runtime_context().gcs_address
    script = f"import ray; ray.init(address={address!r}, logging_level='ERROR'); print('connected')"
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, text=True)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def test_an_altered_tensor_is_detected_by_its_checksum(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The third sync is the one after step 2; its fifth tensor is altered after its checksum was taken.
    monkeypatch.setenv("RLHF_FAIL", f"weight_sync.send:{2 * TENSORS + 5}:alter")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = small_config(
        model,
        {
            "algorithm": "rloo",  # a critic would be one more process
            "prompts_per_step": 12,
            "samples_per_prompt": 2,
            "max_new_tokens": 12,
            "temperature": 0.7,
            "minibatches": 3,
            "policy_deepspeed": {"ranks": 2, "zero_stage": 3},
            "engine": {"count": 2},
        },
    )
    with small_ppo(config, model, tmp_path, small_prompts()) as controller:
        stranger = connect_with_a_wrong_token()
        reachable = beyond_loopback(listeners(os.getpid()))
        first = controller.iterate()
        assert first["objective/kl"] == pytest.approx(0.0, abs=1e-5)
        assert first["rollout/logprob_gap_max"] < 1e-4
        assert first["sync/version"] == 1.0
        # Step 2 samples from synced weights that differ from the first: agreement here is the sync's work.
        batch = controller.collect()
        assert len(batch) == 24
        experience = controller.score(batch)
        assert experience.metrics["rollout/logprob_gap_max"] < 1e-4
        assert abs(experience.metrics["objective/kl"]) > 1e-3
        # Ray's own programs, which ask for the token; each with one socket, the raylet with two.
        programs = Counter((listener.program.partition("::")[0], listener.pid) for listener in reachable)
        # The name of this process, the driver, depends on how the tests are run.
        others = {program for program, pid in programs if pid != os.getpid()}
        assert others <= {"gcs_server", "raylet", "ray", Path(sys.executable).name}, reachable
        assert 44217 not in {listener.port for listener in reachable}, "Ray's metrics, which ask for no token"
        assert [entry for entry, number in programs.items() if number > 1 + (entry[0] == "raylet")] == [], (
            reachable
        )
        assert stranger.wait(timeout=120) != 0
        assert "connected" not in stranger.communicate()[0]
        with pytest.raises(
            WeightSyncError, match=r"received other weights than version 2 sent: 1 of 20 tensors differ"
        ):
            controller.iterate()
