"""Test of a loaded model: it is deterministic, and its sequences do not influence each other.

All architectures of transformers accept the same arguments, but not all of them use them. Some decoder layers
do not pass the borders of packed sequences to their attention. State-space, convolution and linear-attention
layers do not support borders. Dropout settings have many names. The configuration is therefore not
sufficient, and two short sequences are run through the model.

Whether a sequence depends on another one is tested with gradients: without dependence, the gradient of its
hidden states with respect to the embeddings of the other sequence is exactly 0 in every precision and on
every device, independent of rounding. Gradients do not detect positions that continue from one sequence to
the next. For this, hidden states are compared with a tolerance for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_core.config.training import Packing
from rlhf_core.errors import ModelError
from rlhf_core.models.batching import TokenBatch, TokenSequence, collate
from rlhf_core.models.weights import is_random

_LENGTHS = (5, 7)
"""Tokens of the two sequences. They are longer than a convolution kernel and shorter than any attention
window.
"""


def without_dropout(model: Any) -> Any:
    """Disable dropout and jitter in all modules, in place, and return `model`.

    The importance ratio of the first minibatch must be exactly 1.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if is_random(name, value):
                setattr(module, name, 0.0)
    return model


def tested(lm: Any, pack: Packing) -> bool:
    """Return whether sequences of `lm`, a Hugging Face model with a backbone `model`, can share a row.

    With `pack=False`, packing is not tested and the result is False. With `"auto"`, the result is True if no
    sequence depends on another one. With `True`, a ModelError is raised if one does. A ModelError is also
    raised if two passes in training mode differ from each other or from evaluation mode, or if sequences
    depend on padding or on other rows.

    The test takes a few passes over 24 tokens. With sharded parameters (ZeRO-3) it is a collective
    operation, in the context of `models.sharded.Shards`. Random numbers are drawn from a copy of the
    generators.
    """
    training = lm.training
    devices = [lm.device] if lm.device.type == "cuda" else []
    # Without a list, torch would initialize every visible GPU and save its generator. Gradients are needed
    # also where the caller has switched them off.
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            _deterministic(lm)
            lm.eval()
            problem = _dependence(lm, pack=False)
            if problem is not None:
                raise ModelError(
                    f"model.path: {_name(lm)}: in right-padded rows {problem}; use a decoder-only model with"
                    " causal attention"
                )
            if pack is False:
                return False
            problem = _dependence(lm, pack=True)
        finally:
            lm.train(training)
    # An explicit setting must not be changed without a word (decision 16).
    if problem is not None and pack is True:
        raise ModelError(
            f"pack: true, but in packed rows of {_name(lm)} with attention {lm.config._attn_implementation}"
            f" {problem}; set pack: auto or false"
        )
    return problem is None


@torch.no_grad()
def _deterministic(lm: Any) -> None:
    """Raise ModelError if passes in training mode differ from each other or from evaluation mode.

    Two passes in training mode may differ if no random numbers were drawn.
    """
    sequences = _sequences(lm)
    # Padded rows: whether sequences can be packed is not known yet.
    batch = collate(sequences, pad_id=0).to(lm.device)
    lm.eval()
    evaluated = _hidden(lm, batch)
    lm.train()
    before = _generator(lm)
    first, second = _hidden(lm, batch), _hidden(lm, batch)
    # Kernels with an undefined summation order differ by rounding as well, but they draw no random numbers.
    if not torch.equal(first, second) and not torch.equal(before, _generator(lm)):
        raise ModelError(
            f"model.path: {_name(lm)}: two passes in training mode differ by up to"
            f" {(first - second).abs().max():.1e} in the hidden states, though dropout and jitter are off"
            " wherever they could be found; old and new log-probabilities would not be comparable; set the"
            " model's random parts to 0 in its config.json"
        )
    tokens = [position for span in _spans(sequences, batch) for position in range(*span)]
    gap, noise = _gap(first[tokens], evaluated[tokens]), _gap(first[tokens], second[tokens])
    # Not `gap >`: a gap of NaN must also be an error.
    if not gap <= _allowed(first.dtype, noise=noise):
        raise ModelError(
            f"model.path: {_name(lm)}: hidden states in training mode differ by {gap:.1e} (relative) from"
            " those in evaluation mode, so the policy would be trained with other probabilities than it is"
            " evaluated with; use another architecture"
        )


def _allowed(dtype: torch.dtype, *, noise: float) -> float:
    """Return the largest relative difference of hidden states that is caused by rounding.

    Rounding errors grow over the layers like a random walk. The model's own noise can be larger, for example
    if a router has nearly equal choices.
    """
    return max(float(torch.finfo(dtype).eps ** 0.5), 8 * noise)


def _generator(lm: Any) -> torch.Tensor:
    return torch.cuda.get_rng_state(lm.device) if lm.device.type == "cuda" else torch.get_rng_state()


def _dependence(lm: Any, *, pack: bool) -> str | None:
    """Return how a sequence depends on the others of its batch, or None."""
    sequences = _sequences(lm)
    batch = collate(sequences, pad_id=0, pack=pack).to(lm.device)
    spans = _spans(sequences, batch)
    for start, end in spans:
        # One forward pass for each gradient: the shards of a layer are gathered for one backward pass.
        embedded, hidden = _with_embeddings(lm, batch)
        cotangent = torch.zeros_like(hidden)
        # Arbitrary values. With equal values, the gradient would be 0 after a normalisation layer.
        cotangent[start:end] = torch.linspace(-1, 1, cotangent[start:end].numel(), device=lm.device).view_as(
            cotangent[start:end]
        )
        (gradient,) = torch.autograd.grad(hidden, embedded, cotangent)
        own = torch.zeros(len(hidden), dtype=torch.bool, device=lm.device)
        own[start:end] = True
        reached = gradient.flatten(0, 1)[~own]
        if reached.ne(0).any():
            return (
                "tokens of a sequence depend on others than its own (gradient up to"
                f" {reached.abs().max():.1e})"
            )
    with torch.no_grad():
        for sequence, (start, end) in zip(sequences, spans, strict=True):
            alone = _hidden(lm, collate([sequence], pad_id=0).to(lm.device))
            # The same sequence in a batch of another shape shows the noise of the model itself.
            twice = _hidden(lm, collate([sequence, sequence], pad_id=0).to(lm.device))[: len(sequence)]
            gap, noise = _gap(hidden[start:end], alone), _gap(twice, alone)
            allowed = _allowed(hidden.dtype, noise=noise)
            if not gap <= allowed:
                return (
                    f"a sequence's hidden states differ by {gap:.1e} (relative) from those it has alone, more"
                    f" than {allowed:.1e}"
                )
    return None


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative difference of (L, H) hidden states, as the median over tokens."""
    difference, size = (a.float() - b.float()).norm(dim=-1), b.float().norm(dim=-1)
    # The median, because rounding can change the expert of a single token in a mixture of experts.
    return float((difference / size.clamp_min(1e-30)).median())


def _hidden(lm: Any, batch: TokenBatch) -> torch.Tensor:
    """Return hidden states (B*L, H)."""
    states: torch.Tensor = lm.model(**batch.model_inputs(lm.config._attn_implementation)).last_hidden_state
    return states.flatten(0, 1)


def _with_embeddings(lm: Any, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, L, E) input embeddings, detached from their computation, and (B*L, H) hidden states."""
    seen: list[torch.Tensor] = []

    def cut(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    hook = lm.get_input_embeddings().register_forward_hook(cut)
    try:
        hidden = _hidden(lm, batch)
    finally:
        hook.remove()
    if not seen:
        raise ModelError(
            f"model.path: {_name(lm)} does not read its input embeddings; use a decoder-only architecture"
        )
    return seen[0], hidden


def _sequences(lm: Any) -> list[TokenSequence]:
    """Return two sequences without a common token, if the vocabulary is large enough."""
    vocabulary = lm.config.get_text_config().vocab_size
    ids = [3 + i for i in range(sum(_LENGTHS))]
    first, second = ids[: _LENGTHS[0]], ids[_LENGTHS[0] :]
    return [TokenSequence.of((), [i % vocabulary for i in part]) for part in (first, second)]


def _spans(sequences: Sequence[TokenSequence], batch: TokenBatch) -> list[tuple[int, int]]:
    """Return (first, last + 1) flat positions of each sequence."""
    lasts = batch.last_S.tolist()
    return [(last + 1 - len(sequence), last + 1) for sequence, last in zip(sequences, lasts, strict=True)]


def _name(lm: Any) -> str:
    return type(lm).__name__
