"""Stage `register`: the policy becomes a version in the MLflow registry, and champion if its evaluation says
so.

Leaves `registration.json`: `model`, `version`, `created`, `champion`, `rule`, `reason`, `previous_champion`,
`match`, `votes` against the SFT model, `source`, `weights_sha256`, and for a policy of DPO `policy`. After a
match also `match_samples.jsonl` (pairs of answers to read) and `match-DIGEST.json` (the match, which a later
registration uses again).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.algo.groups import by_group
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, CorruptArtifact, InputError
from rlhf_core.evaluation.match import MatchResult, MatchSkipped, run_match
from rlhf_core.evaluation.measures import results_of, titles_of
from rlhf_core.evaluation.policy_files import POLICY_STAGE
from rlhf_core.evaluation.review import Opponent, load_blind_pairs, page_digest, win_rate_by_people
from rlhf_core.evaluation.scoring import MODEL_STAGES
from rlhf_core.evaluation.summary import policy_metrics
from rlhf_core.evaluation.votes import newest_files, read_vote_files
from rlhf_core.pipeline import STAGES
from rlhf_core.storage.artifacts import ArtifactStore, open_artifacts
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import write_json, write_jsonl
from rlhf_core.tracking.champions import BASE, POLICY, REFERENCE, WEIGHTS, registry_errors
from rlhf_core.tracking.gate import Evaluation, Gate, Match, NoMatch, Votes, log_evidence
from rlhf_core.tracking.mlflow_client import Mlflow, clean_name
from rlhf_core.tracking.registry import Candidate, Registration, register
from rlhf_core.tracking.tracker import open_tracking
from rlhf_core.types import Lineage, StageContext, StageResult, prefixed

log = logging.getLogger(__name__)

TRACKER_SECONDS = 300.0
"""An MLflow server that is started again has some minutes for it."""
_SAMPLES = "match_samples.jsonl"
"""Pairs of answers of the match, for people."""


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Register the policy of the stage `register.policy`. The source is its address in the store: nothing is
    copied.

    MLflow is waited for. Raises InfrastructureError if it does not answer; a second run then finds what the
    first one made.
    """
    lineage = context.lineage
    if lineage is None:
        raise InputError(
            "The stage register needs the lineage of its inputs (StageContext.lineage); run it by the"
            " pipeline."
        )
    # Before anything is registered, because a file that cannot be used ends the stage.
    votes = _VotesOfPeople(config, context)
    weights_digest = lineage.inputs[config.register_.policy].attributes["weights_sha256"]
    tracking = open_tracking(config)
    # This stage alone cannot go on without MLflow; others keep their metrics and send them later.
    tracking.wait(TRACKER_SECONDS)
    candidate = _candidate(config, context, lineage, votes, weights_digest, tracking.mlflow)
    registration = register(
        tracking.mlflow,
        config.registered_model,
        candidate,
        gate=Gate(
            config.register_.min_win_rate,
            config.register_.min_prompts,
            config.register_.alpha,
            config.register_.votes_margin,
            config.register_.independent_judge,
        ),
        run_match=lambda tags: _find_or_run_match(config, context, tags, votes),
    )
    # After the match, whose page the votes may be about.
    votes.warn_of_other_pages(registration.already_champion)
    model, version, decision = registration.model, registration.version, registration.decision
    log.info("%s version %s: champion=%s (%s)", model, version, decision.champion, decision.text)
    tracking.set_tags(lineage.parent_run_id, {"rlhf.model_version": f"{model}/{version}"})
    facts: dict[str, Any] = {
        "model": model,
        "version": version,
        "created": registration.created,
        "champion": decision.champion,
        "rule": decision.rule,
        "reason": decision.text,
        "previous_champion": registration.previous,
        "match": registration.match.record() if registration.match else None,
        "votes": candidate.evaluation.votes,
        "source": candidate.source,
        "weights_sha256": weights_digest,
    }
    if config.register_.policy != "ppo":
        facts["policy"] = config.register_.policy
    write_json(context.output / "registration.json", facts, indent=1)
    headline = _headline(registration, candidate.evaluation.votes)
    return StageResult(headline, {name: value for name, value in facts.items() if value is not None})


def _candidate(
    config: PipelineConfig,
    context: StageContext,
    lineage: Lineage,
    votes: _VotesOfPeople,
    weights_digest: str,
    mlflow: Mlflow,
) -> Candidate:
    """Return what is registered of the policy."""
    trained_by = config.register_.policy
    policy, evaluated = lineage.inputs[trained_by], lineage.inputs["evaluate"]
    folder = context.inputs["evaluate"]
    content = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    # A run can have hundreds of data sources. Their metrics are in the run of the evaluation.
    metrics = {name: value for name, value in evaluated.metrics.items() if not name.startswith("by_source/")}
    # With the plain names, so that versions of all policies have the same tags.
    metrics |= policy_metrics(results_of(content, trained_by), "ppo")
    return Candidate(
        source=f"{policy.uri}/policy",
        policy_digest=policy.digest,
        run_id=policy.mlflow_run_id,
        tags=_tags(config, lineage, content, metrics, weights_digest)
        | _reference_tags(mlflow, lineage.parent_run_id),
        evaluation=replace(
            Evaluation.of(content, trained_by),
            votes=votes.win_rate(folder / "samples.jsonl", "sft"),
        ),
    )


def _headline(registration: Registration, votes_against_sft: Votes | None) -> dict[str, float]:
    """Return the headline metrics of the stage."""
    match = registration.match
    headline = {"version": float(registration.version), "champion": float(registration.decision.champion)}
    if match is not None:
        headline["win_rate_over_champion"] = match.win_rate
        headline |= prefixed("length_controlled_over_champion/", match.length_controlled)
        for source, win_rate in match.by_source.items():
            headline[f"by_source/{source}/win_rate_over_champion"] = win_rate
    against = {"sft": votes_against_sft, "champion": match.votes if match else None}
    for opponent, votes in against.items():
        headline |= prefixed(f"votes_against_{opponent}/", votes or {})
    return headline


class _VotesOfPeople:
    """The files of votes in `register.votes`.

    Raises ConfigError if one cannot be read, is damaged, or was changed after the run began.
    """

    def __init__(self, config: PipelineConfig, context: StageContext) -> None:
        self._confidence = config.evaluate.confidence
        self._policy = config.register_.policy
        files = read_vote_files(config)
        for field, file in files.items():
            if context.sources.get(field, file.digest) != file.digest:
                raise ConfigError(f"{field} was changed after the run began; run again")
        self._files = newest_files(files.values())
        self._pages: dict[Opponent, str] = {}
        for file in files.values():
            if file not in self._files:
                log.info(
                    "%s does not count: another file is equal, or has later votes of the same person",
                    file.name,
                )
            elif file.is_empty:
                log.warning("%s has no vote and does not count", file.name)

    def win_rate(self, samples: Path, opponent: Opponent) -> Votes | None:
        """Return the votes of people about the pairs in a file of samples.

        Raises ConfigError if a file of their page has another number of votes.
        """
        if not self._files:
            return None
        pairs = load_blind_pairs(samples, opponent, self._policy)
        self._pages[opponent] = page_digest(pairs)
        try:
            return win_rate_by_people(self._files, pairs, confidence=self._confidence)
        except InputError as error:
            raise ConfigError(error.message) from error

    def warn_of_other_pages(self, already_champion: bool) -> None:
        """Warn of votes that did not count because no page of this run has them."""
        if "champion" in self._pages:
            reason = "it has votes of a page that is not of this evaluation or match"
        elif already_champion:
            reason = "no match was run, because the policy is champion already"
        else:
            reason = "no match was run, and it has votes of a page that is not of this evaluation"
        for file in self._files:
            if file.page not in self._pages.values():
                log.warning("%s was not counted: %s", file.name, reason)


def _find_or_run_match(
    config: PipelineConfig, context: StageContext, champion: Mapping[str, str], votes: _VotesOfPeople
) -> Match | NoMatch:
    name, samples = match_name(config, context, champion), context.output / _SAMPLES
    match = _load_match(config, name, context.output)
    if match is None:
        try:
            result = run_match(config, context, champion)
        except MatchSkipped as reason:
            log.warning("no match against the champion, which therefore stays: %s", reason)
            # Not kept as a match: the reason may be gone at the next registration.
            return NoMatch(str(reason))
        write_jsonl(samples, result.samples)
        match = match_record(result)
    # Without the votes: a later registration with this match can have others.
    _keep_match(context.output, name, match)
    return replace(match, votes=votes.win_rate(samples, "champion"))


def match_record(result: MatchResult) -> Match:
    """Return what the registry records of a match."""
    rate, verdicts = result.comparison.win_rate, result.comparison.verdicts
    by_champion = result.by_champion_model
    by_judge = [_outcomes(result.comparison.preferences)]
    away: dict[str, Any] = {}
    if by_champion is not None:
        by_judge.append(_outcomes(by_champion.preferences))
        away["away_win_rate"] = by_champion.win_rate.mean
        away["away_ties"] = by_champion.verdicts.ties
        away["away_log_evidence"] = log_evidence(_outcomes(by_champion.group_preferences))
    # With the outcomes of both judges, because both decide: a match in which one of them differs is another.
    outcomes = []
    for prompt, *of_prompt in zip(result.prompt_ids, *by_judge, strict=True):
        outcomes.append(" ".join([prompt, *(f"{outcome:g}" for outcome in of_prompt)]))
    groups = [" ".join(of_group) for of_group in by_group(outcomes, result.comparison.groups)]
    prompts = len(set(result.prompt_ids))
    return Match(
        rate.mean,
        rate.low,
        rate.high,
        verdicts.prompts,
        verdicts.wins,
        verdicts.losses,
        result.judge,
        judge_digest=result.judge_digest,
        log_evidence=log_evidence(_outcomes(result.comparison.group_preferences)),
        **away,
        outcomes=tuple(groups),
        length_controlled=result.length_controlled.to_json(),
        regression=result.regression,
        by_source=result.by_source,
        grouped_prompts=prompts if verdicts.prompts < prompts else 0,
    )


def _outcomes(preferences: Sequence[float]) -> list[float]:
    """Return 1 for each win, 0 for a tie and -1 for a loss, and means of these for mean preferences."""
    return [2 * preference - 1 for preference in preferences]


# -- the match of an earlier registration, which is used again with `register.votes` --

# Votes of people are about the answers of one match. On GPUs, the same seeds can give other answers: then the
# votes fit no later match, and each of them is another test, which spends its own level.


def match_name(config: PipelineConfig, context: StageContext, champion: Mapping[str, str]) -> str:
    """Return the name of the file with the match of the candidate in `context` against a champion.

    It contains a digest of what decides the match: the inputs of the stage, among them the candidate's
    judge, the champion, and its judge if that is a trained model which the store has now.
    """
    identity = {
        # A release in which a match has another result has another version.
        "version": STAGES["register"].version,
        "inputs": {stage: ref.digest for stage, ref in context.input_refs.items()},
        # Not the files of votes: the match is used again when they are there.
        "sources": {name: it for name, it in context.sources.items() if not name.startswith("register.")},
        "champion": [champion.get(POLICY), champion.get("eval.judge")],
        "judges_of_champion": _judges(open_artifacts(config), champion),
    }
    return f"match-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _judges(artifacts: ArtifactStore, champion: Mapping[str, str]) -> dict[str, str | None]:
    """Return the digests of trained models that can be the champion's judge; None for a missing one."""
    own = champion.get("eval.judge")
    digests: dict[str, str | None] = {}
    for judge, stage in MODEL_STAGES.items():
        if own in (judge, None):  # None: any of them can have judged a version without the tag
            ref = artifacts.find_registered(stage, champion)
            digests[stage] = None if ref is None else ref.digest
    return digests


def _keep_match(output: Path, name: str, match: Match) -> None:
    """Write the match, without its votes, to the output of the stage. Its samples are there already."""
    for other in output.glob("match-*.json"):  # against a champion that was replaced during the match
        other.unlink()
    content = match.record() | {"votes": None, "outcomes": match.outcomes}
    (output / name).write_text(json.dumps(content) + "\n", encoding="utf-8")


def _load_match(config: PipelineConfig, name: str, output: Path) -> Match | None:
    """Return the match with this name that an earlier registration kept, and copy its samples to `output`;
    None if there is none.
    """
    artifacts = open_artifacts(config)
    ref = artifacts.find_file("register", name)
    if ref is None:
        return None
    try:
        folder = artifacts.fetch(ref)
    except CorruptArtifact as error:
        log.warning("the match is run again: %s", error.message)
        return None
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    shutil.copyfile(folder / _SAMPLES, output / _SAMPLES)
    log.info("the match against the champion is that of the artifact register/%s", ref.key)
    match = Match(**content)
    return replace(match, outcomes=tuple(match.outcomes))


# -- what is recorded --


def _reference_tags(mlflow: Mlflow, run_id: str | None) -> dict[str, str]:
    """Return the tags of the MLflow run that say what references in the configuration stood for."""
    with registry_errors(mlflow, f"read the tags of the run {run_id}"):
        tags = mlflow.tags(run_id) if run_id is not None and mlflow.has_run(run_id) else {}
    return {name: value for name, value in tags.items() if name == BASE or name.startswith(REFERENCE)}


def _is_shown(metric: str) -> bool:
    """Return whether a metric of the evaluation is a tag: a mean, and not of one source of data."""
    is_bound = metric.endswith(("/low", "/high")) and not metric.startswith("win_rate/")
    return not is_bound and not metric.startswith(("by_source/", "distinct_"))


def _tags(
    config: PipelineConfig,
    lineage: Lineage,
    evaluation: Mapping[str, Any],
    metrics: Mapping[str, float],
    weights_digest: str,
) -> dict[str, str]:
    """Return the tags of a version: where it comes from, and the numbers that versions are compared by."""
    text = config.model_dump_json(by_alias=True)
    tags = {
        WEIGHTS: weights_digest,
        "rlhf.config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "rlhf.seed": str(config.run.seed),
        "rlhf.versions": json.dumps(versions()),
        **{f"eval.{name}": f"{value:.6g}" for name, value in metrics.items() if _is_shown(name)},
        "eval.judge": str(evaluation.get("judge")),
        "rlhf.algorithm": titles_of(config.ppo.title)[config.register_.policy],
    }
    for name, ref in lineage.inputs.items():
        tags |= {f"rlhf.{name}.key": ref.key, f"rlhf.{name}.digest": ref.digest}
    if config.register_.policy != "ppo":
        tags[POLICY_STAGE] = config.register_.policy
    if config.sample is not None and config.sample.policy != "ppo":
        tags["rlhf.sample.policy"] = config.sample.policy
    if lineage.parent_run_id is not None:
        tags["rlhf.parent_run_id"] = lineage.parent_run_id
    return {clean_name(name.replace("/", ".")): value for name, value in tags.items()}
