"""A training continued on another number of ranks, through the real DeepSpeed and the real policy loop.

- without `allow_other_ranks` it is refused, by a message that names both numbers
- with it, from two ranks to one and from one to two, under ZeRO 0 to 3: the second step ends with the
  parameters and the moving average of a training that was not interrupted (float32, tolerance 2e-6), weight
  decay included; adapters too
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
from rlhf_core.errors import ConfigError
from rlhf_core.models.batching import TokenSequence
from rlhf_core.system.processes import free_port
from tests.integration import deepspeed_step

SETTINGS = [("policy", dtype, stage) for dtype in ("float32", "bfloat16") for stage in (0, 1, 2, 3)]
SETTINGS += [("policy-lora", "float32", stage) for stage in (2, 3)]
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-3}


def engine_of(rank: Rank, kind: str, dtype: str, stage: int, *, allow: bool) -> Any:
    from rlhf_core.engines.deepspeed import TrainingEngine

    optimizer = OptimizerConfig(
        learning_rate=1e-2, warmup_ratio=0.0, schedule="constant", eps=1e-4, weight_decay=0.3
    )
    sizes = DeepSpeedConfig.model_validate({"zero_stage": stage, "dtype": dtype, "allow_other_ranks": allow})
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


def work(number: int, ranks: int, port: int, folder: Path) -> None:
    """Continue what the other number of ranks left in `folder`, if anything, and leave a step of one's own
    there.
    """
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    found = {}
    for setting in SETTINGS:
        name = label(*setting)
        theirs = folder / f"{3 - ranks}-{name}"
        if theirs.exists():
            if setting == SETTINGS[2]:
                with pytest.raises(ConfigError) as refused:
                    engine_of(rank, *setting, allow=False).load_checkpoint(theirs, folder / "converted")
                found["refused"] = refused.value.message
            engine = engine_of(rank, *setting, allow=True)
            before = sorted(path.relative_to(theirs) for path in theirs.rglob("*"))
            engine.load_checkpoint(theirs, folder / "converted")
            assert sorted(path.relative_to(theirs) for path in theirs.rglob("*")) == before
            assert number != 0 or not (folder / "converted").exists()
            assert engine.steps_done == 1
            step(engine)
            continued, whole = weights(engine), torch.load(folder / f"whole-{name}.pt")
            found[name] = deepspeed_step.largest_difference(continued, whole)
        engine = engine_of(rank, *setting, allow=False)
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
    """By direction and setting: (largest difference, parameter)."""
    from torch.multiprocessing import spawn

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
        difference, parameter = found[label(*setting)]
        assert difference <= TOLERANCE[setting[1]], (
            f"{label(*setting)}: {parameter} differs by {difference:.2g}"
        )


@pytest.mark.parametrize(
    ("direction", "numbers"), [("1 to 2", "by 1 rank(s); got 2;"), ("2 to 1", "by 2 rank(s); got 1;")]
)
def test_without_leave_another_number_of_ranks_is_refused(
    differences: dict[str, dict[str, Any]], direction: str, numbers: str
) -> None:
    message = differences[direction]["refused"]
    assert numbers in message and "allow_other_ranks=true" in message
