"""The laws of the numerics that hold across functions.

Locks: losses and gradients do not depend on how an optimizer step is split over micro-batches, ranks, padding
and packing (law 1); padding, garbage and NaN under the mask change nothing (law 2); the first minibatch on
on-policy data (law 3); one temperature in both log-probabilities cancels (law 8); dtypes are kept; the same
call twice gives the same bits.

Axes: B sequences, T response tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.algo import losses
from rlhf_core.algo.advantages import GroupKind, gae, group_advantages, returns_to_go, token_rewards
from rlhf_core.algo.importance import ImportanceKind, importance_weights
from rlhf_core.algo.kl import Estimator, kl_estimate
from rlhf_core.algo.logprobs import token_entropy, token_logprobs
from rlhf_core.algo.losses import step_denominator
from rlhf_core.algo.masking import masked_mean, masked_sum, masked_var, masked_whiten
from rlhf_core.algo.shaping import overlong_penalty
from rlhf_core.config.base import Aggregation

LAW = settings(max_examples=20, deadline=None, derandomize=True, database=None)
MODES: tuple[Aggregation, ...] = get_args(Aggregation)
VOCABULARY = 6


@dataclass
class Batch:
    """Everything a loss needs, [B, T] each; the logits [B, T, V] are linear in the parameters."""

    features: Tensor
    """[B, T, V, P]: logits = features @ parameters."""
    labels: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    weights: Tensor
    returns: Tensor
    mask: Tensor

    def take(self, rows: list[int], garbage: float, extra: int = 0) -> Batch:
        """Some rows, cut to the longest of them plus `extra` columns of padding, `garbage` under the mask."""
        mask = self.mask[rows]
        length = max([t + 1 for t in range(mask.shape[1]) if mask[:, t].any()], default=0)
        mask = torch.nn.functional.pad(mask[:, :length], (0, extra))
        taken: dict[str, Tensor] = {"mask": mask}
        for field in fields(self):
            if field.name == "mask":
                continue
            whole = getattr(self, field.name)[rows][:, :length]
            padding = whole.new_zeros(len(rows), extra, *whole.shape[2:])
            padded = torch.cat([whole, padding], dim=1)
            if padded.is_floating_point():
                padded = torch.where(mask.reshape(*mask.shape, *[1] * (padded.dim() - 2)), padded, garbage)
            taken[field.name] = padded
        return Batch(**taken)

    def packed(self) -> Batch:
        """The valid tokens alone, [N]."""
        return Batch(**{field.name: getattr(self, field.name)[self.mask] for field in fields(self)})

    def tokens(self) -> int:
        return int(self.mask.sum())

    def sequences(self) -> int:
        return int(self.mask.any(dim=1).sum())


def make_batch(seed: int, batch: int, tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(batch, tokens, generator=generator) < 0.6
    mask[0, 0] = True
    return Batch(
        features=normal(batch, tokens, VOCABULARY, 3),
        labels=torch.randint(VOCABULARY, (batch, tokens), generator=generator),
        old=normal(batch, tokens) - 2,
        ref=normal(batch, tokens) - 2,
        advantages=normal(batch, tokens),
        weights=normal(batch, tokens).exp(),
        returns=normal(batch, tokens),
        mask=mask,
    )


def logits_of(parameters: Tensor, b: Batch) -> Tensor:
    # A model fed with garbage gives garbage, but its parameters are not the cause: cut its graph there.
    valid = b.mask.reshape(*b.mask.shape, 1)
    return torch.where(valid, torch.where(valid.unsqueeze(-1), b.features, 0.0) @ parameters, math.nan)


def policy(p: Tensor, b: Batch, mode: Aggregation, denominator: float | None) -> Tensor:
    return losses.policy_loss(
        token_logprobs(logits_of(p, b), b.labels, 0.8),
        b.old,
        b.advantages,
        b.mask,
        dual_clip=2.0,
        weights=b.weights,
        aggregation=mode,
        denominator=denominator,
    ).loss


def value(p: Tensor, b: Batch, mode: Aggregation, denominator: float | None) -> Tensor:
    values = logits_of(p, b)[..., 0]
    return losses.value_loss(values, b.old, b.returns, b.mask, aggregation=mode, denominator=denominator).loss


def kl(p: Tensor, b: Batch, mode: Aggregation, denominator: float | None) -> Tensor:
    logps = token_logprobs(logits_of(p, b), b.labels, 0.8)
    return losses.kl_loss(logps, b.ref, b.mask, "k3", aggregation=mode, denominator=denominator)


def entropy(p: Tensor, b: Batch, mode: Aggregation, denominator: float | None) -> Tensor:
    per_token = token_entropy(logits_of(p, b), 0.8)
    return losses.entropy_bonus(per_token, b.mask, aggregation=mode, denominator=denominator)


def sft(p: Tensor, b: Batch, mode: Aggregation, denominator: float | None) -> Tensor:
    return losses.sft_loss(token_logprobs(logits_of(p, b), b.labels), b.mask, denominator)


Loss = Callable[[Tensor, Batch, Aggregation, "float | None"], Tensor]
TOKEN_LOSSES: list[tuple[Loss, Aggregation]] = [
    *((loss, mode) for loss in (policy, value, kl, entropy) for mode in MODES),
    (sft, "token-mean"),
]
IDS = [f"{loss.__name__}-{mode}" for loss, mode in TOKEN_LOSSES]


def loss_and_gradient(terms: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """[loss, gradient...] of the sum of `terms(parameters)`, accumulated term by term as a trainer does."""
    parameters = torch.tensor([0.3, -0.7, 0.5], dtype=torch.float64, requires_grad=True)
    total = 0.0
    for term in terms(parameters):
        term.backward()
        total += term.item()
    assert parameters.grad is not None
    return torch.cat([torch.tensor([total], dtype=torch.float64), parameters.grad])


def uneven_parts(seed: int, rows: int, parts: int) -> list[list[int]]:
    """Rows dealt at random; a part may be empty of tokens, or hold most of them."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, (rows,), generator=generator).tolist()
    dealt = [[row for row in range(rows) if owner[row] == part] for part in range(parts)]
    return [part for part in dealt if part]


@pytest.mark.parametrize(("loss", "mode"), TOKEN_LOSSES, ids=IDS)
@LAW
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(2, 7),
    tokens=st.integers(1, 6),
    parts=st.sampled_from([2, 4]),
)
def test_splitting_a_step_changes_neither_loss_nor_gradient(
    loss: Loss, mode: Aggregation, seed: int, batch: int, tokens: int, parts: int
) -> None:
    whole = make_batch(seed, batch, tokens)
    denominator = step_denominator(mode, whole.tokens(), whole.sequences())
    expected = loss_and_gradient(lambda p: [loss(p, whole, mode, None)])
    dealt = uneven_parts(seed, batch, parts)
    micro_batches = [whole.take(rows, garbage=math.nan, extra=i % 3) for i, rows in enumerate(dealt)]
    split = loss_and_gradient(lambda p: [loss(p, part, mode, denominator) for part in micro_batches])
    assert torch.allclose(split, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("loss", "mode"), [x for x in TOKEN_LOSSES if not x[1].startswith("seq")])
def test_packing_does_not_change_loss_or_gradient(loss: Loss, mode: Aggregation) -> None:
    padded = make_batch(4, 5, 7)
    a = loss_and_gradient(lambda p: [loss(p, padded, mode, None)])
    b = loss_and_gradient(lambda p: [loss(p, padded.packed(), mode, None)])
    assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["reward", "dpo"])
@LAW
@given(seed=st.integers(0, 10_000), pairs=st.integers(2, 9), parts=st.sampled_from([2, 4]))
def test_splitting_pairs_does_not_change_the_gradient(
    kind: str,
    seed: int,
    pairs: int,
    parts: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, pairs, 3, generator=generator, dtype=torch.float64)
    ref = torch.randn(2, pairs, generator=generator, dtype=torch.float64)

    def loss(p: Tensor, rows: list[int], denominator: float | None) -> Tensor:
        chosen, rejected = (features @ p)[:, rows]
        if kind == "dpo":
            return losses.dpo_loss(chosen, rejected, *ref[:, rows], 0.3, 0.1, denominator)  # type: ignore[call-arg]  # two tensors
        # As the stage `reward` does it: the mean of the part, by its number of pairs.
        weight = 1.0 if denominator is None else len(rows) / denominator
        return losses.reward_model_loss(chosen, rejected, ref[0, rows], 0.01) * weight

    expected = loss_and_gradient(lambda p: [loss(p, list(range(pairs)), None)])
    split = loss_and_gradient(lambda p: [loss(p, rows, pairs) for rows in uneven_parts(seed, pairs, parts)])
    assert torch.allclose(split, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("loss", "mode"), TOKEN_LOSSES, ids=IDS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e30])
def test_masked_values_do_not_change_the_loss(
    loss: Loss,
    mode: Aggregation,
    garbage: float,
) -> None:
    whole = make_batch(5, 4, 6)
    rows = list(range(4))
    clean = loss_and_gradient(lambda p: [loss(p, whole.take(rows, 0.0), mode, None)])
    dirty = loss_and_gradient(lambda p: [loss(p, whole.take(rows, garbage), mode, None)])
    padded = loss_and_gradient(lambda p: [loss(p, whole.take(rows, garbage, extra=9), mode, None)])
    assert torch.isfinite(clean).all()
    assert torch.equal(dirty, clean)
    assert torch.allclose(padded, clean, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_values_do_not_change_the_advantages(garbage: float) -> None:
    b = make_batch(6, 5, 7)

    def everything(junk: float) -> list[Tensor]:
        old, ref, returns = (torch.where(b.mask, x, junk) for x in (b.old, b.ref, b.returns))
        scores = torch.arange(5.0)
        return [
            token_rewards(scores, kl_estimate(old, ref, "k3"), b.mask, 0.1, score_clip=3.0),
            *gae(returns, old, b.mask, 0.99, 0.95),
            returns_to_go(returns, b.mask, 0.99),
            importance_weights(old, ref, b.mask, "sequence-mask", 0.1, 3.0),
            masked_whiten(returns, b.mask),
            *losses.policy_loss(old, ref, returns, b.mask),
            *losses.value_loss(old, ref, returns, b.mask),
        ]

    for clean, dirty in zip(everything(0.0), everything(garbage), strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


@LAW
@given(seed=st.integers(0, 10_000))
def test_the_first_minibatch_has_ratio_one(seed: int) -> None:
    b = make_batch(seed, 4, 6)
    logps = torch.where(b.mask, b.old, math.nan).requires_grad_()
    result = losses.policy_loss(logps, logps.detach().clone(), b.advantages, b.mask)
    result.loss.backward()
    mean = math.fsum(b.advantages[b.mask].tolist()) / b.tokens()
    assert result.loss.item() == pytest.approx(-mean, rel=1e-12, abs=1e-14)
    assert result.clip_fraction.item() == 0.0
    assert result.approx_kl.item() == 0.0
    assert logps.grad is not None
    assert torch.allclose(logps.grad, torch.where(b.mask, -b.advantages / b.tokens(), 0.0), atol=1e-14)


def test_the_ratio_is_one_only_for_equal_temperatures() -> None:
    b = make_batch(8, 4, 6)
    logits = b.features[..., 0]
    rollout = token_logprobs(logits, b.labels, 0.6)
    same, other = (token_logprobs(logits, b.labels, temperature) for temperature in (0.6, 1.0))
    assert losses.policy_loss(same, rollout, b.advantages, b.mask).approx_kl.item() == 0.0
    assert losses.policy_loss(other, rollout, b.advantages, b.mask).approx_kl.item() > 0.01


def every_result(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    x, y, z = torch.randn(3, 4, 6, generator=generator).to(dtype)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    groups, denominator = torch.tensor([0, 0, 1, 1]), torch.tensor(7.0, dtype=torch.float64)
    return [
        masked_sum(x, mask),
        masked_mean(x, mask),
        masked_var(x, mask),
        masked_whiten(x, mask),
        token_logprobs(x, torch.arange(4)),
        token_entropy(x),
        *(kl_estimate(x, y, estimator) for estimator in get_args(Estimator)),
        token_rewards(x[:, 0], y, mask, 0.1, 2.0),
        *gae(x, y, mask, 0.99, 0.95),
        returns_to_go(x, mask, 0.99),
        *(group_advantages(x[:, 0], groups, kind) for kind in get_args(GroupKind)),
        *(importance_weights(x, y, mask, kind) for kind in get_args(ImportanceKind)),
        overlong_penalty(x[:, 0], 10, 4, 1.0),
        *(losses.aggregate(x, mask, mode, denominator) for mode in MODES),
        *losses.policy_loss(x, y, z, mask, dual_clip=3.0, weights=y.exp(), denominator=denominator),
        *losses.value_loss(x, y, z, mask),
        *losses.value_loss(x, y, z, mask, clip=None),
        losses.entropy_bonus(x, mask),
        losses.kl_loss(x, y, mask),
        losses.sft_loss(x, mask, denominator),
        losses.reward_model_loss(x[0], y[0], z[0], center=0.01),
        losses.dpo_loss(x[0], y[0], z[0], x[1], 0.1, 0.1),
    ]


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_float32_and_float64_are_kept_and_bf16_is_raised(
    given_dtype: torch.dtype,
    expected: torch.dtype,
) -> None:
    assert {result.dtype for result in every_result(given_dtype)} == {expected}


def test_the_same_call_twice_gives_the_same_bits() -> None:
    for a, b in zip(every_result(torch.float32), every_result(torch.float32), strict=True):
        assert torch.equal(a, b)
