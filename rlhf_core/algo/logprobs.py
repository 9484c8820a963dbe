"""Log-probability and entropy of each token, without a second B x T x V tensor.

Axes: B sequences, T response tokens, V vocabulary. The leading axes are free: [B, T, V] padded and [N, V]
packed alike.

Plain autograd keeps the log-softmax for the backward pass, which doubles the largest tensor of the training
step. Here only the logits themselves (alive anyway) are kept, and the softmax is made again, chunk by chunk,
when the gradient is due. A chunk fits the processor's cache, so that the second softmax costs no more than
reading the kept tensor would.

A token whose incoming gradient is exactly 0 gives its logits a gradient of exactly 0, even where they are
NaN: that is how a mask applied to the results protects the logits too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_core.algo.masking import as_float
from rlhf_core.config.base import LOSS_CHUNK


def token_logprobs(logits_BTV: Tensor, labels_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log_softmax(logits / temperature) at each label. [..., V] and [...] -> [...], in nats.

    bf16 and fp16 logits are raised to float32 chunk by chunk; the gradient has the dtype of the logits. A
    negative label (-100, the usual "no label") gives 0 and no gradient; a label beyond the vocabulary is an
    error. The temperature is the one that sampled the tokens, everywhere (law 8).

    >>> token_logprobs(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))  # log(1 / 4), and no label
    tensor([[-1.3863,  0.0000]])
    """
    _check(logits_BTV, temperature)
    if labels_BT.shape != logits_BTV.shape[:-1]:
        raise ValueError(
            "labels must have the shape of the logits without the vocabulary; "
            f"got {tuple(labels_BT.shape)} and {tuple(logits_BTV.shape)}"
        )
    logits = _flat(logits_BTV)
    labels = labels_BT.reshape(logits.shape[:-1]).long()
    # torch declares Function.apply without types
    logprobs: Tensor = _TokenLogprobs.apply(logits, labels, temperature)  # type: ignore[no-untyped-call]
    return logprobs.reshape(labels_BT.shape)


def token_entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the exact entropy -sum p log p of softmax(logits / temperature), per token, in nats.

    [..., V] -> [...]. A logit of -inf is a word that cannot be sampled: it adds 0, and its gradient is 0.

    >>> token_entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))  # log 2, and a certain token
    tensor([0.6931, -0.0000])
    """
    _check(logits_BTV, temperature)
    # torch declares Function.apply without types
    entropy: Tensor = _TokenEntropy.apply(_flat(logits_BTV), temperature)  # type: ignore[no-untyped-call]
    return entropy.reshape(logits_BTV.shape[:-1])


class _TokenLogprobs(torch.autograd.Function):
    """d logp(label) / d logits = (onehot(label) - softmax(logits / temperature)) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.temperature = temperature
        logprobs = _per_token(logits)
        for rows in _chunks(logits):
            log_softmax = torch.log_softmax(_scaled(logits[rows], temperature), dim=-1)
            # Any valid index for a negative label; its result is masked below.
            label = labels[rows].clamp(min=0).unsqueeze(-1)
            logprobs[rows] = log_softmax.gather(-1, label).squeeze(-1)
        return logprobs.masked_fill_(labels < 0, 0.0)

    @staticmethod
    # The backward pass has no graph of its own, because it writes in place. With this, a second derivative is
    # an error instead of a wrong number.
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        slope = grad_logprobs.masked_fill(labels < 0, 0.0).unsqueeze(-1) / ctx.temperature
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            grad, g = grad_logits[rows], slope[rows]
            p = torch.softmax(_scaled(logits[rows], ctx.temperature), dim=-1)
            label = labels[rows].clamp(min=0).unsqueeze(-1)
            # The label's entry is rounded to the dtype of the logits once: in bf16, g - g p is not g (1 - p).
            at_label = (g * (1.0 - p.gather(-1, label))).to(grad.dtype)
            torch.mul(p, -g, out=grad).scatter_(-1, label, at_label)
            _clear_unused(grad, g)
        return grad_logits, None, None


class _TokenEntropy(torch.autograd.Function):
    """dH / d logits_v = -p_v (log p_v + H) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy = _per_token(logits)
        for rows in _chunks(logits):
            logp = _finite_log_softmax(logits[rows], temperature)
            entropy[rows] = logp.exp().mul_(logp).sum(dim=-1).neg_()
        ctx.save_for_backward(logits, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy: Tensor) -> tuple[Tensor, None]:
        logits, entropy = ctx.saved_tensors
        slope = grad_entropy.unsqueeze(-1) / ctx.temperature
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = _finite_log_softmax(logits[rows], ctx.temperature)
            grad, g = grad_logits[rows], slope[rows]
            p_log_ratio = logp.exp().mul_(logp.add_(entropy[rows].unsqueeze(-1)))
            torch.mul(p_log_ratio, -g, out=grad)
            _clear_unused(grad, g)
        return grad_logits, None


def _check(logits: Tensor, temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number above 0; got {temperature}")
    if logits.dim() == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats of shape [..., V]; got {logits.dtype} {tuple(logits.shape)}")


def _flat(logits: Tensor) -> Tensor:
    """Return logits as [N, V] if that is a view. A slice such as `logits[:, :-1]` keeps its axes."""
    # Of other logits `reshape` makes a copy, which would be a second one of the largest tensor of a step.
    if logits.dim() == 1 or logits.is_contiguous():
        return logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    return logits


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the first axis, each of about one chunk of elements."""
    size = LOSS_CHUNK["cpu" if logits.device.type == "cpu" else "cuda"]
    step = max(1, size // max(1, math.prod(logits.shape[1:])))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _per_token(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = as_float(logits)
    return logits if temperature == 1.0 else logits / temperature


def _clear_unused(grad: Tensor, g: Tensor) -> None:
    """Set the gradient of every token with g = 0 to 0, where garbage logits would have made it 0 * NaN."""
    if grad.device.type == "cpu":
        # A boolean mask would read and write the whole chunk once more.
        grad[(g == 0).squeeze(-1).nonzero(as_tuple=True)] = 0.0
    else:
        # The number of indices would have to be read, which waits for the GPU.
        grad.masked_fill_(g == 0, 0.0)


def _finite_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log_softmax with the lowest number in place of -inf: p log p is then 0, and not NaN."""
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return logp.clamp_(min=torch.finfo(logp.dtype).min)
