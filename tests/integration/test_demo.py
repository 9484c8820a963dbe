"""The demo learns what it is for, on each of three seeds: the figures that the README shows.

Slow: each seed is the whole pipeline, four minutes on two idle cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deployments" / "configs" / "demo.yaml"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_raises_the_true_reward(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", str(DEMO), f"run.home={tmp_path}", f"run.seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("summary: ")).read_text())
    gold = summary["evaluate"]["gold_reward"]
    assert summary["reward"]["accuracy"] >= 0.85
    assert gold["ppo"]["low"] > gold["sft"]["high"]
    assert summary["evaluate"]["win_rate"]["mean"] >= 0.70
    assert 0 < summary["evaluate"]["kl"] < 20
