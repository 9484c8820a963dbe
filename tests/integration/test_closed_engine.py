"""An engine that is closed frees its memory, through the real DeepSpeed, on one rank.

- without ZeRO and under ZeRO 1 and 2 nothing of the model and its optimizer is left
- under ZeRO 3 the optimizer's master weights and moments are gone, and what is left is at most a shard of the
  weights
- all of them are held by a ZeRO engine that is dropped without being closed: there is something to free
"""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models.batching import TokenSequence, collate
from tests.integration import deepspeed_step


def held(stage: int, *, closed: bool) -> dict[str, Any]:
    """What is alive after a step of bfloat16 training, and the bytes of tensors beyond those before it."""
    from rlhf_core.engines.deepspeed import TrainingEngine

    before = tensor_bytes()
    sizes = DeepSpeedConfig.model_validate({"zero_stage": stage, "dtype": "bfloat16"})
    model = deepspeed_step.model("sft").bfloat16()
    engine = TrainingEngine(model, sizes, OptimizerConfig(), Rank(), ema_decay=0.5, keep_best=True)
    sequences = [TokenSequence.of(s.prompt_ids, s.response_ids) for s in deepspeed_step.samples()]
    engine.train_step(iter([-engine(collate(sequences, pad_id=0, pack=True)).logprobs_N.mean()]), 10)
    weights = sum(p.numel() for p in engine.module.parameters()) * 2
    moment = weakref.ref(next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"])
    parameter = weakref.ref(next(model.parameters()))
    del model
    if closed:
        engine.close()
    del engine
    return {
        "parameter": parameter() is not None,
        "moment": moment() is not None,
        "left": (tensor_bytes() - before) / weights,
    }


def tensor_bytes() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = [
            x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)
        ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def work(_number: int, folder: Path) -> None:
    join(Rank())
    found = {str(stage): held(stage, closed=True) for stage in range(4)}
    found["dropped"] = held(2, closed=False)
    (folder / "found.json").write_text(json.dumps(found))
    deepspeed_step.leave_for_good()


def test_a_closed_engine_frees_its_memory(tmp_path: Path) -> None:
    from torch.multiprocessing import spawn  # type: ignore[attr-defined]

    spawn(work, (tmp_path,), nprocs=1)
    found = json.loads((tmp_path / "found.json").read_text())
    for stage in ("0", "1", "2"):
        assert not found[stage]["parameter"] and not found[stage]["moment"], stage
        assert found[stage]["left"] == pytest.approx(0.0, abs=0.01), stage
    assert not found["3"]["moment"]
    assert found["3"]["left"] <= 1.01
    assert found["dropped"]["parameter"] and found["dropped"]["left"] > 5
