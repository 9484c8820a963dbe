"""On GPUs, weights reach the engines over CUDA IPC (shared GPUs: one, and two of an engine with tensor
parallelism) and NCCL (two GPUs), and prove that they arrived.

- after each sync, engines and trainer give the same tokens the same log-probabilities: in float32 to 1e-3, in
  bfloat16 to 0.05
- a tensor altered on the way to the engines stops the run with a message that names the version
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.errors import WeightSyncError
from tests.support.small_ppo import TENSORS, save_small_model, small_config, small_ppo, small_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHARED: dict[str, Any] = {"colocate": "all", "engine": {"gpu_memory_utilization": 0.3}}
TWO_RANKS = {"ranks": 2, "zero_stage": 3}
PARALLEL: dict[str, Any] = {
    "colocate": "all",
    "policy_deepspeed": TWO_RANKS,
    "critic_deepspeed": TWO_RANKS,
    "engine": {"gpu_memory_utilization": 0.3, "tensor_parallel": 2},
}
APART: dict[str, Any] = {
    "colocate": "pairs",
    "algorithm": "reinforce_pp",
    "engine": {"gpu_memory_utilization": 0.3},
}


@pytest.mark.parametrize(("dtype", "largest_gap"), [("float32", 1e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize(
    ("backend", "ppo", "gpus"), [("ipc", SHARED, 1), ("ipc", PARALLEL, 2), ("nccl", APART, 2)]
)
def test_engines_and_trainer_agree_after_each_sync_until_a_tensor_is_altered(
    backend: str,
    ppo: dict[str, Any],
    gpus: int,
    dtype: str,
    largest_gap: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    # The third sync is the one after step 2; its fifth tensor is altered after its checksum was taken.
    monkeypatch.setenv("RLHF_FAIL", f"weight_sync.send:{2 * TENSORS + 5}:alter")
    # An embedding of 2 MiB, larger than a bucket.
    model = save_small_model(tmp_path / "model", vocabulary=8192)
    sync = {"backend": backend, "bucket_mib": 1}
    settings = {"prompts_per_step": 16, "max_new_tokens": 12, "minibatches": 2, "weight_sync": sync}
    # On GPUs the default is bfloat16.
    precision = {
        name: {**ppo.get(name, {}), "dtype": dtype} for name in ("policy_deepspeed", "critic_deepspeed")
    }
    engine = {**ppo["engine"], "dtype": dtype}
    config = small_config(model, {**settings, **ppo, **precision, "engine": engine}, device="cuda")
    with small_ppo(config, model, tmp_path, small_prompts()) as controller:
        first = controller.iterate()
        assert first["sync/version"] == 1.0
        assert first["rollout/logprob_gap_mean"] < largest_gap
        # Step 2 samples from synced weights that differ from the first: agreement here is the sync's work.
        experience = controller.score(controller.collect())
        assert experience.metrics["rollout/logprob_gap_mean"] < largest_gap
        assert abs(experience.metrics["objective/kl"]) > 1e-3
        with pytest.raises(WeightSyncError, match="received other weights than version 2 sent"):
            controller.iterate()
