"""What the checkpoints of SFT and of the reward model are kept by: minus the held-out loss, where it was
measured.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config.training import RewardConfig, SFTConfig
from rlhf_core.engines import checkpointing
from rlhf_core.models.batching import TokenSequence
from rlhf_core.stages import reward, sft
from rlhf_core.types import PairExample

LOSSES = (0.9, 0.4, 0.6)
SFT = SFTConfig.model_validate({"batch_size": 1, "eval_every": 2})
REWARD = RewardConfig.model_validate({"batch_size": 1, "early_stop": {"every": 2, "patience": 9}})


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_lower_the_held_out_loss_the_higher_the_score(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, scores = iter(LOSSES), []
    monkeypatch.setattr(checkpointing, "restore", lambda *_: None)
    monkeypatch.setattr(checkpointing, "after_step", lambda *_args, score, **_named: scores.append(score))
    for module in (sft, reward):
        monkeypatch.setattr(module, "train_step", lambda *_: {})
    monkeypatch.setattr(sft, "evaluate_sft", lambda *_: {"eval/loss": next(losses), "eval/perplexity": 1.0})
    monkeypatch.setattr(
        reward, "evaluate_reward", lambda *_: ({"eval/loss": next(losses)}, torch.zeros(0, 2))
    )
    engine: Any = SimpleNamespace(grad_nonfinite=False, snapshot_best=lambda: None, restore_best=lambda: None)
    known: Any = {"seed": 0, "pad_id": 0, "work": tmp_path, "context": None}
    if stage == "sft":
        rows = [TokenSequence((1, 2), (0, 1))] * 6
        sft.train_sft(engine, rows, rows, SFT, **known)
    else:
        pairs = [PairExample("", "", (1,), (2,), (3,))] * 6
        reward.train_reward(engine, pairs, pairs, REWARD, **known)
    # Six steps, the evaluations after every second one; SFT's last one comes after the last checkpoint.
    assert scores == [None, -0.9, None, -0.4, None, -0.6 if stage == "reward" else None]
