"""Attention in 16 bits on a CPU (`cpu_attention`), compared with float64.

- `short_attention` is at least as precise as torch's kernel in bfloat16, also for groups of heads
- the function is chosen by type, length and whether there is AMX
- with torch's kernel the output has its bits
- many sequences are computed in parts, with the same bits
- no token depends on a later one, and the global precision of float32 products is restored
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.config.base import SHORT_ATTENTION
from rlhf_core.models import attention as module
from rlhf_core.models.attention import implementation, short_attention

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=2)


def inputs(length: int, dtype: torch.dtype) -> Rows:
    """Return queries (2, 4, L, 16), and keys and values (2, 2, L, 16)."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, count, length, 16) for count in (4, 2, 2)]
    q, k, v = ((2 * torch.randn(s, generator=generator)).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def error(output: torch.Tensor, rows: Rows, exact: Rows, scaling: float) -> list[float]:
    """Return the mean errors of the output (2, L, heads, 16) and of the three gradients."""
    wanted = scaled_dot_product_attention(*exact, is_causal=True, scale=scaling, enable_gqa=True)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    found = torch.autograd.grad((output * weights).sum(), rows)
    right = torch.autograd.grad((wanted.transpose(1, 2) * weights.double()).sum(), exact)
    pairs = zip((output, *found), (wanted.transpose(1, 2), *right), strict=True)
    return [(a.double() - b).abs().mean().item() for a, b in pairs]


KERNEL = pytest.mark.parametrize("kernel", (False, True))
"""Whether torch's kernel computes the forward pass."""


@KERNEL
@pytest.mark.parametrize("length", (1, 5, 33, 200))
@pytest.mark.parametrize("scaling", (None, 0.1))
def test_short_attention_is_as_precise_as_torch(length: int, scaling: float | None, kernel: bool) -> None:
    rows = inputs(length, torch.bfloat16)
    q, k, v = (row.detach().double().requires_grad_() for row in rows)
    exact = (q, k, v)
    ours = error(short_attention(*rows, scaling, kernel=kernel), rows, exact, scaling or 0.25)
    output = scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=True)
    torchs = error(output.transpose(1, 2), rows, exact, scaling or 0.25)
    # Both round the same numbers to bfloat16, in another order.
    assert all(mine <= 1.5 * other + 1e-6 for mine, other in zip(ours, torchs, strict=True)), (ours, torchs)


def test_the_kernel_has_the_output_of_torch() -> None:
    rows = inputs(33, torch.bfloat16)
    output = short_attention(*rows, None, kernel=True)
    assert torch.equal(output, sdpa_attention_forward(MODULE, *rows, None)[0])


@KERNEL
def test_many_sequences_are_computed_in_parts(kernel: bool) -> None:
    rows = inputs(9, torch.bfloat16)
    whole = short_attention(*rows, None, kernel=kernel)
    parts = short_attention(*rows, None, kernel=kernel, most_scores=3 * 81)
    assert torch.equal(parts, whole)
    gradients = [torch.autograd.grad(output.float().square().sum(), rows) for output in (whole, parts)]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@KERNEL
def test_no_token_depends_on_a_later_one(kernel: bool) -> None:
    q, k, v = (row.detach() for row in inputs(9, torch.bfloat16))
    before = short_attention(q, k, v, None, kernel=kernel)
    for row in (q, k, v):
        row[:, :, 6:] = 5.0
    assert torch.equal(short_attention(q, k, v, None, kernel=kernel)[:, :6], before[:, :6])


def test_the_precision_of_other_products_is_restored() -> None:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    short_attention(*inputs(8, torch.bfloat16), None).sum().backward()
    assert setting.fp32_precision == before


@pytest.mark.parametrize(
    ("dtype", "length", "amx", "name"),
    [
        (torch.bfloat16, 8, False, "_short"),
        (torch.bfloat16, SHORT_ATTENTION, False, "_short"),
        (torch.bfloat16, SHORT_ATTENTION + 1, False, "sdpa_attention_forward"),
        (torch.float16, 8, False, "sdpa_attention_forward"),
        (torch.bfloat16, 8, True, "_short"),
        (torch.bfloat16, SHORT_ATTENTION + 1, True, "sdpa_attention_forward"),
        (torch.float16, 8, True, "sdpa_attention_forward"),
        (torch.float32, 8, False, "sdpa_attention_forward"),
    ],
)
def test_the_function_is_chosen_by_type_and_length(
    dtype: torch.dtype, length: int, amx: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    query = torch.empty(1, 1, length, 8, dtype=dtype)
    assert module.cpu_attention(query).__name__ == name
    with torch.no_grad():
        # torch's forward pass is fast with AMX, and has the same bits (see above).
        alone = "sdpa_attention_forward" if amx else name
        assert module.cpu_attention(query).__name__ == alone


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("borders", (None, (0, 3, 6, 11)))
def test_rows_have_the_output_of_torch(dtype: torch.dtype, borders: tuple[int, ...] | None) -> None:
    rows = [row[:1] for row in inputs(11, dtype)]
    attend = ALL_ATTENTION_FUNCTIONS[implementation("sdpa")]
    output = attend(MODULE, *rows, None, cu_seq_lens_q=borders)[0]
    assert output.dtype == dtype
    parts = [
        sdpa_attention_forward(MODULE, *(row[:, :, a:b].float() for row in rows), None)[0]
        for a, b in pairwise(borders or (0, 11))
    ]
    torch.testing.assert_close(output.float(), torch.cat(parts, dim=1), atol=0.03, rtol=0.03)
