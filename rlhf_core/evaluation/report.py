"""The evaluation as one HTML file that needs nothing else: no script, no link, no font; images inside.

Prompts and responses are untrusted text: everything is escaped, control and direction characters are shown as
marks, and a content security policy forbids whatever might slip through.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.evaluation.markdown import to_html
from rlhf_core.evaluation.report_style import CSS

MODELS = ("sft", "ppo")
LABELS = {"sft": "SFT", "ppo": "PPO", "tie": "tie"}
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


@dataclass(frozen=True)
class Plot:
    """One image of the report."""

    title: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Report:
    """Everything the report shows."""

    name: str
    """Name of the run."""
    evaluation: Mapping[str, Any]
    """The content of `evaluation.json`."""
    samples: Sequence[Mapping[str, Any]]
    """Rows of `samples.jsonl`."""
    plots: Sequence[Plot]
    config: str
    """YAML of the sections that shaped the result."""
    lineage: Sequence[tuple[str, str, str]]
    """(stage, stage key, digest) of each input."""
    data_card: str = ""
    """Markdown."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further lines under the headline."""


def render(report: Report) -> str:
    """The HTML document; the same report gives the same bytes."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    sections = [
        _headline(report),
        _section(
            "Results",
            _results_table(report.evaluation),
            _footnote(report.evaluation),
            _source_table(report.evaluation["by_source"]),
        ),
        _section(
            "Plots",
            "".join(map(_plot, report.plots)) or "<p class=quiet>The PPO stage left no step metrics.</p>",
        ),
        _section("Samples", _samples_note(report.samples), "".join(map(_sample, report.samples))),
        _section("Data", _data_card(report.data_card)) if report.data_card else "",
        _section(
            "Lineage and configuration", _lineage(report.lineage), _details("Configuration", report.config)
        ),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(report.name)}: evaluation</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{chr(10).join(filter(None, sections))}\n</main></body></html>\n"
    )


def _headline(report: Report) -> str:
    evaluation = report.evaluation
    rate = evaluation["win_rate"]
    level = f"{evaluation['confidence']:.0%}"
    verdict, tone = _verdict(rate)
    judged = f"Wins are decided by {_judge(evaluation)}."
    if evaluation.get("judge_trained_on"):
        judged += (
            " The policy was trained with it, so this is no independent evidence that its answers are better."
        )
    facts = "".join(
        f"<span>{_text(name)} <b>{_text(value)}</b></span>" for name, value in report.facts.items()
    )
    cards = [
        _card(
            "Win rate over SFT",
            f"{rate['mean']:.1%}",
            f"{level} interval {rate['low']:.1%} to {rate['high']:.1%}",
            tone,
        ),
        *(_card(f"{label}, PPO", *_gain(evaluation[key])) for key, label in _MEASURES if evaluation.get(key)),
        _card("KL to SFT", f"{evaluation['kl']:.2f}", "nats per response"),
    ]
    return (
        f"<header><p class=kicker>Evaluation · {_text(report.name)}</p><h1>{verdict}</h1>"
        f"<p>{_text(judged)}</p><p class=facts>{facts}</p><div class=cards>{''.join(cards)}</div></header>"
    )


_MEASURES = (("gold_reward", "Gold reward"), ("reward_model", "Reward model"))
_EXCHANGED = "Gold reward, exchanged prompts"


def _verdict(rate: Mapping[str, float]) -> tuple[str, str]:
    if rate["low"] > 0.5:
        return "The PPO policy beats the SFT model", "good"
    if rate["high"] < 0.5:
        return "The PPO policy is worse than the SFT model", "bad"
    return "The PPO policy and the SFT model cannot be told apart", "even"


def _gain(pair: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    sft, ppo, change = pair["sft"]["mean"], pair["ppo"]["mean"], pair["difference"]
    return _number(ppo), f"SFT {_number(sft)}, change {_signed(change)}"


def _signed(change: Mapping[str, float], digits: int = 3) -> str:
    """Return the mean difference with its interval."""
    return f"{change['mean']:+.{digits}f} ({change['low']:+.{digits}f} to {change['high']:+.{digits}f})"


def _card(title: str, value: str, note: str, tone: str = "") -> str:
    return (
        '<div class="card'
        f' {tone}"><p>{_text(title)}</p><strong>{_text(value)}</strong><small>{_text(note)}</small></div>'
    )


def _results_table(evaluation: Mapping[str, Any]) -> str:
    rows: list[str] = []
    for key, label in _MEASURES:
        if evaluation.get(key):
            rows.append(_interval_row(label, evaluation[key]))
        if key == "gold_reward" and evaluation.get("gold_reward_exchanged"):
            rows.append(_interval_row(_EXCHANGED, evaluation["gold_reward_exchanged"]))
    for name, pair in evaluation["rules"].items():
        rows.append(_interval_row(f"Rule: {name}", pair))
    rows.append(_interval_row("Length (tokens)", evaluation["lengths"], digits=1))
    rows.append(_plain_row("Ended by EOS", evaluation["eos_rate"], "{:.1%}"))
    for n in ("1", "2", "3"):
        pair = {model: evaluation["distinct"][model][n] for model in MODELS}
        rows.append(_plain_row(f"Distinct {n}-grams", pair, "{:.1%}"))
    head = (
        "<tr><th>Measure</th><th class=model>SFT</th><th class=model>PPO</th><th>Change</th><th class=bar><i"
        " class=sft></i>SFT<i class=ppo></i>PPO</th></tr>"
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _interval_row(label: str, pair: Mapping[str, Mapping[str, float]], digits: int = 3) -> str:
    cells = "".join(f"<td>{_interval(pair[model], digits)}</td>" for model in MODELS)
    change = _signed(pair["difference"], digits)
    return (
        f"<tr><td>{_text(label)}</td>{cells}<td>{change}</td><td class=bar>{_interval_bars(pair)}</td></tr>"
    )


def _plain_row(label: str, pair: Mapping[str, float], form: str) -> str:
    cells = "".join(f"<td class=model><b>{form.format(pair[model])}</b></td>" for model in MODELS)
    change = f"{(pair['ppo'] - pair['sft']) * 100:+.1f} pp"
    return f"<tr><td>{_text(label)}</td>{cells}<td>{change}</td><td class=bar></td></tr>"


def _interval_bars(pair: Mapping[str, Mapping[str, float]]) -> str:
    """Two dots with their intervals on one scale, SFT above."""
    low, high = min(pair[m]["low"] for m in MODELS), max(pair[m]["high"] for m in MODELS)
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return 8 + 164 * (value - low) / span if high > low else 90.0

    parts = []
    for y, model in ((8, "sft"), (20, "ppo")):
        mean, left, right = (at(pair[model][name]) for name in ("mean", "low", "high"))
        parts.append(
            f'<g class="{model}"><line x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'
            f'<circle cx="{mean:.1f}" cy="{y}" r="4"/></g>'
        )
    return f'<svg width="180" height="28" role="img" aria-label="SFT above, PPO below">{"".join(parts)}</svg>'


def _footnote(evaluation: Mapping[str, Any]) -> str:
    exchanged = (
        f" {_EXCHANGED}: each response is scored against another prompt; a policy that uses its prompts"
        " scores lower."
        if evaluation.get("gold_reward_exchanged")
        else ""
    )
    return (
        f"<p class=quiet>{evaluation['prompts']} held-out prompts, the same for both models and with the same"
        f" seeds; one response each. Small figures and bars are {evaluation['confidence']:.0%} bootstrap"
        " intervals over prompts; the interval of a change is that of the paired difference. What another"
        " training run (another seed) would give is not in these intervals. Distinct n-grams are counted"
        f" over equally many n-grams of either model. Wins are decided by {_text(_judge(evaluation))}, in"
        f" both orders, which cannot matter to a score ({evaluation['inconsistent']:.1%} of the verdicts"
        f" changed).{exchanged}</p>"
    )


def _judge(evaluation: Mapping[str, Any]) -> str:
    return _JUDGES.get(evaluation["judge"], str(evaluation["judge"]))


def _source_table(by_source: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of each measure by data source."""
    if not by_source:
        return ""
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{numbers['prompts']}</td><td>{_interval(numbers['win_rate'])}</td>"
        f"<td>{_changes(numbers)}</td><td>{_interval(numbers['kl_interval'], 2)}</td></tr>"
        for name, numbers in by_source.items()
    )
    head = "<tr><th>Source</th><th>Prompts</th><th>Win rate</th><th>Change</th><th>KL</th></tr>"
    return f"<h3>By data source</h3><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _changes(numbers: Mapping[str, Any]) -> str:
    pairs = {label: numbers[key] for key, label in _MEASURES if numbers.get(key)}
    pairs |= {f"Rule {name}": pair for name, pair in numbers["rules"].items()}
    return "; ".join(f"{_text(label)} {_signed(pair['difference'])}" for label, pair in pairs.items())


def _interval(value: Mapping[str, float], digits: int = 3) -> str:
    return (
        f"<b>{value['mean']:.{digits}f}</b> <small>{value['low']:.{digits}f} to"
        f" {value['high']:.{digits}f}</small>"
    )


_JUDGES = {
    "gold": "the gold reward",
    "reward_model": "the reward model",
    "rules": "the weighted sum of rule rewards",
}


def _plot(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{_text(plot.title)}">'
        f"<figcaption>{_text(plot.caption)}</figcaption></figure>"
    )


def _samples_note(samples: Sequence[Mapping[str, Any]]) -> str:
    wins = sum(row["winner"] == "ppo" for row in samples)
    ties = sum(row["winner"] == "tie" for row in samples)
    return (
        f"<p class=quiet>The first {len(samples)} held-out prompts, not selected: PPO wins {wins}, ties"
        f" {ties}, SFT wins {len(samples) - wins - ties}.</p>"
    )


def _sample(row: Mapping[str, Any]) -> str:
    winner = row["winner"]
    columns = "".join(
        f'<div class="answer {model}{" winner" if winner == model else ""}"><h4>{LABELS[model]}'
        f"{'<em>winner</em>' if winner == model else ''}</h4><pre>{_response(row[model])}</pre>"
        f"<p class=scores>{_scores(row['scores'][model])}</p></div>"
        for model in MODELS
    )
    tie = "<em class=tie>tie</em>" if winner == "tie" else ""
    return (
        f"<article><h3>Prompt{tie}</h3><pre class=prompt>{_text(row['prompt'])}</pre><div"
        f" class=pair>{columns}</div></article>"
    )


def _response(text: str) -> str:
    return _text(text) if text.strip() else "<i>empty</i>"


def _scores(scores: Mapping[str, float]) -> str:
    return "".join(f"<span>{_text(name)} <b>{_number(value)}</b></span>" for name, value in scores.items())


def _lineage(lineage: Sequence[tuple[str, str, str]]) -> str:
    rows = "".join(
        f"<tr><td>{_text(stage)}</td><td><code>{_text(key)}</code></td><td><code>{_text(digest)}</code></td></tr>"
        for stage, key, digest in lineage
    )
    head = "<tr><th>Input</th><th>Stage key</th><th>Digest (sha256 of its manifest)</th></tr>"
    return f"<table class=left><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _data_card(card: str) -> str:
    return (
        "<details open><summary>Data card</summary><div"
        f' class="card-text">{to_html(card, _text)}</div></details>'
    )


def _details(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary><pre>{_text(body)}</pre></details>"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(parts)}</section>"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _text(value: str) -> str:
    return html.escape(_UNSAFE.sub("\N{REPLACEMENT CHARACTER}", value), quote=True)
