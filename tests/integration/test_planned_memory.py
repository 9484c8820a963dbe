"""What `rlhf plan` predicts is what DeepSpeed allocates: parameters, gradients and optimizer state in float32 on 1 and 2
ranks under ZeRO 0 to 3, to the byte (gradients of ZeRO 2: to the parameter that straddles the ranks' border)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.config.training import DeepSpeedConfig
from rlhf_core.planning.memory import state_bytes
from tests.integration.deepspeed_step import model


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_prediction_is_what_deepspeed_allocates(ranks: int, tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "deepspeed_memory.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*command, script, str(tmp_path / "found.json")],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parameters = sum(p.numel() for p in model("policy").parameters())
    for stage, found in json.loads((tmp_path / "found.json").read_text()).items():
        deepspeed = DeepSpeedConfig.model_validate({"ranks": ranks, "zero_stage": int(stage)})
        predicted, _ = state_bytes(parameters, deepspeed, trained=True)
        assert (found["weights"], found["optimizer"]) == (predicted["weights"], predicted["optimizer"]), stage
        slack = 0.01 if stage == "2" else 0.0
        assert found["gradients"] == pytest.approx(predicted["gradients"], rel=slack, abs=0), stage
