"""A training continued on another number of ranks, through the real DeepSpeed and the real policy loop.

- from two ranks to one and from one to two, under ZeRO 0 to 3: the second step ends with the parameters and
  the moving average of a training that was not interrupted (float32, tolerance 2e-6), weight decay included;
  adapters too
- the checkpoint's folder, which is the store's own where that is a local one, is left as it was
- bfloat16 masters keep their precision on the way
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models.batching import TokenSequence
from rlhf_core.system.processes import free_port
from tests.integration import deepspeed_step
from tests.support.prepared_ranks import spawn

SETTINGS = [("policy", dtype, stage) for dtype in ("float32", "bfloat16") for stage in (0, 1, 2, 3)]
SETTINGS += [("policy-lora", "float32", stage) for stage in (2, 3)]
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-3}
"""Weights whose masters are this near can be rounded to two adjacent numbers of bfloat16, which are further
apart for weights above 0.25. Few of them are.
"""


def engine_of(rank: Rank, kind: str, dtype: str, stage: int) -> Any:
    from rlhf_core.engines.deepspeed import TrainingEngine

    deepspeed_step.raise_eps()
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant", weight_decay=0.3)
    sizes = DeepSpeedConfig.model_validate({"zero_stage": stage, "dtype": dtype})
    model = deepspeed_step.model(kind)
    if dtype == "bfloat16":
        model = model.bfloat16()
    return TrainingEngine(model, sizes, optimizer, rank, ema_decay=0.5)


def label(kind: str, dtype: str, stage: int) -> str:
    return f"{kind}-{dtype}-zero{stage}"


def step(engine: Any) -> None:
    samples = deepspeed_step.samples()
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in samples]
    deepspeed_step.policy_step(engine, "policy", samples, sequences, 60, True)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights and their moving average, with which the engine is left."""
    found = {name: tensor.float().clone() for name, tensor in engine.weights()}
    engine.restore_average()
    return found | {f"average.{name}": tensor.float().clone() for name, tensor in engine.weights()}


def compare(continued: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], dtype: str) -> dict[str, Any]:
    """Return the largest difference that rounding does not explain, and where it is; and how many of the
    weights with a large rounding step were rounded in another way.
    """
    largest, where, rounded, large = 0.0, "", 0, 0
    for name, wanted in whole.items():
        difference = (continued[name] - wanted).abs()
        if dtype == "bfloat16":
            # A number from 2^n to 2^(n + 1) has steps of 2^(n - 7).
            step_size = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp(min=1e-9))) - 7)
            is_large = step_size > TOLERANCE[dtype]
            is_step = is_large & (difference > TOLERANCE[dtype]) & (difference <= step_size)
            rounded, large = rounded + int(is_step.sum()), large + int(is_large.sum())
            difference = difference.masked_fill(is_step, 0.0)
        if difference.max() >= largest:
            largest, where = float(difference.max()), name
    return {"largest": largest, "where": where, "rounded": rounded, "large": large}


def work(number: int, ranks: int, port: int, folder: Path) -> None:
    """Continue what the other number of ranks left in `folder`, if anything, and leave a step of one's own
    there.
    """
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        name = label(*setting)
        theirs = folder / f"{3 - ranks}-{name}"
        if theirs.exists():
            engine = engine_of(rank, *setting)
            before = sorted(path.relative_to(theirs) for path in theirs.rglob("*"))
            engine.load_checkpoint(theirs, folder / "converted")
            assert sorted(path.relative_to(theirs) for path in theirs.rglob("*")) == before
            assert number != 0 or not (folder / "converted").exists()
            assert engine.steps_done == 1
            step(engine)
            continued, whole = weights(engine), torch.load(folder / f"whole-{name}.pt")
            found[name] = compare(continued, whole, setting[1])
        engine = engine_of(rank, *setting)
        step(engine)
        engine.save_checkpoint(folder / f"{ranks}-{name}")
        step(engine)
        whole = weights(engine)
        torch.distributed.barrier()
        if number == 0:
            torch.save(whole, folder / f"whole-{name}.pt")
    if number == 0:
        (folder / f"found-{ranks}.json").write_text(json.dumps(found))
    deepspeed_step.leave_for_good()


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By direction and setting: the result of `compare`."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        spawn(work, (ranks, free_port(), folder), nprocs=ranks)
    up = json.loads((folder / "found-2.json").read_text())
    for leftover in folder.glob("1-*"):
        leftover.rename(folder / f"old-{leftover.name}")
    spawn(work, (1, free_port(), folder), nprocs=1)
    return {"1 to 2": up, "2 to 1": json.loads((folder / "found-1.json").read_text())}


@pytest.mark.parametrize("direction", ["1 to 2", "2 to 1"])
def test_training_continues_on_another_number_of_ranks(
    differences: dict[str, dict[str, Any]], direction: str
) -> None:
    found = differences[direction]
    for setting in SETTINGS:
        result = found[label(*setting)]
        assert result["largest"] <= TOLERANCE[setting[1]], (label(*setting), result)
        assert result["rounded"] <= 0.01 * result["large"], (label(*setting), result)
