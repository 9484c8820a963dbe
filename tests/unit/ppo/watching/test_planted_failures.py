"""The failures that the guards are for, planted in the responses and the outputs of the models instead of in
the metrics: `make_rows` and `summarize` compute the metrics, and the guards read these.

- three sound steps raise no guard
- each failure raises its own guard in its third step, and no other guard
- every guard has a failure
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.ppo.watching.guards import NAMES
from rlhf_core.ppo.watching.step_checks import StepChecks
from rlhf_core.rewards.compose import clipped_share
from rlhf_core.types import Rollout
from tests.unit.ppo.training.test_experience import made_by

CONFIG = {
    "ppo": {
        "max_new_tokens": 96,
        "score_clip": 5.0,
        "missing_eos_penalty": 0.0,
        "weight_sync": {"canary": False},
        "guard_limits": {"blind_critic": 3},
    }
}


@dataclass(frozen=True)
class Responses:
    """Responses of one step, with what the models say about them."""

    ids: list[list[int]]
    scores: list[float]
    finished: bool = True
    entropy: float = 1.0
    kl_per_token: float = 0.02
    error_of_values: float = 0.2
    """Standard deviation of the critic's error, in units of the returns."""


def sound(rng: random.Random) -> Responses:
    """Return 60 responses of 20 to 40 random tokens, with scores that do not depend on the length."""
    ids = [[rng.randrange(3, 2000) for _ in range(rng.randint(20, 40))] for _ in range(60)]
    return Responses(ids, [rng.gauss(0, 1) for _ in ids])


def without_eos(step: Responses) -> Responses:
    return replace(step, finished=False)


def one_answer(step: Responses) -> Responses:
    return replace(step, entropy=0.01)


def random_text(step: Responses) -> Responses:
    return replace(step, entropy=6.0)


def other_weights_in_the_engine(step: Responses) -> Responses:
    return replace(step, kl_per_token=-0.5)


def long_responses(step: Responses) -> Responses:
    return replace(step, ids=[[*ids, *reversed(ids), *(i + 1 for i in ids)][:90] for ids in step.ids])


def short_responses(step: Responses) -> Responses:
    return replace(step, ids=[ids[: len(ids) // 3] for ids in step.ids])


def loops(step: Responses) -> Responses:
    """A third of the responses repeats a sentence of seven tokens."""
    responses = list(step.ids)
    for i in range(0, len(responses), 3):
        length = len(responses[i])
        responses[i] = (responses[i][:7] * 6)[:length]
    return replace(step, ids=responses)


def score_of_length(step: Responses) -> Responses:
    return replace(step, scores=[0.1 * len(ids) for ids in step.ids])


def score_of_brevity(step: Responses) -> Responses:
    return replace(step, scores=[-0.1 * len(ids) for ids in step.ids])


def blind_critic(step: Responses) -> Responses:
    return replace(step, error_of_values=2.0)


def scores_beyond_the_clip(step: Responses) -> Responses:
    return replace(step, scores=[9.0, 9.0, 9.0, *step.scores[3:]])


FAILURES: list[tuple[Callable[[Responses], Responses], str]] = [
    (without_eos, "eos_loss"),
    (one_answer, "entropy_collapse"),
    (random_text, "entropy_explosion"),
    (other_weights_in_the_engine, "negative_kl"),
    (long_responses, "length_drift"),
    (short_responses, "length_drift"),
    (loops, "loops"),
    (score_of_length, "score_length"),
    (score_of_brevity, "score_length"),
    (blind_critic, "blind_critic"),
    (scores_beyond_the_clip, "score_clip"),
]


def raised_by(step: Responses, checks: StepChecks, number: int, rng: random.Random) -> set[str]:
    """Return the guards that are raised after one step with these responses."""
    ppo = config_from_tree(CONFIG, "test").ppo
    old = [[-1.0 for _ in ids] for ids in step.ids]
    ref = [[-1.0 - step.kl_per_token for _ in ids] for ids in step.ids]
    clipped = [max(-5.0, min(5.0, score)) for score in step.scores]
    values = [
        [score + step.error_of_values * rng.gauss(0, 1) for _ in ids]
        for score, ids in zip(clipped, step.ids, strict=True)
    ]
    rollouts = [
        Rollout("p", i, (1, 2), tuple(ids), tuple(old[i]), step.finished, 0) for i, ids in enumerate(step.ids)
    ]
    made = made_by(2, rollouts, old, ref, values, clipped, ppo, entropy=step.entropy)
    share = clipped_share(ppo.rewards, {"model": step.scores}, ppo.score_clip)
    assert share is not None
    metrics: dict[str, float] = made.metrics | {"objective/score_clipfrac": share}
    checks.verify(metrics, number)
    return {name for name in NAMES if metrics[f"warnings/{name}"]}


@pytest.mark.parametrize(("failure", "guard"), FAILURES, ids=[failure.__name__ for failure, _ in FAILURES])
def test_a_failure_raises_its_guard(failure: Callable[[Responses], Responses], guard: str) -> None:
    rng = random.Random(0)
    checks = StepChecks(config_from_tree(CONFIG, "test").ppo)
    for number in (1, 2, 3):
        assert raised_by(sound(rng), checks, number, rng) == set()
    raised = [raised_by(failure(sound(rng)), checks, number, rng) for number in (4, 5, 6)]
    assert raised == [set(), set(), {guard}]


def test_there_is_a_failure_for_each_guard() -> None:
    assert {guard for _, guard in FAILURES} == set(NAMES)
