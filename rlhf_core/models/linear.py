"""Linear layers in float32 on CPUs through oneDNN, which torch itself uses there for bfloat16 only.

For float32 torch calls MKL, which leaves AVX-512 unused on CPUs that are not Intel's: half the speed or less
(`docs/decisions/0005`). Names, weights and results to rounding stay those of `nn.Linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class OneDNNLinear(nn.Linear):
    """`nn.Linear`; what is not float32 on a CPU goes torch's own way."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Float32Linear(nn.Linear):
    """A small layer without bias whose output must not be rounded: float32, whatever its weight and input are in."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + b: of float32 on a CPU by oneDNN, where torch has it."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or not _HAS_ONEDNN:
        return functional.linear(x, weight, bias)
    # torch declares Function.apply without types
    output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """y = x W' + b;  dx = dy W,  dW = dy' x,  db = sum of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _matmul(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        return (
            _matmul(dy, weight.t()) if need_x else None,
            _matmul(rows.t(), x.reshape(-1, x.shape[-1]).t()) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b over the last axis of `x`."""
    if x.numel() == 0:
        return functional.linear(x, weight, bias)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def use_onednn(model: Any) -> Any:
    """Turn the plain linear layers of `model` into `OneDNNLinear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
    return model
