"""Scaled-dot-product attention for packed rows: each sequence attends to itself alone, at the cost of its own
length.

Hugging Face models can keep packed sequences apart with a block-diagonal mask, but the cost is then the
square of the length of the whole row. Here the row is cut at the borders of the sequences (`cu_seq_lens_q`,
as flash attention names them), and neighbours of the same length share a call. Without borders it is plain
causal attention. On a GPU with 16-bit numbers, torch's kernel for sequences of different lengths computes the
whole row in one call.

Short sequences in bfloat16 on a CPU are a batch of matrix products (`short_attention`). torch's kernel for
this type gains nothing from `avx512_bf16`, and its backward pass is slow with and without AMX (decision 5).
The precision is that of flash attention: scores and softmax are float32, and probabilities are rounded to
bfloat16 for the products with values and gradients. For long sequences torch's kernel is faster, so the
length is limited.

Axes of these: N sequences times heads, L tokens, D dimensions of a head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf_core.config.base import SHORT_ATTENTION
from rlhf_core.errors import ModelError

NAME = "rlhf_sdpa"


def register() -> None:
    """Register `attn_implementation=NAME` with transformers. A second call has no effect."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME in ALL_ATTENTION_FUNCTIONS:
        return

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention. In packed rows, a token attends to tokens of its own sequence only."""
        borders = kwargs.pop("cu_seq_lens_q", None)
        _refuse_what_is_not_computed(module, (0, key.shape[2]) if borders is None else borders, kwargs)
        borders_S, longest = kwargs.pop("cu_seq_lens_k", None), kwargs.pop("max_length_q", None)
        kwargs.pop("max_length_k", None)
        # torch's kernel for packed rows and `short_attention` have neither.
        plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None
        if borders_S is not None and plain and has_varlen_kernel(query, value):
            return varlen(query, key, value, borders_S, longest, kwargs.get("scaling")), None
        if query.is_cuda and query.dtype == torch.float32:
            # Torch's memory-efficient kernel needs as many heads of keys as of queries. Without it, memory
            # grows with the square of the length.
            module, key, value = _expanded(module, query, key, value)
        if borders is None:
            # `short_attention` masks by position, which is wrong if there are fewer queries than keys.
            causal = plain and getattr(module, "is_causal", True) and query.shape[2] == key.shape[2]
            attention = cpu_attention(query) if causal else sdpa_attention_forward
            return attention(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
        kwargs["is_causal"] = True
        runs = list(_runs(borders))
        # Not slices: the backward of each slice writes zeros for the whole row.
        sizes = [count * length for count, length in runs]
        cut = [x.split_with_sizes(sizes, dim=2) for x in (query, key, value)]
        parts = []
        for (count, length), *inputs in zip(runs, *cut, strict=True):
            q, k, v = (_to_batch(x, count) for x in inputs)
            attention = cpu_attention(q) if plain else sdpa_attention_forward
            output = attention(module, q, k, v, None, **kwargs)[0]
            parts.append(output.reshape(1, count * length, *output.shape[2:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None

    def no_mask(*_args: Any, **_kwargs: Any) -> None:
        """Return no mask: rows are right-padded or split at borders, so that a causal mask is enough."""

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def cpu_attention(query: torch.Tensor) -> Any:
    """Return the function that computes plain causal attention with these queries (N, heads, L, d) fastest.

    On CPUs torch's kernel is slow for short sequences in bfloat16: with AMX its backward pass, and otherwise
    both passes (decision 5).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    on_cpu = query.device.type == "cpu"
    is_short = query.dtype == torch.bfloat16 and query.shape[2] <= SHORT_ATTENTION
    # With AMX, torch's forward pass alone is fast.
    if on_cpu and is_short and (torch.is_grad_enabled() or not torch.cpu._is_amx_tile_supported()):
        return _short
    return sdpa_attention_forward


def _short(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Return `short_attention`. The mask is always None (see `no_mask`)."""
    kernel = torch.cpu._is_amx_tile_supported()
    return short_attention(query, key, value, kwargs.get("scaling"), kernel=kernel), None


def has_varlen_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `varlen` computes with these queries and values (1, heads, L, d): NVIDIA's GPUs from
    Ampere on, and heads of one size.
    """
    # ROCm calls its GPUs cuda as well. The limits of head size, type and generation are those of flash
    # attention 2, which computes packed rows in torch.
    return (
        query.is_cuda
        and torch.version.cuda is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] == value.shape[-1]  # not so in multi-head latent attention (DeepSeek-V3)
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders_S: torch.Tensor,
    longest: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return causal attention inside each sequence of a packed row, (1, L, heads, d).

    Args:
        query: (1, heads, L, d)
        key: (1, key heads, L, d)
        value: (1, key heads, L, d)
        borders_S: (S+1,) int32, where sequences begin and end.
        longest: Tokens of the longest sequence.
        scaling: Factor of the scores; None for 1 / sqrt(d).
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    # Torch 2.11 has no such argument, and its kernel takes fewer heads of keys.
    if _has_parameter(varlen_attn, "enable_gqa"):
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # In `varlen_attn`, `window_size=(-1, 0)` means causal attention.
    output: Any = varlen_attn(
        q, k, v, borders_S, borders_S, longest, longest, scale=scaling, window_size=(-1, 0), **options
    )
    return output[None]  # type: ignore[no-any-return]


@cache
def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter. Its signature is read once, and not in each layer."""
    return name in inspect.signature(function).parameters


def _expanded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Repeat the heads of keys and values. The module that is returned has no groups of heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return SimpleNamespace(is_causal=getattr(module, "is_causal", True)), key, value


def _refuse_what_is_not_computed(module: Any, borders: Sequence[int], kwargs: Mapping[str, Any]) -> None:
    """Raise ModelError for attention that is more than causal, because sdpa would ignore the rest."""
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if cap is not None:
        raise ModelError(
            f"model.path: {type(module).__name__} caps its attention scores (softcap {cap}), which `sdpa`"
            " does not compute; set model.attention=eager"
        )
    if window is not None and (tokens := max(b - a for a, b in itertools.pairwise(borders))) > window:
        raise ModelError(
            f"model.path: {type(module).__name__} attends to a window of {window} tokens, which `sdpa` does"
            f" not compute for packed sequences; got {tokens} tokens; keep prompts and responses within the"
            " window, or set model.attention=eager"
        )


def _runs(borders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (count, length) of adjacent sequences with equal length, which share a call."""
    lengths = [b - a for a, b in itertools.pairwise(borders)]
    for length, same in itertools.groupby(lengths):
        yield len(list(same)), length


def _to_batch(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a view: (1, heads, count * length, d) -> (count, heads, length, d)."""
    return x.squeeze(0).view(x.shape[1], count, -1, x.shape[3]).transpose(0, 1)


def implementation(attention: str) -> str:
    """Return the `attn_implementation` for a configured `model.attention`."""
    if attention == "sdpa":
        register()
        return NAME
    return attention


_SCORES_PER_THREAD = 1 << 19


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    kernel: bool = False,
    most_scores: int | None = None,
) -> Tensor:
    """Return causal attention, (sequences, L, heads, D).

    Args:
        query: (sequences, heads, L, D)
        key: (sequences, key heads, L, D). Each head of keys serves a group of heads of queries.
        value: (sequences, key heads, L, D)
        scaling: Factor of the scores; None for 1 / sqrt(D).
        kernel: Whether torch's kernel computes the forward pass, which is faster with AMX.
        most_scores: Scores that are computed at once; None for 2 MB in float32 for each thread, which fits
            into the cache of its core. One sequence of one head is always computed whole.
    """
    sequences, heads = query.shape[:2]
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    q, k, v = (x.reshape(sequences * heads, *x.shape[2:]) for x in (query, key, value))
    factor = q.shape[-1] ** -0.5 if scaling is None else scaling
    most = _SCORES_PER_THREAD * torch.get_num_threads() if most_scores is None else most_scores
    at_once = max(1, most // q.shape[1] ** 2)
    function = _KernelForward if kernel else _Attention
    # torch declares Function.apply without types
    parts: list[Tensor] = []
    for part in zip(q.split(at_once), k.split(at_once), v.split(at_once), strict=True):
        parts.append(function.apply(*part, factor))  # type: ignore[no-untyped-call]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.view(sequences, heads, *output.shape[1:]).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """O = P V with P = softmax(scaling Q K' + mask);  dV = P' dO,  dP = dO V',
    dS = scaling P (dP - sum of P dP),  dQ = dS K,  dK = dS' Q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        p = _probabilities(q, k, scaling).to(q.dtype)
        ctx.save_for_backward(q, k, v, p)
        ctx.scaling = scaling
        return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        return *_gradients(q, k, v, p.float(), p, ctx.scaling, d_output), None


class _KernelForward(torch.autograd.Function):
    """As `_Attention`, but torch's kernel computes O, and the backward pass computes P again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scaling = scaling
        query, key, value = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        p = _probabilities(q, k, ctx.scaling)
        return *_gradients(q, k, v, p, p.to(q.dtype), ctx.scaling, d_output), None


def _probabilities(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Return P in float32, (N, L, L)."""
    length = q.shape[1]
    mask = torch.full((length, length), -torch.inf).triu_(1)
    scores = _float32_product(q, k.transpose(1, 2)).mul_(scaling).add_(mask)
    return torch.softmax(scores, dim=-1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, rounded: Tensor, scaling: float, d_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV from P in float32 and rounded to bfloat16."""
    d_p = _float32_product(d_output, v.transpose(1, 2))
    # The private operator is one kernel. The formula makes three more tensors of this size.
    d_scores = torch._softmax_backward_data(d_p, p, -1, torch.float32)
    d_scores = d_scores.mul_(scaling).to(q.dtype)
    return d_scores @ k, d_scores.transpose(1, 2) @ q, rounded.transpose(1, 2) @ d_output


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b for bfloat16 matrices, with sums and result in float32."""
    # oneDNN may round the inputs to bfloat16, which changes nothing because they are, and is then as fast.
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set when torch is imported
    before = settings.fp32_precision
    # A setting of the whole process, so it is restored at once: other products of float32 must keep all bits.
    settings.fp32_precision = "bf16"
    try:
        return torch.bmm(a.float(), b.float())
    finally:
        settings.fp32_precision = before
