"""History of champions, promotion by a person, and rollback. Real MLflow on SQLite.

- a rollback revokes the champion and restores the last one that is not revoked; the next match is against it
- a rollback to none leaves no champion, and the next candidate is tested as the first one was
- a revoked policy, and the same weights in another version, never becomes champion again, neither by a match
  nor by a person nor by a rollback, also after the revoked version was deleted
- killed between any two writes, the same command ends in the same state, and there is one champion
- a registration that a rollback concerns is outdated, and is repeated once; a later champion changes nothing
- moves by hand in MLflow are not undone, also during a command; a rollback revokes its version all the same
- the whole match is in the entry of its move
- moves and tests in the tags of an earlier release are read, and copied into the log once
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from rlhf_core.errors import InfrastructureError, InputError
from rlhf_core.tracking.champion_log import (
    ENTRY,
    Move,
    PromotionTest,
    append,
    log_of,
    read_log,
)
from rlhf_core.tracking.champions import (
    REVOKED,
    WEIGHTS,
    find_revocation,
    history,
    moved_by_hand,
    promote,
    revocation,
    rollback,
    settle,
)
from rlhf_core.tracking.gate import Evaluation, Gate, Match
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion
from rlhf_core.tracking.registry import Candidate, refusals, register, why_outdated
from tests.support.champions import OUTCOMES, champion, enter, forked, make_champion, match_of, revoked

WON = match_of(OUTCOMES)


class InBetween(Mlflow):
    """Calls `act` once, after a champion's move was recorded and before the alias is set."""

    def __init__(self, uri: str, act: Callable[[], object]) -> None:
        super().__init__(uri, "champions")
        self._act: Callable[[], object] | None = act

    def create_version(self, name: str, *, tags: Mapping[str, str], **more: Any) -> ModelVersion:
        made = super().create_version(name, tags=tags, **more)
        if self._act is not None and json.loads(tags.get(ENTRY, "{}")).get("moves"):
            act, self._act = self._act, None
            act()
        return made


def test_rollback_restores_the_last_champion_that_is_not_revoked(mlflow: Mlflow, model: str) -> None:
    assert champion(mlflow, model) == "3"
    move, _ = rollback(mlflow, model, "it insults people")
    assert (move.action, move.version, move.previous, move.state) == ("rolled_back", "2", "3", "done")
    assert revoked(mlflow, model) == {"3": "it insults people"}
    assert rollback(mlflow, model, "it is slow").move.version == "1"
    assert revoked(mlflow, model) == {"3": "it insults people", "2": "it is slow"}
    with pytest.raises(InputError, match="has no earlier champion that is not revoked"):
        rollback(mlflow, model, "and this one")
    assert [each.action for each in history(mlflow, model)] == ["crowned"] * 3 + ["rolled_back"] * 2


def test_the_same_rollback_again_changes_nothing(mlflow: Mlflow, model: str) -> None:
    move, _ = rollback(mlflow, model, "bad")
    assert rollback(mlflow, model, "bad") == (move, False)
    assert rollback(mlflow, model, "bad", "2") == (move, False)
    assert (champion(mlflow, model), len(history(mlflow, model))) == ("2", 4)


def test_a_rollback_accepts_only_an_earlier_version_that_is_not_revoked(mlflow: Mlflow, model: str) -> None:
    with pytest.raises(InputError, match=r"version 3 of .* is the champion"):
        rollback(mlflow, model, "bad", "3")
    with pytest.raises(InputError, match="has no version 9; its versions are 1, 2, 3"):
        rollback(mlflow, model, "bad", "9")
    assert rollback(mlflow, model, "bad", "1").move.version == "1"
    with pytest.raises(InputError, match=r"version 3 of .* was revoked: bad"):
        rollback(mlflow, model, "worse", "3")


def test_the_only_champion_can_be_taken_back(mlflow: Mlflow) -> None:
    model = "taken back"
    enter(mlflow, model, "a")
    with pytest.raises(InputError, match="name a version with --to, or use --to none"):
        rollback(mlflow, model, "bad")
    move, _ = rollback(mlflow, model, "bad", "none")
    assert (move.version, move.previous, champion(mlflow, model)) == (None, "1", None)
    assert rollback(mlflow, model, "bad", "none") == rollback(mlflow, model, "bad") == (move, False)
    with pytest.raises(InputError, match="has no champion that could be rolled back"):
        rollback(mlflow, model, "worse")
    assert enter(mlflow, model, "a")[0].decision.rule == "revoked" and champion(mlflow, model) is None
    done, met = enter(mlflow, model, "b")
    assert (done.decision.rule, done.decision.champion, met) == ("first", True, [])
    assert (champion(mlflow, model), history(mlflow, model)[-1].previous) == ("2", None)


def test_a_revoked_policy_is_never_promoted_again(mlflow: Mlflow, model: str) -> None:
    rollback(mlflow, model, "bad")
    done, met = enter(mlflow, model, "c")
    assert (done.version, done.decision.rule, done.decision.champion, met) == ("3", "revoked", False, [])
    assert "version 3 has this policy and was revoked: bad" in done.decision.reason
    # The same weights of another artifact are the same policy.
    done, met = enter(mlflow, model, "d", "weights of c")
    assert (done.version, done.decision.rule, met) == ("4", "revoked", [])
    # Another candidate plays against the champion that was restored.
    done, met = enter(mlflow, model, "e")
    assert (done.decision.champion, met) == (True, ["weights of b"])
    with pytest.raises(InputError, match="was revoked"):
        promote(mlflow, model, "3", "I like it")


def test_a_rollback_does_not_restore_the_weights_that_it_revokes(mlflow: Mlflow, model: str) -> None:
    enter(mlflow, model, "d", "weights of c")
    assert champion(mlflow, model) == "4"
    with pytest.raises(InputError, match=r"version 3 of .* has the same policy as the champion, version 4"):
        rollback(mlflow, model, "bad", "3")
    assert rollback(mlflow, model, "bad").move.version == "2"
    for action in (promote, rollback):
        with pytest.raises(InputError, match="has the same policy as version 4, which was revoked: bad"):
            action(mlflow, model, *(("3", "good") if action is promote else ("worse", "3")))
    with pytest.raises(InputError, match=r"version 4 .* was revoked: bad; .* remove the tag rlhf.revoked of"):
        promote(mlflow, model, "4", "good")
    assert champion(mlflow, model) == "2"


def test_weights_stay_revoked_after_their_version_was_deleted(mlflow: Mlflow, model: str) -> None:
    move, _ = rollback(mlflow, model, "bad")
    mlflow._client.delete_model_version(model, "3")
    done, met = enter(mlflow, model, "c")
    assert (done.version, done.decision.rule, met) == ("4", "revoked", [])
    assert "version 3 has this policy and was revoked: bad" in done.decision.reason
    with pytest.raises(
        InputError, match=f"remove `digests` from the tag rlhf.entry of version {move.number} of "
    ):
        promote(mlflow, model, "4", "good")


def test_commands_do_not_read_all_versions_and_find_the_same_revocations(
    mlflow: Mlflow, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = Mlflow.versions

    def of_tag(self: Mlflow, name: str, tag: str | None = None) -> list[ModelVersion]:
        assert tag is not None or name == log_of(model), "hundreds of versions with their tags take seconds"
        return every(self, name, tag)

    monkeypatch.setattr(Mlflow, "versions", of_tag)
    rollback(mlflow, model, "bad")
    promote(mlflow, model, "1", "better")
    rollback(mlflow, model, "worse")
    mlflow._client.delete_model_version(model, "3")
    mlflow._client.delete_model_version_tag(model, "1", REVOKED)  # by a person
    monkeypatch.undo()
    for digest in "ac":
        enter(mlflow, model, digest)
    versions, moves = mlflow.versions(model), history(mlflow, model)
    found = {each.version: revocation(each, versions, moves) for each in versions}
    assert {number: each and each.version for number, each in found.items()} == {
        "1": None,
        "2": None,
        "4": "3",
    }
    assert found == {each.version: find_revocation(mlflow, model, each) for each in versions}


def test_a_candidate_that_is_revoked_during_its_match_is_no_champion(mlflow: Mlflow, model: str) -> None:
    def play(tags: Any) -> Match:
        mlflow.tag_version(model, "4", {REVOKED: "insults"})
        return WON

    policy = Candidate("/d", "d", None, {WEIGHTS: "weights of d"}, Evaluation(0.8, 80, 20))
    done = register(mlflow, model, policy, gate=Gate(0.5), run_match=play)
    assert (done.decision.champion, done.decision.rule, done.previous) == (False, "revoked", "3")
    assert champion(mlflow, model) == history(mlflow, model)[-1].version == "3"
    tags = {each.version: each.tags for each in mlflow.versions(model)}["4"]
    assert tags["rlhf.gate"] == "revoked"


def test_a_command_reports_that_its_version_was_revoked_in_the_meantime(mlflow: Mlflow, model: str) -> None:
    busy = InBetween(mlflow.uri, lambda: mlflow.tag_version(model, "2", {REVOKED: "insults"}))
    with pytest.raises(InputError, match=r"or version 2 was revoked or deleted, in the meantime"):
        rollback(busy, model, "bad")
    assert champion(mlflow, model) == "1" and revoked(mlflow, model) == {"2": "insults", "3": "bad"}


def facts(done: Any, digest: str) -> dict[str, str]:
    """Return the attributes of the artifact of a registration."""
    found = {"version": done.version, "champion": str(done.decision.champion), "rule": done.decision.rule}
    found["weights_sha256"] = f"weights of {digest}"
    return found | ({"previous_champion": done.previous} if done.previous else {})


def test_a_registration_is_outdated_after_a_rollback_that_concerns_it(mlflow: Mlflow, model: str) -> None:
    def check(made: dict[str, str]) -> str:
        return why_outdated(mlflow, model, made)

    promoted = facts(enter(mlflow, model, "d")[0], "d")
    refused = facts(enter(mlflow, model, "e", outcomes=[-1] * 100)[0], "e")
    assert (promoted["champion"], refused["champion"], refused["previous_champion"]) == ("True", "False", "4")
    assert check(promoted) == check(refused) == ""
    rollback(mlflow, model, "bad")
    assert check(promoted) == f"version 4 of {model} was champion and is revoked"
    assert check(refused) == f"the champion of that time, version 4 of {model}, is revoked"
    # Registered again, the revoked policy is refused, and the other one meets the restored champion.
    revoked_again = facts(enter(mlflow, model, "d")[0], "d")
    done, met = enter(mlflow, model, "e", outcomes=[-1] * 100)
    refused_again = facts(done, "e")
    assert (revoked_again["rule"], met, refused_again["previous_champion"]) == (
        "revoked",
        ["weights of c"],
        "3",
    )
    assert check(revoked_again) == check(refused_again) == "", "it is repeated once"
    mlflow._client.delete_model_version_tag(model, "4", REVOKED)
    assert check(revoked_again) == f"version 4 of {model} is not revoked any more"
    assert check({**refused, "weights_sha256": "unknown"}) == f"MLflow has no such version of {model}"


def test_a_registration_is_not_outdated_by_a_later_champion(mlflow: Mlflow, model: str) -> None:
    done = enter(mlflow, model, "d", outcomes=[-1] * 100)[0]
    enter(mlflow, model, "e")
    assert why_outdated(mlflow, model, facts(done, "d")) == ""
    first = {"version": "1", "champion": "True", "rule": "first", "weights_sha256": "weights of a"}
    assert why_outdated(mlflow, model, first) == ""


def test_a_promotion_by_a_person_revokes_nothing_and_can_be_repeated(mlflow: Mlflow, model: str) -> None:
    move, _ = promote(mlflow, model, "1", "known from last year")
    assert (champion(mlflow, model), move.previous, move.state) == ("1", "3", "done")
    assert promote(mlflow, model, "1", "known from last year") == (move, False)
    assert revoked(mlflow, model) == {}
    assert rollback(mlflow, model, "bad").move.version == "3"


def test_a_version_is_named_by_its_alias_too(mlflow: Mlflow, model: str) -> None:
    mlflow.set_alias(model, "known", "1")
    assert promote(mlflow, model, "known", "good").move.version == "1"
    assert rollback(mlflow, model, "bad", to="candidate").move.version == "3"
    with pytest.raises(InputError, match=r"version 3 of .* is the champion; choose an earlier one"):
        rollback(mlflow, model, "worse", to="champion")
    assert champion(mlflow, model) == "3"


def test_a_move_to_a_deleted_version_blocks_nothing(mlflow: Mlflow, model: str, database: Path) -> None:
    killed_at(
        "champion.recorded", lambda: promote(Mlflow(f"sqlite:///{database}", "champions"), model, "1", "good")
    )
    mlflow._client.delete_model_version(model, "1")
    settle(mlflow, model)
    assert champion(mlflow, model) == "3" and revoked(mlflow, model) == {}
    assert rollback(mlflow, model, "bad").move.version == "2"


def test_without_the_alias_a_person_decides(mlflow: Mlflow, model: str) -> None:
    MlflowClient(mlflow.uri).delete_registered_model_alias(model, "champion")
    done, met = enter(mlflow, model, "d")
    assert (done.decision.champion, done.decision.rule, met) == (False, "unknown", [])
    assert "no version has the alias `champion`, although there were champions" in done.decision.reason
    assert promote(mlflow, model, done.version, "good").move.previous is None


def test_moves_are_in_order_even_if_the_clock_of_a_host_is_ahead(mlflow: Mlflow, model: str) -> None:
    make_champion(mlflow, model, Move(9e9, "promoted", "1", "3", "r"))
    move, _ = rollback(mlflow, model, "bad")
    assert (move.version, history(mlflow, model)[-1]) == ("3", move)
    assert rollback(mlflow, model, "bad") == (move, False), "the same command again changes nothing"


def test_what_is_missing_is_an_input_error(mlflow: Mlflow, model: str) -> None:
    with pytest.raises(InputError, match="--reason must say why"):
        rollback(mlflow, model, " ")
    with pytest.raises(InputError, match="has no registered model 'unknown'; it has "):
        promote(mlflow, "unknown", "1", "r")
    with pytest.raises(InputError, match="--reason must have at most 1000 characters"):
        promote(mlflow, model, "1", "r" * 1001)
    mlflow.ensure_model("empty", "")
    with pytest.raises(InputError, match="empty has no champion that could be rolled back"):
        rollback(mlflow, "empty", "r")
    nowhere = Mlflow("sqlite:////proc/nowhere/x.db", "e")
    with pytest.raises(InfrastructureError, match="did not roll back 'm'"):
        rollback(nowhere, "m", "r")


def test_moves_by_hand_are_not_undone(mlflow: Mlflow, model: str) -> None:
    moves = history(mlflow, model)
    mlflow.create_version(log_of(model), source="x", run_id=None, tags={ENTRY: "no JSON"}, description="")
    mlflow.set_alias(model, "champion", "2")
    settle(mlflow, model)
    assert champion(mlflow, model) == "2"
    assert history(mlflow, model) == moves


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_interrupted_rollback_revokes_also_a_version_that_was_deleted(
    mlflow: Mlflow, model: str, database: Path, is_deleted: bool
) -> None:
    killed_at(
        "champion.recorded", lambda: rollback(Mlflow(f"sqlite:///{database}", "champions"), model, "bad")
    )
    if is_deleted:
        mlflow._client.delete_model_version(model, "3")
    settle(mlflow, model)
    assert champion(mlflow, model) == "2" and history(mlflow, model)[-1].state == "done"
    assert revoked(mlflow, model) == ({} if is_deleted else {"3": "bad"})
    done, met = enter(mlflow, model, "c")
    assert (done.decision.rule, met) == ("revoked", [])


def test_an_entry_has_the_whole_match(mlflow: Mlflow, model: str) -> None:
    evidence = WON.record() | {
        "by_source": {f"source {i}".ljust(100): 0.5 for i in range(20)},
        "regression": {f"set {i}".ljust(100): {"mean": 0.5} for i in range(100)},
    }
    make_champion(mlflow, model, Move(9e9, "crowned", "1", "3", "\u0436" * 1000, evidence))
    move = history(mlflow, model)[-1]
    assert (move.evidence, move.reason) == (evidence, "\u0436" * 1000) and "@" in move.by


def test_an_interrupted_promotion_does_not_restore_a_revoked_version(
    mlflow: Mlflow, model: str, database: Path
) -> None:
    rollback(mlflow, model, "bad")
    move = Move(9e9, "crowned", "3", "2", "r")
    killed_at(
        "champion.recorded", lambda: make_champion(Mlflow(f"sqlite:///{database}", "champions"), model, move)
    )
    settle(mlflow, model)
    assert champion(mlflow, model) == "2"


POINTS = ("champion.recorded", "champion.revoked", "champion.moved", "champion.done")


def killed_at(point: str, action: Any) -> None:
    """Run `action` in a process that is killed at the failpoint."""

    def act() -> None:
        os.environ["RLHF_FAIL"] = f"{point}:1:kill"
        action()

    _, status = os.waitpid(forked(act), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize(("point", "present"), [("champion.recorded", "3"), ("champion.moved", "2")])
def test_an_alias_that_a_command_moves_was_not_moved_by_hand(
    point: str, present: str, mlflow: Mlflow, model: str, database: Path
) -> None:
    def problem() -> str:
        return moved_by_hand(mlflow, model, mlflow.by_alias(model, "champion"), history(mlflow, model))

    move = Move(9e9, "promoted", "2", "3", "r")
    killed_at(point, lambda: make_champion(Mlflow(f"sqlite:///{database}", "champions"), model, move))
    assert champion(mlflow, model) == present
    assert problem() == "", "the move is not finished"
    settle(mlflow, model)
    mlflow.tag_version(model, "2", {REVOKED: "bad"})
    settle(mlflow, model)
    assert champion(mlflow, model) != "2"
    assert problem() == "", "the champion was revoked"
    promote(mlflow, model, "1", "r")
    mlflow.set_alias(model, "champion", "3")
    assert "moved by hand" in problem()


@pytest.mark.parametrize(("to", "after"), [(None, "2"), ("none", None)])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_rollback_is_finished_by_the_same_command(
    point: str, to: str | None, after: str | None, database: Path, mlflow: Mlflow, model: str
) -> None:
    killed_at(point, lambda: rollback(Mlflow(f"sqlite:///{database}", "champions"), model, "bad", to))
    assert champion(mlflow, model) in (after, "3")
    move, changed = rollback(mlflow, model, "bad", to)
    assert (move.version, move.previous, move.state) == (after, "3", "done")
    assert changed == (point != "champion.done"), "it finishes the move, unless that was done"
    assert champion(mlflow, model) == after and revoked(mlflow, model) == {"3": "bad"}
    assert [each.state for each in history(mlflow, model)] == ["done"] * 4


@pytest.mark.parametrize("point", ["champion.recorded", "champion.moved", "champion.done"])
def test_a_killed_promotion_is_finished_by_the_same_command(
    point: str, database: Path, mlflow: Mlflow, model: str
) -> None:
    killed_at(point, lambda: promote(Mlflow(f"sqlite:///{database}", "champions"), model, "1", "good"))
    assert champion(mlflow, model) in ("1", "3")
    assert promote(mlflow, model, "1", "good").move.version == "1"
    assert champion(mlflow, model) == "1" and len(history(mlflow, model)) == 4


@pytest.mark.parametrize(
    "point",
    ["register.created", "register.tested", "register.decided", "champion.recorded", "champion.moved",
        "champion.done", "register.promoted"],
)  # fmt: skip
def test_a_killed_registration_is_finished_by_the_same_command(
    point: str, database: Path, mlflow: Mlflow, model: str
) -> None:
    killed_at(point, lambda: enter(Mlflow(f"sqlite:///{database}", "champions"), model, "d"))
    assert champion(mlflow, model) in ("3", "4")
    unfinished = [each.version for each in refusals(mlflow, model, history(mlflow, model)) if each.unfinished]
    assert unfinished == (["4"] if point == "register.decided" else [])
    done, _ = enter(mlflow, model, "d")
    assert not refusals(mlflow, model, history(mlflow, model))
    assert (done.version, done.decision.champion, done.decision.rule) == ("4", True, "match")
    moves = history(mlflow, model)
    assert champion(mlflow, model) == "4"
    assert [(each.version, each.state) for each in moves] == [(v, "done") for v in "1234"]
    tests = [test.version for test in read_log(mlflow, model).tests]
    assert tests == list("1234"), "the test that was repeated spends its level once"


WRITES = (
    "create_model_version",
    "create_registered_model",
    "delete_registered_model_alias",
    "set_registered_model_alias",
    "set_model_version_tag",
)


def killed_before_write(number: int, mlflow: Mlflow, action: Any) -> bool:
    """Run `action` in a process that is killed before a write to MLflow; False if there are fewer writes."""

    def act() -> None:
        count = 0
        for name in WRITES:
            write = getattr(mlflow._client, name)

            def counted(*given: Any, write: Any = write, **more: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*given, **more)

            setattr(mlflow._client, name, counted)
        action(mlflow)

    _, status = os.waitpid(forked(act), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), "see its error on stderr"
    return code != 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rollback", "rollback to none", "promote", "register"])
def test_a_kill_between_any_two_writes_leaves_one_end(what: str, database: Path, mlflow: Mlflow) -> None:
    ends, number = [], 1
    while True:
        model = f"{what} killed before write {number}"
        for digest in "abc":
            enter(mlflow, model, digest)

        def act(mlflow: Mlflow, model: str = model) -> None:
            if what == "rollback":
                rollback(mlflow, model, "bad")
            elif what == "rollback to none":
                rollback(mlflow, model, "bad", "none")
            elif what == "promote":
                promote(mlflow, model, "1", "good")
            else:
                enter(mlflow, model, "d")

        killed = killed_before_write(number, Mlflow(f"sqlite:///{database}", "champions"), act)
        assert champion(mlflow, model) in ("1", "2", "3", "4", None)
        act(mlflow)
        moves = [(each.action, each.version, each.previous, each.state) for each in history(mlflow, model)]
        ends.append((champion(mlflow, model), revoked(mlflow, model), moves))
        if not killed:
            break
        number += 1
    assert all(end == ends[-1] for end in ends)
    assert number > (3 if what == "promote" else 4)


def test_another_registration_finishes_a_move_that_was_interrupted(
    database: Path, mlflow: Mlflow, model: str
) -> None:
    killed_at("champion.recorded", lambda: rollback(Mlflow(f"sqlite:///{database}", "x"), model, "bad"))
    assert champion(mlflow, model) == "3"
    _, met = enter(mlflow, model, "d")
    assert met == ["weights of b"], "the match is against the champion that the rollback restored"


def test_the_tags_of_an_earlier_release_are_read_once(mlflow: Mlflow) -> None:
    """Moves and tests were tags of the registered model."""
    model = "of an earlier release"
    mlflow.ensure_model(model, "")
    for number in "124":
        tags = {WEIGHTS: f"w{number}"}
        mlflow.create_version(model, source="/x", run_id=None, tags=tags, description="")
    mlflow.set_alias(model, "champion", "2")

    def tag(name: str, content: Mapping[str, Any]) -> None:
        mlflow._client.set_registered_model_tag(model, f"rlhf.{name}", json.dumps(content))

    move = {"time": 1.0, "version": "1", "previous": None, "reason": "r", "evidence": None, "digests": None}
    rollback_of_9 = {"action": "rolled_back", "version": "2", "previous": "9", "digests": {WEIGHTS: "w4"}}
    tag("champion.01", {**move, "action": "crowned", "state": "done"})
    tag("champion.02", {**move, "action": "promoted", "version": "4", "state": "started"})
    tag("champion.03", {**move, **rollback_of_9, "state": "overtaken", "revoked": False})
    tag("champion.04", {**move, **rollback_of_9, "state": "started", "revoked": False})
    tag("champion.x", {"no": "move"})
    test = {"time": 5.0, "level": 0.001, "champion": "1", "judge": None, "prompts": 100, "outcomes": "x"}
    tag("test.05.3", test)
    tag("test.04.1", {**test, "time": 4.0, "champion": None})
    tag("test.06.1", {**test, "level": 1.0})
    # An interrupted move of that release counts if it had moved the alias.
    assert [(each.action, each.state) for each in history(mlflow, model)] == [
        ("crowned", "done"), ("rolled_back", "done")
    ]  # fmt: skip
    tests = [(each.version, each.time, each.champion) for each in read_log(mlflow, model).tests]
    assert tests == [("1", 4.0, None), ("3", 5.0, "1")]
    # Another process that has begun the log at the same time.
    [entry] = mlflow.versions(log_of(model))
    mlflow.create_version(log_of(model), source="x", run_id=None, tags=entry.tags, description="")
    tag("champion.09", {**move, "action": "crowned", "version": "3", "previous": "2", "state": "done"})
    assert rollback(mlflow, model, "bad").move.version == "1"
    assert len(history(mlflow, model)) == 3, "later tags do not count"
    # The version 9, with the weights of version 3, was revoked and deleted.
    what = f"`digests` from the tag rlhf.entry of version 1 of {log_of(model)}"
    with pytest.raises(InputError, match=f"has the same policy as version 9, .* remove {what}"):
        promote(mlflow, model, "3", "good")


def test_an_entry_counts_unless_another_of_its_kind_is_in_between(mlflow: Mlflow, model: str) -> None:
    after = read_log(mlflow, model).last
    test = PromotionTest(9e9, 0.001, "3", None, 100, "x", "3")
    append(mlflow, model, after, test)
    first = append(mlflow, model, after, Move(1.0, "promoted", "1", "3", "first"))
    append(mlflow, model, after, replace(test, level=0.002))
    append(mlflow, model, after, Move(1.0, "promoted", "2", "3", "second"))
    last = append(mlflow, model, first, Move(1.0, "promoted", "2", "1", "third"))
    log = read_log(mlflow, model)
    assert [(each.reason, each.state) for each in log.moves[-3:]] == [
        ("first", "started"), ("second", "overtaken"), ("third", "started")
    ]  # fmt: skip
    assert (log.tests[-1].level, log.last) == (0.001, last)
    settle(mlflow, model)
    assert champion(mlflow, model) == "2"
