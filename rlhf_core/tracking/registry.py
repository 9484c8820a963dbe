"""The model registry: one version per policy, alias `candidate` for the newest and `champion` for the best
evaluated one.

`tracking.gate` decides whether a candidate becomes champion, based on a match against the current champion or
on recorded evaluations. The match itself runs in another module.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rlhf_core.config.redact import has_credentials
from rlhf_core.errors import InfrastructureError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.gate import Decision, Evaluation, Gate, Match, decide
from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion, describe_failure, short_reason

log = logging.getLogger(__name__)

CANDIDATE, CHAMPION = "candidate", "champion"
POLICY = "rlhf.policy_digest"
"""Tag that identifies a version: digest of the PPO artifact. Registering the same policy again finds it."""

WEIGHTS = "rlhf.weights_sha256"
"""Tag with the digest of its weights."""

_EVALUATION, _OUTCOME = "rlhf.evaluation", "rlhf.outcome"


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


def register(
    mlflow: Mlflow,
    model: str,
    candidate: Candidate,
    *,
    gate: Gate,
    run_match: Callable[[Mapping[str, str]], Match | None] = lambda tags: None,
) -> Registration:
    """Make `candidate` a version of `model` and move the aliases. Raises RLHFError if MLflow does not accept
    it.

    Args:
        mlflow: the tracker.
        model: name of the registered model.
        candidate: the policy.
        gate: requirements for a champion.
        run_match: runs a match against the version with these tags; returns None if that is not possible. If
            another version becomes champion in the meantime, the next match is against that one.
    """
    with _registry_errors(mlflow, model):
        mlflow.ensure_model(
            model, "Policies made by the RLHF pipeline. `champion` is the best one evaluated."
        )
        version, created = _find_or_create(mlflow, model, candidate)
        failpoint("register.created")
        _log_model(mlflow, model, version.version, candidate)
        mlflow.set_alias(model, CANDIDATE, version.version)
        champion = mlflow.by_alias(model, CHAMPION)
    while champion is None or champion.version != version.version:
        match = _match(candidate, champion, gate, run_match)
        with _registry_errors(mlflow, model):
            # The match can take long, and other versions may have been tested in the meantime.
            tags_by_version = {each.version: each.tags for each in mlflow.versions(model)}
        opponent = champion.version if champion else None
        evidence = _evidence(candidate, match)
        tests = _tests(tags_by_version.get(version.version, {}))
        number = _number(tests, tags_by_version.values(), opponent, evidence)
        decision = _decide(candidate, champion, match, gate, number)
        if decision.tested:
            tests.setdefault(_key(opponent), {})[evidence] = number
        outcome = _Outcome(decision, opponent, match)
        with _registry_errors(mlflow, model):
            now = mlflow.by_alias(model, CHAMPION)
            if (now and now.version) != outcome.opponent:
                champion = now
                continue
            # Before the alias, so that a retry after a kill in between makes the same decision.
            mlflow.tag_version(model, version.version, outcome.tags(tests))
            failpoint("register.decided")
            if decision.champion:
                mlflow.set_alias(model, CHAMPION, version.version)
            failpoint("register.crowned")
        return Registration(model, version.version, created, *outcome)
    return Registration(model, version.version, created, *_Outcome.of(champion.tags))


def has_version(mlflow: Mlflow, model: str, weights_sha256: str) -> bool:
    """Return whether these weights are a version of `model`."""
    return any(version.tags.get(WEIGHTS) == weights_sha256 for version in mlflow.versions(model))


_Tests = dict[str, dict[str, int]]
"""All tests of a version: `_key` of the champion, then `_evidence`, and the number of the test."""


class _Outcome(NamedTuple):
    """A decision of the gate, as stored in the tags of a version."""

    decision: Decision
    opponent: str | None
    """Version that was champion at that time."""
    match: Match | None

    def tags(self, tests: _Tests) -> dict[str, str]:
        return {
            "rlhf.gate": self.decision.rule,
            "rlhf.gate_reason": self.decision.reason,
            _OUTCOME: json.dumps(
                {
                    "champion": self.decision.champion,
                    "met": self.opponent,
                    "match": asdict(self.match) if self.match else None,
                    "tested": self.decision.tested,
                    "tests": tests,
                }
            ),
        }

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> _Outcome:
        """Read how the champion with these tags became champion; the reason can be unknown."""
        kept = _outcome(tags)
        try:
            match = Match(**kept["match"]) if kept["match"] else None
            decision = Decision(
                True, tags["rlhf.gate"], tags["rlhf.gate_reason"], bool(kept.get("tested", match))
            )
            if kept["champion"]:
                return cls(decision, kept["met"], match)
        except (KeyError, TypeError):
            pass  # the tags were written by another program or edited by hand
        return cls(Decision(True, "unchanged", "this policy is the champion already"), None, None)


def _key(opponent: str | None) -> str:
    """Return the key in `_Tests` for a champion with this version. Keys of JSON objects are strings."""
    return opponent or ""


def _evidence(candidate: Candidate, match: Match | None) -> str:
    """Return a digest of the numbers that a test uses."""
    text = json.dumps([candidate.evaluation.to_json(), asdict(match) if match else None])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number(own: _Tests, versions: Iterable[Mapping[str, str]], opponent: str | None, evidence: str) -> int:
    """Return the number of the test against the champion `opponent`. `versions` has the tags of all versions.

    Tests with the same numbers are the same test, so a process that was killed after it recorded a test makes
    the same decision again. With other numbers, a version that was tested before is tested again at a
    separate level.
    """
    key = _key(opponent)
    same = own.get(key, {}).get(evidence)
    if same is not None:
        return same
    return 1 + sum(len(_tests(tags).get(key, {})) for tags in versions)


def _tests(tags: Mapping[str, str]) -> _Tests:
    """Return all tests of the version with `tags`. Unreadable entries are ignored."""
    outcome = _outcome(tags)
    opponent, tests = outcome.get("met"), outcome.get("tests")
    if isinstance(tests, dict):
        return {
            champion: {
                evidence: number for evidence, number in entries.items() if type(number) is int and number > 0
            }
            for champion, entries in tests.items()
            if isinstance(entries, dict)
        }
    # Earlier versions of the code only recorded the last test.
    if (
        "met" in outcome
        and (opponent is None or isinstance(opponent, str))
        and outcome.get("tested", outcome.get("match"))
    ):
        return {_key(opponent): {"": 1}}
    return {}


def _outcome(tags: Mapping[str, str]) -> dict[str, Any]:
    """Return the outcome written by `_Outcome.tags`. Empty if it is missing or invalid, because tags can be
    edited.
    """
    try:
        kept = json.loads(tags.get(_OUTCOME, "{}"))
    except (ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _match(
    candidate: Candidate,
    champion: ModelVersion | None,
    gate: Gate,
    run_match: Callable[[Mapping[str, str]], Match | None],
) -> Match | None:
    """Return the match against the champion, or None if the decision does not depend on one."""
    if champion is None or _record(champion) is None or candidate.evaluation.win_rate < gate.min_win_rate:
        return None
    return run_match(champion.tags)


def _decide(
    candidate: Candidate, champion: ModelVersion | None, match: Match | None, gate: Gate, number: int
) -> Decision:
    record = _record(champion) if champion is not None else None
    if champion is not None and record is None:
        text = f"the champion, version {champion.version}, has no recorded evaluation"
        return Decision(False, "unknown", text)
    return decide(candidate.evaluation, record, match, gate=gate, number=number)


def _record(version: ModelVersion) -> Evaluation | None:
    return Evaluation.from_json(version.tags.get(_EVALUATION, ""))


@contextmanager
def _registry_errors(mlflow: Mlflow, model: str) -> Iterator[None]:
    """Convert any error of MLflow, which raises those of four libraries, to an InfrastructureError."""
    try:
        yield
    except Exception as error:
        address = "(address hidden)" if has_credentials(mlflow.uri) else mlflow.uri
        raise InfrastructureError(
            f"MLflow at {address} did not register the model {model!r}: {short_reason(error)}"
        ) from error


def _find_or_create(mlflow: Mlflow, model: str, candidate: Candidate) -> tuple[ModelVersion, bool]:
    tags = {**candidate.tags, POLICY: candidate.policy_digest, _EVALUATION: candidate.evaluation.to_json()}
    for version in mlflow.versions(model):
        if version.tags.get(POLICY) == candidate.policy_digest:
            mlflow.tag_version(model, version.version, tags)
            return version, False
    source = candidate.source
    if mlflow.uri.startswith("http") and "://" not in source:
        # A server refuses a local path as a source, because it would serve the files. This scheme keeps the
        # path readable for users.
        source = f"local-store://{source}"
    description = _description(candidate)
    run_id = candidate.run_id if candidate.run_id and mlflow.has_run(candidate.run_id) else None
    return (
        mlflow.create_version(model, source=source, run_id=run_id, tags=tags, description=description),
        True,
    )


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
