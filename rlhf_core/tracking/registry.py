"""The model registry: one version per policy, alias `candidate` for the newest and `champion` for the best
evaluated one.

`tracking.gate` decides whether a candidate becomes champion, based on a match against the current champion.
The match itself runs in another module. `tracking.promotion_tests` keeps the levels that the tests spent, and
`tracking.champions` moves the alias and keeps the history.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from rlhf_core.config.redact import has_credentials
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.champion_log import Log, Move, read_log
from rlhf_core.tracking.champions import (
    CHAMPION,
    POLICY,
    WEIGHTS,
    find_revocation,
    history,
    move_champion,
    registry_errors,
    revocation,
    settle,
    settled,
)
from rlhf_core.tracking.gate import (
    BY_A_PERSON,
    Decision,
    Evaluation,
    Gate,
    Match,
    NoMatch,
    decide,
    refused_alone,
)
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion
from rlhf_core.tracking.mlflow_errors import describe_failure
from rlhf_core.tracking.promotion_tests import next_test, spend

log = logging.getLogger(__name__)

CANDIDATE = "candidate"
LOCAL_STORE = "local-store://"
"""Prefix of the path of a folder in the source of a version, if MLflow is a server."""
_EVALUATION = "rlhf.evaluation"
OUTCOME = "rlhf.outcome"
"""Tag of a version with the outcome of its last registration."""

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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Main metrics of its evaluation."""
    evaluation_run_id: str | None = None
    """MLflow run that measured them."""


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
        settle(mlflow, model)
        version, created = _find_or_create(mlflow, model, candidate)
        failpoint("register.created")
        _log_model(mlflow, model, version.version, candidate)
        mlflow.set_alias(model, CANDIDATE, version.version)
        champion = mlflow.by_alias(model, CHAMPION)
    while champion is None or champion.version != version.version:
        with registry_errors(mlflow, action):
            revoked = _revoked(mlflow, model, version)
        match = None if revoked else _match(candidate, champion, gate, run_match)
        with registry_errors(mlflow, action):
            # The match can take long, and other versions may have been tested in the meantime.
            entries, _ = settled(mlflow, model)
            opponent = champion.version if champion else None
            now = mlflow.by_alias(model, CHAMPION)
            if (now.version if now else None) != opponent:
                champion = now
                continue
            choose = partial(next_test, version.version, candidate.evaluation, match, opponent, gate, clock())
            refusal = _revoked(mlflow, model, version) or _champion_is_missing(entries, champion)
            decision = refusal or _decide(candidate, champion, match, gate, choose(entries.tests).level)
            # Before the alias, so that a retry after a kill in between makes the same decision.
            if decision.tested:
                test = spend(mlflow, model, entries, choose)
                decision = _decide(candidate, champion, match, gate, test.level)
            outcome = _Outcome(decision, opponent, match if isinstance(match, Match) else None)
            # A version that was champion before kept the evaluation of that time (`_find_or_create`).
            promoted_by = _tags(candidate) if decision.champion else {}
            mlflow.tag_version(model, version.version, {**outcome.tags(), **promoted_by})
            failpoint("register.decided")
            if decision.champion:
                evidence = outcome.match.record() if outcome.match else None
                move = Move(clock(), "crowned", version.version, opponent, decision.reason, evidence)
                moved = move_champion(mlflow, model, move, entries.last)
                if moved.state != "done" or _revoked(mlflow, model, version):  # in the meantime
                    champion = mlflow.by_alias(model, CHAMPION)
                    continue
            failpoint("register.promoted")
        return Registration(model, version.version, created, *outcome)
    return Registration(model, version.version, created, *_Outcome.of(champion.tags), already_champion=True)


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
    champion = mlflow.by_alias(model, CHAMPION)
    now = champion.version if champion else None

    def is_revoked(number: str) -> bool:
        version = next((each for each in versions if each.version == number), ModelVersion(number, {}))
        return revocation(version, versions, moves) is not None

    own, previous = facts["version"], facts.get("previous_champion")
    if facts["champion"] == "True":
        is_gone = own != now and is_revoked(own)
        return f"version {own} of {model} was champion and is revoked" if is_gone else ""
    if facts["rule"] == "revoked":
        return "" if is_revoked(own) else f"version {own} of {model} is not revoked any more"
    if previous is not None and previous != now and is_revoked(previous):
        return f"the champion of that time, version {previous} of {model}, is revoked"
    return ""


def read_outcome(tags: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the tag `OUTCOME`. Empty if it is missing or invalid, because tags can be
    edited.
    """
    try:
        kept = json.loads(tags.get(OUTCOME, "{}"))
    except (ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


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


class _Outcome(NamedTuple):
    """A decision of the gate, as stored in the tags of a version."""

    decision: Decision
    opponent: str | None
    """Version that was champion at that time."""
    match: Match | None

    def tags(self) -> dict[str, str]:
        return {
            "rlhf.gate": self.decision.rule,
            "rlhf.gate_reason": self.decision.reason,
            OUTCOME: json.dumps(
                {
                    "champion": self.decision.champion,
                    "met": self.opponent,
                    "match": self.match.record() if self.match else None,
                    "tested": self.decision.tested,
                }
            ),
        }

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> _Outcome:
        """Read how the champion with these tags became champion; the reason can be unknown."""
        kept = read_outcome(tags)
        try:
            match = Match(**kept["match"]) if kept["match"] else None
            decision = Decision(True, tags["rlhf.gate"], tags["rlhf.gate_reason"], bool(kept["tested"]))
            if kept["champion"]:
                return cls(decision, kept["met"], match)
        except (KeyError, TypeError):
            pass  # the tags were written by another program or edited by hand
        return cls(Decision(True, "unchanged", "this policy is the champion already"), None, None)


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
    record = _record(champion) if champion is not None else None
    if champion is not None and record is None:
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
    run_id = candidate.run_id if candidate.run_id and mlflow.has_run(candidate.run_id) else None
    return (
        mlflow.create_version(model, source=source, run_id=run_id, tags=tags, description=description),
        True,
    )


def _was_champion(mlflow: Mlflow, model: str, version: str) -> bool:
    """Return whether the version is or was champion."""
    champion = mlflow.by_alias(model, CHAMPION)
    if champion is not None and champion.version == version:
        return True
    return any(version in (move.version, move.previous) for move in read_log(mlflow, model).done)


def _description(candidate: Candidate) -> str:
    return (
        f"Win rate {candidate.evaluation.win_rate:.3f} against the SFT model. Load the folder:"
        f" {candidate.source}"
    )


def _log_model(mlflow: Mlflow, model: str, version: str, candidate: Candidate) -> None:
    """Record the candidate as an output of the run that trained it, with its version and its evaluation
    metrics.

    If MLflow does not support logged models (before MLflow 3), only a warning is logged.
    """
    if not candidate.run_id or not mlflow.has_run(candidate.run_id):
        return
    tags = {"rlhf.source": candidate.source, **candidate.tags}
    try:
        model_id = mlflow.log_model(
            model,
            key=(POLICY, candidate.policy_digest),
            run_id=candidate.run_id,
            tags=tags,
            description=_description(candidate),
        )
        mlflow.link_version(model_id, model, version)
        if candidate.evaluation_run_id and mlflow.has_run(candidate.evaluation_run_id):
            mlflow.log_model_metrics(candidate.evaluation_run_id, model_id, candidate.metrics)
    except Exception as error:
        address = "(address hidden)" if has_credentials(mlflow.uri) else mlflow.uri
        log.warning(
            "MLflow at %s %s: version %s has no logged model.", address, describe_failure(error), version
        )
