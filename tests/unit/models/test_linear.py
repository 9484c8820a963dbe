"""oneDNN linear layers.

Rules: values and gradients are those of nn.Linear; only plain linear layers are turned, in place, with
their weights; bfloat16 is computed in float32 and rounded on CPUs that have no products for it; other dtypes
take torch's own way; an empty batch and repeated calls work.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.models.linear import OneDNNLinear, use_onednn


class _Special(nn.Linear):
    """A subclass somebody else made."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (7, 24), (3, 5, 24), (0, 24)])
def test_values_and_gradients_are_those_of_a_plain_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 10, bias=bias)
    ours = use_onednn(copy.deepcopy(plain))
    assert type(ours) is OneDNNLinear
    x = torch.randn(shape)
    results = []
    for layer in (plain, ours):
        given = x.clone().requires_grad_()
        output = layer(given)
        (output * torch.arange(10.0)).sum().backward()
        results.append([output.detach(), given.grad, *(p.grad for p in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_frozen_weights_get_no_gradient_and_the_input_still_does() -> None:
    layer = use_onednn(nn.Linear(8, 4)).requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 8))


def test_only_plain_linear_layers_are_turned_and_names_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Special(4, 4), nn.LayerNorm(4))
    names = list(model.state_dict())
    use_onednn(model)
    assert [type(module) for module in model] == [OneDNNLinear, _Special, nn.LayerNorm]
    assert list(model.state_dict()) == names


def test_16_bit_products_are_rounded_float32_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.models.linear._BY_ONEDNN", {torch.float32, torch.bfloat16})
    products, product = [], torch.ops.mkldnn._linear_pointwise

    def counted(x: torch.Tensor, *others: Any) -> Any:
        products.append(x.dtype)
        return product(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    torch.manual_seed(0)
    layer = use_onednn(nn.Linear(300, 40)).bfloat16()
    exact = copy.deepcopy(layer).float()
    x = torch.randn(3, 50, 300).bfloat16()
    results = []
    for each, given in ((layer, x.clone()), (exact, x.float())):
        output = each(given.requires_grad_())
        (output.float() * torch.linspace(-1, 1, 40).bfloat16()).sum().backward()
        results.append([output.detach(), given.grad, each.weight.grad])
    # Forward, for the input and for the weight, of both layers.
    assert products == [torch.float32] * 6
    for got, expected in zip(*results, strict=True):
        assert got is not None and expected is not None
        assert got.dtype == torch.bfloat16
        # Not equal bits: oneDNN and torch may add up in another order, which can change what is rounded.
        torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_take_torchs_own_way(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.models.linear._BY_ONEDNN", {torch.float32})
    layer = use_onednn(nn.Linear(6, 3)).to(dtype)
    x = torch.randn(5, 6, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_same_input_gives_the_same_bits() -> None:
    layer = use_onednn(nn.Linear(64, 64))
    x = torch.randn(33, 64)
    assert torch.equal(layer(x), layer(x))
