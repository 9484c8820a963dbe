"""Stage `evaluate`: the policies of PPO and DPO, or the one that there is, against the SFT model on held-out
prompts, and against each other.

    (agreement of language models with people ->) prompts -> responses of SFT, then of each policy (same
    seeds) -> scores by each measure -> KL -> win rate -> win rates over the data's chosen answers ->
    regression sets -> report

Leaves `evaluation.json` (the numbers), `samples.jsonl` (pairs to read), `report.html` (self-contained),
`figures/` (all of these in `evaluation_files.py`), the prompts of regression sets in `regression/`, and all
answers in the record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.evaluate import POLICIES
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.prompt_sets import with_room
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import DataError
from rlhf_core.evaluation import generate, scoring
from rlhf_core.evaluation.chosen_answers import by_score, compare_with_chosen, load_chosen, prompts_to_answer
from rlhf_core.evaluation.exchanged_prompts import exchanged_gold
from rlhf_core.evaluation.language_model import MEASURE, LanguageModelJudge
from rlhf_core.evaluation.measures import flat_name, main_policy, titles_of
from rlhf_core.evaluation.policy_files import PolicyFiles, trained_files
from rlhf_core.evaluation.prompts import prompts_of_evaluation, shared_prompts
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.regression import compare_on_sets, prepare_sets
from rlhf_core.evaluation.statistics import Answer, Comparison, failed_sets, regression_differences
from rlhf_core.evaluation.summary import (
    ByModel,
    Intervals,
    JudgeFacts,
    Measured,
    OptionalResults,
    answered_prompts,
    answers,
    evaluation_json,
    flat_metrics,
    notable_rows,
    sample_rows,
    without_masked,
)
from rlhf_core.record.answers import AnswerRecord
from rlhf_core.record.schema import PREFERENCE, REWARD
from rlhf_core.rewards.compose import code_digests
from rlhf_core.stages.agreement import check_language_model_rewards, load_checked_judge
from rlhf_core.stages.evaluation_files import Samples, write_evaluation
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PromptExample, RewardInput, StageContext, StageResult, prefixed

log = logging.getLogger(__name__)

_HELD_OUT, _CHOSEN = "held-out", "chosen answers"
"""Reserved names of sets of prompts. A regression set cannot use them."""
_ANSWERED = 128
"""Prompts with answers that the tracker gets one by one. It takes tens of milliseconds for each."""
_NOTABLE = 3
"""Answers that the report shows of each selection."""


def run(config: PipelineConfig, context: StageContext) -> StageResult:
    """Evaluate the models; see the module's docstring.

    Raises:
        DataError: There are no held-out prompts.
        ConfigError: The judge is one that this run does not have.
        GateFailed: A language model that judges or rewards agrees too little with the held-out pairs.
        RLHFError: What engines, models and reward sources raise.
    """
    prompts = _held_out_prompts(config, context)
    gold_known = scoring.has_gold(prompts)
    judge = scoring.choose_measure(config, gold_known=gold_known)
    decoder = load_decoder(context.data)
    device = resolve_device(config.run.device)
    policies = _policies(config, context)
    policy = main_policy(policies)
    models = {"sft": PolicyFiles(context.inputs["sft"] / "model"), **policies}
    count = config.evaluate.answers_per_prompt
    sources = [prompt.source or "unnamed" for prompt in prompts] * count
    pairs = load_chosen(config, context.data, judge)
    regression_sets = prepare_sets(config, context)
    config = with_room(config, regression_sets)
    sets = {_HELD_OUT: prompts, _CHOSEN: prompts_to_answer(pairs, prompts), **regression_sets}
    interval = Intervals(config, prompts, pairs, *regression_sets.values())
    stage = scoring.MODEL_STAGES.get(judge)
    judge_model = None if stage is None else context.inputs[stage] / "model"
    scorer = scoring.ResponseScorer(config, decoder.pad, device, context)
    score = partial(scorer.score, judge, judge_model)
    record = AnswerRecord("evaluation", config.record, partial(generate.seed_of, config))
    with evaluation_session(config, device, context):
        # First: a judge that is refused costs no samples. PPO has measured its rewards before.
        agreement = {} if policy == "ppo" else check_language_model_rewards(config, context, "evaluate")
        language_model = None
        if judge == MEASURE:
            language_model = load_checked_judge(config, context, "evaluate", "eval", device)
        by_model = generate.responses_to_sets(
            config, models, decoder.response, sets, device=device, context=context, answers=count
        )
        responses = {model: by_set[_HELD_OUT] for model, by_set in by_model.items()}
        measured = _measure(config, context, policies, responses, sources, scorer, gold_known=gold_known)
        _add_answers(record, sets, by_model, measured, judge)
        to_pairs = {model: [*by_set[_HELD_OUT], *by_set[_CHOSEN]] for model, by_set in by_model.items()}
        regression = compare_on_sets(config, by_model, "sft", context.sources, interval, record)
        prefer = by_score(score) if language_model is None else language_model.prefer
        over_chosen = compare_with_chosen(pairs, to_pairs, decoder.response, prefer, interval)
        responses, measured = without_masked(responses, measured)
        failpoint("evaluate.measured")
        scored_answers = answers(responses, measured)

        def versus(model: str, opponent: str) -> Comparison:
            if language_model is not None:
                found = language_model.compare(responses[model], responses[opponent], interval)
            else:
                found = interval.compare(scored_answers[model], scored_answers[opponent], judge)
            record.note(f"{PREFERENCE}{opponent}", responses[model], found.preferences)
            return found

        ppo_over_dpo = versus("ppo", "dpo") if len(policies) > 1 else None
        # The main policy is the last one: what is reported of the judge's consistency is of this comparison.
        last_first = {name: versus(name, "sft") for name in reversed(policies)}
        comparisons = dict(reversed(last_first.items()))
    facts = _judge_facts(config, context, judge, policies, language_model, gold_known=gold_known)
    others = OptionalResults(
        ppo_over_dpo=ppo_over_dpo,
        gold_exchanged=exchanged_gold(responses, interval) if gold_known else None,
        over_chosen=over_chosen,
        regression=regression,
        unscored=len(sources) - len(measured.sources),
    )
    evaluation = evaluation_json(responses, measured, comparisons, facts, interval, others)
    evaluation["rl_algorithm"] = config.ppo.title
    name_of_judge = scoring.judge_name(config, judge)
    samples = _shown(config, scored_answers, comparisons, policy, name_of_judge)
    metrics = flat_metrics(evaluation) | agreement
    if language_model is not None:
        metrics |= language_model.metrics()
    record.save(context)
    write_evaluation(config, context, evaluation, samples, measured, metrics)
    attributes = {"prompts": len(prompts), "judge": name_of_judge, "rl_algorithm": config.ppo.title}
    for name, is_trained_on in facts.trained_on.items():
        attributes[flat_name("judge_trained_on", name)] = is_trained_on
    return StageResult(metrics, attributes | _failed_regression_sets(regression, policies))


def _shown(
    config: PipelineConfig,
    scored: Mapping[str, Sequence[Answer]],
    comparisons: Mapping[str, Comparison],
    policy: str,
    judge: str,
) -> Samples:
    """Return the answers to read. The first ones are not selected, so that they are representative."""
    first = range(min(config.evaluate.samples, len(scored["sft"])))
    titles = titles_of(config.ppo.title)
    return Samples(
        sample_rows(scored, comparisons, first),
        notable_rows(scored, comparisons, policy, _NOTABLE),
        answered_prompts(scored, comparisons, titles, judge, _ANSWERED),
    )


def _add_answers(
    record: AnswerRecord,
    sets: Mapping[str, Sequence[PromptExample]],
    by_model: Mapping[str, Mapping[str, Sequence[RewardInput]]],
    measured: Measured,
    judge: str,
) -> None:
    """Add all answers of all models, and note the values of those to held-out prompts."""
    for model, by_set in by_model.items():
        for name, answers_to_set in by_set.items():
            record.add(model, sets[name], answers_to_set, name)
    scores = {**measured.rules, **measured.measures}
    columns = {f"{REWARD}{name}": values for name, values in scores.items()}
    columns |= {"score": measured.measures.get(judge, {}), "kl": measured.kl}
    for column, values in columns.items():
        for model, of_model in values.items():
            record.note(column, by_model[model][_HELD_OUT], of_model)


def _failed_regression_sets(regression: Mapping[str, Any], policies: Iterable[str]) -> dict[str, str]:
    """Return the regression sets that failed: `fallen` of PPO's policy, `fallen_dpo` of DPO's."""
    fallen = {}
    for policy in policies:
        if failed := failed_sets(regression_differences(regression, policy)):
            fallen[flat_name("fallen", policy)] = ", ".join(failed)
            log.warning("regression sets failed against the SFT model (%s): %s", policy, ", ".join(failed))
    return fallen


def _judge_facts(
    config: PipelineConfig,
    context: StageContext,
    judge: str,
    policies: Mapping[str, PolicyFiles],
    language_model: LanguageModelJudge | None,
    *,
    gold_known: bool,
) -> JudgeFacts:
    digests = scoring.judge_digests(
        config,
        gold_known=gold_known,
        reward_code=code_digests(config.ppo.rewards, context.sources),
        inputs=context.input_refs,
    )
    if language_model is not None:
        digests[MEASURE] = language_model.digest
    trained_on: dict[str, bool] = {}
    for policy in POLICIES:
        if policy in policies:
            trained_on[policy] = scoring.policy_trained_on(config, policy, judge)
    about = None if language_model is None else language_model.to_json()
    return JudgeFacts(judge, digests, trained_on, about)


def _held_out_prompts(config: PipelineConfig, context: StageContext) -> list[PromptExample]:
    """Return the prompts of the evaluation. Raises `DataError` if there are none."""
    held_out = load_prompts(context.data, "eval")
    prompts = prompts_of_evaluation(config, held_out)
    if not prompts:
        raise DataError(
            "evaluation needs held-out prompts; got 0; raise data.eval_fraction or give more prompts"
        )
    if config.evaluations_choose and (shared := shared_prompts(config, held_out)):
        log.warning(
            "%d of %d prompts also chose PPO's policy, because only %d prompts are held out: results are"
            " slightly too high; raise data.eval_fraction or data.max_eval",
            shared,
            len(prompts),
            len(held_out),
        )
    return prompts


def _policies(config: PipelineConfig, context: StageContext) -> dict[str, PolicyFiles]:
    """Return the files of the policies that the run has, that of PPO first."""
    policies: dict[str, PolicyFiles] = {}
    for stage in POLICIES:
        if stage in context.inputs:
            policies[stage] = trained_files(config, stage, context.inputs)
    return policies


def _measure(
    config: PipelineConfig,
    context: StageContext,
    policies: Mapping[str, PolicyFiles],
    responses: Mapping[str, list[RewardInput]],
    prompt_sources: list[str],
    scorer: scoring.ResponseScorer,
    *,
    gold_known: bool,
) -> Measured:
    """Score all responses with every measure.

    There is one call for each measure, because batch normalisation must cover the responses of all models.
    """
    sources = scoring.rule_sources(config)
    models = {name: stage for name, stage in scoring.MODEL_STAGES.items() if stage in context.inputs}
    parts = len(models) + len(policies) + int(gold_known) + int(bool(sources))
    done = 0

    def report() -> None:
        nonlocal done
        context.progress("evaluate scores", done, parts, "measures")
        done += 1

    count = len(responses["sft"])
    all_responses = list(chain.from_iterable(responses.values()))

    def by_model(values: Sequence[float]) -> ByModel:
        found: ByModel = {}
        # Each model has as many responses, and its responses are adjacent.
        for index, model in enumerate(responses):
            found[model] = list(values[index * count : (index + 1) * count])
        return found

    measures: dict[str, ByModel] = {}
    rules: dict[str, ByModel] = {}
    report()
    if gold_known:
        measures["gold"] = by_model(scoring.score_gold(all_responses))
        report()
    for name, stage in models.items():
        measures[name] = by_model(scorer.reward_model(context.inputs[stage] / "model", all_responses))
        report()
    if sources:
        batch = scoring.score_rules(
            config, sources, all_responses, code_digests(config.ppo.rewards, context.sources)
        )
        if usage := prefixed("eval/rules/", batch.usage_metrics()):
            context.metrics.log_metrics(usage, 0)
        if any(source.weight for source in sources):
            measures["rules"] = by_model(batch.total)
        rules = {name: by_model(values) for name, values in batch.by_source.items()}
        report()
    reference = context.inputs["sft"] / "model"
    kl: ByModel = {}
    for name, files in policies.items():
        kl[name] = scorer.policy_kl(files, reference, responses[name])
        report()
    return Measured(measures, rules, kl, prompt_sources)
