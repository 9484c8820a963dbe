"""The model registry: one version per policy, alias `candidate` for the newest and `champion` for the best
evaluated one.

`tracking.gate` decides whether a candidate becomes champion, based on a match against the current champion.
The match itself runs in another module. `tracking.champion_log` keeps the tests and their levels, and
`tracking.champions` moves the alias.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.champion_log import Log, Move, PromotionTest, append, read_log
from rlhf_core.tracking.champions import (
    CHAMPION,
    POLICY,
    REVOKED,
    WEIGHTS,
    find_revocation,
    history,
    move_champion,
    moved_by_hand,
    number_of,
    registry_errors,
    revocation,
    settle,
)
from rlhf_core.tracking.gate import (
    BY_A_PERSON,
    Decision,
    Evaluation,
    Gate,
    Match,
    NoMatch,
    Spent,
    decide,
    next_level,
    refused_alone,
)
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion

log = logging.getLogger(__name__)

CANDIDATE = "candidate"
LOCAL_STORE = "local-store://"
"""Prefix of the path of a folder in the source of a version, if MLflow is a server."""
_EVALUATION = "rlhf.evaluation"
_RULE, _REASON, _WINS = "rlhf.gate", "rlhf.gate_reason", "rlhf.gate_wins"
"""Tags of a version with the decision of its last registration."""

RunMatch = Callable[[Mapping[str, str]], Match | NoMatch]
"""Runs a match against the version with these tags."""


@dataclass(frozen=True)
class Candidate:
    """A policy to be registered."""

    source: str
    """Address of the folder with the model, in Hugging Face layout."""
    policy_digest: str
    """Digest of the artifact that contains it."""
    run_id: str | None
    """MLflow run that trained it."""
    tags: Mapping[str, str]
    """Lineage."""
    evaluation: Evaluation


@dataclass(frozen=True)
class Registration:
    """Result of `register`."""

    model: str
    version: str
    created: bool
    """False if this policy had a version already."""
    decision: Decision
    previous: str | None
    """Version that was champion before."""
    match: Match | None = None
    already_champion: bool = False
    """Whether the policy was champion before, so that the decision is an earlier one."""


def register(
    mlflow: Mlflow,
    model: str,
    candidate: Candidate,
    *,
    gate: Gate,
    run_match: RunMatch = lambda tags: NoMatch("it was not run"),
    clock: Callable[[], float] = time.time,
) -> Registration:
    """Make `candidate` a version of `model` and move the aliases. Raises RLHFError if MLflow does not accept
    it.

    Args:
        mlflow: The tracker.
        model: Name of the registered model.
        candidate: The policy.
        gate: Requirements for a champion.
        run_match: Runs a match. If another version becomes champion in the meantime, the next match is
            against that one.
        clock: Returns the seconds since 1970.
    """
    action = f"register the model {model!r}"
    with registry_errors(mlflow, action):
        mlflow.ensure_model(
            model, "Policies made by the RLHF pipeline. `champion` is the best one evaluated."
        )
        entries = settle(mlflow, model)
        if problem := moved_by_hand(mlflow, model, mlflow.by_alias(model, CHAMPION), entries.moves):
            log.warning("%s: %s", model, problem)
        version, created = _find_or_create(mlflow, model, candidate)
        failpoint("register.created")
        mlflow.set_alias(model, CANDIDATE, version.version)
        champion = mlflow.by_alias(model, CHAMPION)
    while champion is None or champion.version != version.version:
        with registry_errors(mlflow, action):
            # Before the match, which takes as long as an evaluation.
            revoked = _revoked(mlflow, model, version)
        match = None
        if not revoked:
            match = _match(candidate, champion, gate, run_match)
        with registry_errors(mlflow, action):
            # The match can take long, and other versions may have been tested in the meantime.
            entries = settle(mlflow, model)
            opponent = number_of(champion)
            now = mlflow.by_alias(model, CHAMPION)
            if number_of(now) != opponent:
                champion = now
                continue
            choose = partial(
                _next_test, version.version, candidate.evaluation, match, opponent, gate, clock()
            )
            # Asked again: a person can have rolled the version
            # back, or deleted the champion, during the match.
            refusal = _revoked(mlflow, model, version) or _champion_is_missing(entries, champion)
            decision = refusal or _decide(candidate, champion, match, gate, choose(entries.tests).level)
            # Before the alias, so that a retry after a kill in between makes the same decision.
            if decision.tested:
                test = _spend(mlflow, model, entries, choose)
                # Decided again: if another process spent this part of
                # the budget first, the level is lower than it was.
                decision = _decide(candidate, champion, match, gate, test.level)
            played, evidence = None, None
            if isinstance(match, Match):
                played, evidence = match, match.record()
            tags = {_RULE: decision.rule, _REASON: decision.reason, _WINS: str(decision.champion)}
            if decision.champion:
                # A version that was champion before kept the evaluation of that time (`_find_or_create`).
                tags |= _tags(candidate)
            mlflow.tag_version(model, version.version, tags)
            failpoint("register.decided")
            if decision.champion:
                move = Move(clock(), "crowned", version.version, opponent, decision.reason, evidence)
                moved = move_champion(mlflow, model, move, entries.last)
                if moved.state != "done" or _revoked(mlflow, model, version):  # in the meantime
                    champion = mlflow.by_alias(model, CHAMPION)
                    continue
            failpoint("register.promoted")
        return Registration(model, version.version, created, decision, opponent, played)
    with registry_errors(mlflow, action):
        return _earlier_registration(read_log(mlflow, model), model, champion, created)


class Refusal(NamedTuple):
    """A version that its last registration did not make champion, or not yet."""

    time: float
    """When the version was created, in seconds since 1970."""
    version: str
    reason: str
    unfinished: bool = False
    """Whether it was decided that it wins, and the registration ended before the move."""


def refusals(mlflow: Mlflow, model: str, moves: Iterable[Move]) -> list[Refusal]:
    """Return the refused versions of `model`, the oldest first.

    Args:
        mlflow: The tracker.
        model: Name of the registered model.
        moves: The history of its champions.
    """
    won = {(move.version, move.reason) for move in moves if move.action == "crowned"}
    found = []
    with registry_errors(mlflow, f"list the versions of {model!r}"):
        for version in mlflow.versions(model):
            reason = version.tags.get(_REASON, "")
            unfinished = version.tags.get(_WINS) == str(True)
            if unfinished and REVOKED in version.tags:
                continue
            if reason and (version.version, reason) not in won:
                found.append(Refusal(version.created, version.version, reason, unfinished))
    return sorted(found)


def has_version(mlflow: Mlflow, model: str, weights_sha256: str) -> bool:
    """Return whether these weights are a version of `model`."""
    return _with_weights(mlflow.versions(model), weights_sha256)


def why_outdated(mlflow: Mlflow, model: str, facts: Mapping[str, str]) -> str:
    """Return why a registration is not true any more; empty if it is.

    It is not if the registry has lost the version; if a rollback has since then revoked the version that it
    made champion, or the champion that it compared the version with; or if the version was refused because of
    a revocation that a person has removed. It remains true if a later champion replaced that of its time.

    Args:
        mlflow: The tracker.
        model: Name of the registered model.
        facts: Attributes of the artifact: `registration.json` as texts, without values that are null.
    """
    versions = mlflow.versions(model)
    if not _with_weights(versions, facts["weights_sha256"]):
        return f"MLflow has no such version of {model}"
    moves = history(mlflow, model)
    now = number_of(mlflow.by_alias(model, CHAMPION))

    def is_revoked(number: str) -> bool:
        version = next((each for each in versions if each.version == number), ModelVersion(number, {}))
        return revocation(version, versions, moves) is not None

    own, previous = facts["version"], facts.get("previous_champion")
    if facts["champion"] == "True":
        if own != now and is_revoked(own):
            return f"version {own} of {model} was champion and is revoked"
        return ""
    if facts["rule"] == "revoked":
        if not is_revoked(own):
            return f"version {own} of {model} is not revoked any more"
        return ""
    if previous is not None and previous != now and is_revoked(previous):
        return f"the champion of that time, version {previous} of {model}, is revoked"
    return ""


def _with_weights(versions: Iterable[ModelVersion], weights_sha256: str) -> bool:
    return any(version.tags.get(WEIGHTS) == weights_sha256 for version in versions)


def _revoked(mlflow: Mlflow, model: str, version: ModelVersion) -> Decision | None:
    """Return the refusal if the version, or another one with the same policy, was rolled back."""
    found = find_revocation(mlflow, model, version)
    if found is None:
        return None
    return Decision(
        False,
        "revoked",
        f"version {found.version} has this policy and was revoked: {found.reason}",
        advice="train another policy",
    )


def _champion_is_missing(entries: Log, champion: ModelVersion | None) -> Decision | None:
    """Return the refusal if the history has champions, but no version has the alias: MLflow deletes it with
    its version. After a rollback to no champion there is none to be missed.
    """
    if champion is None and entries.done and entries.done[-1].version is not None:
        text = f"no version has the alias `{CHAMPION}`, although there were champions"
        return Decision(False, "unknown", text, advice="a person can name one with `rlhf promote`")
    return None


def _earlier_registration(entries: Log, model: str, champion: ModelVersion, created: bool) -> Registration:
    """Return the registration that made the champion what it is; the reason can be unknown."""
    decision, opponent, match = Decision(True, "unchanged", "this policy is the champion already"), None, None
    crowned = [move for move in entries.done if (move.action, move.version) == ("crowned", champion.version)]
    if crowned:
        move = crowned[-1]
        decision = Decision(True, champion.tags.get(_RULE, decision.rule), move.reason, tested=True)
        opponent = move.previous
        if move.evidence:
            match = Match(**move.evidence)
    return Registration(model, champion.version, created, decision, opponent, match, already_champion=True)


def _match(
    candidate: Candidate, champion: ModelVersion | None, gate: Gate, run_match: RunMatch
) -> Match | NoMatch | None:
    """Return the match against the champion, or None if the decision does not depend on one."""
    if champion is None or _record(champion) is None or refused_alone(candidate.evaluation, gate):
        return None
    return run_match(champion.tags)


def _decide(
    candidate: Candidate,
    champion: ModelVersion | None,
    match: Match | NoMatch | None,
    gate: Gate,
    level: float,
) -> Decision:
    record = None
    if champion is not None:
        record = _record(champion)
        if record is None:
            text = f"the champion, version {champion.version}, has no recorded evaluation"
            return Decision(False, "unknown", text, advice=BY_A_PERSON)
    return decide(candidate.evaluation, record, match, gate=gate, level=level)


def _record(version: ModelVersion) -> Evaluation | None:
    return Evaluation.from_json(version.tags.get(_EVALUATION, ""))


def _tags(candidate: Candidate) -> dict[str, str]:
    return {**candidate.tags, POLICY: candidate.policy_digest, _EVALUATION: candidate.evaluation.to_json()}


def _find_or_create(mlflow: Mlflow, model: str, candidate: Candidate) -> tuple[ModelVersion, bool]:
    tags = _tags(candidate)
    for version in mlflow.versions(model):
        if version.tags.get(POLICY) == candidate.policy_digest:
            if _was_champion(mlflow, model, version.version):
                # The gate compares the judge of a match with the one by which the champion was promoted.
                tags = {name: value for name, value in tags.items() if name not in version.tags}
            mlflow.tag_version(model, version.version, tags)
            return replace(version, tags={**version.tags, **tags}), False
    source = candidate.source
    if mlflow.uri.startswith("http") and "://" not in source:
        # A server refuses a local path as a source, because it would serve the files. This scheme keeps the
        # path readable for users.
        source = f"{LOCAL_STORE}{source}"
    description = _description(candidate)
    run_id = candidate.run_id
    # A policy that is reused can have been trained under
    # another tracker, whose run ids this one does not know.
    if not run_id or not mlflow.has_run(run_id):
        run_id = None
    created = mlflow.create_version(model, source=source, run_id=run_id, tags=tags, description=description)
    return created, True


def _was_champion(mlflow: Mlflow, model: str, version: str) -> bool:
    """Return whether the version is or was champion."""
    champion = mlflow.by_alias(model, CHAMPION)
    if champion is not None and champion.version == version:
        return True
    return any(version in (move.version, move.previous) for move in read_log(mlflow, model).done)


def _description(candidate: Candidate) -> str:
    found = candidate.evaluation
    return (
        f"Win rate {found.win_rate:.1%} over the SFT model ({found.wins} won, {found.losses} lost,"
        f" {found.ties} tied; judge: {found.judge}). Load the folder: {candidate.source}"
    )


# -- the tests of candidates, and the level that each of them spends --

# The log of the model contains all tests, also those of versions that were deleted. The budget is computed
# from it alone.


def _next_test(
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


def _spend(
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
