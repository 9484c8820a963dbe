"""`rlhf check-reward`, and `ppo.check_rewards` in the stage `ppo`.

- the exit code says whether there is a finding; the card is a table or JSON, with the response that shows it
- a function that cannot be loaded, and a configuration without rewards, are errors
- rows have the responses of pairs with the same prompt, and the reference answer
- the stage logs the card, warns, and ends if that is asked for; nothing is checked without `check_rewards`
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_cli.main import main
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.rewards import AnswerReward
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation.reward_views import Card, Finding, Row, rows_of
from rlhf_core.ops.check_reward import check_reward, show
from rlhf_core.stages.ppo import check_rewards_of_stage
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.types import PairExample, PromptExample
from tests.support.data_artifact import TEXTS, data_artifact

SMALL = "{sft_examples: 40, pairs: 40, prompts: 20}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration of the demo's task, with its true reward."""
    path = tmp_path / "c.yaml"
    sets = ", ".join(f"{name}: [{{path: synthetic}}]" for name in ("sft", "preference", "prompts"))
    path.write_text(
        f"run: {{home: {tmp_path / 'home'}, device: cpu}}\n"
        f"data: {{{sets}, synthetic: {SMALL}}}\n"
        "ppo: {rewards: [{type: gold}]}\n"
    )
    return path


def test_the_exit_code_says_whether_there_is_a_finding(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-reward", str(file), "--prompts", "6"]) == 0
    assert capsys.readouterr().out.startswith("no finding (rewards checked: 1, prompts: 6)")
    mine = tmp_path / "mine.py"
    mine.write_text("def score(samples):\n    return [float(len(s.response.split()[0])) for s in samples]\n")
    rewards = f"ppo.rewards=[{{type: python, file: {mine}, function: 'mine:score'}}]"
    assert main(["check-reward", str(file), rewards, "--prompts", "6", "--json"]) == 1
    output = capsys.readouterr()
    card = json.loads(output.out)
    [crash] = [row for row in card["rows"] if row["check"] == "fails"]
    assert (crash["source"], crash["result"]) == ("python", "finding")
    assert "IndexError" in crash["evidence"] and "mine.py:2" in crash["evidence"]
    assert "Traceback" not in output.err
    assert not (tmp_path / "home").exists()


def test_dropped_thoughts_are_in_no_response(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Qwen3's own template does for a last answer without thoughts.
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ '<think>\\n\\n</think>\\n\\n' + m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
    )
    seen: list[Row] = []

    def check_sources(sources: object, rows: list[Row], encode: object, checks: object) -> Card:
        seen.extend(rows)
        return Card((), len(rows))

    monkeypatch.setattr("rlhf_core.ops.check_reward.check_sources", check_sources)
    for thoughts, kept in (("keep", True), ("drop", False)):
        check_reward(file, [f"data.chat_template={tmp_path}/t.jinja", f"data.thoughts={thoughts}"], 6)
        texts = [text for row in seen for text in row.good]
        assert texts and all(text.startswith("<think>") is kept for text in texts)
        seen.clear()


def test_the_table_shows_findings_first_and_names_the_other_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = (
        Finding("fails", "It raises.", "mine", "passes"),
        Finding("batch", "The batch counts.", "mine", "passes"),
        Finding("hedge", "Several answers are right.", "mine", "finding", "response '1\x1b[2J'", "read one"),
        Finding("pairs", "Pairs.", "mine", "not measured", "no pairs"),
    )
    show(Card(rows, 5), Console(width=120))
    verdict, *lines = capsys.readouterr().out.splitlines()
    assert verdict == "1 finding (rewards checked: 1, prompts: 5)"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["mine", "finding", "hedge: Several answers are right."],
        ["", "", r"Seen: response '1\x1b[2J'"],
        ["", "", "To do: read one."],
        ["mine", "passes", "fails, batch"],
        ["mine", "not measured", "pairs: no pairs"],
    ]


def test_what_cannot_be_checked_is_an_error(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("raise OSError('no licence')\n")
    rewards = f"ppo.rewards=[{{type: python, file: {tmp_path / 'mine.py'}, function: 'mine:score'}}]"
    assert main(["check-reward", str(file), rewards]) == 2
    assert "no licence" in capsys.readouterr().err
    assert main(["check-reward", str(file), "--prompts", "0"]) == 2


def test_rows_have_the_responses_of_pairs_and_the_answer() -> None:
    texts: dict[tuple[int, ...], str] = {(1,): "good #### 18", (2,): "bad #### 17"}
    pairs = [PairExample("one", "p", (9,), (1,), (2,)), PairExample("other", "q", (9,), (1,), (2,))]
    prompts = [
        PromptExample("none", "p", (9,), {"answer": "5"}),
        PromptExample("one", "p", (9,), {"answer": "18"}),
    ]
    one, none = rows_of(prompts, pairs, lambda ids: texts[tuple(ids)], [AnswerReward()], 5)
    assert (one.good, one.bad, one.answer) == (("good #### 18",), ("bad #### 17",), "18")
    assert one.data_form() == "good #### {}"
    assert (none.good, none.answer) == ((), "5")
    without = [PromptExample("one", "p", (9,), {"id": "7"})]
    found = rows_of(without, pairs, lambda ids: texts[tuple(ids)], [], 5)
    assert [row.prompt.prompt_id for row in found] == ["one", "other"]


def test_the_stage_logs_the_card_and_ends_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_artifact(tmp_path / "data", TEXTS[:12])
    decoder = load_decoder(data)
    tables: list[tuple[str, list[dict[str, str]]]] = []
    metrics = RecordingMetrics()
    monkeypatch.setattr(metrics, "log_table", lambda name, rows: tables.append((name, rows)))
    context = stage_context(tmp_path / "work", inputs={"data": data}, metrics=metrics)

    def check(level: str) -> None:
        rewards = [{"type": "keywords", "words": ["fox"], "cap": 1000}]
        config = config_from_tree({"ppo": {"rewards": rewards, "check_rewards": level}}, "test")
        check_rewards_of_stage(config, context, decoder)

    check("off")
    assert tables == []
    check("warn")
    [(name, rows)] = tables
    assert name == "reward_checks" and {row["check"] for row in rows} >= {"fails", "gameable"}
    assert "reward total: gameable: " in caplog.text
    with pytest.raises(GateFailed, match=r"correct the reward, or set ppo\.check_rewards to warn"):
        check("refuse")
