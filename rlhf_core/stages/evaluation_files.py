"""The files of the stage `evaluate`: numbers, samples, figures and the report.

They are part of the artifact, and are logged to MLflow.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.evaluation import plots
from rlhf_core.evaluation.measures import endless_models, main_policy, titles_of
from rlhf_core.evaluation.prompts import shared_prompts
from rlhf_core.evaluation.report import Plot, Report, render
from rlhf_core.evaluation.summary import Measured
from rlhf_core.ppo.watching.guards import in_words
from rlhf_core.system.files import write_jsonl
from rlhf_core.types import AnsweredPrompt, ArtifactRef, StageContext, prefixed

log = logging.getLogger(__name__)


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
    text = json.dumps(evaluation, indent=2, allow_nan=False)
    (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    write_jsonl(out / "samples.jsonl", samples.first)
    (out / "figures").mkdir()
    images: list[Plot] = []
    figures = [_distribution(measured, titles)]
    if "ppo" in context.inputs:
        figures = [*_figures(_history(context), figures[0]), *evaluation_figures(config, context)]
    for name, title, caption, figure in figures:
        (out / "figures" / f"{name}.png").write_bytes(plots.to_png(figure))
        context.metrics.log_figure(name, figure)
        images.append(Plot(title, caption, plots.to_image(figure)))
    html = render(_report(config, context, evaluation, samples, images))
    (out / "report.html").write_text(html, encoding="utf-8")
    context.metrics.log_metrics(prefixed("eval/", metrics), 0)
    context.metrics.log_answers(samples.answered)
    context.metrics.log_file(out / "report.html")
    context.metrics.flush()


def _history(context: StageContext) -> plots.StepMetrics:
    """Return the metrics of the steps of PPO."""
    return plots.read_step_metrics(context.inputs["ppo"] / "metrics.jsonl")


def _distribution(measured: Measured, titles: Mapping[str, str]) -> CaptionedFigure:
    """Return the figure of the scores of the SFT model and the policy."""
    policy = main_policy(measured.kl)
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
            "Mean score of the rollout batches, and how far the policy has moved from the SFT model.",
            plots.training_curves(history),
        )
        against_kl = CaptionedFigure(
            "reward_against_kl",
            "Reward against KL",
            _caption_of_reward_against_kl(history),
            plots.reward_against_kl(history),
        )
        figures = [by_step, distribution, against_kl]
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
    file = context.inputs["ppo"] / "evaluations.jsonl"
    if not file.is_file():
        return []
    found: dict[int, dict[str, float]] = {}
    best = None
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        version = int(row.pop("version"))
        found[version] = row
        if row.pop("best"):
            best = version
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
