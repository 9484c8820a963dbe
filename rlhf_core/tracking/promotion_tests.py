"""The tests of candidates for champion, and the level that each of them spends.

The log of the model (`champion_log`) contains all tests, also those of versions that were deleted. The budget
is computed from it alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence

from rlhf_core.evaluation.evidence import Spent, next_level
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.champion_log import Log, PromotionTest, append, read_log
from rlhf_core.tracking.gate import Evaluation, Gate, Match, NoMatch
from rlhf_core.tracking.mlflow_client import Mlflow


def next_test(
    version: str,
    evaluation: Evaluation,
    match: Match | NoMatch | None,
    opponent: str | None,
    gate: Gate,
    now: float,
    tests: Iterable[PromotionTest],
) -> PromotionTest:
    """Return the test that is to be made, with its level.

    A match that repeats the outcomes of an earlier one and adds prompts continues its test, at the same
    level. A process that was killed after it recorded a test therefore makes the same decision again.

    Args:
        version: The candidate.
        evaluation: Its evaluation.
        match: Its match, if there was one.
        opponent: Version of the champion.
        gate: Requirements for a champion.
        now: Time of a new test, in seconds since 1970.
        tests: Earlier tests of all versions of the model.
    """

    def digest(prompts: int) -> str | None:
        if isinstance(match, Match):
            return match.digest(prompts)
        # Only a match can be continued: another evaluation is another test.
        return hashlib.sha256(evaluation.to_json().encode()).hexdigest()[:16]

    if isinstance(match, Match):
        prompts, judge = match.prompts, match.judge_digest
    else:
        prompts, judge = evaluation.verdicts.prompts, evaluation.judge_digest
    time, level = now, None
    # One entry for each test: others continue it.
    earlier: dict[tuple[str, float], PromotionTest] = {}
    for test in tests:
        earlier[test.version, test.time] = test
        same = (test.version, test.champion, test.judge) == (version, opponent, judge)
        if same and level is None and test.outcomes == digest(test.prompts):
            time, level = test.time, test.level
    if level is None:
        level = _level(opponent, earlier.values(), gate, now)
    return PromotionTest(time, level, opponent, judge, prompts, digest(prompts) or "", version)


def spend(
    mlflow: Mlflow, model: str, log: Log, choose: Callable[[Sequence[PromotionTest]], PromotionTest]
) -> PromotionTest:
    """Record the next test of a version, and return it.

    Of several processes that would spend the same part of the budget, one does. The others compute the level
    of their test again.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        log: The log.
        choose: Returns the next test, from those that were made before.
    """
    while True:
        test = choose(log.tests)
        if test in log.tests:
            return test
        failpoint("register.level")
        append(mlflow, model, log.last, test)
        failpoint("register.tested")
        log = read_log(mlflow, model)


def _level(opponent: str | None, earlier: Iterable[PromotionTest], gate: Gate, now: float) -> float:
    """Return the level of a test at time `now` against `opponent`, after the tests `earlier`.

    It is above 0, as a test needs it. Nothing is left if five processes test at the same time, or if the
    clock of this host is behind those of the hosts that made the last tests.
    """
    if opponent is None:
        return gate.first_level(1 + sum(test.champion is None for test in earlier))
    spent = [Spent(test.time, test.level) for test in earlier if test.champion is not None]
    return max(next_level(spent, now, gate.alpha), sys.float_info.min)
