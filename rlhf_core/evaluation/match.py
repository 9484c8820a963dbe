"""Match of the policy against the current champion.

Both answer the same prompts, which neither was trained on, and the judge of the evaluation compares the
answers. If the judge is a reward model, it is the one that the candidate was trained with. If the champion
was judged by another reward model, that one judges the same answers as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.prompt_sets import with_room
from rlhf_core.data.tokenizer import load_decoder, tokenizer_digest
from rlhf_core.errors import CorruptArtifact, InputError, UnexpectedError, classified
from rlhf_core.evaluation import generate, scoring
from rlhf_core.evaluation.language_model import MEASURE, LanguageModelJudge
from rlhf_core.evaluation.policy_files import (
    CONFIGURED_BY,
    PolicyFiles,
    files_made_with,
    policy_stage,
    trained_files,
)
from rlhf_core.evaluation.prompts import TrainedPrompts, data_of_ancestors, prompts_of_evaluation
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.regression import compare_on_sets, load_sets
from rlhf_core.evaluation.statistics import (
    Answer,
    Comparison,
    Interval,
    group_of,
    regression_differences,
    units,
)
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.pipeline import PolicyStage, StageName
from rlhf_core.record.schema import PREFERENCE, REWARD
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.rewards.compose import code_digests
from rlhf_core.storage.artifacts import ArtifactStore, open_artifacts
from rlhf_core.types import ArtifactRef, Nodes, PromptExample, RewardInput, StageContext

log = logging.getLogger(__name__)

MOST_SOURCES = 20
_HELD_OUT = "held-out"
"""Name of the prompts of the match; no regression set can have it."""


_OWN, _OF_CHAMPION = "own", "of champion"
"""Names of the scores by the judge of the candidate's evaluation and by the champion's reward model."""
_Pair = tuple[RewardInput, RewardInput]
"""Answers of candidate and champion to one prompt."""


class MatchSkipped(Exception):
    """The match is not possible. The message has the reason."""


@dataclass(frozen=True)
class MatchResult:
    """Result of a match of the candidate against the champion."""

    judge: str
    """The measure that decided."""
    judge_digest: str | None
    """Digest of the judge; None if it is not known."""
    prompt_ids: tuple[str, ...]
    """(n,) prompt of each pair of answers that was compared, in order."""
    comparison: Comparison
    """Comparison by the judge of the candidate's evaluation."""
    by_champion_model: Comparison | None
    """Comparison of the same prompts by the champion's reward model. None if the champion was not judged by
    one, if the judge is the same model, or if the model is not in this store.
    """
    length_controlled: Interval
    """Win rate of the candidate by the judge of its evaluation, with answers of equal length."""
    regression: Mapping[str, Mapping[str, float]]
    """Differences on the regression sets, candidate minus champion (`statistics.regression_differences`)."""
    by_source: Mapping[str, float]
    """Mean preference for the candidate over the prompts of each data source. Empty if there is only one, or
    more than `MOST_SOURCES`, because the record of a match is a tag of limited length.
    """
    samples: tuple[Mapping[str, str], ...]
    """The first `evaluate.samples` pairs of answers, with the winner by the judge, for people."""


@dataclass(frozen=True)
class _Champion:
    policy: PolicyFiles
    tokenizer: str
    data: tuple[Path, ...]
    """Data artifacts that it, its judges and the models before it were trained on."""
    template: str
    """`data.template` of its run."""
    reward: Path | None
    """The champion's reward model, if one was its judge. None if it is not in this store, or if it is the
    judge of the candidate as well.
    """


def run_match(config: PipelineConfig, context: StageContext, champion: Mapping[str, str]) -> MatchResult:
    """Compare the candidate in `context.inputs` with the champion, prompt by prompt.

    Args:
        config: Configuration of the candidate's run.
        context: Context of the register stage.
        champion: Tags of the champion's version.

    Raises:
        MatchSkipped: The champion is not in this store, has another tokenizer or template, or is of a kind
            that cannot be served, or too few prompts are left. Lack of memory and other failures of the
            system are raised as they are.
    """
    from rlhf_core.engines.distributed import resolve_device

    prompts = prompts_of_evaluation(config, load_prompts(context.data, "eval"))
    judge = scoring.choose_measure(config, gold_known=scoring.has_gold(prompts))
    opponent = _load_champion(config, context, champion, judge)
    # Answers are compared as tokens of one tokenizer: the judge scores the tokens of both.
    tokenizer = tokenizer_digest(context.inputs[config.register_.policy] / "policy")
    if (opponent.tokenizer, opponent.template) != (tokenizer, config.data.template):
        raise MatchSkipped("it has another tokenizer or template")
    prompts = _untrained_prompts(config, context, opponent)
    device = resolve_device(config.run.device)
    with evaluation_session(config, device, context):
        return _run_match(config, context, prompts, opponent, judge, device)


def _untrained_prompts(
    config: PipelineConfig, context: StageContext, opponent: _Champion
) -> list[PromptExample]:
    """Return the prompts of the match, which neither policy was trained on.

    Raises MatchSkipped if too few are left for a test.
    """
    data = context.data
    made = config.model_dump(mode="json", by_alias=True)
    try:
        before = data_of_ancestors(config, open_artifacts(config), made)
    except CorruptArtifact as error:
        raise MatchSkipped(f"prompts that the candidate was trained on are not known: {error}") from error
    # Also the data of the models that both were trained from: their prompts are not new to the policies
    # either.
    trained = TrainedPrompts.of([data, *before, *opponent.data])
    held_out = load_prompts(data, "eval")
    untrained = trained.untrained(held_out)
    # Equal prompts have equal ids, seeds and answers, so each id is asked once.
    unique = {prompt.prompt_id: prompt for prompt in prompts_of_evaluation(config, held_out, untrained)}
    if not unique:
        raise MatchSkipped("no held-out prompt is left that neither policy was trained on")
    groups = set(map(group_of, unique.values()))
    # Before anything is sampled: a match whose outcome is known would spend its level.
    if len(groups) < config.register_.min_prompts:
        left = " that neither policy was trained on" if len(untrained) < len(held_out) else ""
        raise MatchSkipped(
            f"only {units(len(groups), len(unique), 'held-out prompts')} are left{left}, and"
            f" register.min_prompts={config.register_.min_prompts} are needed; raise evaluate.prompts,"
            " data.max_eval and data.eval_fraction until there are enough"
        )
    return list(unique.values())


@dataclass(frozen=True)
class _Registered:
    """The artifacts of a registered version."""

    artifacts: ArtifactStore
    tags: Mapping[str, str]
    """Tags of the version."""
    nodes: Nodes | None
    """The hosts whose processes read them; None if those are here, or the store is a folder."""

    def fetch(self, stage: StageName) -> Path:
        """Return the folder of an artifact. With `nodes`, those fetch its weights, and this host does not."""
        ref = _artifact(self.artifacts, stage, self.tags)
        if self.nodes is not None:
            self.nodes.add_inputs([ref])
        return self.artifacts.fetch(ref, weights=self.nodes is None)


def _load_champion(
    config: PipelineConfig, context: StageContext, tags: Mapping[str, str], judge: str
) -> _Champion:
    """Return the champion's files and judge. Raises MatchSkipped if the store lacks one that is needed."""
    artifacts = open_artifacts(config)
    registered = _Registered(artifacts, tags, None if artifacts.is_local else context.nodes)
    try:
        trained_by = policy_stage(tags)
        data = _artifact(artifacts, "data", tags)
        made = artifacts.config(_artifact(artifacts, CONFIGURED_BY[trained_by], tags))
        trained_on = (artifacts.fetch(data), *data_of_ancestors(config, artifacts, made))
        folder = registered.fetch(trained_by)
        # By the settings of its own run, which decide whether its adapter is loaded separately.
        files = files_made_with(made, trained_by, folder, lambda: registered.fetch("sft"))
        own_judge = tags.get("eval.judge", "")
        # Versions of earlier releases have no tag with their judge.
        stage = scoring.MODEL_STAGES.get(own_judge or judge)
        reward = None
        if stage is not None and not _is_own_model(context, tags, stage, judge):
            reward = _reward_model(registered, stage)
        tokenizer = tokenizer_digest(folder / "policy")
        return _Champion(files, tokenizer, trained_on, str(made["data"]["template"]), reward)
    except (CorruptArtifact, InputError) as error:  # other errors of the store are retried by the pipeline
        raise MatchSkipped(error.message) from error


def _is_own_model(context: StageContext, tags: Mapping[str, str], stage: StageName, judge: str) -> bool:
    """Return whether the trained model that judged the champion is the judge of the candidate."""
    own = context.input_refs.get(stage)
    is_same = own is not None and own.digest == tags.get(f"rlhf.{stage}.digest")
    return is_same and judge == tags.get("eval.judge")


def _reward_model(champion: _Registered, stage: StageName) -> Path | None:
    try:
        return champion.fetch(stage) / "model"
    except MatchSkipped as reason:
        log.warning("the champion's model of the stage %s will not judge: %s", stage, reason)
        return None


def _artifact(artifacts: ArtifactStore, stage: StageName, tags: Mapping[str, str]) -> ArtifactRef:
    ref = artifacts.find_registered(stage, tags)
    if ref is None:
        raise MatchSkipped(f"its {stage} artifact is not in this store")
    return ref


def _run_match(
    config: PipelineConfig,
    context: StageContext,
    prompts: list[PromptExample],
    champion: _Champion,
    judge: str,
    device: str,
) -> MatchResult:
    """Generate the answers of both policies, judge the pairs, and return the result."""
    sets = {_HELD_OUT: prompts}
    if config.evaluate.regression:
        sets |= load_sets(config, context.inputs["evaluate"])
        config = with_room(config, sets)
    interval = Intervals(config, *sets.values())
    by_set = _responses_of_both(config, context, sets, champion, device)
    record = AnswerRecord("match", config.record, partial(generate.seed_of, config))
    for model, found in by_set.items():
        # The record has the names of stages, as in the evaluation.
        named = config.register_.policy if model == "candidate" else model
        for name, answers in found.items():
            record.add(named, sets[name], answers, name)
    pairs = list(zip(by_set["candidate"][_HELD_OUT], by_set["champion"][_HELD_OUT], strict=True))
    judged = _judge_pairs(config, context, pairs, champion.reward, judge, device, interval, record)
    compared = compare_on_sets(config, by_set, "champion", context.sources, interval, record)
    regression = regression_differences(compared, "candidate")
    prompt_ids = tuple(ours.prompt_id for ours, _ in judged.pairs)
    # Verdicts and not margins of scores, which have no bounds and differ between judges (decision 37).
    preferences = judged.comparison.preferences
    samples = []
    for pair, preference in list(zip(judged.pairs, preferences, strict=True))[: config.evaluate.samples]:
        samples.append(_sample(*pair, preference, config.register_.policy))
        [group] = interval.groups(pair[:1])
        # Only where it says more: another row would give the pages of earlier matches another digest
        # (`review.blind_pairs`).
        if group != pair[0].prompt_id:
            samples[-1]["group"] = group
    ours, theirs = zip(*judged.pairs, strict=True)
    record.note(f"{PREFERENCE}champion", ours, preferences)
    record.save(context)
    controlled = interval.length_controlled(preferences, ours, theirs, judged.comparison.groups)
    return MatchResult(
        judge,
        judged.judge_digest,
        prompt_ids,
        judged.comparison,
        judged.by_champion_model,
        controlled,
        regression,
        _by_source(prompts, prompt_ids, preferences),
        tuple(samples),
    )


def _responses_of_both(
    config: PipelineConfig,
    context: StageContext,
    sets: Mapping[str, list[PromptExample]],
    champion: _Champion,
    device: str,
) -> dict[str, dict[str, list[RewardInput]]]:
    """Return the responses of `candidate` and `champion`, by set of prompts.

    Raises MatchSkipped if the champion cannot be served.
    """
    decoder = load_decoder(context.data)

    def respond(name: str, files: PolicyFiles) -> dict[str, list[RewardInput]]:
        return generate.responses_to_sets(
            config,
            {name: files},
            decoder.response,
            sets,
            device=device,
            context=context,
            answers=config.evaluate.answers_per_prompt,
        )[name]

    candidate_by_set = respond("candidate", trained_files(config, config.register_.policy, context.inputs))
    try:
        champion_by_set = respond("champion", champion.policy)
    except Exception as error:
        # The candidate was just served in the same way. A retry helps against failures of the system, and not
        # against errors of the champion, which may be older or of another kind.
        if not isinstance(classified(error), InputError | UnexpectedError):
            raise
        raise MatchSkipped(f"it cannot be served here ({type(error).__name__}: {error})") from error
    return {"candidate": candidate_by_set, "champion": champion_by_set}


@dataclass(frozen=True)
class _JudgedPairs:
    """The pairs of answers that all judges could score, and what the judges say."""

    pairs: list[_Pair]
    comparison: Comparison
    """See `MatchResult.comparison`."""
    judge_digest: str | None
    by_champion_model: Comparison | None
    """See `MatchResult.by_champion_model`."""


def _judge_pairs(
    config: PipelineConfig,
    context: StageContext,
    pairs: list[_Pair],
    champion_reward: Path | None,
    judge: str,
    device: str,
    interval: Intervals,
    record: AnswerRecord,
) -> _JudgedPairs:
    """Compare the answers by the judge of the candidate's evaluation, and by the champion's reward model."""
    code = code_digests(config.ppo.rewards, context.sources)
    scorer = scoring.ResponseScorer(config, load_decoder(context.data).pad, device, context)

    def score(measure: str, reward: Path | None, column: str) -> list[float]:
        # In one call, so that batch normalisation treats both models' responses alike.
        samples = [ours for ours, _ in pairs] + [theirs for _, theirs in pairs]
        values = scorer.score(measure, reward, samples, code)
        record.note(column, samples, values)
        return values

    stage = scoring.MODEL_STAGES.get(judge)
    own_model = None if stage is None else context.inputs[stage] / "model"
    scores = {} if judge == MEASURE else {_OWN: score(judge, own_model, "score")}
    if champion_reward is not None:
        # The measure only selects the kind of scoring: the model may also be one of the stage `judge`.
        scores[_OF_CHAMPION] = score("reward_model", champion_reward, f"{REWARD}judge_of_champion")
    # Both judges compare the same pairs, and a language model is asked about no others.
    kept, scored = _scored(pairs, scores)
    digest: str | None
    if judge == MEASURE:
        model = LanguageModelJudge(config, context, device)
        comparison = model.compare([ours for ours, _ in kept], [theirs for _, theirs in kept], interval)
        digest = model.digest
    else:
        comparison = _compare_scores(interval, _OWN, scored)
        refs = context.input_refs
        known = scoring.judge_digests(config, gold_known=judge == "gold", reward_code=code, inputs=refs)
        digest = known.get(judge)
    # A policy's own reward model favours it. So that of the champion judges too, and the smaller evidence
    # of both counts (decision 37).
    by_champion_model = None
    if champion_reward is not None:
        by_champion_model = _compare_scores(interval, _OF_CHAMPION, scored)
    return _JudgedPairs(kept, comparison, digest, by_champion_model)


def _scored(
    pairs: list[_Pair], scores: Mapping[str, Sequence[float]]
) -> tuple[list[_Pair], list[tuple[Answer, Answer]]]:
    """Return the pairs to which no judge gave NaN, and their answers with the scores.

    `scores` has, by judge, those (2n,) of the candidate's answers, then those of the champion's. Raises
    MatchSkipped if no pair is left.
    """
    kept: list[_Pair] = []
    scored: list[tuple[Answer, Answer]] = []
    for index, (ours, theirs) in enumerate(pairs):
        our_scores = {name: values[index] for name, values in scores.items()}
        their_scores = {name: values[len(pairs) + index] for name, values in scores.items()}
        if not any(map(math.isnan, (*our_scores.values(), *their_scores.values()))):
            kept.append((ours, theirs))
            scored.append((Answer(ours, our_scores), Answer(theirs, their_scores)))
    if not kept:
        raise MatchSkipped("no pair of answers could be scored by all judges of the match")
    return kept, scored


def _compare_scores(interval: Intervals, judge: str, scored: Sequence[tuple[Answer, Answer]]) -> Comparison:
    ours, theirs = zip(*scored, strict=True)
    return interval.compare(ours, theirs, judge)


def _by_source(
    prompts: Sequence[PromptExample], prompt_ids: Sequence[str], preferences: Sequence[float]
) -> dict[str, float]:
    """Return the mean of the preferences (n,), each with its prompt, by source."""
    sources = {prompt.prompt_id: prompt.source for prompt in prompts}
    found: dict[str, list[float]] = {}
    for prompt_id, preference in zip(prompt_ids, preferences, strict=True):
        found.setdefault(sources[prompt_id], []).append(preference)
    if not 1 < len(found) <= MOST_SOURCES:
        return {}
    # Cut, because the record of a match is a tag of limited length.
    return {source[:100]: fmean(of_source) for source, of_source in sorted(found.items())}


def _sample(ours: RewardInput, theirs: RewardInput, preference: float, policy: PolicyStage) -> dict[str, str]:
    """Return a row of the samples, where the candidate has the name of the stage that trained it."""
    winners = {1.0: policy, 0.5: "tie", 0.0: "champion"}
    return {
        "prompt_id": ours.prompt_id,
        "prompt": ours.prompt,
        "champion": theirs.response,
        policy: ours.response,
        "winner": winners[preference],
    }
