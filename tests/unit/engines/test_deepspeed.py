"""The engine around DeepSpeed, which is scripted here.

- parts of a loss on ranks whose gradients are averaged give the gradient of the whole, whatever the
  micro-batches
- matrices decay; norms and biases do not
- on several GPUs, gradients are reduced during the backward pass, where DeepSpeed can do it; offloaded state
  is in pinned memory
- `restore_average` replaces the weights that are saved by their moving average
- the plan counts the same bytes in a checkpoint as the engine
- engines get the tensors of the model's files, which are not the parameters of a Mixtral
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig
from rlhf_core.engines.deepspeed import TrainingEngine, WeightAverage, WeightCopy, _decay_groups
from rlhf_core.engines.sharding import deepspeed_config
from rlhf_core.models.saving import WeightStream
from rlhf_core.planning.loads import checkpoint_bytes


class Averaging:
    """DeepSpeed on one of `ranks`, before its optimizer's step: the caller has losses divided by `gas`, the
    accumulation steps, and gradients are averaged over ranks."""

    def __init__(self, module: nn.Module, ranks: int = 1, gas: int = 1) -> None:
        self.module, self.ranks, self.gas = module, ranks, gas

    def fp16_enabled(self) -> bool:
        return False

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        (loss / self.ranks / (self.gas if scale_wrt_gas else 1)).backward()

    def step(self) -> None:
        pass

    def was_step_applied(self) -> bool:
        return True

    def get_global_grad_norm(self) -> float:
        return 1.0


class WholeParameters(TrainingEngine):
    """Needs no DeepSpeed to gather parameters, because none is sharded."""

    def _gathered(self, parameters: list[nn.Parameter], *, to_change: bool = False) -> Any:
        return nullcontext()


def engine_of(lm: nn.Module, *, ranks: int = 1, gas: int = 1, average: WeightAverage | None = None) -> Any:
    engine: Any = WholeParameters.__new__(WholeParameters)
    engine.rank = SimpleNamespace(rank=0, world_size=ranks)
    engine.engine = Averaging(nn.ModuleDict({"lm": lm}), ranks, gas)
    engine.module.lm = lm
    engine.optimizer, engine.optimizer_config = SimpleNamespace(param_groups=[]), OptimizerConfig()
    engine.zero_stage, engine.lora = 0, None
    engine.steps_done = engine.skipped_steps = engine._skipped_in_a_row = 0
    engine._own_clipping, engine._average = False, average
    return engine


def test_partial_losses_add_up_to_the_whole_gradient() -> None:
    lm = nn.Linear(1, 1, bias=False)
    nn.init.ones_(lm.weight)
    for micro_batches in ([[1.0, 2.0], [3.0]], [[4.0], [5.0], [6.0, 7.0]]):  # of two ranks
        engine = engine_of(lm, ranks=2, gas=len(micro_batches))
        engine.train_step((sum(x * lm.weight.sum() for x in group) / 7 for group in micro_batches), 1)
    # The mean of 1 to 7.
    assert lm.weight.grad is not None and lm.weight.grad.item() == pytest.approx(4.0)


def test_only_matrices_have_weight_decay() -> None:
    groups = _decay_groups(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 0.3)
    found = sorted(
        (parameter.ndim, group["weight_decay"]) for group in groups for parameter in group["params"]
    )
    assert found == [(1, 0.0), (1, 0.0), (1, 0.0), (2, 0.3)]


def test_the_average_of_the_weights_replaces_them(tmp_path: Path) -> None:
    lm = nn.Linear(1, 1, bias=False)
    nn.init.constant_(lm.weight, 1.0)
    moving = WeightAverage(lm, 0.9, rank_device="cpu")
    nn.init.constant_(lm.weight, 2.0)
    moving.update()
    engine = engine_of(lm, average=moving)

    def saved() -> float:
        found: dict[str, torch.Tensor] = {}

        def save(_folder: Path, weights: WeightStream) -> None:
            for group in weights.groups:
                found.update(group)

        engine.save_model(tmp_path / "m", save)
        return found["weight"].item()

    assert saved() == 2.0
    engine.restore_average()
    assert saved() == pytest.approx(0.9 * 1 + 0.1 * 2)


@pytest.mark.parametrize(
    ("stage", "overlap", "overlaps"),
    [(1, True, False), (2, True, True), (3, True, True), (2, False, False)],
)
def test_gradients_are_reduced_during_the_backward_pass(stage: Any, overlap: bool, overlaps: bool) -> None:
    settings = DeepSpeedConfig(ranks=2, zero_stage=stage, offload="optimizer")
    zero = deepspeed_config(settings, trained=10, clip=1.0, overlap=overlap)["zero_optimization"]
    assert zero["overlap_comm"] is overlaps
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


@pytest.mark.parametrize("tied", [True, False])
def test_engines_get_the_parameters_of_a_llama_in_their_order(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    lm = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    engine = engine_of(lm)
    sent = list(engine.weights())
    parameters = list(lm.named_parameters())
    assert [name for name, _ in sent] == [name for name, _ in parameters]
    assert all(
        tensor.data_ptr() == p.data_ptr() for (_, tensor), (_, p) in zip(sent, parameters, strict=True)
    )
    assert engine.shapes() == [(name, tuple(p.shape)) for name, p in parameters]


def test_engines_get_the_experts_under_the_names_of_their_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import MixtralConfig, MixtralForCausalLM

    lm = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    lm.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    engine = engine_of(lm)
    sent = dict(engine.weights())
    assert sent.keys() == expected.keys()
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in sent
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())
    assert engine.shapes() == [(name, tuple(tensor.shape)) for name, tensor in sent.items()]


@pytest.mark.parametrize("copies", [(), ("average",), ("average", "best")])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_the_bytes_of_a_checkpoint_as_the_engine_does(
    dtype: Any, zero_stage: Any, copies: tuple[str, ...]
) -> None:
    lm = nn.Linear(4, 3).to(getattr(torch, dtype))
    engine = engine_of(lm)
    engine.zero_stage, engine._best = zero_stage, None
    if "average" in copies:
        engine._average = WeightAverage(lm, 0.5, rank_device="cpu")
    if "best" in copies:
        engine._best = WeightCopy(lm, "best", rank_device="cpu")
    size = 4 if dtype == "float32" else 2
    planned = checkpoint_bytes(size, zero_stage, average="average" in copies, best="best" in copies)
    whole, of_rank_0 = engine.checkpoint_bytes
    assert whole == 15 * planned
    sharded = {0: 0, 1: 12, 2: 12, 3: planned}[zero_stage]  # the optimizer's state, or all of it
    assert of_rank_0 == 15 * (planned - sharded)
    # Frozen weights under an adapter are not part of a checkpoint.
    lm.weight.requires_grad_(False)
    engine.lora = LoraConfig()
    assert engine.checkpoint_bytes == (3 * planned, 3 * (planned - sharded))
