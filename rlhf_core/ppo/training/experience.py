"""Compute the experience of a step from its rollouts and the outputs of the models: KL, token rewards,
advantages, returns.

    controller: scores with penalties, group advantages ----+   one number per response
                                                            v
    policy ranks, each for its rows: `make_rows` -> columns of each token, which stay there
                                                 -> `ResponseSums` of each response
                                                            |
    controller: `summarize` adds them up in the order of the batch -> metrics, mean and scale of whitening

A row depends only on its own response, and the sums are added in the order of the batch. Therefore the
result has the same bits for any number of ranks and any distribution of the responses.

Axes: `B` responses, `T` the longest of them.

`repeats` finds responses that repeat themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algo.advantages import AdvantageInputs, gae, group_advantages, returns_to_go, token_rewards
from rlhf_core.algo.importance import importance_weights
from rlhf_core.algo.kl import kl_estimate
from rlhf_core.algo.masking import WHITEN_EPS, select
from rlhf_core.algo.shaping import overlong_penalty
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.rewards import UserFunction
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.ppo.training.batch import FloatArray, IntArray, RowColumns, joined, offsets_of
from rlhf_core.rewards.python_worker import load_function

_LOOP_TOKENS = 16
"""Shortest response and shortest loop that count as repetition, in tokens."""


def repeats(response_ids: Sequence[int] | np.ndarray[Any, Any]) -> bool:
    """Return whether a response of 16 tokens or more has at most two different tokens or contains a loop.

    A loop is a piece of any length that occurs three or more times in a row and covers at least 16 tokens and
    a quarter of the response.
    """
    length = len(response_ids)
    if length < _LOOP_TOKENS:
        return False
    ids_T = np.asarray(response_ids)
    if len(set(ids_T.tolist())) <= 2:
        return True
    shortest = max(_LOOP_TOKENS, math.ceil(length / 4))
    for period in _periods(ids_T, shortest // 5):
        needed = max(3 * period, shortest) - period
        # In a loop of this period, each token is equal to the token one period before.
        differs = np.flatnonzero(ids_T[period:] != ids_T[:-period])
        edges = np.concatenate(([-1], differs, [length - period]))
        runs_of_equal = np.diff(edges) - 1
        if runs_of_equal.max() >= needed:
            return True
    return False


def _periods(ids_T: np.ndarray, window: int) -> Iterator[int]:
    """Yield the periods that a loop of at least `5 * window` tokens can have, each once.

    All periods up to a third of the length would take quadratic time. Only those are tried at which one of
    about twenty windows of the response recurs. One of the windows begins among the first `window` tokens of
    the loop. One period later, still within the loop, the same tokens follow.

    A window that repeats a few tokens (spaces, dashes) recurs at nearly every position of a long series of
    them. If the series is longer than the loop's period, the whole loop has the period of the series. If it
    is shorter, the window is extended to the end of the series before the search. Windows that overlap their
    recurrence by more than half are of this kind, so the number of periods is small in all cases.
    """
    length, size, text = len(ids_T), ids_T.itemsize, ids_T.tobytes()
    seen = set()
    for start in range(0, length - window, window):
        end = start + window
        small = _small_period(text[start * size : end * size], size)
        if small:
            if small not in seen:
                seen.add(small)
                yield small
            breaks = np.flatnonzero(ids_T[start + small :] != ids_T[start:-small])
            if not len(breaks):
                continue
            end = start + small + int(breaks[0]) + 1
        piece = text[start * size : end * size]
        # The limit is where the second occurrence may end: a loop has at least three pieces, so its period
        # is at most a third of the length.
        for position in _occurrences(text, piece, start + 1, end + length // 3, size):
            period = position - start
            if period not in seen:
                seen.add(period)
                yield period


def _small_period(piece: bytes, size: int) -> int:
    """Return the smallest period of `piece` that is at most half of its tokens, or 0. A token has `size`
    bytes.
    """
    half = len(piece) // size // 2
    for period in _occurrences(piece, piece[: half * size], 1, 2 * half, size):
        if piece[period * size :] == piece[: -period * size]:
            return period
    return 0


def _occurrences(text: bytes, piece: bytes, first: int, end: int, size: int) -> Iterator[int]:
    """Yield the positions of the tokens of `piece` in `text`, between the tokens `first` and `end`."""
    offset = text.find(piece, first * size, end * size)
    while offset >= 0:
        if offset % size == 0:
            yield offset // size
        # `find` compares bytes, so it can stop within a token. Continue at the next one.
        offset = text.find(piece, offset + size - offset % size, end * size)


# All rows of a rank at once would each be as wide as the longest response of the rank.
_BLOCK_ROWS = 64
"""Rows that are padded to the same length and computed at the same time."""
_ROUNDING = 1e-5
"""Deviation of returns, relative to returns and errors, that is rounding: 1e-7 in float32, and more over a
long response.
"""

Sums = NDArray[np.float64]


# -- numbers of whole responses --


def shaped_scores(
    lengths_B: IntArray, finished_B: NDArray[np.bool_], scores: Sequence[float], ppo: PPOConfig
) -> torch.Tensor:
    """Return scores (B,) minus the penalties for responses that were cut by the length limit or came close to
    it.
    """
    scores_B = torch.tensor(scores, dtype=torch.float32)
    scores_B = scores_B - ppo.eos_penalty * torch.from_numpy(~finished_B).float()
    if ppo.overlong is not None:
        lengths = torch.from_numpy(lengths_B.astype(np.int64))
        scores_B = scores_B + overlong_penalty(
            lengths, ppo.response_limit, ppo.overlong.buffer, ppo.overlong.factor
        )
    return scores_B


def uniform_groups(scores_B: torch.Tensor, ppo: PPOConfig) -> list[int]:
    """Return the groups (consecutive samples of one prompt) with equal scores, from which nothing is learned.

    NaN scores are ignored.
    """
    groups = scores_B.reshape(-1, ppo.samples_per_prompt)
    # By the range: the standard deviation of equal floats is not always 0, because their mean is rounded.
    low = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    high = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    # `>=`: a group without any score has inf and -inf, and nothing is learned from it either.
    uniform: list[int] = torch.nonzero(low >= high).flatten().tolist()
    return uniform


def response_advantages(scores_B: torch.Tensor, ppo: PPOConfig) -> torch.Tensor | None:
    """Return (B,) the advantage of each response in its group, or None if the algorithm has no groups."""
    if ppo.group_kind is None:
        return None
    return group_advantages(scores_B, groups_of(scores_B, ppo), ppo.group_kind)


OwnAdvantages = Callable[[AdvantageInputs], tuple[torch.Tensor, dict[str, float]]]
"""Returns (B,) advantages, and metrics by name."""


def own_advantages_of(ppo: PPOConfig, code: bytes | None = None) -> OwnAdvantages | None:
    """Return the user's advantages, or None if section `ppo` has none.

    Args:
        ppo: Section `ppo`.
        code: Source of the file of the function, if it was read before.

    Raises:
        ConfigError: The function cannot be loaded.
    """
    if ppo.advantages is None:
        return None
    name = ppo.advantages.function
    function = load_user_function(ppo.advantages, "ppo.advantages", code)

    def advantages(inputs: AdvantageInputs) -> tuple[torch.Tensor, dict[str, float]]:
        values, metrics = with_metrics(function(inputs), f"ppo.advantages: {name} must return advantages")
        if not isinstance(values, torch.Tensor) or values.shape != inputs.scores_B.shape:
            found = getattr(values, "shape", values)
            raise InputError(
                f"ppo.advantages: {name} must return a tensor ({len(inputs.scores_B)},); got {found!r:.80}"
            )
        # Responses without a score are masked, so their advantages may be anything.
        if not values[~inputs.scores_B.isnan()].isfinite().all():
            raise InputError(f"ppo.advantages: {name} must return finite advantages; got {values!r:.80}")
        # Constants of the loss, in float32 as the columns of the ranks.
        return values.detach().float(), {each: float(number) for each, number in metrics.items()}

    return advantages


def with_metrics(result: Any, rule: str) -> tuple[Any, Mapping[str, Any]]:
    """Return what a user's function returned, if this is a value and a dict of metrics.

    Raises:
        InputError: It is something else. `rule` is the beginning of the message.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise InputError(f"{rule} and a dict of metrics; got {result!r:.80}")
    value, metrics = result
    return value, metrics


def load_user_function(section: UserFunction, field: str, code: bytes | None) -> Callable[..., Any]:
    """Return a user's function. `code` is the source of its file, if it was read before.

    Raises:
        ConfigError: It cannot be loaded.
    """
    try:
        # Importing a user's file can raise anything.
        return load_function(section.function, section.file, code)
    except Exception as error:
        raise ConfigError(
            f"{field}.function: {section.function} cannot be loaded ({type(error).__name__}: {error});"
            " correct it"
        ) from error


def groups_of(scores_B: torch.Tensor, ppo: PPOConfig) -> torch.Tensor:
    """Return (B,) the number of the prompt of each response."""
    return torch.arange(len(scores_B)) // ppo.samples_per_prompt


# -- rows of one rank --


@dataclass(frozen=True)
class ModelRows:
    """What the engine and the models returned for the responses of one rank: one array (T,) per response."""

    response_ids: Sequence[IntArray]
    rollout_logprobs: Sequence[FloatArray]
    """Log-probabilities by the engine."""
    old_logprobs: Sequence[FloatArray]
    """Log-probabilities by the policy before the update."""
    entropy: Sequence[FloatArray]
    """Entropy of the policy."""
    ref_logprobs: Sequence[FloatArray]
    """Log-probabilities by the reference."""
    values: Sequence[FloatArray] | None
    """Values by the critic; None without one."""


@dataclass(frozen=True)
class ResponseSums:
    """Sums over the tokens of each response, (rows,) in float64; 0 for a response without a score."""

    kl: Sums
    """Sum of k1, in nats."""
    rewards: Sums
    entropy: Sums
    values: Sums
    gap: Sums
    """Sum of the absolute differences between the log-probabilities of engine and trainer."""
    gap_max: Sums
    """Largest of these differences."""
    gap_k3: Sums
    weights: Sums
    """Sum of the importance weights, without bounds."""
    weights_square: Sums
    advantages: Sums
    advantages_spread: Sums
    """Sum of the squared deviations from the mean of the response."""
    returns: Sums
    returns_spread: Sums
    errors: Sums
    """Sum of returns minus values."""
    errors_spread: Sums
    repeating: Sums
    """1 if the response repeats itself, also without a score."""


def make_rows(
    rows: ModelRows,
    scores: FloatArray,
    advantages: FloatArray | None,
    ppo: PPOConfig,
    kl_coef: float,
) -> tuple[RowColumns, ResponseSums]:
    """Return the experience of some responses, and their sums.

    The columns are `old_logprobs`, `ref_logprobs`, `advantages` (before whitening), `returns`, `values` and
    `weights` (importance weights for the gap between engine and trainer). They are 0 for a response without a
    score, except for the log-probabilities and values.

    Args:
        rows: Outputs of engine and models.
        scores: (rows,) with penalties. A response with the score NaN is masked.
        advantages: (rows,) see `response_advantages`.
        ppo: Section `ppo`.
        kl_coef: Coefficient of the KL penalty, used with `kl.place: reward`.
    """
    blocks = []
    for start in range(0, len(scores), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        chosen = ModelRows(
            rows.response_ids[part],
            rows.rollout_logprobs[part],
            rows.old_logprobs[part],
            rows.entropy[part],
            rows.ref_logprobs[part],
            None if rows.values is None else rows.values[part],
        )
        # `torch.tensor` copies: arguments of Ray's calls are read-only arrays.
        of_group = None if advantages is None else torch.tensor(advantages[part])
        blocks.append(_make_block(chosen, torch.tensor(scores[part]), of_group, ppo, kl_coef))
    names = ("old_logprobs", "ref_logprobs", "advantages", "returns", "values", "weights")
    columns = {name: joined([block.columns[name] for block in blocks]) for name in names}
    # The empty array is for a rank without responses.
    sums = {
        name: np.concatenate([np.zeros(0), *(block.sums[name] for block in blocks)])
        for name in ResponseSums.__dataclass_fields__
    }
    return RowColumns(offsets_of([len(ids) for ids in rows.response_ids]), columns), ResponseSums(**sums)


@dataclass(frozen=True)
class _Block:
    columns: dict[str, FloatArray]
    sums: dict[str, Sums]


def _make_block(
    rows: ModelRows,
    scores_B: torch.Tensor,
    advantages_B: torch.Tensor | None,
    ppo: PPOConfig,
    kl_coef: float,
) -> _Block:
    """Return the values of the tokens of one block of responses, and the sums of each response."""
    old_BT, ref_BT = padded(rows.old_logprobs), padded(rows.ref_logprobs)
    values_BT = torch.zeros_like(old_BT) if rows.values is None else padded(rows.values)
    rollout_BT, entropy_BT = padded(rows.rollout_logprobs), padded(rows.entropy)
    lengths_B = torch.tensor([len(ids) for ids in rows.response_ids])
    # Also of responses without a score, so that all columns and sums have the same offsets.
    inside_BT = torch.arange(old_BT.shape[1]) < lengths_B.unsqueeze(1)
    mask_BT = inside_BT & ~scores_B.isnan().unsqueeze(1)

    k1_BT = select(kl_estimate(old_BT, ref_BT, "k1"), mask_BT)
    in_reward = kl_coef if ppo.kl.place == "reward" else 0.0
    # Without a penalty in the reward it is multiplied by 0.
    penalty_BT = kl_estimate(old_BT, ref_BT, ppo.kl.used_estimator) if in_reward else k1_BT
    rewards_BT = token_rewards(scores_B, penalty_BT, mask_BT, in_reward)
    if advantages_B is not None:
        # On each token of a response its advantage in the group, minus the future KL penalty.
        kl_only_BT = token_rewards(torch.zeros_like(scores_B), penalty_BT, mask_BT, in_reward)
        future_BT = returns_to_go(kl_only_BT, mask_BT, ppo.gamma)
        advantages_BT = returns_BT = select(advantages_B.unsqueeze(1) + future_BT, mask_BT)
    elif ppo.uses_critic:
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, ppo.lam)
    else:
        advantages_BT = returns_BT = returns_to_go(rewards_BT, mask_BT, ppo.gamma)
    weights_BT = _importance_weights(old_BT, rollout_BT, mask_BT, lengths_B, ppo)

    offsets = offsets_of(lengths_B.numpy())
    tokens = {
        "kl": k1_BT,
        "rewards": rewards_BT,
        "entropy": select(entropy_BT, mask_BT),
        "values": select(values_BT, mask_BT),
        "advantages": advantages_BT,
        "returns": returns_BT,
        "errors": select(returns_BT - values_BT, mask_BT),
        **_engine_gap(old_BT, rollout_BT, mask_BT),
    }
    flat = {name: numbers_BT[inside_BT].double().numpy() for name, numbers_BT in tokens.items()}
    # For an empty row, `reduceat` returns an element of the next one. Every response has a token.
    sums = {name: np.add.reduceat(values, offsets[:-1]) for name, values in flat.items()}
    sums["gap_max"] = np.maximum.reduceat(flat["gap"], offsets[:-1])
    # Deviations from the mean: a variance from sums of squares would cancel where the mean is large.
    for name in ("advantages", "returns", "errors"):
        means = np.repeat(sums[name] / np.diff(offsets), np.diff(offsets))
        sums[f"{name}_spread"] = np.add.reduceat((flat[name] - means) ** 2, offsets[:-1])
    sums["repeating"] = np.array([float(repeats(ids)) for ids in rows.response_ids])
    columns = {
        "old_logprobs": old_BT,
        "ref_logprobs": ref_BT,
        "advantages": advantages_BT,
        "returns": returns_BT,
        "values": values_BT,
        "weights": weights_BT,
    }
    return _Block({name: numbers_BT[inside_BT].numpy() for name, numbers_BT in columns.items()}, sums)


def padded(arrays: Sequence[Any]) -> torch.Tensor:
    """Stack arrays of shape (T,) to (B, T), padded with zeros."""
    # Copies, because arrays from Ray's object store are read-only, which torch does not support.
    return pad_sequence(
        [torch.from_numpy(np.array(array, dtype=np.float32)) for array in arrays], batch_first=True
    )


def _importance_weights(
    old_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    lengths_B: torch.Tensor,
    ppo: PPOConfig,
) -> torch.Tensor:
    kind, bounds = ppo.used_importance, ppo.importance_bounds
    if kind != "sequence-mask":
        return importance_weights(old_BT, rollout_BT, mask_BT, kind, *bounds)
    # The sum over a response must not depend on the padding, which may change its rounding.
    rows = []
    for row, length in enumerate(lengths_B.tolist()):
        place = (slice(row, row + 1), slice(length))
        rows.append(importance_weights(old_BT[place], rollout_BT[place], mask_BT[place], kind, *bounds)[0])
    return pad_sequence(rows, batch_first=True)


def _engine_gap(
    old_BT: torch.Tensor, rollout_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the differences between engine and trainer for the same weights and tokens."""
    # Bounds that change no weight, also if `ppo.importance` has others or is off.
    weights_BT = importance_weights(old_BT, rollout_BT, mask_BT, "truncate", 0.0, float("inf"))
    return {
        "gap": select((old_BT - rollout_BT).abs(), mask_BT),
        # KL(engine || trainer): the tokens are samples of the engine.
        "gap_k3": select(kl_estimate(rollout_BT, old_BT, "k3"), mask_BT),
        "weights": weights_BT,
        "weights_square": weights_BT.square(),
    }


# -- the whole batch --


@dataclass(frozen=True)
class Whitening:
    """Mean and scale that whiten the advantages of a batch."""

    mean: float
    scale: float

    def apply(self, advantages: FloatArray) -> FloatArray:
        """Return (advantages - mean) * scale, rounded once."""
        return ((advantages.astype(np.float64) - self.mean) * self.scale).astype(np.float32)


@dataclass(frozen=True)
class Summary:
    """What the sums of all responses say about the batch."""

    metrics: dict[str, float]
    whitening: Whitening | None
    """None if advantages are not whitened."""


def summarize(
    sums: ResponseSums,
    scores_B: torch.Tensor,
    lengths_B: IntArray,
    finished_B: NDArray[np.bool_],
    ppo: PPOConfig,
) -> Summary:
    """Return metrics and whitening from the sums of all responses, in the order of the batch.

    Args:
        sums: Sums of all responses.
        scores_B: Scores with penalties; NaN if a response has no score.
        lengths_B: Number of tokens of each response.
        finished_B: Whether each response ended with EOS.
        ppo: Section `ppo`.
    """
    scored = ~scores_B.isnan()
    scored_B = scored.numpy()
    tokens = int(lengths_B[scored_B].sum())
    responses = int(scored_B.sum())
    known_scores_B = scores_B[scored]
    lengths = torch.from_numpy(lengths_B.astype(np.int64))
    metrics = {
        "objective/kl": _ratio(sums.kl, responses),
        "objective/scores": known_scores_B.mean().item() if responses else 0.0,
        "objective/scores_std": _std(known_scores_B),
        "objective/rlhf_reward": _ratio(sums.rewards, responses),
        "objective/entropy": _ratio(sums.entropy, responses),
        "policy/entropy": _ratio(sums.entropy, tokens),
        **_response_metrics(lengths, torch.from_numpy(finished_B), scored),
        "rollout/repeating_rate": _ratio(sums.repeating, len(scored_B)),
        "rollout/score_length_correlation": _score_length(known_scores_B, lengths[scored]),
        "rollout/logprob_gap_mean": _ratio(sums.gap, tokens),
        "rollout/logprob_gap_max": float(sums.gap_max.max()),
        "rollout/logprob_gap_k3": _ratio(sums.gap_k3, tokens),
        # Without a single scored token it is 0, and not a division by 0.
        # Kish's effective sample size, as a share of the tokens.
        "rollout/effective_sample_size": float(
            sums.weights.sum() ** 2 / max(sums.weights_square.sum() * tokens, 1e-30)
        ),
    }
    if ppo.uses_critic:
        metrics["value/mean"] = _ratio(sums.values, tokens)
        explained = _explained_variance(sums, lengths_B, scored_B)
        if explained is not None:
            metrics["value/explained_variance"] = explained
    if ppo.samples_per_prompt > 1:
        uniform = uniform_groups(scores_B, ppo)
        metrics["rollout/zero_variance_groups"] = len(uniform) * ppo.samples_per_prompt / len(scored_B)
    whitening = None
    if ppo.whitens:
        variance = _variance(sums.advantages, sums.advantages_spread, lengths_B, scored_B)
        # The same epsilon as in `masked_whiten`, with which a test compares the result.
        whitening = Whitening(_ratio(sums.advantages, tokens), 1 / math.sqrt(variance + WHITEN_EPS))
    return Summary(metrics, whitening)


def _ratio(sums_B: Sums, count: int) -> float:
    return float(sums_B.sum()) / max(1, count)


def _explained_variance(sums: ResponseSums, lengths_B: IntArray, scored_B: NDArray[np.bool_]) -> float | None:
    """Return 1 - var(returns - values) / var(returns), or None if the returns do not vary: no critic is then
    better or worse than another one.
    """
    variance = _variance(sums.returns, sums.returns_spread, lengths_B, scored_B)
    errors = _variance(sums.errors, sums.errors_spread, lengths_B, scored_B)
    tokens = max(1, int(lengths_B[scored_B].sum()))
    size = sum(float(sums_B.sum() / tokens) ** 2 for sums_B in (sums.returns, sums.errors)) + errors
    # Equal returns are sums of advantages and values, which round differently at each token.
    if variance <= _ROUNDING**2 * size:
        return None
    return 1.0 - errors / variance


def _variance(sums_B: Sums, spread_B: Sums, lengths_B: IntArray, scored_B: NDArray[np.bool_]) -> float:
    """Return the unbiased variance of all tokens (Chan et al. 1979, equation 2.1, over responses)."""
    sums, lengths = sums_B[scored_B], lengths_B[scored_B].astype(np.float64)
    count = lengths.sum()
    if count < 2:
        return 0.0
    between = lengths * (sums / lengths - sums.sum() / count) ** 2
    return float((spread_B[scored_B].sum() + between.sum()) / (count - 1))


def _response_metrics(
    lengths_B: torch.Tensor, finished_B: torch.Tensor, scored_B: torch.Tensor
) -> dict[str, float]:
    return {
        "rollout/length": lengths_B.float().mean().item(),
        "rollout/eos_rate": finished_B.float().mean().item(),
        # An empty response is EOS alone.
        "rollout/empty_rate": (finished_B & (lengths_B <= 1)).float().mean().item(),
        "rollout/unscored": float((~scored_B).sum()),
    }


def _score_length(scores_B: torch.Tensor, lengths_B: torch.Tensor) -> float:
    """Return Pearson's correlation, or 0 if scores or lengths are constant."""
    scores_B, lengths_B = scores_B.double(), lengths_B.double()
    scores_B, lengths_B = scores_B - scores_B.mean(), lengths_B - lengths_B.mean()
    scale = scores_B.norm() * lengths_B.norm()
    return ((scores_B * lengths_B).sum() / scale).item() if scale > 0 else 0.0


def _std(values_B: torch.Tensor) -> float:
    """Return the standard deviation, which is exactly 0 for equal values."""
    # In float64, because the float32 mean of equal values may differ from them, and guards compare with 0.
    return values_B.double().std(unbiased=False).item() if values_B.numel() else 0.0
