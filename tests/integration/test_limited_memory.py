"""Models that are larger than the memory of a rank (ZeRO-3).

All of them are slow.

- a rank holds its shards and single tensors while a model is loaded and tested, never the whole model, and
  the ranks of a host together read the files from the disk once
- SFT, reward model and the ranks of PPO train, save checkpoints, evaluate and save the result on four
  ranks whose address space is limited to the baseline and less than the weights of one model; models that are
  loaded whole do not fit that limit
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.models.folder import ModelFolder
from tests.integration.deepspeed_step import TORCHRUN
from tests.integration.limited_memory import make_model

MIB = 1 << 20
LIMIT = 0.9
"""Memory that a rank may use beyond its baseline, as a share of the weights of one model in float32."""
RANKS = 4
"""A rank of PPO has shards of three models: policy (with the reference), critic and reward model. On four
ranks these are 0.75 of the weights of one model.
"""


def run(ranks: int, folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(Path(__file__).with_name("limited_memory.py"))
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), script, str(folder), *arguments],
        # Each thread would reserve 64 MiB of addresses, used or not.
        env={**os.environ, **TORCHRUN, "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*.json"))]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_never_holds_the_whole_model_while_loading(tmp_path: Path, summary_lines: list[str]) -> None:
    weights = make_model(tmp_path, layers=16, hidden=768)
    code, output = run(4, tmp_path, "load", "sharded")
    assert code == 0, output[-3000:]
    found = results(tmp_path, "load-sharded")
    assert len(found) == 4
    for rank in found:
        assert weights / 4 < rank["peak"] - rank["before"] < 0.65 * weights
    read = sum(rank["read"] for rank in found) / weights
    summary_lines.append(f"bytes that four ranks of a host read from the disk: {read:.2f} times the weights")
    assert 0.9 < read < 1.1, "the page cache serves all ranks but the first"


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_model_larger_than_the_memory_of_a_rank_is_trained(
    tmp_path: Path, summary_lines: list[str]
) -> None:
    weights = make_model(tmp_path, layers=24, hidden=1024)
    limit = str(int(LIMIT * weights) // MIB)
    for stage in ("sft", "reward", "ppo"):
        code, output = run(RANKS, tmp_path, stage, "whole", limit)
        assert code != 0 and "memory" in output, output[-3000:]
        code, output = run(RANKS, tmp_path, stage, "sharded", limit)
        assert code == 0, (stage, [line for line in output.splitlines() if "Error" in line])
        assert len(results(tmp_path, f"{stage}-sharded")) == RANKS
        peaks = [rank["peak"] - rank["baseline"] for rank in results(tmp_path, f"{stage}-sharded")]
        summary_lines.append(
            f"{stage}: memory of a rank: {max(peaks) / weights:.2f} times one model's weights"
        )
        assert max(peaks) < LIMIT * weights
    for model in ("sft/model", "reward/model", "ppo/policy"):
        assert 4 * ModelFolder(tmp_path / model).parameters > 0.99 * weights
