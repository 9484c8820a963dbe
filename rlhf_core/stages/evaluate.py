"""Stage `evaluate`: the policies of PPO and DPO, or the one that there is, against the SFT model on held-out
prompts, and against each other.

    (agreement of language models with people ->) prompts -> responses of SFT, then of each policy (same
    seeds) -> scores by each measure -> KL -> win rate -> win rates over the data's chosen answers ->
    regression sets -> report

Leaves `evaluation.json` (the numbers), `samples.jsonl` (pairs to read), `report.html` (self-contained),
`figures/` (all of these by `write_evaluation`), the prompts of regression sets in `regression/`, and all
answers in the record.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_pairs, load_prompts
from rlhf_core.data.prompt_sets import with_room
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import DataError
from rlhf_core.evaluation import generate, plots, scoring
from rlhf_core.evaluation.language_model import MEASURE, LanguageModelJudge
from rlhf_core.evaluation.measures import endless_models, flat_name, main_policy, titles_of
from rlhf_core.evaluation.policy_files import PolicyFiles, trained_files
from rlhf_core.evaluation.prompts import prompts_of_evaluation, shared_prompts
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.regression import compare_on_sets, prepare_sets
from rlhf_core.evaluation.report import Plot, Report, render
from rlhf_core.evaluation.scoring import exchanged_gold, has_gold
from rlhf_core.evaluation.statistics import (
    Answer,
    Comparison,
    failed_sets,
    preference,
    regression_differences,
)
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
from rlhf_core.pipeline import POLICIES
from rlhf_core.ppo.watching.guards import in_words
from rlhf_core.ppo.watching.selection import read_evaluations
from rlhf_core.record.schema import PREFERENCE, REWARD
from rlhf_core.record.writer import AnswerRecord
from rlhf_core.rewards.compose import code_digests
from rlhf_core.stages.agreement import check_language_model_rewards, load_checked_judge
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import write_jsonl
from rlhf_core.types import (
    AnsweredPrompt,
    ArtifactRef,
    PairExample,
    PromptExample,
    RewardInput,
    StageContext,
    StageResult,
    prefixed,
)

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
    # In the order of `generate.responses_to_sets`: the first answers to all prompts, then the second ones.
    sources = [prompt.source or "unnamed" for prompt in prompts] * count
    pairs = load_chosen(config, context.data, judge)
    regression_sets = prepare_sets(config, context)
    # Engines are started once, for all sets.
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
        # From here on every answer has all scores, so that models are compared on the same prompts.
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
        measures[name] = by_model(scorer.reward_model(stage, context.inputs[stage] / "model", all_responses))
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


class CaptionedFigure(NamedTuple):
    """A figure of the report."""

    name: str
    """Name of the file in `figures/` without its ending."""
    title: str
    caption: str
    figure: Any
    """A matplotlib figure."""


class Samples(NamedTuple):
    """Prompts with the answers of all models."""

    first: list[dict[str, Any]]
    """Rows of `samples.jsonl`, which are not selected."""
    notable: Mapping[str, list[dict[str, Any]]]
    """Further rows, by what they were selected for."""
    answered: list[AnsweredPrompt]
    """For the pages of the tracker."""


def write_evaluation(
    config: PipelineConfig,
    context: StageContext,
    evaluation: Mapping[str, Any],
    samples: Samples,
    measured: Measured,
    metrics: Mapping[str, float],
) -> None:
    """Write the files of the artifact, and log the same content.

    Args:
        config: The configuration.
        context: Context of the stage.
        evaluation: Content of `evaluation.json`.
        samples: Answers to read.
        measured: Values of all responses, for the figures.
        metrics: Metrics for the tracker, without the prefix `eval/`.
    """
    titles = titles_of(config.ppo.title)
    for problem in endless_models(evaluation["eos_rate"], titles):
        log.warning("%s", problem)
    out = context.output
    # A NaN ends the stage: other readers of JSON refuse a file with one.
    text = json.dumps(evaluation, indent=2, allow_nan=False)
    (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    write_jsonl(out / "samples.jsonl", samples.first)
    (out / "figures").mkdir()
    images: list[Plot] = []
    figures = [_distribution(measured, titles)]
    if "ppo" in context.inputs:
        history = plots.read_step_metrics(context.inputs["ppo"] / "metrics.jsonl")
        figures = [*_figures(history, figures[0]), *evaluation_figures(config, context)]
    for name, title, caption, figure in figures:
        (out / "figures" / f"{name}.png").write_bytes(plots.to_png(figure))
        context.metrics.log_figure(name, figure)
        # Last, because `to_image` thins long lines of the figure itself.
        images.append(Plot(title, caption, plots.to_image(figure)))
    html = render(_report(config, context, evaluation, samples, images))
    (out / "report.html").write_text(html, encoding="utf-8")
    context.metrics.log_metrics(prefixed("eval/", metrics), 0)
    context.metrics.log_answers(samples.answered)
    context.metrics.log_file(out / "report.html")
    context.metrics.flush()


def _distribution(measured: Measured, titles: Mapping[str, str]) -> CaptionedFigure:
    """Return the figure of the scores of the SFT model and the policy."""
    policy = main_policy(measured.kl)
    # Two panels have room beside each other; the measures are in the order of their trust.
    shown = {name: (pair["sft"], pair[policy]) for name, pair in list(measured.measures.items())[:2]}
    return CaptionedFigure(
        "reward_distribution",
        "Reward distribution before and after",
        "Scores of both models' responses to the same held-out prompts; dashed lines are the means.",
        plots.reward_distribution(shown, titles[policy], plots.DPO if policy == "dpo" else plots.PPO),
    )


def _figures(history: plots.StepMetrics, distribution: CaptionedFigure) -> list[CaptionedFigure]:
    """Return the figures of the steps of PPO, with that of the scores."""
    figures = [distribution]
    if len(history) and history.has("objective/scores") and history.has("objective/kl"):
        by_step = CaptionedFigure(
            "reward_and_kl_by_step",
            "Reward and KL by step",
            "Mean score of the rollout batches, and the KL of the policy to its reference.",
            plots.training_curves(history),
        )
        against_kl = CaptionedFigure(
            "reward_against_kl",
            "Reward against KL",
            _caption_of_reward_against_kl(history),
            plots.reward_against_kl(history),
        )
        figures = [by_step, distribution, against_kl]
    # A single source is the score, which has a figure already.
    if len(plots.reward_means(history)) > 1:
        by_source = CaptionedFigure(
            "reward_sources",
            "Reward sources by step",
            "Raw value of each source before normalisation and weight.",
            plots.reward_sources(history),
        )
        figures.append(by_source)
    return figures


def evaluation_figures(config: PipelineConfig, context: StageContext) -> list[CaptionedFigure]:
    """Return the figure of the evaluations during PPO; none if there were no evaluations."""
    found, best = read_evaluations(context.inputs["ppo"] / "evaluations.jsonl")
    if not found:
        return []
    limit = config.ppo.publish_kl_limit
    sentences = ["Means over the held-out prompts."]
    if best is not None:
        sentences.append("Diamonds: the best version.")
    if math.isfinite(limit):
        sentences.append(f"Dotted line: the largest KL of a best version, {limit:g} nats per response.")
    sentences.append(in_words(found, "eval/gold", "The true reward"))
    sentences.append(in_words(found, "eval/judge", "The judge's score"))
    caption = " ".join(filter(None, sentences))
    figure = plots.evaluation_curves(found, best=best, max_kl=limit)
    return [CaptionedFigure("evaluations", "Evaluations during training", caption, figure)]


def _caption_of_reward_against_kl(history: plots.StepMetrics) -> str:
    points = "One point per step, against the square root of the KL (Gao et al. 2022): the score that is"
    if history.has(plots.GOLD):
        return (
            f"{points} maximised, and the true reward. Over-optimisation is where the true reward bends down"
            " while the score still rises."
        )
    return (
        f"{points} maximised. The true reward of these responses was not computed. The score rises under"
        " over-optimisation too, so this curve cannot show it."
    )


def _report(
    config: PipelineConfig,
    context: StageContext,
    evaluation: Mapping[str, Any],
    samples: Samples,
    images: list[Plot],
) -> Report:
    """Return the content of `report.html`."""
    dump = config.model_dump(mode="json", by_alias=True)
    sections = {name: dump[name] for name in ("model", "data", "sft", "reward", "dpo", "ppo", "evaluate")}
    if not config.dpo.enabled:
        del sections["dpo"]
    if config.ppo.enabled:
        trained = {f"{config.ppo.title} steps": str(config.ppo.steps)}
        if config.ppo.teacher is not None:
            trained["teacher"] = config.ppo.teacher.path
    else:
        trained = {"DPO": config.dpo.description}
    lineage = []
    for stage, ref in context.input_refs.items():
        lineage.append((stage, _minutes([ref]), ref.key, ref.digest))
    return Report(
        name=config.run.name,
        evaluation=evaluation,
        samples=samples.first,
        notable=samples.notable,
        plots=images,
        config=yaml.safe_dump(sections, sort_keys=False, allow_unicode=True),
        lineage=lineage,
        data_card=_data_card(context.data),
        is_best_version=config.ppo.enabled and config.ppo.publish == "best",
        shared_prompts=shared_prompts(config, load_prompts(context.data, "eval")),
        facts={
            "base model": config.model.path or "tiny Llama from scratch",
            **trained,
            "seed": str(config.run.seed),
            "held-out prompts": str(evaluation["prompts"]),
            "inputs made in": _minutes(context.input_refs.values()),
        },
    )


def _minutes(refs: Iterable[ArtifactRef]) -> str:
    """Return the time that it took to make these artifacts; empty if none has it."""
    seconds = [float(ref.attributes["seconds"]) for ref in refs if "seconds" in ref.attributes]
    return f"{sum(seconds) / 60:.1f} min" if seconds else ""


def _data_card(folder: Path) -> str:
    path = folder / "data_card.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# -- both models against the data's own answers, the preferred ones of held-out pairs --
#
# The judge of the evaluation compares the answers of both models with the chosen ones. If it is a sum of
# rules, there is no comparison: pairs do not have the fields of a prompt's row, which rules may read.


_JUDGES = ("language_model", "gold", "judge_model", "reward_model")

ResponsesByModel = Mapping[str, list[RewardInput]]
Prefer = Callable[[ResponsesByModel, list[RewardInput]], Mapping[str, Sequence[float]]]
"""Returns the preferences of each model's answers over the (n,) chosen ones."""


def by_score(score: Callable[[list[RewardInput]], list[float]]) -> Prefer:
    """Return the preferences by a score, which is called once for all answers."""

    def prefer(answers: ResponsesByModel, chosen: list[RewardInput]) -> dict[str, list[float]]:
        samples = list(chosen)
        for own in answers.values():
            samples += own
        scores = score(samples)
        count = len(chosen)
        preferences = {}
        for number, model in enumerate(answers, 1):
            of_model = scores[number * count : (number + 1) * count]
            preferences[model] = list(map(preference, of_model, scores[:count]))
        return preferences

    return prefer


def load_chosen(config: PipelineConfig, data: Path, judge: str) -> list[PairExample]:
    """Return the first `evaluate.prompts` held-out pairs with different prompts, or none if there is no
    comparison with them.

    Args:
        config: Configuration of the run.
        data: Folder of the data artifact.
        judge: Judge of the evaluation.
    """
    if not config.evaluate.chosen or judge not in _JUDGES:
        return []
    by_prompt: dict[str, PairExample] = {}
    for pair in load_pairs(data, "eval"):
        # Several pairs of a prompt have the same responses of the models, and would count them several times.
        by_prompt.setdefault(pair.prompt_id, pair)
    pairs = list(by_prompt.values())[: config.evaluate.prompts]
    if judge == "gold" and not has_gold(list(map(_prompt, pairs))):
        return []
    return pairs


def prompts_to_answer(pairs: Sequence[PairExample], held_out: Sequence[PromptExample]) -> list[PromptExample]:
    """Return the prompts of `pairs` that are not in `held_out`: to these, the models' responses are known."""
    known = {prompt.prompt_id for prompt in held_out}
    return [_prompt(pair) for pair in pairs if pair.prompt_id not in known]


def compare_with_chosen(
    pairs: Sequence[PairExample],
    responses: Mapping[str, Sequence[RewardInput]],
    decode: Callable[[Sequence[int]], str],
    prefer: Prefer,
    interval: Intervals,
) -> dict[str, Any] | None:
    """Return each model's win rate over the chosen answers, and the difference paired by prompt; None without
    pairs.

    Args:
        pairs: (n,) pairs with different prompts.
        responses: Responses of each model, to all prompts of the pairs and possibly to others.
        decode: Decodes the tokens of a response.
        prefer: Returns the judge's preferences.
        interval: Computes the confidence intervals.
    """
    if not pairs:
        return None
    chosen = [_chosen(pair, decode) for pair in pairs]
    answers: dict[str, list[RewardInput]] = {}
    for model, own in responses.items():
        by_prompt = {answer.prompt_id: answer for answer in own}
        answers[model] = [by_prompt[pair.prompt_id] for pair in pairs]
    preferences = {model: list(values) for model, values in prefer(answers, chosen).items()}
    groups = interval.groups(chosen)
    rates: dict[str, Any] = {}
    controlled = {}
    for model, own in answers.items():
        rates[model] = interval.win_rate(preferences[model], groups).to_json()
        controlled[model] = interval.length_controlled(preferences[model], own, chosen, groups).to_json()
    for name, found in interval.by_model("win_rate_over_chosen", preferences, groups).items():
        # Only the differences. The rates of models are above, with Wilson's interval.
        if name not in responses:
            rates[name] = found
    return {"prompts": len(pairs), "win_rate": rates, "win_rate_length_controlled": controlled}


def _prompt(pair: PairExample) -> PromptExample:
    return PromptExample(pair.prompt_id, pair.prompt, pair.prompt_ids, {}, pair.source, pair.group)


def _chosen(pair: PairExample, decode: Callable[[Sequence[int]], str]) -> RewardInput:
    return RewardInput(
        prompt_id=pair.prompt_id,
        prompt=pair.prompt,
        response=decode(pair.chosen_ids),
        prompt_ids=pair.prompt_ids,
        response_ids=pair.chosen_ids,
        finished=True,
    )
