"""Two processes that change the champion of one model at the same time. Real MLflow on SQLite.

- a rollback revokes only the champion that the caller could see, not one that a registration makes meanwhile
- the later of two moves holds, in the alias and in the history, wherever the earlier one was interrupted
- of two moves that were decided at the same time, only the first one counts
- a version that is revoked meanwhile never keeps the alias, and its registration says that it is refused
- an alias on a revoked version is moved by the next command, which then does nothing else
- two candidates that are tested at the same time do not spend the same part of the budget
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from rlhf_core.errors import InputError
from rlhf_core.tracking.champion_log import Move, PromotionTest, read_log
from rlhf_core.tracking.champions import REVOKED, history, move_champion, promote, rollback, settle
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.champions import champion, enter, forked, revoked

EVEN = [-1, 1] * 50


class Paused:
    """Runs `action` in another process, which stops at the failpoint until `resume`."""

    def __init__(self, point: str, mlflow: Mlflow, action: Callable[[Mlflow], object]) -> None:
        def act() -> None:
            os.environ["RLHF_FAIL"] = f"{point}:1:stop"
            action(Mlflow(mlflow.uri, "champions"))

        self._child = forked(act)
        _, status = os.waitpid(self._child, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def resume(self) -> int:
        """Let it go on, and return its exit code."""
        os.kill(self._child, signal.SIGCONT)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


@pytest.mark.parametrize("to", [None, "none", "2"])
@pytest.mark.parametrize("point", ["champion.recorded", "champion.checked"])
def test_a_rollback_revokes_no_champion_that_a_registration_makes_meanwhile(
    point: str, to: str | None, mlflow: Mlflow, model: str
) -> None:
    other = Paused(point, mlflow, lambda mlflow: enter(mlflow, model, "d"))
    with pytest.raises(
        InputError, match=r"the champion of .* is version 4 now, not version 3; nothing else was changed"
    ):
        rollback(mlflow, model, "version 3 insults people", to)
    assert champion(mlflow, model) == "4" and revoked(mlflow, model) == {}
    assert other.resume() == 0
    assert champion(mlflow, model) == "4" and revoked(mlflow, model) == {}
    move, _ = rollback(mlflow, model, "version 4 insults people", to)
    assert move.previous == "4" and list(revoked(mlflow, model)) == ["4"]


@pytest.mark.parametrize("to", [None, "none"])
@pytest.mark.parametrize("point", ["champion.moved", "champion.done"])
def test_a_rollback_during_a_registration_holds(
    point: str, to: str | None, mlflow: Mlflow, model: str
) -> None:
    other = Paused(point, mlflow, lambda mlflow: enter(mlflow, model, "d"))
    move, _ = rollback(mlflow, model, "bad", to)  # finishes the promotion of version 4 first
    after = "3" if to is None else None
    assert (move.previous, move.version) == ("4", after)
    assert other.resume() == 0
    assert champion(mlflow, model) == after and revoked(mlflow, model) == {"4": "bad"}
    assert history(mlflow, model)[-1] == move
    tags = {each.version: each.tags for each in mlflow.versions(model)}["4"]
    assert tags["rlhf.gate"] == "revoked"


@pytest.mark.parametrize(
    "point", ["champion.recorded", "champion.revoked", "champion.checked", "champion.moved"]
)
def test_a_promotion_during_a_rollback_holds(point: str, mlflow: Mlflow, model: str) -> None:
    other = Paused(point, mlflow, lambda mlflow: rollback(mlflow, model, "bad"))
    move, _ = promote(mlflow, model, "1", "good")  # finishes the rollback first
    assert (move.previous, move.version) == ("2", "1")
    assert other.resume() == 0
    assert champion(mlflow, model) == "1" and history(mlflow, model)[-1] == move
    assert [each.state for each in history(mlflow, model)] == ["done"] * 5


@pytest.mark.parametrize("point", ["champion.recorded", "champion.checked", "champion.moved"])
def test_of_two_moves_after_the_same_entry_one_holds_in_alias_and_history(
    point: str, mlflow: Mlflow, model: str
) -> None:
    after = read_log(mlflow, model).last
    first, second = (Move(1e9, "promoted", version, "3", "it is good") for version in "12")
    other = Paused(point, mlflow, lambda mlflow: move_champion(mlflow, model, first, after))
    assert move_champion(mlflow, model, second, after).state == "overtaken"
    assert champion(mlflow, model) == "1"
    assert other.resume() == 0
    assert [(each.version, each.state) for each in history(mlflow, model)[-2:]] == [
        ("1", "done"), ("2", "overtaken")
    ]  # fmt: skip
    assert champion(mlflow, model) == "1"


@pytest.mark.parametrize("point", ["champion.checked", "champion.moved"])
def test_a_process_that_sets_the_alias_late_sets_it_again(point: str, mlflow: Mlflow, model: str) -> None:
    other = Paused(point, mlflow, lambda mlflow: promote(mlflow, model, "1", "good"))
    settle(mlflow, model)
    promote(mlflow, model, "2", "better")
    assert other.resume() == 0
    assert champion(mlflow, model) == history(mlflow, model)[-1].version == "2"


def test_settle_takes_the_alias_from_a_revoked_version(mlflow: Mlflow, model: str) -> None:
    move, _ = rollback(mlflow, model, "bad")
    mlflow.set_alias(model, "champion", "3")
    settle(mlflow, model)
    assert champion(mlflow, model) == "2"
    mlflow.set_alias(model, "champion", "3")
    assert rollback(mlflow, model, "bad") == (move, False) and champion(mlflow, model) == "2"
    mlflow.set_alias(model, "champion", "3")
    with pytest.raises(InputError, match=r"is version 2 now, not version 3; nothing"):
        rollback(mlflow, model, "another reason")
    assert champion(mlflow, model) == "2" and history(mlflow, model)[-1] == move
    for version in "12":
        mlflow.tag_version(model, version, {REVOKED: "bad"})
    settle(mlflow, model)
    assert champion(mlflow, model) is None


@pytest.mark.parametrize("point", ["register.level", "register.tested"])
def test_two_candidates_do_not_spend_the_same_part_of_the_budget(
    point: str, mlflow: Mlflow, model: str
) -> None:
    def tests() -> dict[str, PromotionTest]:
        return {test.version: test for test in read_log(mlflow, model).tests}

    levels = [test.level for test in tests().values()]
    other = Paused(point, mlflow, lambda mlflow: enter(mlflow, model, "d", outcomes=EVEN))
    enter(mlflow, model, "e", outcomes=EVEN)
    assert other.resume() == 0
    [first, second] = [tests()[version].level for version in "45"]
    # Each test spends a quarter of what is left: without the other one's test, both would spend the same.
    expected = levels[-1] * 0.75**2
    assert min(first, second) == pytest.approx(expected, rel=0.1), (levels, first, second)
