"""Split invariance through the real DeepSpeed.

- two optimizer steps give the same parameters on 1 and 2 ranks, under ZeRO 0, 2 and 3, with one or several
  micro-batches, padded and packed, for 9 sequences of uneven length (float32, to 2e-6)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.integration.deepspeed_step import SETTINGS, policy

TOLERANCE = 2e-6


def test_neither_ranks_nor_zero_nor_micro_batches_nor_packing_change_a_step(tmp_path: Path) -> None:
    script = [str(Path(__file__).parent / "deepspeed_step.py"), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path.cwd())}
    for ranks in ("1", "2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *script]
        done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    results = {path.stem: torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("*.pt"))}
    assert len(results) == 2 * len(SETTINGS)
    start = dict(policy().lm.named_parameters())
    reference = results["ranks1-zero0-1000-padded"]
    assert max((reference[name] - start[name]).abs().max().item() for name in start) > 1e-3
    for setting, weights in results.items():
        for name, tensor in reference.items():
            difference = (weights[name] - tensor).abs().max().item()
            assert difference <= TOLERANCE, f"{setting}: {name} differs by {difference:.2g}"
