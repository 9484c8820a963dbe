"""The demo learns what it is for, on each of three seeds: the figures that the README shows.

- the true reward rises, after PPO and step by step, by the demo's own measure (`rewards/gold/mean`)
- the policy uses the prompt on each seed: with exchanged prompts its gold reward falls
- so does the reward model on each seed: with exchanged prompts its held-out accuracy falls
- no guard is raised
- what its checkpoints take, hashing included, is at most 2 % of its PPO steps
- without a KL penalty a weak reward model is over-optimised: its score rises to the end, the true reward
  falls

Slow: each seed is the whole pipeline, four minutes on two idle cores.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import mean

import pytest

from tests.benchmarks import overoptimization

DEMO = Path(__file__).parents[2] / "deployments" / "configs" / "demo.yaml"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_raises_the_true_reward(seed: int, tmp_path: Path, summary_lines: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "rlhf_cli.main",
        "run",
        str(DEMO),
        f"run.home={tmp_path}",
        f"run.seed={seed}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(Path(done.stdout.splitlines()[-1].removeprefix("summary: ")).read_text())
    gold = summary["evaluate"]["gold_reward"]
    assert summary["reward"]["accuracy"] >= 0.83  # measured: 0.901, 0.877, 0.879
    assert gold["ppo"]["low"] > gold["sft"]["high"]
    table = summary["evaluate"]["policies"]["ppo"]
    assert table["win_rate"]["mean"] >= 0.70 and 0 < table["kl"] < 20
    # Measured: 0.140, 0.128, 0.084.
    assert summary["reward"]["accuracy"] - summary["reward"]["accuracy_exchanged"] >= 0.04
    exchanged = summary["evaluate"]["gold_reward_exchanged"]
    assert gold["sft"]["mean"] - exchanged["sft"]["mean"] >= 0.5  # measured: 1.021, 0.997, 0.985
    assert gold["ppo"]["mean"] - exchanged["ppo"]["mean"] >= 0.6  # measured: 1.159, 1.181, 1.152
    watched = gold_by_step(tmp_path)
    assert mean(watched[-5:]) - mean(watched[:5]) >= 0.6  # measured: 1.227, 1.255, 1.175
    seconds = seconds_of(tmp_path, "timing/checkpoint", "timing/step")
    summary_lines.append(f"checkpoints of seed {seed}: {seconds[0]:.2f} s of {seconds[1]:.1f} s in PPO steps")
    assert seconds[0] <= 0.02 * seconds[1]
    assert alarms(tmp_path) == []


def gold_by_step(home: Path) -> list[float]:
    """The true reward of the rollouts of each PPO step."""
    (metrics,) = home.glob("store/artifacts/ppo/*/*/metrics.jsonl")
    return [json.loads(line)["rewards/gold/mean"] for line in metrics.read_text().splitlines()]


def alarms(home: Path) -> list[str]:
    """The tags of guards in MLflow that were raised."""
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        return [name for (name,) in database.execute("select key from tags where key like 'rlhf.guard.%'")]


def seconds_of(home: Path, *metrics: str) -> list[float]:
    """Sums over the steps of PPO, as MLflow has them."""
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        query = (
            "select sum(metrics.value) from metrics join tags using (run_uuid) where metrics.key = ? and"
            " tags.key = 'rlhf.stage' and tags.value = 'ppo'"
        )
        return [float(database.execute(query, (name,)).fetchone()[0]) for name in metrics]


def test_without_a_kl_penalty_the_true_reward_falls_while_the_score_rises(
    tmp_path: Path, summary_lines: list[str]
) -> None:
    without, accuracy = overoptimization.run(tmp_path, overoptimization.WITHOUT, seed=0)
    with_kl, _ = overoptimization.run(tmp_path, overoptimization.WITH, seed=0)
    assert accuracy > 0.5
    assert 5 <= without.peak < 40, "it rises first"
    assert without.gold[without.peak] - without.gold[0] >= 0.2  # measured: 0.51
    assert without.fall >= 0.8  # measured: 3.55
    assert without.rise >= 1.3  # measured: 2.25
    assert without.kl[-1] > 2 * with_kl.kl[-1]
    assert with_kl.gold[-1] > without.gold[-1] + 0.4, "a KL penalty limits the loss"  # measured: 3.95
    summary_lines.append(
        f"over-optimisation: the true reward falls by {without.fall:.2f} from step {without.peak + 1} to the"
        f" end, where the score rises by {without.rise:.2f}; by {with_kl.fall:.2f} with a KL penalty"
    )
