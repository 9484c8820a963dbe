"""Report and plots.

- the report needs no other file or host, and untrusted text never becomes markup
- a secret of the environment is hidden in samples and in the data card
- on a phone, a wide table scrolls in its own box
- its numbers are those of the evaluation, and its verdict follows from the interval
- plots show the recorded step metrics, also with missing values and single steps, and give the same bytes
  every time
"""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation import plots
from rlhf_core.evaluation.plots import Image, Panel, Reading, StepMetrics, read_step_metrics
from rlhf_core.evaluation.report import Plot, Report, markdown_to_html, render, with_outcome
from rlhf_core.evaluation.statistics import Answer
from rlhf_core.evaluation.summary import notable_rows
from rlhf_core.types import RewardInput

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)'",
    "javascript:alert(1) <a href='javascript:alert(1)'>x</a>",
    "<svg/onload=alert(1)><style>*{background:url(http://example.org)}</style>",
    "&lt;script&gt; &#x3c;script&#x3e;",
    "\u202egnirts\u202c \x00\x1b[31m\x7f \ud800",
    "&#x202e;&#27;&#0;",
    "[x](javascript:alert(1)) ![x](http://example.org) <http://example.org>",
    "{{ 7 * 7 }}{% raw %}{# #}",
)
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "article", "div", "p",
    "span", "b", "i", "em", "small", "strong", "h1", "h2", "h3", "h4", "table", "thead", "tbody", "tr", "th",
    "td", "nav", "a", "code", "pre", "figure", "figcaption", "svg", "g", "line", "circle", "details",
    "summary", "path", "rect", "text",
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
    collector.text = " ".join(collector.text.split())
    return collector


def interval(mean: float, spread: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - spread, "high": mean + spread}


def of_policy(win: float = 0.8, trained: bool = False) -> dict[str, Any]:
    verdicts = {"wins": 90, "losses": 30, "ties": 8}
    table = {"win_rate": interval(win), "kl": interval(3.25), "verdicts": verdicts}
    return table | {"judge_trained_on": trained}


def evaluation(win: float = 0.8) -> dict[str, Any]:
    pair = {"sft": interval(0.25), "ppo": interval(1.5), "difference": {"ppo": interval(1.25)}}
    return {
        "policies": {"ppo": of_policy(win)}, "rl_algorithm": "PPO", "judge": "gold", "inconsistent": 0.0,
        "gold_reward": pair,
        "reward_model": None, "rules": {"keywords": pair},
        "lengths": {"sft": interval(30), "ppo": interval(34), "difference": {"ppo": interval(4)}},
        "eos_rate": {"sft": 0.9, "ppo": 1.0}, "prompts": 128, "confidence": 0.95, "by_source": {},
        "distinct": {model: {"1": 0.1, "2": 0.2, "3": 0.3} for model in ("sft", "ppo")},
    }  # fmt: skip


def sample(text: str = "A fox.", winner: str = "ppo") -> dict[str, Any]:
    scores = {"sft": {"gold": 0.5}, "ppo": {"gold": 1.25}}
    return {"prompt_id": "p", "prompt": text, "sft": text, "ppo": text, "winner": winner, "scores": scores}


def image(text: str = "step 1") -> Image:
    reading = Reading(text, ((text, text),), x=5.0, left=0.0, width=10.0)
    return Image(10.0, 10.0, "<path/>", (Panel(0.0, 10.0, 5.0, (reading,)),))


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "name": "demo", "evaluation": evaluation(), "samples": [sample()],
        "plots": [Plot("t", "c", image())],
        "config": "ppo: {}\n", "lineage": [("sft", "1.5 min", "0123", "abcd")], "data_card": "# Data\n",
        "facts": {"seed": "0"},
    }  # fmt: skip
    return Report(**(fields | changes))


@pytest.mark.parametrize(("is_best", "shared"), [(True, 7), (True, 0), (False, 7)])
def test_a_policy_that_was_chosen_on_these_prompts_is_named(is_best: bool, shared: int) -> None:
    page = " ".join(render(report(is_best_version=is_best, shared_prompts=shared)).split())
    assert ("(ppo.publish: best)" in page) is is_best
    assert ("except 7 that are also used here: its win rate" in page) is (is_best and shared == 7)


@pytest.mark.parametrize("text", HOSTILE)
def test_untrusted_text_never_becomes_markup(text: str) -> None:
    document = render(
        report(
            name=text,
            samples=[sample(text)],
            notable={text: [sample(text)]},
            plots=[Plot(text, text, image(text))],
            config=text,
            data_card=f"# {text}\n",
            lineage=[(text, text, text, text)],
            facts={text: text},
            evaluation=evaluation()
            | {
                "rules": {text: evaluation()["gold_reward"]},
                "by_source": {text: evaluation(), "b": evaluation()},
            },
        )
    )
    plain = parse(
        render(
            report(
                notable={"a": [sample("a")]},
                evaluation=evaluation() | {"by_source": {"a": evaluation(), "b": evaluation()}},
            )
        )
    )
    hostile = parse(document)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert {tag for tag, _ in hostile.tags} <= TAGS
    links = {attributes["href"] or "" for _, attributes in hostile.tags if "href" in attributes}
    assert links == {"#results", "#training", "#samples", "#notable", "#lineage", "#data"}
    assert not {name for _, attributes in hostile.tags for name in attributes if name.startswith("on")}
    document.encode("utf-8")
    assert not set("\u202e\u202c\x00\x1b\x7f") & set(document)


def test_a_secret_that_the_process_knows_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the fox says correct horse"
    samples, card = [sample(text)], f"# Data\n\n- {text}\n"
    given = report(samples=samples, notable={"lowest": samples}, data_card=card)
    count = render(given).count(text)
    assert count == 7, "three texts of each sample, and the data card"
    monkeypatch.setenv("MY_TOKEN", "correct horse")
    shown = render(given)
    assert "correct horse" not in shown and shown.count("the fox says (hidden)") == count
    assert given.samples == [sample(text)]


@pytest.mark.parametrize("trained", [False, True])
def test_headline_names_the_judge_and_whether_it_was_trained_on(trained: bool) -> None:
    judged = {"judge": "reward_model", "policies": {"ppo": of_policy(trained=trained)}}
    headline = parse(render(report(evaluation=evaluation() | judged)).split("</header>")[0]).text
    assert "Wins are decided by the reward model." in headline
    assert ("The policy was trained with it" in headline) == trained


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_model_whose_responses_never_end_is_named_above_the_results(rate: float) -> None:
    page = render(report(evaluation=evaluation() | {"eos_rate": {"sft": 0.9, "ppo": rate}}))
    assert ("0.0% of the responses of the PPO model end with EOS" in page) == (rate == 0)


def test_results_show_paired_differences_and_data_sources() -> None:
    sources = {"a.jsonl": evaluation(0.9), "b.jsonl": evaluation(0.3)}
    text = parse(render(report(evaluation=evaluation() | {"by_source": sources}))).text
    assert "+1.250 (+1.150 to +1.350)" in text
    assert "What another training run (another seed) would give is not in these intervals" in text
    assert "By data source" in text and "a.jsonl" in text and "30.0% 20.0% to 40.0%" in text


def test_win_rates_over_the_data_are_in_percent_and_their_difference_in_points() -> None:
    rates = {"sft": interval(0.4), "ppo": interval(0.65), "difference": {"ppo": interval(0.25)}}
    controlled = {"sft": interval(0.4), "ppo": interval(0.6)}
    chosen = {"prompts": 40, "win_rate": rates, "win_rate_length_controlled": controlled}
    text = parse(render(report(evaluation=evaluation() | {"over_chosen": chosen}))).text
    assert "data's answers 40.0% 30.0% to 50.0% 65.0% 55.0% to 75.0% +25.0 pp +15.0 to +35.0" in text


def test_regression_sets_have_a_column_and_a_result_for_the_policy_of_dpo() -> None:
    three: dict[str, Any] = {name: interval(1.0) for name in ("sft", "ppo", "dpo", "ppo_minus_dpo")}
    found: dict[str, Any] = evaluation()
    for name in ("gold_reward", "lengths"):
        found[name] = three | {"difference": {"ppo": interval(1.0), "dpo": interval(1.0)}}
    found |= {"rules": {}, "eos_rate": dict.fromkeys(("sft", "ppo", "dpo"), 1.0)}
    found["distinct"] = {model: {"1": 0.1, "2": 0.2, "3": 0.3} for model in ("sft", "ppo", "dpo")}
    controlled = {"win_rate_length_controlled": interval(0.5)}
    found["policies"] = {name: of_policy() | controlled for name in ("ppo", "dpo")}
    names = ("win_rate_ppo_over_dpo", "win_rate_ppo_over_dpo_length_controlled")
    found |= dict.fromkeys(names, interval(0.5))
    item = {"sft": interval(0.5), "ppo": interval(0.7), "dpo": interval(0.125), "margin": 0.2, "prompts": 9}
    item |= {"difference": {"ppo": interval(0.2), "dpo": interval(-0.375)}}
    rows = [sample() | {"dpo": "x", "scores": {model: {} for model in ("sft", "ppo", "dpo")}}]
    page = render(report(evaluation=found | {"regression": {"sums": item}}, samples=rows))
    text = parse(page.split("Regression sets")[1].split("</table>")[0]).text
    assert "Change, DPO" in text and "0.125" in text and "-0.375 (-0.475 to -0.275)" in text
    results = [word for word in text.split() if word in ("passed", "failed")]
    assert results == ["passed", "failed"], "PPO, then DPO"
    header = parse(page.split("</header>")[0]).text
    assert "DPO's policy is not promoted, because regression sets failed: sums." in header
    assert "It is not promoted" not in header


def test_data_card_becomes_headings_tables_lists_and_code() -> None:
    card = r"""
## Sets
| set | rows |
|---|--:|
| sft | 4 \| 5 |

two
lines **bold** &lt;eos&gt; a\_b
- `a < b`
- c
```text
# <b>raw</b>
```
end
"""
    expected = """
<h3>Sets</h3>
<table class="left">
<thead>
<tr>
<th>set</th>
<th>rows</th>
</tr>
</thead>
<tbody>
<tr>
<td>sft</td>
<td>4 | 5</td>
</tr>
</tbody>
</table>
<p>two
lines <strong>bold</strong> &lt;eos&gt; a_b</p>
<ul>
<li><code>a &lt; b</code></li>
<li>c</li>
</ul>
<pre><code class="language-text"># &lt;b&gt;raw&lt;/b&gt;
</code></pre>
<p>end</p>
"""
    assert markdown_to_html(card) == expected.lstrip()


def test_links_images_and_html_of_a_data_card_remain_text() -> None:
    card = "[a](http://x) ![b](http://x) <http://x> <b>c</b>\n\n<div>d</div>\n\n[e]: http://x\n\n[e]\n"
    tags = [tag for tag, _ in parse(markdown_to_html(card)).tags]
    assert set(tags) == {"p"}
    assert "[e]: http://x" in markdown_to_html(card)


@pytest.mark.parametrize("card", ["```\nnever closed", "|", "#", "- ", "|||\n|-|", "-", "~~~~", "`"])
def test_incomplete_markdown_is_rendered(card: str) -> None:
    assert isinstance(markdown_to_html(card), str)


def test_report_loads_no_external_resources() -> None:
    collector = parse(render(report()))
    assert not [attributes for _, attributes in collector.tags if "src" in attributes]
    contents = [attributes.get("content") for tag, attributes in collector.tags if tag == "meta"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in contents
    assert "url(" not in render(report()) and "http" not in render(report()).replace("http-equiv", "")


def test_report_shows_the_numbers_of_the_evaluation() -> None:
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
    ("win", "verdict"), [(0.8, "beats"), (0.5, "no significant difference"), (0.2, "is worse than")]
)
def test_verdict_follows_from_the_interval(win: float, verdict: str) -> None:
    assert verdict in render(report(evaluation=evaluation(win)))


def test_report_names_the_algorithm_that_ran() -> None:
    text = parse(render(report(evaluation=evaluation() | {"rl_algorithm": "GRPO"}))).text
    assert "The GRPO policy beats the SFT model" in text and "PPO" not in text


def test_report_has_times_and_selected_answers_only_if_there_are_any() -> None:
    plain = render(report())
    assert "1.5 min" in plain and 'id="notable"' not in plain
    shown = parse(render(report(notable={"Lowest": [sample("Bad.")]})))
    assert "Selected answers" in shown.text and "Bad." in shown.text


@pytest.mark.parametrize(("winner", "count"), [("ppo", 1), ("sft", 1), ("tie", 0)])
def test_winner_of_a_sample_is_marked(winner: str, count: int) -> None:
    document = render(report(samples=[sample(winner=winner)]))
    assert document.count(' winner"') == count
    assert ("answer ppo winner" in document) == (winner == "ppo")


def test_empty_responses_and_missing_step_metrics_are_stated() -> None:
    document = render(report(samples=[sample("")], plots=[]))
    assert "<i>empty</i>" in document
    assert "no step metrics" in document


def history(steps: int) -> StepMetrics:
    return StepMetrics(
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
def test_curves_have_the_recorded_values_and_units(steps: int) -> None:
    figure = plots.training_curves(history(steps))
    top, bottom = figure.axes
    assert top.lines[0].get_ydata().tolist() == history(steps).column("objective/scores").tolist()
    assert bottom.get_ylabel() == "KL (nats per response)"
    assert bottom.get_xlabel() == "step"
    assert plots.to_png(figure).startswith(b"\x89PNG")


def test_readings_of_a_panel_cover_it_and_have_the_values_of_each_step() -> None:
    rows = [{"step": s, "objective/kl": s * s, "objective/scores": s / 3} for s in (1, 2, 3)]
    top, bottom = plots.to_image(plots.training_curves(StepMetrics(rows))).panels
    assert [(reading.place, reading.values) for reading in top.readings] == [
        ("step 1", (("score", "0.3333"),)),
        ("step 2", (("score", "0.6667"),)),
        ("step 3", (("score", "1"),)),
    ]
    assert [reading.values for reading in bottom.readings][2] == (("KL", "9"),)
    first, second, third = top.readings
    assert first.left + first.width == pytest.approx(second.left)
    assert second.left + second.width == pytest.approx(third.left)
    assert all(reading.left <= reading.x <= reading.left + reading.width for reading in top.readings)
    [panel] = plots.to_image(plots.reward_against_kl(StepMetrics(rows))).panels
    assert panel.readings[1].place == "step 2, KL 4"


def test_a_long_run_has_at_most_200_readings_and_missing_values_have_none() -> None:
    [panel] = plots.to_image(plots.reward_sources(history(1000))).panels
    assert len(panel.readings) == 200
    missing = StepMetrics([{"step": 1, "objective/scores": 1.0}, {"step": 2}])
    found = plots.to_image(plots.training_curves(missing))
    assert [[reading.values for reading in panel.readings] for panel in found.panels] == [[(("score", "1"),)]]
    assert "score 1" in parse(render(report(plots=[Plot("t", "c", found)]))).text


@pytest.mark.parametrize(
    ("evaluations", "places"),
    [
        ([{"eval/kl": 0, "eval/score": 1}, {"eval/kl": 4}], [["step 0"], ["step 0, KL 0"]]),
        ([{"eval/score": 1}, {"eval/score": 2}], [["step 0", "step 10"]]),
        ([{"eval/kl": 0, "eval/gold": 1}, {}], [["step 0"], ["step 0, KL 0"]]),
    ],
)
def test_evaluations_without_a_value_have_no_reading(
    evaluations: list[dict[str, float]], places: list[list[str]]
) -> None:
    figure = plots.evaluation_curves(dict(zip((0, 10), evaluations, strict=True)), best=None, max_kl=9.0)
    found = plots.to_image(figure)
    assert [[reading.place for reading in panel.readings] for panel in found.panels] == places
    assert places[0][0] in parse(render(report(plots=[Plot("t", "c", found)]))).text


def test_a_figure_without_any_value_has_no_panel() -> None:
    found = plots.to_image(plots.evaluation_curves({0: {"eval/kl": 0}, 10: {}}, best=None, max_kl=9.0))
    assert found.panels == ()
    assert "Values: t" not in render(report(plots=[Plot("t", "c", found)]))


def test_the_image_of_a_long_run_has_the_first_and_the_last_of_at_most_2000_points_of_a_line() -> None:
    figure = plots.reward_against_kl(history(6000))
    [line] = figure.axes[0].lines
    ends = line.get_xydata()[[0, -1]].tolist()
    svg = plots.to_image(figure).svg
    assert 1990 < svg.count("<use") < 2030, "ticks have markers too"
    assert line.get_xydata()[[0, -1]].tolist() == ends


def test_readings_of_a_distribution_count_the_responses_of_each_bin() -> None:
    [panel] = plots.to_image(plots.reward_distribution({"gold": ([0.0, 0.1, 1.0], [1.0, 1.0, 1.0])})).panels
    assert panel.readings[-1].values == (("SFT", "1"), ("PPO", "3"))


def test_an_image_has_the_colours_of_the_page_in_light_and_dark_and_no_address() -> None:
    found = plots.to_image(plots.reward_against_kl(history(5))).svg
    assert not re.search("#[0-9a-f]{6}", found) and "url(" not in found and "http" not in found
    light, dark = re.findall(r":root \{(.*?)\}", render(report()), re.DOTALL)
    own = {f"--{name}:" for name in plots.VARIABLES.values()}
    assert own <= set(light.split()) and own - set(dark.split()) == {"--sft:"}
    assert plots.to_image(plots.reward_against_kl(history(5))).svg == found


def test_what_is_decided_after_the_report_takes_its_place_once_as_text() -> None:
    page = render(report(samples=[sample("decided after this page")]))
    found = with_outcome(page, [("promotion", "demo version 1: champion"), ("reason", HOSTILE[0] + "\x1b")])
    text = parse(found.split("</header>")[0]).text
    assert "promotion demo version 1: champion" in text and "decided after this page" not in text
    assert "decided after this page" in found and HOSTILE[0] not in found and "\x1b" not in found
    assert "decided after this page" in parse(with_outcome(page, []).split("</header>")[0]).text


def test_only_the_first_samples_are_open() -> None:
    page = render(report(samples=[sample(f"row {number}.") for number in range(7)]))
    before, _, more = page.partition("<summary>2 more</summary>")
    assert "row 4." in before and "row 5." not in before and "row 6." in more


def test_score_and_gold_reward_are_plotted_against_root_kl(tmp_path: Path) -> None:
    rows = [{"step": s, "objective/kl": s * s, "objective/scores": s, plots.GOLD: -s} for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score, gold = plots.reward_against_kl(read_step_metrics(tmp_path / "metrics.jsonl")).axes[0].lines
    assert (list(score.get_xdata()), list(score.get_ydata())) == ([1, 2, 3], [1, 2, 3])
    assert (list(gold.get_xdata()), list(gold.get_ydata())) == ([1, 2, 3], [-1, -2, -3])


def test_reward_against_kl_has_one_point_per_step() -> None:
    figure = plots.reward_against_kl(history(5))
    [points] = figure.axes[0].lines
    assert points.get_xydata()[4].tolist() == pytest.approx([0.5**0.5, 5**0.5])


def test_distribution_counts_all_responses_of_both_models() -> None:
    rng = np.random.default_rng(0)
    sft, ppo = rng.normal(size=40).tolist(), [2.0] * 40
    axes = plots.reward_distribution({"gold": (sft, ppo), "rules": (ppo, ppo)}).axes
    assert [sum(patch.get_height() for patch in bars) for bars in axes[0].containers] == [40, 40]
    assert axes[0].get_xlabel() == "gold reward (true reward)"


def test_same_figure_gives_the_same_bytes() -> None:
    first, second = (plots.to_png(plots.reward_sources(history(30))) for _ in range(2))
    assert first == second


def test_a_matplotlibrc_in_the_working_folder_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "matplotlibrc").write_text("text.usetex: True\naxes.facecolor: black\n")
    script = (
        "import hashlib, os; from rlhf_core.evaluation import plots\n"
        "figure, _ = plots._figure(4, 3)\n"
        "print(os.getcwd(), hashlib.sha256(plots.to_png(figure)).hexdigest())"
    )
    command = [sys.executable, "-P", "-c", script]
    results = [
        subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.split()
        for cwd in (folder, tmp_path)
    ]
    assert [cwd for cwd, _ in results] == [str(folder), str(tmp_path)]
    assert results[0][1] == results[1][1]


def test_running_mean_skips_missing_values() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert plots._running_mean(values, 2).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_repeated_steps_count_once_and_steps_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "x": 1.0},
        {"step": 3, "x": 3.0},
        {"step": 2, "x": 9.0},
        {"step": 2, "x": 2.0, "note": "text"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_step_metrics(path)
    assert read.column("x").tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(read.column("nothing")).all() and not read.has("nothing")
    assert len(read_step_metrics(tmp_path / "missing.jsonl")) == 0


@pytest.mark.parametrize("line", ["{", "[1]", '{"x": 1}'])
def test_invalid_line_of_step_metrics_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(CorruptArtifact, match=r"metrics\.jsonl:2"):
        read_step_metrics(path)


def test_selected_answers_are_the_worst_and_the_most_changed_ones() -> None:
    scores = {"sft": [1.0, 0.0, 2.0, 1.0], "ppo": [1.5, 0.5, 0.8, 1.0]}
    answers = {
        model: [
            Answer(RewardInput(f"p{i}", f"prompt {i}", "a.", (1,), (2,), finished=True), {"gold": score})
            for i, score in enumerate(of_model)
        ]
        for model, of_model in scores.items()
    }
    found = notable_rows(answers, {}, "ppo", 2)
    assert {title: [row["prompt_id"] for row in rows] for title, rows in found.items()} == {
        "Lowest score (gold)": ["p1", "p2"],
        "Fell most from SFT (gold)": ["p2"],
        "Rose most from SFT (gold)": ["p0", "p1"],
    }
    unscored = {model: [Answer(answer.sample) for answer in of_model] for model, of_model in answers.items()}
    assert notable_rows(unscored, {}, "ppo", 2) == {}


PHONE = """<iframe id="page" width="390" height="800" srcdoc="PAGE"></iframe>
<script>
document.getElementById("page").onload = event => {
  const page = event.target.contentDocument;
  page.querySelectorAll("details").forEach(each => each.open = true);
  const wide = [...page.querySelectorAll("section")].filter(each => each.scrollWidth > each.clientWidth);
  const tables = [...page.querySelectorAll("table")];
  const scrolled = tables.filter(each => each.scrollWidth > each.clientWidth);
  const numbers = scrolled.map(each => tables.indexOf(each));
  document.body.append(`sections ${wide.map(each => each.id)}, tables ${numbers}`);
};
</script>"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_no_column_of_a_table_is_cut_off_on_a_phone(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    wide = "| " + " | ".join(f"a{number}" * 9 for number in range(9)) + " |\n"
    page = render(report(data_card=f"# Data\n\n{wide}{'|---' * 9}|\n{wide}"))
    (tmp_path / "phone.html").write_text(PHONE.replace("PAGE", html.escape(page)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    line = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", str(tmp_path / "phone.html")]
    shown = subprocess.run(line, capture_output=True, text=True, timeout=90, check=True).stdout
    assert re.findall(r"sections (.*), tables (.*)</body>", shown) == [("", "3")], (
        "the last one scrolls alone"
    )
