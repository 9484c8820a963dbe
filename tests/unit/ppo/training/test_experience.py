"""The experience of a rollout batch, compared with numbers that are computed by hand.

- token rewards are minus the KL of the configured estimator, plus the score at the last token; returns follow
  from unwhitened advantages, gamma and lambda
- padding of shorter responses changes nothing
- a response that is cut by the length limit gets the penalty; the KL of a policy equal to its reference is 0
- the gap between engine and trainer counts only response tokens; importance weights are trainer over engine,
  within their bounds
- each algorithm without a critic has the advantages of its paper; a KL in the loss is not in the reward
- empty responses, the deviation of scores, and the explained variance are those of their definitions
- one NaN among log-probabilities or values makes a checked metric NaN; repeating responses are counted
- a response without a score is masked; uniform groups are found and counted
- all numbers have the same bits for 1, 2 and 3 ranks and any distribution of the responses, and agree with
  a calculation over the whole batch
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.algo.masking import masked_whiten
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.training.batch import RankShare
from rlhf_core.ppo.training.experience import (
    ModelRows,
    _periods,
    make_rows,
    padded,
    repeats,
    response_advantages,
    shaped_scores,
    summarize,
    uniform_groups,
)
from rlhf_core.ppo.update import sums_in_batch_order
from rlhf_core.ppo.watching.step_checks import WATCHED
from rlhf_core.types import Rollout


def _rollout(logprobs: tuple[float, ...], finished: bool = True) -> Rollout:
    return Rollout("p", 0, (1, 2), tuple(range(3, 3 + len(logprobs))), logprobs, finished, 0)


def _make(
    rollouts: list[Rollout],
    old: list[Any],
    ref: list[Any],
    values: list[Any] | None,
    scores: list[float],
    **ppo: Any,
) -> Any:
    config = config_from_tree(
        {"ppo": {"whiten_advantages": False, "lam": 1.0, "missing_eos_penalty": 0.0, **ppo}}, "test"
    ).ppo
    return made_by(1, rollouts, old, ref, values, scores, config)


def made_by(
    ranks: int,
    rollouts: list[Rollout],
    old: list[Any],
    ref: list[Any],
    values: list[Any] | None,
    scores: list[float],
    ppo: PPOConfig,
    *,
    order: Sequence[int] | None = None,
    entropy: float = 0.5,
) -> Any:
    """Return the experience that several ranks make, as padded tensors.

    `order` is the order in which the responses are distributed, `entropy` that of every token.
    """
    unused: Any = None
    count = len(rollouts)
    lengths = np.array([len(r.response_ids) for r in rollouts], np.int32)
    finished = np.array([r.finished for r in rollouts])
    scores_B = shaped_scores(lengths, finished, scores, ppo)
    advantages_B = response_advantages(scores_B, ppo)
    shares = [
        RankShare(np.array(list(order or range(count))[rank::ranks], np.int64), unused, unused, [])
        for rank in range(ranks)
    ]
    names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "weights")
    rows: dict[str, dict[int, Any]] = {name: {} for name in names}
    sums = []
    for share in shares:
        chosen = share.indices.tolist()

        def floats(numbers: Sequence[Any]) -> list[Any]:
            return [np.array(numbers[i], np.float32) for i in chosen]  # noqa: B023

        inputs = ModelRows(
            [np.array(rollouts[i].response_ids, np.int32) for i in chosen],
            floats([r.rollout_logprobs for r in rollouts]),
            floats(old),
            floats([[entropy] * len(o) for o in old]),
            floats(ref),
            None if values is None else floats(values),
        )
        of_group = None if advantages_B is None else advantages_B.numpy()[share.indices]
        columns, of_rank = make_rows(inputs, scores_B.numpy()[share.indices], of_group, ppo, 0.1)
        sums.append(of_rank)
        for name in names:
            rows[name] |= {index: columns.row(name, row) for row, index in enumerate(chosen)}
    summary = summarize(sums_in_batch_order(shares, sums), scores_B, lengths, finished, ppo)
    if summary.whitening is not None:
        rows["advantages"] = {i: summary.whitening.apply(row) for i, row in rows["advantages"].items()}
    tensors = {f"{name}_BT": padded([of_name[i] for i in range(count)]) for name, of_name in rows.items()}
    inside_BT = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
    return SimpleNamespace(
        mask_BT=inside_BT & ~scores_B.isnan().unsqueeze(1),
        scores_B=scores_B,
        metrics=summary.metrics,
        sums=sums,
        **tensors,
    )


def test_returns_are_the_score_minus_the_future_kl_penalty() -> None:
    made = _make([_rollout((-1.0, -2.0))], [[-1.0, -2.0]], [[-2.0, -2.5]], [[0.25, 0.5]], [3.0])
    # k1 = 1.0, 0.5; rewards -0.1, 3 - 0.05; with lambda 1 the returns are 2.85 and 2.95, advantages less the
    # values.
    torch.testing.assert_close(made.returns_BT, torch.tensor([[2.85, 2.95]]))
    torch.testing.assert_close(made.advantages_BT, torch.tensor([[2.6, 2.45]]))
    assert made.metrics["objective/kl"] == pytest.approx(1.5)
    assert made.metrics["objective/rlhf_reward"] == pytest.approx(2.85)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # One token at log p - log ref = -1: -1, |-1|, 1/2 and e - 1 - 1 nats, at 0.1 a nat.
    [(None, 0.1), ("k1", 0.1), ("abs", -0.1), ("k2", -0.05), ("k3", -0.1 * (math.e - 2))],
)
def test_the_kl_penalty_uses_the_configured_estimator(estimator: str | None, expected: float) -> None:
    made = _make([_rollout((-2.0,))], [[-2.0]], [[-1.0]], [[0.0]], [0.0], kl={"estimator": estimator})
    assert made.returns_BT.item() == pytest.approx(expected)
    assert made.metrics["objective/kl"] == -1.0


@pytest.mark.parametrize(
    ("options", "cut"), [({"missing_eos_penalty": 1.0}, 6.0), ({"overlong": {"buffer": 1}}, 6.0)]
)
def test_a_penalty_counts_also_where_scores_are_high(options: dict[str, Any], cut: float) -> None:
    rollouts = [_rollout((-1.0,) * 2), _rollout((-1.0,) * 2, finished=False)]
    if "overlong" in options:
        rollouts[0] = _rollout((-1.0,))
    numbers = [[-1.0] * len(r.response_ids) for r in rollouts]
    made = _make(rollouts, numbers, numbers, numbers, [7.0, 7.0], max_new_tokens=2, score_clip=5.0, **options)
    assert made.metrics["objective/rlhf_reward"] == pytest.approx((7.0 + cut) / 2)


def test_gamma_discounts_and_lambda_blends() -> None:
    made = _make([_rollout((-1.0,) * 2)], [[-1.0] * 2], [[-1.0] * 2], [[1.0] * 2], [3.0], gamma=0.5, lam=0.25)
    # TD errors 0.5 * 1 - 1 = -0.5 and 3 - 1 = 2; the first advantage is -0.5 + 0.5 * 0.25 * 2.
    assert made.advantages_BT.tolist() == [[-0.25, 2.0]]


def test_a_longer_neighbour_changes_nothing() -> None:
    short = ([_rollout((-1.0,))], [[-1.0]], [[-1.5]], [[0.2]], [1.0])
    alone = _make(*short)
    with_longer = _make(
        [*short[0], _rollout((-1.0,) * 5)],
        [*short[1], [-1.0] * 5],
        [*short[2], [-9.0] * 5],
        [*short[3], [7.0] * 5],
        [*short[4], -4.0],
    )
    torch.testing.assert_close(with_longer.returns_BT[0, :1], alone.returns_BT[0])
    assert with_longer.mask_BT.tolist() == [[True] + [False] * 4, [True] * 5]


def test_a_response_cut_by_the_limit_pays_the_penalty() -> None:
    arguments = ([[-1.0]], [[-1.0]], [[0.0]], [1.0])
    cut = _make([_rollout((-1.0,), finished=False)], *arguments, missing_eos_penalty=0.75)
    ended = _make([_rollout((-1.0,))], *arguments, missing_eos_penalty=0.75)
    assert (cut.scores_B.item(), ended.scores_B.item()) == (0.25, 1.0)
    assert ended.metrics["objective/kl"] == 0.0


def test_the_engine_gap_counts_only_response_tokens() -> None:
    made = _make(
        [_rollout((-1.0, -2.0, -3.0)), _rollout((-1.5,))],
        [[-1.0, -2.0, -3.0], [-1.1]],
        [[-1.0, -2.0, -3.0], [-1.1]],
        [[0.0] * 3, [0.0]],
        [0.0, 0.0],
    )
    # One of four tokens is 0.4 off.
    assert made.metrics["rollout/logprob_gap_mean"] == pytest.approx(0.1, abs=1e-6)
    assert made.metrics["rollout/logprob_gap_max"] == pytest.approx(0.4, abs=1e-6)
    # k3 = e^0.4 - 1 - 0.4 = 0.0918247 on that token.
    assert made.metrics["rollout/logprob_gap_k3"] == pytest.approx(0.0918247 / 4, rel=1e-4)
    # Weights 1, 1, 1, e^0.4 = 1.4918247: their sum squared 20.176490, over 4 x 5.2255409.
    assert made.metrics["rollout/effective_sample_size"] == pytest.approx(20.176490 / 20.902164, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [[1.0, 1.0], [1.0, 0.0]]),
        ("truncate", [[1.5, 0.75], [0.5, 0.0]]),
        ("mask", [[0.0, 0.75], [0.0, 0.0]]),
        # Geometric means sqrt(3 x 0.75) = 1.5 and 0.25.
        ("sequence-mask", [[3.0, 0.75], [0.0, 0.0]]),
    ],
)
def test_the_weights_are_trainer_over_engine_within_their_bounds(
    kind: str, expected: list[list[float]]
) -> None:
    # p(trainer) / p(engine) is 3, 0.75 and 0.25.
    old = [[math.log(0.6), math.log(0.3)], [math.log(0.2)]]
    rollouts = [_rollout((math.log(0.2), math.log(0.4))), _rollout((math.log(0.8),))]
    bounds = (0.5, 1.6) if kind == "sequence-mask" else (0.5, 1.5)
    made = _make(
        rollouts, old, old, [[0.0] * 2, [0.0]], [0.0, 0.0], importance=kind, importance_bounds=bounds
    )
    torch.testing.assert_close(made.weights_BT, torch.tensor(expected))


@pytest.mark.parametrize("place", ["rollout", "old", "ref", "values"])
def test_one_nonfinite_number_makes_the_checked_metrics_nonfinite(place: str) -> None:
    numbers = {name: [[-1.0, -1.0], [-1.0]] for name in ("rollout", "old", "ref", "values")}
    numbers[place][1][0] = math.nan
    rollouts = [_rollout(tuple(row)) for row in numbers["rollout"]]
    made = _make(rollouts, numbers["old"], numbers["ref"], numbers["values"], [0.0, 1.0])
    assert any(not math.isfinite(made.metrics[name]) for name in WATCHED)


TEXT = tuple(range(100, 140))


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 7, 16, 40, 64])
@pytest.mark.parametrize("before", [(), TEXT])
def test_a_loop_is_found_for_any_period_and_position(period: int, before: tuple[int, ...]) -> None:
    piece = tuple(range(period))
    assert repeats((*before, *piece * (3 + 40 // period)))
    assert repeats((*piece * (3 + 40 // period), *before))


@pytest.mark.parametrize(
    "ids",
    [
        TEXT,
        TEXT * 2,  # said twice
        (7,) * 15,  # short
        (*TEXT, 1, 2, 3, 1, 2, 3, 1, 2, 3, *TEXT),  # a refrain of nine tokens
        (*range(100), *(5,) * 20),  # a line of dashes in a long answer
        tuple((i * i) % 17 + (i * 7) % 5 for i in range(60)),
    ],
)
def test_two_repetitions_or_a_short_loop_do_not_count(ids: tuple[int, ...]) -> None:
    assert not repeats(ids)


def _repeats_by_all_periods(ids: Sequence[int]) -> bool:
    """The definition, in quadratic time."""
    if len(ids) < 16:
        return False
    if len(set(ids)) <= 2:
        return True
    for period in range(1, len(ids) // 3 + 1):
        needed = max(3 * period, 16, math.ceil(len(ids) / 4))
        found = period
        for i in range(period, len(ids)):
            found = found + 1 if ids[i] == ids[i - period] else period
            if found >= needed:
                return True
    return False


def _with_a_loop(chance: random.Random) -> list[int]:
    """Random tokens, or rows of equal tokens, with a loop that is about as long as it must be to count."""
    letters, length, longest = (
        chance.choice([2, 3, 4, 300]),
        chance.randrange(14, 200),
        chance.choice([1, 1, 5, 40]),
    )
    ids: list[int] = []
    while len(ids) < length:
        ids += [chance.randrange(letters)] * chance.randint(1, longest)
    del ids[length:]
    period = chance.randint(1, length // 3 + 1)
    loop = max(3 * period, 16, math.ceil(length / 4)) + chance.randint(-2, 1)
    start = chance.randint(0, max(0, length - loop))
    for i in range(start + period, min(start + loop, length)):
        ids[i] = ids[i - period]
    return ids


def test_loops_agree_with_a_search_over_all_periods() -> None:
    chance = random.Random(0)
    found = []
    for _ in range(800):
        ids = _with_a_loop(chance)
        found.append(repeats(ids))
        assert found[-1] == _repeats_by_all_periods(ids), ids
    assert 200 < sum(found) < 700


LONG = random.Random(0).choices(range(50_000), k=4096)
DASHES = [7] * 900


@pytest.mark.parametrize(
    "ids",
    [
        LONG,
        [token % 3 for token in LONG],
        [*DASHES, *LONG[:1000], *DASHES, *LONG[1000:2000], *DASHES],
        [*[1, 2, 3] * 300, *LONG[:1000], *[1, 2, 3] * 320, *LONG[1000:2000]],
        [*DASHES, 8, *DASHES, 9, *DASHES, 10, *DASHES[:300], 11, *DASHES],
    ],
    ids=["text", "three letters", "rows of dashes", "rows of three", "rows side by side"],
)
def test_few_periods_of_a_long_response_are_tried(ids: list[int]) -> None:
    """All 1365 of them, for 512 responses, would take ten seconds of every step."""
    ids_T = np.array(ids)
    assert len(list(_periods(ids_T, len(ids) // 20))) < 100
    ids_T[1000:3000] = np.tile(ids_T[1000:1500], 4)
    assert repeats(ids_T.tolist())


@pytest.mark.parametrize(
    ("scores", "expected"), [([1.0, 2.0, 3.0], 1.0), ([3.0, 2.0, 1.0], -1.0), ([2.0, 2.0, 2.0], 0.0)]
)
def test_the_correlation_of_score_and_length_is_measured(scores: list[float], expected: float) -> None:
    rollouts = [_rollout((-1.0,) * n) for n in (1, 2, 3)]
    numbers = [[-1.0] * n for n in (1, 2, 3)]
    made = _make(rollouts, numbers, numbers, numbers, scores)
    assert made.metrics["rollout/score_length_correlation"] == pytest.approx(expected)


def test_responses_that_repeat_themselves_are_counted() -> None:
    rollouts = [
        replace(_rollout((-1.0,) * 20), response_ids=tuple(ids))
        for ids in ([5] * 20, [5, 6] * 10, [5, 6, 7, 8] * 5, range(20))
    ]
    numbers = [[-1.0] * 20] * 4
    assert _make(rollouts, numbers, numbers, numbers, [0.0] * 4).metrics["rollout/repeating_rate"] == 0.75


def test_a_response_of_only_eos_is_empty() -> None:
    rollouts = [
        _rollout((-1.0,)),
        _rollout((-1.0,), finished=False),
        _rollout((-1.0,) * 2),
        _rollout((-1.0,) * 3),
    ]
    numbers = [[-1.0] * n for n in (1, 1, 2, 3)]
    assert _make(rollouts, numbers, numbers, numbers, [0.0] * 4).metrics["rollout/empty_rate"] == 0.25


def test_score_deviation_and_explained_variance_match_the_statistics_module() -> None:
    logprobs = [[-1.0]] * 3
    made = _make([_rollout((-1.0,))] * 3, logprobs, logprobs, [[1.0], [2.0], [4.5]], [1.0, 3.0, 5.0])
    # Deviations -2, 0, 2 of the scores, which are the returns; they are 0, 1 and 0.5 above the values: -0.5,
    # 0.5, 0.
    assert made.metrics["objective/scores_std"] == pytest.approx(math.sqrt(8 / 3))
    assert made.metrics["value/explained_variance"] == pytest.approx(1 - 0.5 / 8)


@pytest.mark.parametrize("count", [1, 64])
def test_constant_scores_have_deviation_0_and_no_explained_variance(count: int) -> None:
    numbers = [[-1.0, -1.0]] * count
    values = [[0.7, 0.5 + 0.01 * i] for i in range(count)]
    metrics = _make([_rollout((-1.0, -1.0))] * count, numbers, numbers, values, [0.7] * count).metrics
    assert metrics["objective/scores_std"] == 0.0
    assert "value/explained_variance" not in metrics


@pytest.mark.parametrize("score", [0.0, 0.7, 1.0])
def test_rounding_of_equal_returns_has_no_explained_variance(score: float) -> None:
    lengths = range(1, 60)
    logprobs = [[-1.0] * length for length in lengths]
    values = [[0.3 * math.sin(length * t + 1) for t in range(length)] for length in lengths]
    rollouts = [_rollout((-1.0,) * length) for length in lengths]
    made = _make(rollouts, logprobs, logprobs, values, [score] * len(rollouts))
    assert 0 < made.returns_BT[made.mask_BT].std() < 1e-6, "the returns are rounded"
    assert "value/explained_variance" not in made.metrics


def test_whitening_changes_advantages_and_not_returns() -> None:
    rollouts = [_rollout((-1.0, -1.0)), _rollout((-1.0, -1.0, -1.0))]
    logprobs, values = [[-1.0] * 2, [-1.0] * 3], [[0.1] * 2, [0.3] * 3]
    plain = _make(rollouts, logprobs, logprobs, values, [1.0, -2.0])
    white = _make(rollouts, logprobs, logprobs, values, [1.0, -2.0], whiten_advantages=True)
    chosen = white.advantages_BT[white.mask_BT]
    assert chosen.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert chosen.var().item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(white.returns_BT, plain.returns_BT)


def _group(algorithm: str, scores: list[float], **ppo: Any) -> Any:
    """Two prompts with two samples each, two tokens per response, no critic; the policy is 0.1 above its
    reference.
    """
    old, ref = [[-1.0, -1.0]] * 4, [[-1.1, -1.1]] * 4
    config = {"algorithm": algorithm, "samples_per_prompt": 2, "score_clip": None, **ppo}
    return _make([_rollout((-1.0, -1.0)) for _ in range(4)], old, ref, None, scores, **config)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Scores 1, 3 | 5, 5: deviations from the mean -1, 1 | 0, 0; std (unbiased) sqrt(2); the other's mean
        # 3, 1.
        ("dr_grpo", [-1.0, 1.0, 0.0, 0.0]),
        ("reinforce_baseline", [-1.0, 1.0, 0.0, 0.0]),
        ("rloo", [-2.0, 2.0, 0.0, 0.0]),
        ("grpo", [-(0.5**0.5), 0.5**0.5, 0.0, 0.0]),
    ],
)
def test_group_advantages_are_equal_on_all_tokens(algorithm: str, expected: list[float]) -> None:
    made = _group(algorithm, [1.0, 3.0, 5.0, 5.0], kl={"place": "loss"})
    wanted = torch.tensor(expected).unsqueeze(1).expand(4, 2)
    torch.testing.assert_close(made.advantages_BT, wanted, rtol=1e-5, atol=1e-6)
    assert made.metrics["rollout/zero_variance_groups"] == 0.5


@pytest.mark.parametrize(("gamma", "first"), [(1.0, 0.02), (0.5, 0.015)])
def test_group_advantages_include_the_future_kl_penalty(gamma: float, first: float) -> None:
    made = _group("rloo", [1.0, 3.0, 5.0, 5.0], gamma=gamma, kl={"coef": 0.1, "place": "reward"})
    # 0.1 nats per token at coefficient 0.1: 0.01 to be paid at the second token, at the first 0.01 + gamma *
    # 0.01.
    torch.testing.assert_close(made.advantages_BT[1], torch.tensor([2.0 - first, 1.99]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.advantages_BT[2], torch.tensor([-first, -0.01]), rtol=1e-5, atol=1e-6)


def test_a_kl_in_the_loss_is_not_in_the_reward() -> None:
    arguments = ([_rollout((-1.0, -2.0))], [[-1.0, -2.0]], [[-2.0, -2.5]], [[0.0, 0.0]], [3.0])
    made = _make(*arguments, kl={"place": "loss"})
    assert made.metrics["objective/rlhf_reward"] == 3.0
    assert made.metrics["objective/kl"] == pytest.approx(1.5)


def test_reinforce_pp_uses_discounted_returns_whitened_by_default() -> None:
    arguments = (
        [_rollout((-1.0, -1.0)), _rollout((-1.0,))],
        [[-1.0] * 2, [-1.0]],
        [[-1.0] * 2, [-1.0]],
        None,
    )
    plain = _make(*arguments, [1.0, -1.0], algorithm="reinforce_pp", gamma=0.5)
    torch.testing.assert_close(plain.advantages_BT, torch.tensor([[0.5, 1.0], [-1.0, 0.0]]))
    white = _make(*arguments, [1.0, -1.0], algorithm="reinforce_pp", whiten_advantages=None)
    assert white.advantages_BT[white.mask_BT].mean().item() == pytest.approx(0.0, abs=1e-6)


def test_a_response_without_a_score_is_masked_and_counted() -> None:
    nan = float("nan")
    made = _group("rloo", [1.0, 3.0, 2.0, nan], kl={"place": "loss"})
    assert made.mask_BT.any(1).tolist() == [True, True, True, False]
    assert made.metrics["rollout/unscored"] == 1.0
    assert made.metrics["objective/scores"] == pytest.approx(2.0)
    # Its sibling has nobody left to be compared with.
    assert made.advantages_BT[2:].abs().max().item() == 0.0
    assert torch.isfinite(made.advantages_BT).all()


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    rollouts = [_rollout((-1.0,) * n) for n in (5, 8, 10)]
    numbers = [[-1.0] * n for n in (5, 8, 10)]
    options = {"max_new_tokens": 10, "overlong": {"buffer": 4, "factor": 2.0}}
    made = _make(rollouts, numbers, numbers, numbers, [1.0] * 3, **options)
    # Free up to 6 tokens; 8 are half-way: 1.0; at 10 the whole 2.0.
    assert made.scores_B.tolist() == [1.0, 0.0, -1.0]


def test_uniform_groups_are_found_for_any_float() -> None:
    scores = torch.tensor([0.7, 0.7, 0.7, 0.1, 0.1, 0.2, float("nan"), 0.3, 0.3])
    by_three = PPOConfig.model_validate({"samples_per_prompt": 3, "score_clip": None})
    assert uniform_groups(scores, by_three) == [0, 2]


# -- several ranks --

SETTINGS: list[dict[str, Any]] = [
    {"kl": {"estimator": "k3"}, "importance": "truncate", "gamma": 0.99, "lam": 0.95},
    {"algorithm": "grpo", "samples_per_prompt": 4, "importance": "mask", "importance_bounds": (0.99, 1.01)},
    {"algorithm": "reinforce_pp", "importance": "sequence-mask", "importance_bounds": (0.999, 1.001)},
]


def _random_batch(count: int = 150) -> tuple[Any, ...]:
    """Rollouts, and numbers of policy, reference and critic; two responses have no score."""
    noise = np.random.default_rng(0)
    lengths = noise.integers(1, 90, count).tolist()
    old = [noise.normal(-2, 1, length).astype(np.float32) for length in lengths]
    ref = [row + noise.normal(0, 0.1, len(row)).astype(np.float32) for row in old]
    engine = [row + noise.normal(0, 0.01, len(row)).astype(np.float32) for row in old]
    values = [noise.normal(0, 1, length).astype(np.float32) for length in lengths]
    scores = noise.normal(0, 2, count).tolist()
    scores[3] = scores[40] = math.nan
    rollouts = [_rollout(tuple(row.tolist()), bool(i % 5)) for i, row in enumerate(engine)]
    return rollouts, old, ref, values, scores


def _bits(made: Any) -> dict[str, Any]:
    tensors = {name: value.numpy().tobytes() for name, value in vars(made).items() if name.endswith("_BT")}
    return {**tensors, **{name: value.hex() for name, value in made.metrics.items()}}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings.get("algorithm", "ppo")))
def test_any_number_of_ranks_and_any_distribution_give_the_same_bits(settings: dict[str, Any]) -> None:
    rollouts, old, ref, values, scores = _random_batch(152)
    ppo = config_from_tree({"ppo": {"whiten_advantages": True, "minibatches": 1, **settings}}, "test").ppo
    used = values if ppo.uses_critic else None
    whole = _bits(made_by(1, rollouts, old, ref, used, scores, ppo))
    shuffled = random.Random(1).sample(range(152), 152)
    by_length = sorted(range(152), key=lambda i: len(rollouts[i].response_ids))
    for ranks in (1, 2, 3):
        for order in (range(152), shuffled, by_length, by_length[::-1]):
            assert _bits(made_by(ranks, rollouts, old, ref, used, scores, ppo, order=order)) == whole


def test_whitening_and_sums_agree_with_the_whole_batch() -> None:
    rollouts, old, ref, values, scores = _random_batch()
    tree = {"ppo": {"whiten_advantages": True, "lam": 0.95, "missing_eos_penalty": 0.0}}
    plain = config_from_tree({"ppo": {**tree["ppo"], "whiten_advantages": False}}, "test").ppo
    made = made_by(3, rollouts, old, ref, values, scores, config_from_tree(tree, "test").ppo)
    unwhitened = made_by(2, rollouts, old, ref, values, scores, plain)
    mask = made.mask_BT
    expected = masked_whiten(unwhitened.advantages_BT, mask)
    torch.testing.assert_close(made.advantages_BT[mask], expected[mask], rtol=0, atol=1e-6)
    gap_BT = (made.old_logprobs_BT - padded([r.rollout_logprobs for r in rollouts])).abs()
    metrics = made.metrics
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(gap_BT[mask].mean().item(), rel=1e-5)
    assert metrics["value/mean"] == pytest.approx(made.values_BT[mask].mean().item(), rel=1e-5, abs=1e-7)
    kl_BT = (made.old_logprobs_BT - made.ref_logprobs_BT)[mask]
    assert metrics["objective/kl"] == pytest.approx(kl_BT.double().sum().item() / 148, rel=1e-5)
    errors = (made.returns_BT - made.values_BT)[mask]
    explained = 1 - errors.var().item() / made.returns_BT[mask].var().item()
    assert metrics["value/explained_variance"] == pytest.approx(explained, rel=1e-5)
