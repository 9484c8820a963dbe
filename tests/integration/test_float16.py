"""float16 with a dynamic loss scale, through the real DeepSpeed, on a CPU, where DeepSpeed's check for
float16 support is replaced (CPUs can compute in float16).

- under ZeRO 1 to 3 on one rank, three steps end near those in float32, norms included
- steps whose gradient overflows halve the scale, change nothing, are counted, and end nothing while the scale
  is large
- what is not finite at any scale ends the training with NonFiniteError
- an engine that goes on from a checkpoint has the scale, and ends in the same bits
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.batching import TokenSequence, collate
from tests.integration import deepspeed_step
from tests.support.prepared_ranks import spawn


def engine_of(rank: Rank, dtype: str, stage: int) -> Any:
    from rlhf_core.engines.deepspeed import TrainingEngine

    deepspeed_step.raise_eps()
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_ratio=0.0, schedule="constant")
    sizes = DeepSpeedConfig.model_validate({"zero_stage": stage, "dtype": dtype})
    model = deepspeed_step.model("sft")
    return TrainingEngine(model.half() if dtype == "float16" else model, sizes, optimizer, rank)


def step(engine: Any, factor: float = 1.0) -> float:
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in deepspeed_step.samples()]
    logprobs_N = engine(collate(sequences, pad_id=0, pack=True)).logprobs_N
    norm: float = engine.train_step(iter([-factor * logprobs_N.mean()]), 10**6)
    return norm


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.weights()}


def work(_number: int, folder: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    rank = Rank()
    join(rank)
    get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for stage in (1, 2, 3):
        plain, half = engine_of(rank, "float32", stage), engine_of(rank, "float16", stage)
        norms = [(step(plain), step(half)) for _ in range(3)]
        difference = deepspeed_step.largest_difference(weights(half), weights(plain))[0]
        before = weights(half)
        # 1e4 x 65536, and x 4096, is beyond what float16 holds.
        overflows = sum(not math.isfinite(step(half, factor=1e4)) for _ in range(5))
        unchanged = all(torch.equal(before[name], tensor) for name, tensor in weights(half).items())
        half.save_checkpoint(folder / f"{stage}")
        resumed = engine_of(rank, "float16", stage)
        resumed.load_checkpoint(folder / f"{stage}", folder / "converted")
        scales = [float(engine.optimizer.loss_scale) for engine in (half, resumed)]
        skipped = resumed.skipped_steps
        for engine in (half, resumed):
            step(engine)
        ends = weights(half), weights(resumed)
        found[stage] = {
            "norms": norms,
            "difference": difference,
            "overflows": overflows,
            "unchanged": unchanged,
            "skipped": skipped,
            "scales": scales,
            "bits": all(torch.equal(ends[0][name], tensor) for name, tensor in ends[1].items()),
            "until_the_end": steps_until_it_ends(half),
        }
    (folder / "found.json").write_text(json.dumps(found))
    deepspeed_step.leave_for_good()


def steps_until_it_ends(engine: Any) -> int:
    for count in range(1, 60):
        try:
            step(engine, factor=math.nan)
        except NonFiniteError:
            return count
    return 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("float16")
    spawn(work, (folder,), nprocs=1)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_float16_trains_like_float32(found: dict[str, Any], stage: str) -> None:
    seen = found[stage]
    assert seen["difference"] < 1e-3  # 11 bits on weights around 0.1, and AdamW's 3 steps of 1e-3
    for plain, half in seen["norms"]:
        assert half == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_overflows_lower_the_scale_and_change_nothing_else(found: dict[str, Any], stage: str) -> None:
    seen = found[stage]
    assert seen["skipped"] == seen["overflows"] == 5 and seen["unchanged"]
    # 65536, spared once (hysteresis), then halved four times.
    assert seen["scales"] == [4096.0, 4096.0]
    assert seen["bits"]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_what_is_not_finite_at_any_scale_ends_the_training(found: dict[str, Any], stage: str) -> None:
    # At 4096, 2048, ..., 16 it may be the scale; at 8, 4 and 2 it is a fault, and the third ends it.
    assert found[stage]["until_the_end"] == 9 + 3
