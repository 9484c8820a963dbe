"""The losses of all stages, and how they are averaged.

Axes: B sequences, T response tokens. Every loss is a scalar to be minimised.

Where a loss takes `aggregation` and `denominator`, they are `aggregate`'s. With the denominator of the whole
optimizer step (all ranks, all micro-batches) the losses of its parts ADD UP to the loss of the whole,
gradients included, for every way to split the tokens. A caller that averages over ranks or divides by
accumulation steps must undo both.

Only the newest numbers of a loss (`logprobs`, `values`, the policy's in DPO) receive gradients. Old and
reference log-probabilities, advantages, returns and weights are constants, even if they require gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algo.kl import LOG_RATIO_LIMIT, Estimator, kl_estimate
from rlhf_core.algo.masking import as_float, divide, masked_mean, select
from rlhf_core.config.base import Aggregation


class PolicyLoss(NamedTuple):
    loss: Tensor
    """Scalar, unit of the advantages."""
    clip_fraction: Tensor
    """Share of this call's valid tokens, 0 to 1, held by the clip (the dual clip not included). Detached."""
    approx_kl: Tensor
    """Mean of k3 between old and new over this call's valid tokens, in nats. Detached."""


class ValueLoss(NamedTuple):
    loss: Tensor
    """Scalar, unit of the returns, squared."""
    clip_fraction: Tensor
    """Share of this call's valid tokens, 0 to 1, held by the clip. Detached."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss of the policy reads: a micro-batch of an optimizer step."""

    logprobs_BT: Tensor
    """Log-probabilities of the policy, with gradient."""
    old_logprobs_BT: Tensor
    """Log-probabilities of the policy before the update."""
    ref_logprobs_BT: Tensor
    """Log-probabilities of the reference."""
    advantages_BT: Tensor
    """Advantages, whitened if configured."""
    weights_BT: Tensor
    """Importance weights for the difference between engine and trainer; ones if there are none."""
    mask_BT: Tensor
    """Response tokens."""
    aggregation: Aggregation
    """How the losses of tokens become a scalar."""
    denominator: float
    """Divisor of the aggregation: the count of the whole optimizer step, over all ranks."""

    def mean(self, x_BT: Tensor) -> Tensor:
        """Return the aggregated numbers of tokens, a scalar. Those of all micro-batches of the optimizer step
        add up to the mean over the step.
        """
        return aggregate(x_BT, self.mask_BT, self.aggregation, self.denominator)


def aggregate(
    x: Tensor,
    mask: Tensor,
    mode: Aggregation,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return one number from per-token numbers. [B, T] -> scalar; 0.0 for an empty mask.

        token-mean           sum of all valid tokens / number of tokens
        seq-mean-token-mean  sum over sequences of the mean of their tokens / number of sequences
        seq-mean-token-sum   sum over sequences of the sum of their tokens / number of sequences
        token-sum            sum of all valid tokens / 1

    A row without a valid token is not a sequence. `denominator` (positive) replaces what stands after the
    last slash: give it `step_denominator` of the whole optimizer step. The token modes take packed [N] too.

    >>> x, mask = torch.tensor([[1.0, 1.0, 4.0], [3.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> aggregate(x, mask, "token-mean"), aggregate(x, mask, "seq-mean-token-mean")
    (tensor(2.2500), tensor(2.5000))
    """
    x = select(x, mask)
    if mode in ("token-mean", "token-sum"):
        total = x.sum()
        count = mask.bool().sum() if mode == "token-mean" else torch.ones_like(total)
    elif mode in ("seq-mean-token-mean", "seq-mean-token-sum"):
        if mask.dim() != 2:
            raise ValueError(f"{mode} needs one row per sequence, [B, T]; got shape {tuple(mask.shape)}")
        tokens_B = mask.bool().sum(dim=1)
        per_row = x.sum(dim=1)
        if mode == "seq-mean-token-mean":
            # A row without tokens would be 0 / 0, and its NaN that of the whole batch.
            per_row = per_row / tokens_B.clamp(min=1)
        total = per_row.sum()
        count = (tokens_B > 0).sum()
    else:
        raise ValueError(f"mode must be one of {', '.join(get_args(Aggregation))}; got {mode!r}")
    return divide(total, count.clamp(min=1) if denominator is None else denominator)


def step_denominator(mode: Aggregation, tokens: int, sequences: int) -> float:
    """Return the `denominator` of `mode` for an optimizer step with these valid tokens and non-empty
    sequences.

    >>> step_denominator("token-mean", tokens=640, sequences=32)
    640.0
    """
    if mode == "token-sum":
        return 1.0
    return float(tokens if mode == "token-mean" else sequences)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Return the clipped surrogate loss of PPO (Schulman et al. 2017, eq. 7).

        r = exp(logprobs - old_logprobs)         L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The log-ratio is clamped to [-20, 20].

    >>> old, new = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -1.0]])
    >>> result = policy_loss(new, old, torch.ones(1, 2), torch.ones(1, 2))
    >>> result.loss, result.clip_fraction  # -(1.2 + 1) / 2: the ratio exp(0.5) is clipped to 1.2
    (tensor(-1.1000), tensor(0.5000))

    Args:
        logprobs: [B, T] log-probabilities of the policy, with gradient.
        old_logprobs: [B, T] log-probabilities before the update.
        advantages: [B, T].
        mask: [B, T] response tokens.
        clip_low: Lower distance of the clip from 1.
        clip_high: Upper distance of the clip from 1.
        dual_clip: c > 1 limits L to -c A where A < 0: there a large r makes it grow without limit (Ye et al.
            2020, "Mastering Complex Control in MOBA Games").
        weights: [B, T] from `importance.importance_weights`. They multiply L after the clip.
        aggregation: How the loss of each token becomes a scalar, see `aggregate`.
        denominator: Divisor of the aggregation for a micro-batch: the count of the whole optimizer step.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, or None; got {dual_clip}")
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    advantages = select(advantages, mask).detach()

    ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    # Where both are equal, as at ratio 1, torch gives each of them half of the gradient. The halves add up to
    # the whole, because `clamp` passes the gradient on between its bounds and at them.
    per_token = torch.maximum(plain, clipped)
    if dual_clip is not None:
        # Only there: where A > 0, the clip has bounded the loss already.
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -dual_clip * advantages), per_token)
    if weights is not None:
        per_token = per_token * select(weights, mask).detach()

    loss = aggregate(per_token, mask, aggregation, denominator)
    # Strictly above: both are equal at ratio 1, so that nothing counts as clipped in the first minibatch.
    return PolicyLoss(loss, *_policy_metrics(clipped > plain, new, old, mask))


@torch.no_grad()
def _policy_metrics(held: Tensor, new: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return `clip_fraction` and `approx_kl` of `PolicyLoss`."""
    # The tokens are samples of the old policy, so it is the first argument: KL(old || new).
    approx_kl = masked_mean(kl_estimate(old, new, "k3"), mask)
    return masked_mean(held.to(new.dtype), mask), approx_kl


def sequence_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    # The ranges of the paper's experiments. They are far below PPO's, because the mean over the tokens of a
    # response varies much less than a single token.
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Return the loss of GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7): the ratio is that of a whole
    response, the geometric mean of the ratios of its tokens, and so is the clip.

        s = exp(mean over the tokens of (logprobs - old_logprobs))
        L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    The mean log-ratio is clamped to [-20, 20]. L is that of each token, so that advantages may differ in a
    response; aggregated by `seq-mean-token-mean` it is the paper's.

    >>> old, new = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.9, -1.7]])
    >>> result = sequence_policy_loss(new, old, torch.ones(1, 2), torch.ones(1, 2), clip_high=1.0)
    >>> round(result.loss.item(), 4)  # -exp((0.1 + 0.3) / 2)
    -1.2214

    Args:
        logprobs: [B, T] log-probabilities of the policy, with gradient.
        old_logprobs: [B, T] log-probabilities before the update.
        advantages: [B, T], usually equal within a response.
        mask: [B, T] response tokens.
        clip_low: Lower distance of the clip from 1.
        clip_high: Upper distance of the clip from 1.
        weights: [B, T] from `importance.importance_weights`. They multiply L after the clip.
        aggregation: How the loss of each token becomes a scalar, see `aggregate`.
        denominator: Divisor of the aggregation for a micro-batch: the count of the whole optimizer step.
    """
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    advantages = select(advantages, mask).detach()
    tokens_B = mask.bool().sum(dim=1).clamp(min=1)
    log_ratio_B = (new - old).sum(dim=1) / tokens_B
    ratio = log_ratio_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(1)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    per_token = torch.maximum(plain, clipped)
    if weights is not None:
        per_token = per_token * select(weights, mask).detach()
    loss = aggregate(per_token, mask, aggregation, denominator)
    return PolicyLoss(loss, *_policy_metrics(clipped > plain, new, old, mask))


def clipped_weight_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
) -> PolicyLoss:
    """Return the loss of CISPO (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5). The clip holds the weight of a
    token, and not its gradient.

        r = exp(logprobs - old_logprobs)
        L = -clip(r, 1 - clip_low, 1 + clip_high) A logprobs        without the gradient of the clipped r

    The log-ratio is clamped to [-20, 20]. `clip_fraction` counts the tokens whose r is clipped.

    >>> old, new = torch.tensor([[-1.0]]), torch.tensor([[-0.5]], requires_grad=True)
    >>> result = clipped_weight_loss(new, old, torch.full((1, 1), 2.0), torch.ones(1, 1), clip_high=0.2)
    >>> round(result.loss.item(), 4)  # r = exp(0.5) = 1.65 is clipped to 1.2: -1.2 * 2 * -0.5
    1.2
    >>> result.loss.backward()
    >>> new.grad  # -1.2 * 2, which the loss of PPO would not have
    tensor([[-2.4000]])

    Args:
        logprobs: [B, T] log-probabilities of the policy, with gradient.
        old_logprobs: [B, T] log-probabilities before the update.
        advantages: [B, T].
        mask: [B, T] response tokens.
        clip_low: Lower distance of the clip from 1; 1 is no lower bound.
        clip_high: Upper distance of the clip from 1.
        weights: [B, T] from `importance.importance_weights`. They multiply L.
        aggregation: How the loss of each token becomes a scalar, see `aggregate`.
        denominator: Divisor of the aggregation for a micro-batch: the count of the whole optimizer step.
    """
    new, old = select(logprobs, mask), select(old_logprobs, mask).detach()
    advantages = select(advantages, mask).detach()
    # Detached before the clip, so that a token has a gradient also where its weight is clipped.
    ratio = (new - old).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = -clipped * advantages * new
    if weights is not None:
        per_token = per_token * select(weights, mask).detach()
    loss = aggregate(per_token, mask, aggregation, denominator)
    return PolicyLoss(loss, *_policy_metrics(clipped != ratio, new, old, mask))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
) -> ValueLoss:
    """Return the squared error of the critic, with PPO's clip.

    L = max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) / 2, or (v - R)^2 / 2 when clip is None.

    >>> ones = torch.ones(1, 1)
    >>> value_loss(3 * ones, 2 * ones, 2 * ones, ones, clip=None).loss
    tensor(0.5000)

    Args:
        values: [B, T] values, with gradient.
        old_values: [B, T] values before the update.
        returns: [B, T], see `advantages.gae`.
        mask: [B, T] response tokens.
        clip: Largest change of a value that is not clipped, in the unit of the reward, or None.
        aggregation: How the loss of each token becomes a scalar, see `aggregate`.
        denominator: Divisor of the aggregation for a micro-batch: the count of the whole optimizer step.
    """
    new, old = select(values, mask), select(old_values, mask).detach()
    returns = select(returns, mask).detach()
    plain = (new - returns).square()
    if clip is None:
        loss = aggregate(plain / 2, mask, aggregation, denominator)
        return ValueLoss(loss, torch.zeros_like(loss))
    clipped = (old + (new - old).clamp(-clip, clip) - returns).square()
    # The larger error, as in OpenAI's baselines (ppo2): a value that is nearer to its return by more than
    # `clip` gets no gradient, and one that has moved away from it keeps its own.
    loss = aggregate(torch.maximum(plain, clipped) / 2, mask, aggregation, denominator)
    return ValueLoss(loss, masked_mean((clipped > plain).to(plain.dtype), mask))


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return the aggregated entropy per token ([B, T], from `logprobs.token_entropy`), in nats.

    A coefficient times it is SUBTRACTED from the loss.

    >>> entropy_bonus(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    tensor(1.5000)
    """
    return aggregate(entropy, mask, aggregation, denominator)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: Estimator = "k2",
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return the aggregated KL estimate, a scalar in nats. A coefficient times it is ADDED to the loss.

    The gradient is the plain derivative of the estimator. The gradient of k2 is that of the KL in
    expectation over the policy's own samples. The gradients of the unbiased estimators are not: k1's has mean
    zero, k3's is that of KL(reference || policy).

    >>> kl_loss(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.ones(1, 1))
    tensor(0.1250)

    Args:
        logprobs: [B, T] log-probabilities of the policy, with gradient.
        ref_logprobs: [B, T] log-probabilities of the reference.
        mask: [B, T] response tokens.
        estimator: See `kl.kl_estimate`.
        aggregation: How the loss of each token becomes a scalar, see `aggregate`.
        denominator: Divisor of the aggregation for a micro-batch: the count of the whole optimizer step.
    """
    new, ref = select(logprobs, mask), select(ref_logprobs, mask).detach()
    return aggregate(kl_estimate(new, ref, estimator), mask, aggregation, denominator)


def reward_model_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    margin_B: Tensor | None = None,
    center: float = 0.0,
) -> Tensor:
    """Return the Bradley-Terry loss, the mean over pairs (Ouyang et al. 2022, eq. 1).

        L = -log sigmoid(c - r - margin) + center (c + r)^2

    >>> reward_model_loss(torch.tensor([2.0]), torch.tensor([1.0]))  # -log sigmoid(1)
    tensor(0.3133)

    Args:
        chosen_B: [B] scores of the chosen responses.
        rejected_B: [B] scores of the rejected responses.
        margin_B: [B] intended difference of the scores (Touvron et al. 2023, eq. 2).
        center: Coefficient that keeps the mean of the scores near 0, which the first term leaves free
            (Eisenstein et al. 2023).
    """
    chosen, rejected = as_float(chosen_B), as_float(rejected_B)
    gap = chosen - rejected
    if margin_B is not None:
        gap = gap - margin_B
    # Not log(sigmoid(gap)): in float32 the sigmoid of a gap below about -89 is 0, and the loss infinite.
    per_pair = -logsigmoid(gap)
    if center != 0.0:
        per_pair = per_pair + center * (chosen + rejected).square()
    # Not `mean`, which is NaN for a micro-batch without pairs. A rank can have one, because all ranks have
    # the same number of micro-batches, and its loss must be 0 and have a graph.
    return divide(per_pair.sum(), max(per_pair.numel(), 1))


def sft_loss(logprobs: Tensor, mask: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Return the negative log-likelihood per trained token, in nats. Any shape.

    `denominator`: trained tokens of the whole optimizer step.

    >>> sft_loss(torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([1, 1, 0]))
    tensor(2.)
    """
    return -masked_mean(logprobs, mask, denominator)


def dpo_loss(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return the DPO loss, the mean over pairs (Rafailov et al. 2023, eq. 7).

        h = beta ((policy_chosen - policy_rejected) - (ref_chosen - ref_rejected))
        L = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)

    >>> dpo_loss(*torch.tensor([[-1.0], [-3.0], [-2.0], [-2.0]]), beta=0.5)  # -log sigmoid(0.5 x 2)
    tensor(0.3133)

    Args:
        policy_chosen_B: [B] summed log-probabilities of the chosen responses, with gradient.
        policy_rejected_B: [B] summed log-probabilities of the rejected responses, with gradient.
        ref_chosen_B: [B] summed log-probabilities under the reference.
        ref_rejected_B: [B] summed log-probabilities under the reference.
        beta: Coefficient of the implicit KL penalty.
        label_smoothing: Probability that a label is wrong (Mitchell 2023, "cDPO").
        denominator: Number of pairs of the whole optimizer step.
    """
    h = beta * _gap(policy_chosen_B, policy_rejected_B, ref_chosen_B, ref_rejected_B)
    # logsigmoid(-h) and not log(1 - sigmoid(h)), which is log 0 in float32 for h above about 17.
    per_pair = -(1.0 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)
    return _mean_of_pairs(per_pair, denominator)


def robust_dpo_loss(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    beta: float,
    label_smoothing: float,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return the robust DPO loss, the mean over pairs (Chowdhury et al. 2024, arXiv 2403.00409, eq. 12). Its
    expectation over flipped labels is the DPO loss of the true ones; that of label smoothing is not.

        h = beta ((policy_chosen - policy_rejected) - (ref_chosen - ref_rejected))
        L = (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e)        e = label_smoothing

    A single value can be negative.

    >>> pair = torch.tensor([[-1.0], [-3.0], [-2.0], [-2.0]])
    >>> robust_dpo_loss(*pair, beta=0.5, label_smoothing=0.1)  # h = 1: (0.9 x 0.3133 - 0.1 x 1.3133) / 0.8
    tensor(0.1883)

    Args:
        policy_chosen_B: [B] summed log-probabilities of the chosen responses, with gradient.
        policy_rejected_B: [B] summed log-probabilities of the rejected responses, with gradient.
        ref_chosen_B: [B] summed log-probabilities under the reference.
        ref_rejected_B: [B] summed log-probabilities under the reference.
        beta: Coefficient of the implicit KL penalty.
        label_smoothing: Probability that a label is wrong, below 0.5.
        denominator: Number of pairs of the whole optimizer step.
    """
    h = beta * _gap(policy_chosen_B, policy_rejected_B, ref_chosen_B, ref_rejected_B)
    right, wrong = logsigmoid(h), logsigmoid(-h)
    # The field `dpo.label_smoothing` ends at 0.49, which keeps this divisor above 0.
    per_pair = (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (1.0 - 2.0 * label_smoothing)
    return _mean_of_pairs(per_pair, denominator)


def ipo_loss(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    beta: float,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Return the loss of identity preference optimisation, the mean over pairs (Azar et al. 2023, arXiv
    2310.12036, eq. 17). The gap has a target, so that pairs that always agree do not widen it for ever.

        g = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
        L = (g - 1 / (2 beta))^2

    >>> ipo_loss(*torch.tensor([[-1.0], [-3.0], [-2.0], [-2.0]]), beta=0.5)  # (2 - 1)^2
    tensor(1.)

    Args:
        policy_chosen_B: [B] log-probabilities of the chosen responses, with gradient: sums as in the paper,
            or means over tokens as in TRL.
        policy_rejected_B: [B] log-probabilities of the rejected responses, with gradient.
        ref_chosen_B: [B] log-probabilities under the reference.
        ref_rejected_B: [B] log-probabilities under the reference.
        beta: Coefficient of the KL penalty, tau in the paper.
        denominator: Number of pairs of the whole optimizer step.
    """
    gap = _gap(policy_chosen_B, policy_rejected_B, ref_chosen_B, ref_rejected_B)
    return _mean_of_pairs((gap - 1.0 / (2.0 * beta)).square(), denominator)


def _gap(
    policy_chosen_B: Tensor, policy_rejected_B: Tensor, ref_chosen_B: Tensor, ref_rejected_B: Tensor
) -> Tensor:
    """Return [B]: log-ratio of policy over reference of the chosen response, minus that of the rejected."""
    # In float32 before the difference: the sums of long responses are in the hundreds, where neighbouring
    # numbers of bfloat16 are 1 or more apart.
    policy_gap = as_float(policy_chosen_B) - as_float(policy_rejected_B)
    return policy_gap - (as_float(ref_chosen_B) - as_float(ref_rejected_B)).detach()


def _mean_of_pairs(per_pair_B: Tensor, denominator: Tensor | float | None) -> Tensor:
    return divide(per_pair_B.sum(), max(per_pair_B.numel(), 1) if denominator is None else denominator)
