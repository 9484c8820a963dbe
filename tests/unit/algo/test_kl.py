"""Locks: the four estimators and their limits, what they estimate, k3 >= 0 in float32 too (law 5); the KL
controllers and their checkpoints.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algo.kl import AdaptiveKL, Estimator, FixedKL, kl_estimate

LOGP = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REF = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)  # d = 0.5, -1, 0


def categorical(seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Log-probabilities of a policy and a reference over 7 words, and their exact KL."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), dim=0)
    q = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), dim=0)
    exact = math.fsum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    return p, q, exact


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("abs", [0.5, 1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),  # 0.25/2, 1/2
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0, 0.0]),  # e^-0.5 - 1 + 0.5, e^1 - 1 - 1
    ],
)
def test_each_estimator_is_its_formula(estimator: Estimator, expected: list[float]) -> None:
    assert kl_estimate(LOGP, REF, estimator).tolist() == pytest.approx(expected, abs=1e-15)


def test_k3_clamps_the_log_ratio_inside_the_exponential_only() -> None:
    d = torch.tensor([30.0, -30.0, 1e4], dtype=torch.float64)
    expected = [math.exp(-20) - 1 + 30, math.exp(20) - 1 - 30, math.exp(-20) - 1 + 1e4]
    assert kl_estimate(d, torch.zeros_like(d), "k3").tolist() == pytest.approx(expected, rel=1e-14)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(d=st.floats(-1e3, 1e3, width=32))
def test_k3_is_never_negative(d: float) -> None:
    for dtype in (torch.float32, torch.float64):
        assert kl_estimate(torch.tensor([d], dtype=dtype), torch.zeros(1, dtype=dtype), "k3").item() >= 0.0


def test_k3_is_never_negative_for_the_smallest_float32_differences() -> None:
    # exp(-d) - 1 + d taken literally is negative for about half of these
    d = torch.logspace(-30, 0, 20_001)
    for sign in (1.0, -1.0):
        assert kl_estimate(sign * d, torch.zeros_like(d), "k3").min().item() >= 0.0


@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_the_kl_in_expectation(seed: int) -> None:
    p, q, exact = categorical(seed)
    for estimator in ("k1", "k3"):
        assert (p.exp() * kl_estimate(p, q, estimator)).sum().item() == pytest.approx(exact, rel=1e-12)


def test_k1_and_k3_are_unbiased() -> None:
    p, q, exact = categorical(4)
    generator = torch.Generator().manual_seed(5)
    samples = torch.multinomial(p.exp(), 100_000, replacement=True, generator=generator)
    for estimator in ("k1", "k3"):
        estimates = kl_estimate(p[samples], q[samples], estimator)
        error = estimates.std().item() / math.sqrt(len(samples))
        assert abs(estimates.mean().item() - exact) < 4 * error
        assert error < 0.02 * exact


@pytest.mark.parametrize("seed", range(3))
def test_only_k2_has_the_gradient_of_the_kl(seed: int) -> None:
    p, q, _ = categorical(seed)
    logits = p.clone().requires_grad_()
    log_policy = torch.log_softmax(logits, dim=0)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def expected(estimator: Estimator) -> torch.Tensor:
        """The mean over samples from the policy: the sampling itself passes no gradient."""
        return gradient((log_policy.detach().exp() * kl_estimate(log_policy, q, estimator)).sum())

    kl = gradient((log_policy.exp() * (log_policy - q)).sum())
    other_way = gradient((q.exp() * (q - log_policy)).sum())
    assert torch.allclose(expected("k2"), kl, atol=1e-12)
    assert torch.allclose(expected("k1"), torch.zeros_like(kl), atol=1e-12)
    assert torch.allclose(expected("k3"), other_way, atol=1e-12)
    assert not torch.allclose(kl, other_way, atol=1e-3)


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="k1, abs, k2, k3; got 'k4'"):
        kl_estimate(LOGP, REF, "k4")  # type: ignore[arg-type]  # unknown on purpose


def test_a_fixed_coefficient_never_moves() -> None:
    controller = FixedKL(0.05)
    controller.update(kl=1e9, n_sequences=512)
    assert controller.coef == 0.05


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.6, 0.2 * 1.00064),  # 6.6/6 - 1 = 0.1;          1 + 0.1 * 64/10000
        (9.0, 0.2 * 1.00128),  # 9/6 - 1 = 0.5 -> 0.2;     1 + 0.2 * 64/10000
        (0.0, 0.2 * 0.99872),  # 0/6 - 1 = -1 -> -0.2;     1 - 0.2 * 64/10000
        (6.0, 0.2),
        (math.nan, 0.2),
        (math.inf, 0.2),
    ],
)
def test_the_adaptive_coefficient_is_clipped_and_ignores_nonfinite_kl(kl: float, coef: float) -> None:
    controller = AdaptiveKL(init=0.2, target=6.0, horizon=10_000)
    controller.update(kl, n_sequences=64)
    assert controller.coef == pytest.approx(coef, rel=1e-14)


def test_the_adaptive_coefficient_brings_the_kl_to_its_target() -> None:
    # A policy whose KL is 1 / coef: the target of 4 nats belongs to a coefficient of 0.25.
    controller = AdaptiveKL(init=0.01, target=4.0, horizon=1_000)
    for _ in range(400):
        controller.update(1.0 / controller.coef, n_sequences=100)
    assert controller.coef == pytest.approx(0.25, rel=1e-3)


def test_a_restored_controller_continues_with_the_same_bits() -> None:
    kls = [9.0, 5.5, 6.3, 2.0, 8.0]
    straight, before = AdaptiveKL(0.1, 6.0, 1e4), AdaptiveKL(0.1, 6.0, 1e4)
    for kl in kls[:3]:
        before.update(kl, 64)
    after = AdaptiveKL(0.7, 6.0, 1e4)
    after.load_state_dict(before.state_dict())
    for kl in kls[3:]:
        after.update(kl, 64)
    for kl in kls:
        straight.update(kl, 64)
    assert after.coef == straight.coef
    fixed = FixedKL(0.7)
    fixed.load_state_dict(FixedKL(0.1).state_dict())
    assert fixed.coef == 0.1


def test_settings_that_would_break_the_controller_are_refused() -> None:
    with pytest.raises(ValueError, match="target must be above 0"):
        AdaptiveKL(0.1, target=0.0, horizon=1e4)
    with pytest.raises(ValueError, match="horizon must be above 0"):
        AdaptiveKL(0.1, target=6.0, horizon=-1)
    # 1 - 0.2 * 100/10 = -1: the coefficient would reward divergence
    with pytest.raises(ValueError, match=r"horizon must be above n_sequences / 5 \(20\).*got 10"):
        AdaptiveKL(0.1, target=6.0, horizon=10).update(kl=0.0, n_sequences=100)
