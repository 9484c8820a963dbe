"""On a GPU, the peak that `rlhf plan` predicts for SFT steps is torch's own figure, within 10 %.

A policy of half a billion parameters (the shape of Qwen2.5-0.5B), two packed micro-batches, through the real
engine: with and without checkpointing, with adapters, under ZeRO 0, 2 and 3. What CUDA and the process need
besides tensors is not in torch's figure and not compared.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig
from rlhf_core.models.shape import ModelShape
from rlhf_core.planning.memory import ForwardPass, Model
from tests.integration.deepspeed_memory import small_model, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE: dict[str, Any] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
LENGTHS = (3072, 2048, 2000, 1072)


@pytest.fixture(scope="module")
def rank() -> Iterator[Any]:
    from rlhf_core.engines.distributed import Rank, join, leave

    alone = Rank(device="cuda")
    join(alone)
    yield alone
    leave()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "lora": {"r": 16}},
        {"zero_stage": 2, "gradient_checkpointing": True},
        {"zero_stage": 3, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_predicted_peak_is_what_torch_measures(settings: dict[str, Any], rank: Any) -> None:
    predicted, measured = predicted_and_measured(settings, rank)
    message = f"predicted {predicted / 2**30:.2f} GiB, measured {measured / 2**30:.2f}"
    assert predicted == pytest.approx(measured, rel=0.10), message


def predicted_and_measured(settings: dict[str, Any], rank: Any) -> tuple[float, int]:
    """Return the peak of two SFT steps in bytes: that of the plan, and torch's."""
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.models.adapters import add_adapter

    lora = LoraConfig.model_validate(settings["lora"]) if "lora" in settings else None
    deepspeed = DeepSpeedConfig.model_validate(
        {"dtype": "bfloat16"} | {name: value for name, value in settings.items() if name != "lora"}
    )
    shape = ModelShape(896, 4864, 24, 14, 2, 64, 151936, tied=False)
    planned = Model(shape, deepspeed, lora=lora)
    predicted = planned.state.total + max(planned.backward(_batch()).total, planned.step.total)

    made = small_model("bfloat16", "cuda", **SHAPE)
    add_adapter(made, lora)
    engine = TrainingEngine(made, deepspeed, OptimizerConfig(), rank)
    del made
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(engine, LENGTHS, 2)
    measured = torch.cuda.max_memory_allocated()
    engine.close()
    return predicted, measured


def _batch() -> ForwardPass:
    return ForwardPass(sum(LENGTHS), max(LENGTHS))
