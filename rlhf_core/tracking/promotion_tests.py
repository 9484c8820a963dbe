"""The tests of candidates for champion, and the level that each of them spent.

A test is recorded in two places: the tag `rlhf.outcome` of its version, and a tag of the registered model,
which remains if the version is deleted. Both are read, and a test that is in both counts once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_core.evaluation.evidence import Spent, next_level
from rlhf_core.system.failpoints import failpoint
from rlhf_core.tracking.gate import Evaluation, Gate, Match, NoMatch
from rlhf_core.tracking.mlflow_client import Mlflow

OUTCOME = "rlhf.outcome"
"""Tag of a version with the outcome of its last registration, and all its tests."""
_TEST = "rlhf.test."
"""Prefix of the tags of the registered model with one test each."""


@dataclass(frozen=True)
class PromotionTest:
    """A test that a version was subject to."""

    time: float
    """Seconds since 1970."""
    level: float
    champion: str | None
    """The champion that the version was compared with; None: its own SFT model."""
    judge: str | None
    """Digest of the judge."""
    prompts: int
    outcomes: str
    """Digest of the outcomes of these prompts."""


def all_tests(mlflow: Mlflow, model: str) -> dict[str, list[PromotionTest]]:
    """Return the tests of `model` by version, also of versions that were deleted.

    A test that only its version has, because an earlier release recorded it, is added to the tags of the
    model.
    """
    # By tag of the model. A test has one time and one level, also if more prompts continue it.
    tests: dict[str, tuple[str, PromotionTest]] = {}
    tags = mlflow.model_tags(model) or {}
    for name, text in tags.items():
        if name.startswith(_TEST) and (test := _read(_parsed(text))) is not None:
            tests[name] = (name.rpartition(".")[2], test)
    for version in mlflow.versions(model):
        for entry in _entries(version.tags):
            test = _read(entry)
            if test is not None and _tag(version.version, test) not in tests:
                record_test(mlflow, model, version.version, test)
                tests[_tag(version.version, test)] = (version.version, test)
    by_version: dict[str, list[PromotionTest]] = {}
    for number, test in sorted(tests.values(), key=lambda entry: entry[1].time):
        by_version.setdefault(number, []).append(test)
    return by_version


def record_test(mlflow: Mlflow, model: str, version: str, test: PromotionTest) -> None:
    """Record a test of a version in the tags of the model."""
    mlflow.tag_model(model, {_tag(version, test): json.dumps(asdict(test))})


def next_test(
    evaluation: Evaluation,
    match: Match | NoMatch | None,
    opponent: str | None,
    own: Iterable[PromotionTest],
    others: Iterable[PromotionTest],
    gate: Gate,
    now: float,
) -> PromotionTest:
    """Return the test that is to be made, with its level.

    A match that repeats the outcomes of an earlier one and adds prompts continues its test, at the same
    level. A process that was killed after it recorded a test therefore makes the same decision again.

    Args:
        evaluation: Evaluation of the candidate.
        match: Its match, if there was one.
        opponent: Version of the champion.
        own: Earlier tests of the candidate.
        others: Tests of all versions of the model.
        gate: Requirements for a champion.
        now: Time of a new test, in seconds since 1970.
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
    for test in own:
        if (test.champion, test.judge, test.outcomes) == (opponent, judge, digest(test.prompts)):
            return PromotionTest(test.time, test.level, opponent, judge, prompts, digest(prompts) or "")
    level = _level(opponent, others, gate, now)
    return PromotionTest(now, level, opponent, judge, prompts, digest(prompts) or "")


def _level(opponent: str | None, others: Iterable[PromotionTest], gate: Gate, now: float) -> float:
    """Return the level of a test at time `now` against `opponent`, after the tests `others`.

    It is above 0, as a test needs it. Nothing is left if five processes test at the same time, or if the
    clock of this host is behind those of the hosts that made the last tests.
    """
    if opponent is None:
        return gate.first_level(1 + sum(test.champion is None for test in others))
    spent = [Spent(test.time, test.level) for test in others if test.champion is not None]
    return max(next_level(spent, now, gate.alpha), sys.float_info.min)


def spend(mlflow: Mlflow, model: str, version: str, test: PromotionTest, gate: Gate) -> PromotionTest:
    """Record a test of a version, and return it with the level that it has.

    Two processes can read the tests at the same time and would spend the same part of the budget. Each
    records its test before it reads the others again. At least one of both sees the other's test, and its
    level becomes smaller. The level of a test that the tag `OUTCOME` of its version has is settled.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        version: Number of the version that is tested.
        test: Result of `next_test`.
        gate: Requirements for a champion.
    """
    record_test(mlflow, model, version, test)
    failpoint("register.tested")
    tested = mlflow.version(model, version)
    tags = tested.tags if tested is not None else {}
    settled = [_read(entry) for entry in _entries(tags)]
    if any(each is not None and (each.time, each.level) == (test.time, test.level) for each in settled):
        return test
    others = [
        each
        for number, tests in all_tests(mlflow, model).items()
        for each in tests
        if (number, each.time) != (version, test.time)
    ]
    level = _level(test.champion, others, gate, test.time)
    if level < test.level:
        test = replace(test, level=level)
        record_test(mlflow, model, version, test)
    return test


def read_outcome(tags: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the tag `OUTCOME`. Empty if it is missing or invalid, because tags can be
    edited.
    """
    kept = _parsed(tags.get(OUTCOME, "{}"))
    return kept if isinstance(kept, dict) else {}


def _entries(tags: Mapping[str, str]) -> list[Any]:
    """Return the tests in the tag `OUTCOME`, each as it was written."""
    entries = read_outcome(tags).get("tests")
    return entries if isinstance(entries, list) else []


def _tag(version: str, test: PromotionTest) -> str:
    return f"{_TEST}{round(test.time * 1e6):020d}.{version}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read(entry: Any) -> PromotionTest | None:
    """Return the test in an entry of a tag; None if it cannot be read."""
    try:
        test = PromotionTest(**entry)
    except TypeError:
        return None
    if isinstance(test.level, float) and isinstance(test.time, float) and 0 < test.level < 1:
        return test
    return None
