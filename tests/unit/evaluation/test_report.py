"""Locks the report and the plots.

- the file needs nothing from outside and no hostile text becomes markup;
- its numbers are those of the evaluation, its verdict follows the interval;
- plots are drawn from the history as written, with gaps and single steps, to the same bytes each time.
"""

import html
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation import plots
from rlhf_core.evaluation.history import History, read_history
from rlhf_core.evaluation.markdown import to_html
from rlhf_core.evaluation.report import Plot, Report, render

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)'",
    "javascript:alert(1) <a href='javascript:alert(1)'>x</a>",
    "<svg/onload=alert(1)><style>*{background:url(http://example.org)}</style>",
    "&lt;script&gt; &#x3c;script&#x3e;",
    "\u202egnirts\u202c \x00\x1b[31m\x7f \ud800",
)
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "article", "div", "p", "span", "b",
    "i", "em", "small", "strong", "h1", "h2", "h3", "h4", "table", "thead", "tbody", "tr", "th", "td", "code", "pre",
    "figure", "figcaption", "img", "svg", "g", "line", "circle", "details", "summary",
}  # fmt: skip


class Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(document: str) -> Collector:
    collector = Collector()
    collector.feed(document)
    return collector


def interval(mean: float, spread: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - spread, "high": mean + spread}


def evaluation(win: float = 0.8) -> dict[str, Any]:
    pair = {"sft": interval(0.25), "ppo": interval(1.5), "difference": interval(1.25)}
    return {
        "win_rate": interval(win), "judge": "gold", "inconsistent": 0.0, "gold_reward": pair, "reward_model": None,
        "rules": {"keywords": pair}, "kl": 3.25, "lengths": {"sft": interval(30), "ppo": interval(34), "difference": interval(4)},
        "eos_rate": {"sft": 0.9, "ppo": 1.0}, "prompts": 128, "confidence": 0.95,
        "judge_trained_on": False, "by_source": {}, "kl_interval": interval(3.25),
        "distinct": {model: {"1": 0.1, "2": 0.2, "3": 0.3} for model in ("sft", "ppo")},
    }  # fmt: skip


def sample(text: str = "A fox.", winner: str = "ppo") -> dict[str, Any]:
    scores = {"sft": {"gold": 0.5}, "ppo": {"gold": 1.25}}
    return {"prompt_id": "p", "prompt": text, "sft": text, "ppo": text, "winner": winner, "scores": scores}


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "name": "demo", "evaluation": evaluation(), "samples": [sample()], "plots": [Plot("t", "c", b"\x89PNG")],
        "config": "ppo: {}\n", "lineage": [("sft", "0123", "abcd")], "data_card": "# Data\n", "facts": {"seed": "0"},
    }  # fmt: skip
    return Report(**(fields | changes))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_hostile_text_becomes_markup(text: str) -> None:
    document = render(
        report(
            name=text,
            samples=[sample(text)],
            plots=[Plot(text, text, b"x")],
            config=text,
            data_card=f"# {text}\n",
            lineage=[(text, text, text)],
            facts={text: text},
            evaluation=evaluation()
            | {
                "rules": {text: evaluation()["gold_reward"]},
                "by_source": {text: evaluation(), "b": evaluation()},
            },
        )
    )
    plain = parse(
        render(report(evaluation=evaluation() | {"by_source": {"a": evaluation(), "b": evaluation()}}))
    )
    hostile = parse(document)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert {tag for tag, _ in hostile.tags} <= TAGS
    assert not {
        name
        for _, attributes in hostile.tags
        for name in attributes
        if name.startswith("on") or name == "href"
    }
    document.encode("utf-8")
    assert not set("\u202e\u202c\x00\x1b\x7f") & set(document)


@pytest.mark.parametrize("trained", [False, True])
def test_the_headline_says_who_judged_and_whether_the_policy_was_trained_on_it(trained: bool) -> None:
    judged = {"judge": "reward_model", "judge_trained_on": trained}
    headline = render(report(evaluation=evaluation() | judged)).split("</header>")[0]
    assert "Wins are decided by the reward model." in headline
    assert ("The policy was trained with it" in headline) == trained


def test_the_results_show_the_paired_difference_and_each_source() -> None:
    sources = {"a.jsonl": evaluation(0.9), "b.jsonl": evaluation(0.3)}
    text = "".join(parse(render(report(evaluation=evaluation() | {"by_source": sources}))).text)
    assert "+1.250 (+1.150 to +1.350)" in text
    assert "What another training run (another seed) would give is not in these intervals" in text
    assert "By data source" in text and "a.jsonl" in text and "0.300 0.200 to 0.400" in text


def test_the_data_cards_markdown_becomes_headings_tables_lists_and_code() -> None:
    card = "\n".join(
        [
            "## Sets",
            "| set | rows |",
            "|---|--:|",
            "| sft | 4 \\| 5 |",
            "",
            "two",
            r"lines **bold** &lt;eos&gt; a\_b",
            "- `a < b`",
            "* c",
            "```",
            "# <b>raw</b>",
            "```",
            "end",
        ]
    )
    assert (
        to_html(card, html.escape)
        == "<h3>Sets</h3><table class=left><tr><th>set</th><th>rows</th></tr><tr><td>sft</td><td>4 |"
        " 5</td></tr></table><p>two lines <b>bold</b> &lt;eos&gt; a_b</p><ul><li><code>a &lt;"
        " b</code></li><li>c</li></ul><pre># &lt;b&gt;raw&lt;/b&gt;</pre><p>end</p>"
    )


@pytest.mark.parametrize("card", ["```\nnever closed", "|", "#", "- ", "|||\n|-|", "-", "~~~~", "`"])
def test_a_broken_data_card_still_ends(card: str) -> None:
    assert isinstance(to_html(card, html.escape), str)


def test_the_file_needs_nothing_from_outside() -> None:
    collector = parse(render(report()))
    sources = [attributes["src"] or "" for _, attributes in collector.tags if "src" in attributes]
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    contents = [attributes.get("content") for tag, attributes in collector.tags if tag == "meta"]
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in contents
    assert "url(" not in render(report()) and "http" not in render(report()).replace("http-equiv", "")


def test_the_numbers_are_those_of_the_evaluation() -> None:
    text = parse(render(report())).text
    for shown in (
        "80.0%",
        "70.0% to 90.0%",
        "1.500",
        "0.250",
        "+1.250",
        "3.25",
        "Rule: keywords",
        "128 held-out",
        "seed",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("win", "verdict"), [(0.8, "beats"), (0.5, "cannot be told apart"), (0.2, "is worse than")]
)
def test_the_verdict_follows_the_interval(win: float, verdict: str) -> None:
    assert verdict in render(report(evaluation=evaluation(win)))


@pytest.mark.parametrize(("winner", "count"), [("ppo", 1), ("sft", 1), ("tie", 0)])
def test_the_winner_of_a_sample_is_marked(winner: str, count: int) -> None:
    document = render(report(samples=[sample(winner=winner)]))
    assert document.count(' winner"') == count
    assert ("answer ppo winner" in document) == (winner == "ppo")


def test_an_empty_response_is_shown_as_such_and_a_run_without_steps_says_so() -> None:
    document = render(report(samples=[sample("")], plots=[]))
    assert "<i>empty</i>" in document
    assert "no step metrics" in document


def history(steps: int) -> History:
    return History(
        [
            {
                "step": s,
                "objective/kl": 0.1 * s,
                "objective/scores": s**0.5,
                "rewards/a/mean": 1.0,
                "rewards/b/mean": 2.0,
            }
            for s in range(1, steps + 1)
        ]
    )


@pytest.mark.parametrize("steps", [1, 2, 60])
def test_curves_carry_the_values_and_labels_with_units(steps: int) -> None:
    figure = plots.training_curves(history(steps))
    top, bottom = figure.axes
    assert top.lines[0].get_ydata().tolist() == history(steps).column("objective/scores").tolist()
    assert bottom.get_ylabel() == "KL (nats per response)"
    assert bottom.get_xlabel() == "PPO step"
    assert plots.to_png(figure).startswith(b"\x89PNG")


def test_score_and_true_reward_are_both_drawn_against_the_square_root_of_the_kl(tmp_path: Path) -> None:
    rows = [{"step": s, "objective/kl": s * s, "objective/scores": s, plots.GOLD: -s} for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score, gold = plots.reward_against_kl(read_history(tmp_path / "metrics.jsonl")).axes[0].lines
    assert (list(score.get_xdata()), list(score.get_ydata())) == ([1, 2, 3], [1, 2, 3])
    assert (list(gold.get_xdata()), list(gold.get_ydata())) == ([1, 2, 3], [-1, -2, -3])


def test_kl_against_reward_has_a_point_per_step_coloured_by_step() -> None:
    figure = plots.reward_against_kl(history(5))
    points = figure.axes[0].collections[0]
    assert points.get_offsets()[4].tolist() == pytest.approx([0.5, 5**0.5])
    assert points.get_array().tolist() == [1, 2, 3, 4, 5]


def test_the_distribution_counts_every_response_of_both_models() -> None:
    rng = np.random.default_rng(0)
    sft, ppo = rng.normal(size=40).tolist(), [2.0] * 40
    axes = plots.reward_distribution({"gold": (sft, ppo), "rules": (ppo, ppo)}).axes
    assert [sum(patch.get_height() for patch in bars) for bars in axes[0].containers] == [40, 40]
    assert axes[0].get_xlabel() == "gold reward (true reward)"


def test_the_same_figure_gives_the_same_bytes() -> None:
    first, second = (plots.to_png(plots.reward_sources(history(30))) for _ in range(2))
    assert first == second


def test_the_running_mean_skips_gaps() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert plots._running_mean(values, 2).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_a_replayed_step_counts_once_and_steps_are_ordered(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "x": 1.0},
        {"step": 3, "x": 3.0},
        {"step": 2, "x": 9.0},
        {"step": 2, "x": 2.0, "note": "text"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_history(path)
    assert read.column("x").tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(read.column("nothing")).all() and not read.has("nothing")
    assert len(read_history(tmp_path / "missing.jsonl")) == 0


@pytest.mark.parametrize("line", ["{", "[1]", '{"x": 1}'])
def test_a_broken_line_of_the_history_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(CorruptArtifact, match=r"metrics\.jsonl:2"):
        read_history(path)
