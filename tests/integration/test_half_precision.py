"""The first steps of AdamW in bfloat16 and float16, through the real DeepSpeed, on one rank.

- the first step moves a weight by the learning rate, as Adam's corrected moments do: nothing was counted
  before it
- it ends in the same parameters under every ZeRO stage that the configuration allows, the optimizer offloaded
  or not (tolerance 2^-8: the last of bfloat16's 8 bits, for weights below 1), weight decay included, near
  those of float32
- with `grad_accum_dtype: float32` the gradients of 400 micro-batches add up to 400 times one, under ZeRO 2
  and 3; in bfloat16 the part of them is lost that additions in torch lose, and a warning says so
- a step whose gradient is NaN changes nothing: the next one ends in the bits of a training without it
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import DTYPES
from tests.integration import deepspeed_step
from tests.support.prepared_ranks import spawn

RATE = 1e-2
LAST_BIT = 2**-8
SETTINGS: list[tuple[str, int, str, str | None]] = [("bfloat16", stage, "none", None) for stage in range(4)]
SETTINGS += [("bfloat16", stage, "optimizer", None) for stage in (1, 2, 3)]
SETTINGS += [("bfloat16", stage, "none", "float32") for stage in (2, 3)]
SETTINGS += [("float16", stage, "none", None) for stage in (1, 2, 3)]
"""(dtype, ZeRO stage, offload, grad_accum_dtype). The preflight refuses float16 under ZeRO 0: DeepSpeed
divides by a loss scale there that it has not multiplied by.
"""
MANY = 400
"""A bfloat16 sum of n equal numbers g stops growing where g is less than half of the distance of its
neighbours: after 256 to 512 additions, depending on the bits of g, as half a last bit of a number of 8 bits
is 1/512 to 1/256 of it.
"""


def engine_of(dtype: str, stage: int, offload: str, sums: str | None = None) -> Any:
    from rlhf_core.engines.deepspeed import TrainingEngine

    optimizer = OptimizerConfig(learning_rate=RATE, warmup_ratio=0.0, schedule="constant", weight_decay=1.0)
    sizes = DeepSpeedConfig.model_validate(
        {"zero_stage": stage, "dtype": dtype, "offload": offload, "grad_accum_dtype": sums}
    )
    return TrainingEngine(deepspeed_step.model("sft").to(DTYPES[dtype]), sizes, optimizer, Rank())


def weights_after(engine: Any, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """One step of two micro-batches."""
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in deepspeed_step.samples()]
    halves = (collate(half, pad_id=0, pack=True) for half in (sequences[:5], sequences[5:]))
    engine.train_step((-factor * engine(batch).logprobs_N.sum() / 54 for batch in halves), 10**6)
    return {name: tensor.float().clone() for name, tensor in engine.weights()}


def share_of_many(dtype: str, stage: int, sums: str | None) -> tuple[float, int]:
    """The norm of the sum of many equal gradients as a share of that many times the norm of one; warnings on
    the way.
    """
    first, second = (engine_of(dtype, stage, "none", sums) for _ in range(2))
    warnings: list[Any] = []

    def keep(record: logging.LogRecord) -> bool:
        warnings.append(record)
        return True

    logging.getLogger("rlhf_core.engines.deepspeed").addFilter(keep)
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in deepspeed_step.samples()[:1]]
    batch = collate(sequences, pad_id=0, pack=True)
    one = first.train_step(iter([-first(batch).logprobs_N.mean()]), 10**6)
    many = second.train_step((-second(batch).logprobs_N.mean() for _ in range(MANY)), 10**6)
    return many / (MANY * one), len(warnings)


def share_by_hand() -> float:
    """What `share_of_many` is where gradients are added up in bfloat16: torch's additions and
    nothing else.
    """
    model = deepspeed_step.model("sft").to(torch.bfloat16)
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in deepspeed_step.samples()[:1]]
    (-model(collate(sequences, pad_id=0, pack=True)).logprobs_N.mean()).backward()
    one = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    total = torch.zeros_like(one)
    for _ in range(MANY):
        total += one
    return float(total.float().norm() / (MANY * one.float().norm()))


def work(_number: int, folder: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    join(Rank())
    get_accelerator().is_fp16_supported = lambda: True
    start = {name: p.detach() for name, p in deepspeed_step.model("sft").lm.named_parameters()}
    plain = weights_after(engine_of("float32", 0, "none"))
    reference = {dtype: weights_after(engine_of(dtype, 1, "none")) for dtype in ("bfloat16", "float16")}
    found = {}
    for dtype, stage, offload, sums in SETTINGS:
        stumbles, straight = (engine_of(dtype, stage, offload, sums) for _ in range(2))
        first = weights_after(stumbles)
        weights_after(straight)
        skipped = weights_after(stumbles, factor=math.nan)
        ends = weights_after(stumbles), weights_after(straight)
        decayed = {name: tensor * (1 - RATE) for name, tensor in start.items()}
        moved = torch.cat([(first[name] - tensor).abs().flatten() for name, tensor in decayed.items()])
        off = torch.cat([(first[name] - tensor).abs().flatten() for name, tensor in plain.items()])
        found[f"{dtype}-{stage}-{offload}-{sums}"] = {
            "moved": moved.median().item(),
            "from float32": off.mean().item(),
            "from ZeRO 1": deepspeed_step.largest_difference(first, reference[dtype])[0],
            "unchanged": all(torch.equal(first[name], tensor) for name, tensor in skipped.items()),
            "skipped": stumbles.skipped_steps,
            "bits": all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items()),
        }
    found["sums"] = {
        f"{stage}-{sums}": share_of_many("bfloat16", stage, sums)
        for stage in (2, 3)
        for sums in (None, "float32")
    }
    found["sums"]["by hand"] = share_by_hand()
    (folder / "found.json").write_text(json.dumps(found))
    deepspeed_step.leave_for_good()


def settings(found: dict[str, Any]) -> dict[str, Any]:
    return {name: seen for name, seen in found.items() if name != "sums"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("half")
    spawn(work, (folder,), nprocs=1)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("stage", ["2", "3"])
def test_many_gradients_add_up_in_float32_and_not_in_bfloat16(
    found: dict[str, Any], stage: str, summary_lines: list[str]
) -> None:
    share, warnings = found["sums"][f"{stage}-float32"]
    assert share == pytest.approx(1.0, abs=0.01)
    assert warnings == 0
    share, warnings = found["sums"][f"{stage}-None"]
    assert share == pytest.approx(found["sums"]["by hand"], abs=1e-3)
    assert share < 0.97, "at least three times what the other sums may be off by"
    assert warnings == 1
    summary_lines.append(
        f"sum of {MANY} bfloat16 gradients under ZeRO {stage}: {share:.4f} of the true one,"
        f" {found['sums']['by hand']:.4f} by hand, {found['sums'][f'{stage}-float32'][0]:.4f} with float32"
        " sums"
    )


def test_the_first_step_is_adams_first_under_every_zero_stage(found: dict[str, Any]) -> None:
    assert len(settings(found)) == len(SETTINGS)
    for name, seen in settings(found).items():
        assert seen["moved"] == pytest.approx(RATE, rel=0.01), name
        assert seen["from ZeRO 1"] <= LAST_BIT, name
        assert seen["from float32"] < RATE / 50, name


def test_a_gradient_that_is_nan_leaves_no_trace(found: dict[str, Any]) -> None:
    for name, seen in settings(found).items():
        assert seen["unchanged"] and seen["skipped"] == 1, name
        assert seen["bits"], name
