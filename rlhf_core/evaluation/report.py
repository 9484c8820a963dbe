"""The evaluation as one HTML file without scripts or external resources. Its links stay on the page, and its
style shows the values of a figure at the pointer.

`report.html.j2` is the page and `report.css` its style. Prompts and responses are untrusted text: jinja2
escapes every value, `_visible` replaces control and direction characters, and a content security policy in
the page blocks scripts and requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from rlhf_core.config.redact import without_secrets
from rlhf_core.evaluation.measures import (
    MEASURES,
    MODELS,
    NOT_IDENTIFIED,
    endless_models,
    flat_name,
    main_policy,
    results_of,
    titles_of,
)
from rlhf_core.evaluation.statistics import failed_sets, regression_differences, units

if TYPE_CHECKING:
    from rlhf_core.evaluation.plots import Image

_JUDGES = {
    "gold": "the gold reward",
    "judge_model": "a second reward model, trained with other pairs",
    "reward_model": "the reward model",
    "rules": "the weighted sum of rule rewards",
}

_SHOWN = 5
"""Samples that are open; the reader opens the others."""
_PENDING = "<span>promotion <b>decided after this page: see the page of the run in MLflow</b></span>"
# Control characters except tab and newline, marks that change the direction of text, byte order marks and
# surrogates, which UTF-8 cannot encode.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


@dataclass(frozen=True)
class Plot:
    """One figure of the report."""

    title: str
    caption: str
    image: Image


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    name: str
    """Name of the run."""
    evaluation: Mapping[str, Any]
    """The content of `evaluation.json`."""
    samples: Sequence[Mapping[str, Any]]
    """Rows of `samples.jsonl`."""
    notable: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, kw_only=True)
    """Further rows, by what they were selected for."""
    plots: Sequence[Plot]
    config: str
    """YAML of the configuration sections that affect the result."""
    lineage: Sequence[tuple[str, str, str, str]]
    """(stage, time, stage key, digest) of each input."""
    data_card: str = ""
    """Markdown."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Names and values that are shown below the headline."""
    is_best_version: bool = False
    """Whether the policy was chosen among the versions of PPO (`ppo.publish: best`)."""
    shared_prompts: int = 0
    """Prompts of the evaluation that were also used for this choice."""


def render(report: Report) -> str:
    """Return the HTML document. The same report always gives the same bytes."""
    evaluation = report.evaluation
    shown = without_secrets({"samples": list(report.samples), "notable": dict(report.notable)})
    report = replace(report, **shown, data_card=without_secrets(report.data_card))
    models = [model for model in MODELS if model in evaluation["eos_rate"]]
    policy = main_policy(models)
    own = results_of(evaluation, policy)
    titles = titles_of(evaluation["rl_algorithm"])
    verdict, tone = _verdict(own["win_rate"], titles[policy])
    sets = evaluation.get("regression", {})
    page = environment().get_template("report.html.j2")
    document = page.render(
        name=report.name,
        evaluation=evaluation,
        samples=report.samples,
        shown=_SHOWN,
        pending=Markup(_PENDING),
        plots=report.plots,
        config=report.config,
        lineage=report.lineage,
        data_card=report.data_card,
        facts=report.facts,
        is_best_version=report.is_best_version,
        shared_prompts=report.shared_prompts,
        measures=MEASURES,
        not_identified=NOT_IDENTIFIED,
        prompts=units(sum(own["verdicts"].values()), evaluation["prompts"], "held-out prompts"),
        models=models,
        policy=policy,
        own=own,
        # The policy of DPO, if it is not the one that the page is about.
        dpo=evaluation["policies"].get("dpo") if policy != "dpo" else None,
        titles=titles,
        names=[titles[model] for model in models],
        contents=_contents(report),
        title=titles[policy],
        notable=report.notable,
        winner=flat_name("winner", policy),
        verdict=verdict,
        tone=tone,
        judge=_judge(evaluation),
        endless=endless_models(evaluation["eos_rate"], titles),
        failed={name: _failed(sets, name) for name in models if name != "sft"},
    )
    return document.strip() + "\n"


def with_outcome(document: str, outcome: Sequence[tuple[str, str]]) -> str:
    """Return a report with names and values that were decided after it, in place of `_PENDING`."""
    fact = Markup("<span>{} <b>{}</b></span>")
    facts = [fact.format(_visible(name), _visible(value)) for name, value in outcome]
    # No other place can have this text: the page escapes all texts of models and data.
    return document.replace(_PENDING, "\n".join(facts), 1) if facts else document


def _contents(report: Report) -> dict[str, str]:
    """Return the headings of the sections by their anchors."""
    headings = {"results": "Results", "training": "Training", "samples": "Samples"}
    if report.notable:
        headings["notable"] = "Selected answers"
    headings["lineage"] = "Time, lineage and configuration"
    if report.data_card:
        headings["data"] = "Data"
    return headings


def _failed(sets: Mapping[str, Any], policy: str) -> list[str]:
    """Return the names of the regression sets that failed."""
    differences = regression_differences(sets, policy)
    return [name for name, found in differences.items() if failed_sets({name: found})]


def _judge(evaluation: Mapping[str, Any]) -> str:
    if "language_model" in evaluation:
        return f"the language model {evaluation['language_model']['name']}"
    return _JUDGES.get(evaluation["judge"], str(evaluation["judge"]))


def markdown_to_html(text: str) -> str:
    """Return the HTML of a data card. Raw HTML, links and images in `text` remain text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    # A data card quotes samples from outside. Without these rules no markup with an address is created, and
    # link definitions are not removed from the text.
    parser.disable(["link", "image", "autolink", "reference", "html_inline", "html_block"])
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"  # h1 and h2 are the headings of the page
        elif token.type == "table_open":
            token.attrSet("class", "left")
        elif token.type in ("th_open", "td_open"):
            token.attrs.pop("style", None)
    # Entities such as &#x202e; are characters only after rendering.
    return _visible(parser.renderer.render(tokens, parser.options, {}))


@cache
def environment() -> Environment:
    """Return the environment of pages. It escapes every value and replaces invisible characters."""
    pages = Environment(
        loader=PackageLoader("rlhf_core.evaluation", package_path=""),
        autoescape=True,
        finalize=_finalize,
        # A misspelt name would otherwise be an empty place in the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(
        changes=_changes,
        column=lambda by_model, name: {model: values[name] for model, values in by_model.items()},
        fixed=lambda value, digits: f"{value:.{digits}f}",
        interval_bars=_interval_bars,
        markdown=markdown_to_html,
        number=_number,
        percent=lambda value, digits=1: f"{value:.{digits}%}",
        points=_points,
        signed=_signed,
        svg=lambda content: Markup(_visible(content)),
    )
    return pages


def _finalize(value: Any) -> Any:
    """Replace invisible characters in a value before jinja2 escapes it.

    Values with `__html__` are the output of macros and of `markdown_to_html`, where they are already
    replaced.
    """
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _visible(value)
    return value


def _visible(text: str) -> str:
    return INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _verdict(rate: Mapping[str, float], title: str) -> tuple[str, str]:
    """Return the headline and the CSS class of its card, from the interval of the win rate."""
    if rate["low"] > 0.5:
        return f"The {title} policy beats the SFT model", "good"
    if rate["high"] < 0.5:
        return f"The {title} policy is worse than the SFT model", "bad"
    return f"The {title} policy and the SFT model have no significant difference in win rate", "even"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _signed(difference: Mapping[str, float], digits: int = 3) -> str:
    """Return a mean difference with its interval."""
    mean, low, high = (f"{difference[part]:+.{digits}f}" for part in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _points(difference: Mapping[str, float]) -> str:
    """Return a mean difference of rates with its interval, in percentage points."""
    mean, low, high = (f"{100 * difference[part]:+.1f}" for part in ("mean", "low", "high"))
    return f"{mean} pp ({low} to {high})"


def _changes(source: Mapping[str, Any], policy: str) -> str:
    """Return the mean difference of every measure of one data source, policy minus SFT model."""
    parts = []
    for key, label in MEASURES.items():
        if source.get(key):
            parts.append(f"{label} {_signed(source[key]['difference'][policy])}")
    for name, by_model in source["rules"].items():
        parts.append(f"Rule {name} {_signed(by_model['difference'][policy])}")
    return "; ".join(parts)


def _interval_bars(by_model: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the positions in pixels of the models' means and intervals, on one scale,
    in an image 180 wide.
    """
    models = [model for model in MODELS if model in by_model]
    low = min(by_model[model]["low"] for model in models)
    high = max(by_model[model]["high"] for model in models)
    bars = []
    for number, model in enumerate(models):
        bar: dict[str, Any] = {"model": model, "y": 8 + 12 * number}
        for part in ("mean", "low", "high"):
            # Without any width there is no scale, and all are drawn in the middle.
            if high > low:
                bar[part] = 8 + 164 * (by_model[model][part] - low) / (high - low)
            else:
                bar[part] = 90.0
        bars.append(bar)
    return bars
