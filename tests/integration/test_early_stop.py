"""Trainings of the reward model and of SFT that stop early, through the real DeepSpeed: one rank without
ZeRO, two ranks under ZeRO-3.

- it ends before its epochs do, with the very weights that had the lowest held-out loss
- a training that is killed, after that evaluation and again when all that is left is to restore it, ends in
  the same bits, from checkpoints that hold the best weights and the counts
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig, RewardConfig, SFTConfig
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models.batching import TokenSequence
from rlhf_core.stages.training import Training, train_epochs
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import free_port
from rlhf_core.types import PairExample
from tests.integration import deepspeed_step
from tests.support.checkpoints import keep
from tests.support.prepared_ranks import spawn
from tests.support.small_ppo import local_context as nowhere

SETTINGS = {"batch_size": 8, "epochs": 20, "checkpoint_every": 3, "early_stop": {"every": 2, "patience": 3}}
REWARD, SFT = RewardConfig.model_validate(SETTINGS), SFTConfig.model_validate(SETTINGS)


class _Killed(Exception):
    pass


def pairs(count: int, seed: int) -> list[PairExample]:
    """Labels are noise: what is learned by heart makes the held-out loss rise."""
    chance = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(1, 64) for _ in range(length))

    return [PairExample("", "", tokens(4), tokens(chance.randint(2, 8)), tokens(3)) for _ in range(count)]


def sequences(count: int, seed: int) -> list[TokenSequence]:
    return [TokenSequence.of(pair.prompt_ids, pair.chosen_ids) for pair in pairs(count, seed)]


def train(rank: Rank, kind: str, stage: int, folder: Path, dies_after: int | None = None) -> dict[str, Any]:
    """Digests of the weights at the end and of those kept on the way, the held-out losses by step, and where
    it ended. All ranks die together, after `dies_after` optimizer steps, or with 0 when the best weights are
    to be restored.
    """
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.stages import reward, sft

    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant")
    sizes = DeepSpeedConfig.model_validate({"zero_stage": stage, "ranks": rank.world_size})
    kept: list[str] = []
    losses: dict[int, float] = {}

    class Engine(TrainingEngine):
        def measure(self) -> None:
            """Evaluate the weights apart from the training, where it evaluates them."""
            if self.steps_done and self.steps_done % 2 == 0:
                if kind == "reward":
                    found, _ = reward.evaluate_reward(self, pairs(24, 1), REWARD, 0)
                else:
                    found = sft.evaluate_sft(self, sequences(24, 1), SFT, 0)
                losses[self.steps_done] = found["eval/loss"]

        def train_step(self, *args: Any) -> float:
            if self.steps_done == dies_after:
                raise _Killed
            self.measure()
            return super().train_step(*args)

        def snapshot_best(self) -> None:
            super().snapshot_best()
            kept.append(digest(self))

        def restore_best(self) -> None:
            if dies_after == 0:
                raise _Killed
            self.measure()
            super().restore_best()

    engine = Engine(
        deepspeed_step.model("value" if kind == "reward" else "policy"),
        sizes,
        optimizer,
        rank,
        keep_best=True,
    )
    store = CheckpointStore(Store(folder / "store"), "key", folder / f"work-{dies_after}", keep(2))
    context = replace(nowhere(folder), checkpoints=store) if rank.rank == 0 else None
    metrics: dict[str, float] = {}
    with contextlib.suppress(_Killed):
        training = Training("reward" if kind == "reward" else "sft", 0, 0, folder, context)
        if kind == "reward":
            trained = train_epochs(engine, pairs(24, 0), pairs(24, 1), REWARD, training, reward.OBJECTIVE)
            metrics = trained.metrics
        else:
            metrics = sft.train_sft(engine, sequences(24, 0), sequences(24, 1), SFT, training)
    best = metrics.get("best_step")
    return {
        "weights": digest(engine),
        "kept": kept,
        "steps": engine.steps_done,
        "best": best,
        "losses": losses,
    }


def digest(engine: Any) -> str:
    """Return the digest of all weights; a collective."""
    found = hashlib.sha256()
    for name, tensor in engine.weights():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def work(number: int, ranks: int, port: int, kind: str, stage: int, folder: Path) -> None:
    """One rank: an undisturbed training, and one that is killed twice."""
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    whole = train(rank, kind, stage, folder / "whole")
    killed = folder / "killed"
    first = train(rank, kind, stage, killed, dies_after=int(whole["best"]) + 5)
    second = train(rank, kind, stage, killed, dies_after=0)
    last = train(rank, kind, stage, killed)
    if number == 0:
        (folder / "result.json").write_text(json.dumps([whole, first, second, last]))
    deepspeed_step.leave_for_good()


@pytest.mark.parametrize(("kind", "ranks", "stage"), [("reward", 1, 0), ("reward", 2, 3), ("sft", 2, 3)])
def test_best_weights_survive_kills_bit_by_bit(kind: str, ranks: int, stage: int, tmp_path: Path) -> None:
    spawn(work, (ranks, free_port(), kind, stage, tmp_path), nprocs=ranks)
    whole, first, second, last = json.loads((tmp_path / "result.json").read_text())
    assert 0 < whole["best"] < whole["steps"] == whole["best"] + 3 * 2 < 60
    assert whole["weights"] == whole["kept"][-1]
    assert int(min(whole["losses"], key=whole["losses"].__getitem__)) == whole["best"]
    assert first["steps"] == whole["best"] + 5 and first["best"] is None
    assert second["steps"] == whole["steps"] and second["weights"] != whole["weights"]
    assert (last["weights"], last["best"]) == (whole["weights"], whole["best"])
    # It never saw the best evaluation itself: the weights came out of the checkpoint.
    assert last["kept"] == []
    manifests = [
        json.loads(path.read_text()) for path in (tmp_path / "whole" / "store").rglob("manifest.json")
    ]
    assert {m["step"] % 2 for m in manifests} == {0, 1}
