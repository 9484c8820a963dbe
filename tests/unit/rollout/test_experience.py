"""Experience: what a rollout batch becomes, against numbers worked out by hand.

- token rewards are minus the KL everywhere and the score at the last token; returns follow from unwhitened advantages
- what pads shorter responses changes nothing
- a response cut by the length limit pays the penalty; KL of a policy equal to its reference is 0
- the gap between engine and trainer is measured on response tokens alone
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_core.config.load import config_from_tree
from rlhf_core.rollout.experience import make_experience
from rlhf_core.types import Rollout


def _rollout(logprobs: tuple[float, ...], finished: bool = True) -> Rollout:
    return Rollout("p", 0, (1, 2), tuple(range(3, 3 + len(logprobs))), logprobs, finished, 0)


def _make(
    rollouts: list[Rollout], old: list[Any], ref: list[Any], values: list[Any], scores: list[float], **ppo: Any
) -> Any:
    config = config_from_tree({"ppo": {"whiten_advantages": False, "lam": 1.0, **ppo}}, "test").ppo
    return make_experience(
        rollouts,
        old_logprobs=old,
        ref_logprobs=ref,
        values=values,
        entropy=[[0.5] * len(o) for o in old],
        scores=scores,
        ppo=config,
        kl_coef=0.1,
    )


def test_returns_are_the_score_minus_the_priced_kl_still_to_come() -> None:
    made = _make([_rollout((-1.0, -2.0))], [[-1.0, -2.0]], [[-2.0, -2.5]], [[0.25, 0.5]], [3.0])
    # k1 = 1.0, 0.5; rewards -0.1, 3 - 0.05; with lambda 1 the returns are 2.85 and 2.95, advantages less the values.
    torch.testing.assert_close(made.returns_BT, torch.tensor([[2.85, 2.95]]))
    torch.testing.assert_close(made.advantages_BT, torch.tensor([[2.6, 2.45]]))
    assert made.metrics["objective/kl"] == pytest.approx(1.5)
    assert made.metrics["objective/rlhf_reward"] == pytest.approx(2.85)


def test_a_longer_neighbour_changes_nothing() -> None:
    short = ([_rollout((-1.0,))], [[-1.0]], [[-1.5]], [[0.2]], [1.0])
    alone = _make(*short)
    beside = _make(
        [*short[0], _rollout((-1.0,) * 5)],
        [*short[1], [-1.0] * 5],
        [*short[2], [-9.0] * 5],
        [*short[3], [7.0] * 5],
        [*short[4], -4.0],
    )
    torch.testing.assert_close(beside.returns_BT[0, :1], alone.returns_BT[0])
    assert beside.mask_BT.tolist() == [[True] + [False] * 4, [True] * 5]


def test_a_response_cut_by_the_limit_pays_the_penalty() -> None:
    arguments = ([[-1.0]], [[-1.0]], [[0.0]], [1.0])
    cut = _make([_rollout((-1.0,), finished=False)], *arguments, missing_eos_penalty=0.75)
    ended = _make([_rollout((-1.0,))], *arguments, missing_eos_penalty=0.75)
    assert (cut.scores_B.item(), ended.scores_B.item()) == (0.25, 1.0)
    assert ended.metrics["objective/kl"] == 0.0


def test_the_gap_to_the_engine_is_measured_on_response_tokens_alone() -> None:
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
    assert 0 < made.metrics["rollout/effective_sample_size"] < 1


def test_whitened_advantages_have_mean_0_and_variance_1_while_returns_stay() -> None:
    rollouts = [_rollout((-1.0, -1.0)), _rollout((-1.0, -1.0, -1.0))]
    logprobs, values = [[-1.0] * 2, [-1.0] * 3], [[0.1] * 2, [0.3] * 3]
    plain = _make(rollouts, logprobs, logprobs, values, [1.0, -2.0])
    white = _make(rollouts, logprobs, logprobs, values, [1.0, -2.0], whiten_advantages=True)
    chosen = white.advantages_BT[white.mask_BT]
    assert chosen.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert chosen.var().item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(white.returns_BT, plain.returns_BT)
