"""Linear layers on CPUs through oneDNN.

For float32 torch calls MKL, which leaves AVX-512 unused on CPUs that are not Intel's: half the speed or less
(`docs/decisions/0005`). Names, weights and results to rounding stay those of `nn.Linear`.

For bfloat16 torch calls oneDNN too, but on CPUs without AVX-512 it has slow loops instead. There,
products are computed in float32 and rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf_core.errors import ModelError

_BY_ONEDNN: set[torch.dtype] = set()
"""Types that this module multiplies on a CPU."""
if torch.backends.mkldnn.is_available():
    _BY_ONEDNN.add(torch.float32)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _BY_ONEDNN.add(torch.bfloat16)


class OneDNNLinear(nn.Linear):
    """`nn.Linear` by oneDNN. Inputs of other types than those of `_BY_ONEDNN` are computed by torch."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Float32Linear(nn.Linear):
    """A small layer without bias that computes in float32 for every type of weight and input, because its
    output must not be rounded.
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None)


class Float32Head(nn.Linear):
    """A 16-bit language-model head with float32 logits: products and sums are computed in float32.

    The backward pass is that of a normal 16-bit head, which rounds the gradients of the logits.
    """

    def forward(self, input: Tensor) -> Tensor:
        # `torch.mm` with an `out_dtype` takes matrices only.
        rows = input.reshape(-1, input.shape[-1])
        # torch declares Function.apply without types
        logits: Tensor = _Float32Logits.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return logits.reshape(*input.shape[:-1], -1)


class _Float32Logits(torch.autograd.Function):
    """y = x W' + b in float32, (N, H) and (V, H) -> (N, V).

    In 16 bits: dx = dy W,  dW = dy' x,  db = sum of dy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda" and bias is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)  # avoids a float32 copy of the weight
        return linear(x.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rounded = dy.to(x.dtype)
        return (
            rounded @ weight if need_x else None,
            rounded.t() @ x if need_weight else None,
            dy.sum(0).to(x.dtype) if need_bias else None,
        )


def use_float32_head(model: Any) -> Any:
    """Convert the 16-bit `lm_head` of `model` to `Float32Head`, in place."""
    head = model.lm_head
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"model.head_dtype: float32 needs a head that is a linear layer; {type(model).__name__} has a "
            f"{type(head).__name__}; use model.head_dtype=model"
        )
    if head.weight.dtype != torch.float32:
        head.__class__ = Float32Head
    return model


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W' + b, on a CPU by oneDNN if torch was built with it."""
    if not _computed_here(x) or weight.dtype != x.dtype:
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
            _weight_gradient(x.reshape(-1, x.shape[-1]), rows) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return dy' x, (O, I) from (N, I) and (N, O)."""
    # `_matmul` copies its first argument if that is not contiguous, so this is the smaller of both.
    if dy.shape[1] > x.shape[1]:
        return _matmul(x.t(), dy.t()).t()
    return _matmul(dy.t(), x.t())


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b over the last axis of `x`."""
    # oneDNN raises an error for products over 0 elements, such as the gradient of a weight from 0 rows.
    if x.numel() == 0 or not _computed_here(x):
        return functional.linear(x, weight, bias)
    if x.dtype != torch.float32:
        # Here and not before: only the 16-bit tensors are kept for the backward pass.
        exact = _matmul(x.float(), weight.float(), None if bias is None else bias.float())
        return exact.to(x.dtype)
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def _computed_here(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _BY_ONEDNN


def use_onednn(model: Any) -> Any:
    """Convert the plain linear layers of `model` to `OneDNNLinear`, in place."""
    for module in model.modules():
        # Not isinstance: subclasses, such as those of bitsandbytes, compute in their own way.
        if type(module) is nn.Linear:
            # Only the class changes, so that names, hooks and tied weights stay.
            module.__class__ = OneDNNLinear
    return model
