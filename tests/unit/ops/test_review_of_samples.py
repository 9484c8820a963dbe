"""`rlhf review --of sample`: pairs of answers to training prompts, whose votes are data of the next run.

- the page has two different answers to each prompt that can be data; the choice follows from the run
- the first `--pairs` of them are shown; the file of votes says how many there were
- votes are rows for `data.preference`, and the agreement with the judge is recorded in MLflow
- options that do not fit together, and runs without such answers, are input errors
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import main as cli
from rlhf_core.config.data import Source
from rlhf_core.data.examples import to_record
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.sources import read_rows
from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.review import (
    ANSWERS,
    AnswersToPrompt,
    BlindPair,
    SampledAnswer,
    page_digest,
    write_answers,
)
from rlhf_core.ops.review import load_sampled_pairs, open_review, votes_command
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.sampled_run import made_run, save_votes

NAME = "small-seed0"
WORDS = ("red", "blue", "green")


def answers_to(number: int) -> AnswersToPrompt:
    """Of three answers to a prompt, the last word has the highest score. Others cannot be data."""
    usable = [SampledAnswer(f"{word} {number}", float(score), True) for score, word in enumerate(WORDS)]
    others = (SampledAnswer(f"cut {number}", 9.0, False), SampledAnswer(f"failed {number}", None, False))
    return AnswersToPrompt(f"p{number}", f"Prompt {number}", (*usable, *others, usable[0]))


EQUAL = AnswersToPrompt("e", "Equal answers", (SampledAnswer("same", 1.0, True),) * 3)
PROMPTS = [EQUAL, *map(answers_to, range(80))]


@pytest.fixture
def home(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run whose stage `sample` has answers to 81 prompts."""
    uri = f"sqlite:///{database}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run_id = Mlflow(uri, "review").create_run("small", {}).run_id
    made_run(tmp_path, NAME, PROMPTS, mlflow_run_id=run_id, tracking_uri=uri)
    return tmp_path


def rlhf(*arguments: Any) -> int:
    return cli.main(list(map(str, arguments)))


def saved_votes(home: Path, pairs: list[BlindPair], choices: Sequence[str | None]) -> Path:
    return save_votes(home / "votes.json", pairs, choices)


def test_two_different_answers_that_can_be_data_to_each_prompt(tmp_path: Path) -> None:
    write_answers(tmp_path, PROMPTS)
    pairs = load_sampled_pairs(tmp_path / ANSWERS)
    assert sorted(pair.prompt for pair in pairs) == sorted(each.prompt for each in PROMPTS[1:])
    assert [pair.prompt for pair in pairs] != [each.prompt for each in PROMPTS[1:]]
    shown = set()
    for pair in pairs:
        number = pair.prompt.removeprefix("Prompt ")
        first, second = pair.first.removesuffix(f" {number}"), pair.second.removesuffix(f" {number}")
        assert first != second and {first, second} < set(WORDS)
        better = pair.first if WORDS.index(first) > WORDS.index(second) else pair.second
        assert pair.sample[pair.sample["winner"]] == better
        shown.add((first, second))
    assert len(shown) == 6, "every order of every two words"
    assert pairs == load_sampled_pairs(tmp_path / ANSWERS)
    write_answers(tmp_path, PROMPTS[:-1])
    assert pairs[:40] != load_sampled_pairs(tmp_path / ANSWERS)[:40]


def test_equal_scores_are_a_tie_of_the_judge(tmp_path: Path) -> None:
    answers = (SampledAnswer("red", 0.5, True), SampledAnswer("blue", 0.5, True))
    write_answers(tmp_path, [AnswersToPrompt("p", "Name a colour.", answers)])
    [pair] = load_sampled_pairs(tmp_path / ANSWERS)
    assert pair.sample["winner"] == "tie"


def test_the_command_that_records_votes_is_for_a_shell() -> None:
    command = votes_command("my runs/summary.json", "/data/my models", "champion", None)
    words = ["my runs/summary.json", "--home", "/data/my models", "--against", "champion"]
    assert shlex.split(command) == ["rlhf", "review", *words, "--votes", "FILE"]


def test_without_scores_there_is_no_agreement(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unscored = [SampledAnswer(word, None, True) for word in WORDS]
    made_run(home / "people", NAME, [AnswersToPrompt("p", "Name a colour.", tuple(unscored))])
    votes = saved_votes(home, open_review(NAME, str(home / "people"), "sample").pairs, ["1"])
    assert rlhf("review", NAME, "--home", home / "people", "--of", "sample", "--votes", votes) == 0
    assert "agreement with the judge of the run: none" in capsys.readouterr().out


def test_votes_become_rows_for_the_next_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlhf("review", NAME, "--home", home, "--of", "sample") == 0
    out = capsys.readouterr().out
    folder = home / "runs" / NAME / "review"
    assert f"50 pairs: open {folder}/of-sample.html" in out
    assert f"rlhf review {NAME} --home {home} --of sample --votes FILE" in out
    page = (folder / "of-sample.html").read_text()
    assert page.count("<article") == 50 and "rlhf review RUN --of sample --votes FILE" in page
    assert page.split('data-page="')[1][:64] == page_digest(open_review(NAME, str(home), "sample").pairs[:50])

    endpoint = "http://127.0.0.1:9000"
    arguments = ("--home", home, "--of", "sample", "--pairs", 5, "--endpoint", endpoint)
    assert rlhf("review", NAME, *arguments) == 0
    out = capsys.readouterr().out
    assert "5 pairs: open" in out
    assert f"rlhf review {NAME} --home {home} --endpoint {endpoint} --of sample --votes FILE" in out
    pairs = open_review(NAME, str(home), "sample").pairs[:5]
    # The person agrees with the scores twice, disagrees once, is undecided once and does not vote once.
    best = ["1" if pair.first == pair.sample[pair.sample["winner"]] else "2" for pair in pairs]
    votes = saved_votes(home, pairs, [best[0], best[1], "2" if best[2] == "1" else "1", "tie", None])
    for _ in range(2):
        assert rlhf("review", NAME, "--home", home, "--of", "sample", "--votes", votes) == 0
        out = capsys.readouterr().out
        assert "4 votes" in out and "agreement with the judge of the run: 0.625" in out
        assert "win rate" not in out
        assert "3 preference rows for data.preference" in out
    [file] = folder.glob("labels-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = [pair.first if vote == "1" else pair.second for pair, vote in zip(pairs, best, strict=True)]
    assert [row["prompt"] for row in rows] == [pair.prompt for pair in pairs[:3]]
    assert [row["chosen"] for row in rows[:2]] == chosen[:2] and rows[2]["rejected"] == chosen[2]

    source = Source(path=str(file))
    records = [to_record(row, source, "preference", "a") for row in read_rows(source) if isinstance(row, Row)]
    assert len(records) == 3 and not any(isinstance(record, BadRow) for record in records)


def test_the_votes_are_recorded_in_the_run_in_mlflow(home: Path, database: Path) -> None:
    summary = json.loads((home / "runs" / NAME / "summary.json").read_text())
    votes = saved_votes(home, open_review(NAME, str(home), "sample").pairs[:1], ["1"])
    assert rlhf("review", NAME, "--home", home, "--of", "sample", "--votes", votes) == 0
    metrics = Mlflow(f"sqlite:///{database}", "review")._client.get_run(summary["mlflow_run_id"]).data.metrics
    assert metrics["review/of_sample/votes"] == 1.0 and metrics["review/of_sample/judge_agreement"] in (0, 1)
    assert not any("win_rate" in name for name in metrics)


def test_votes_of_another_page_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = open_review(NAME, str(home), "sample").pairs
    of_page = ["review", NAME, "--home", home, "--of", "sample", "--votes"]
    for choices in (["1"] * 4, ["1"] * 100, []):
        assert rlhf(*of_page, saved_votes(home, pairs[:5], choices)) == 2
        assert "name the run whose page was reviewed, with the same --of" in capsys.readouterr().err
    assert rlhf(*of_page, saved_votes(home, pairs[:5], [None] * 5)) == 2
    assert "the file has no vote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--of", "sample", "--against", "champion"), "--against: got champion with --of sample"),
        (("--of", "sample", "--against", "sft"), "--against: got sft with --of sample"),
        (("--of", "sample", "--pairs", "0"), "--pairs: must be at least 1; got 0"),
        (("--of", "sample", "--pairs", "3", "--votes", "f"), "--pairs: got 3 with --votes"),
        ((), "has no stage evaluate; run it first"),
    ],
)
def test_options_that_do_not_fit_together(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path, NAME, PROMPTS[:5])
    assert rlhf("review", NAME, "--home", tmp_path, *options) == 2
    assert message in capsys.readouterr().err


def test_runs_without_answers_to_compare_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_sample = ("review", NAME, "--home", tmp_path, "--of", "sample")
    made_run(tmp_path, NAME, [EQUAL])
    assert rlhf(*of_sample) == 2
    assert "has no prompt with two different answers that can be data" in capsys.readouterr().err
    file = tmp_path / "runs" / NAME / "summary.json"
    summary = json.loads(file.read_text())
    file.write_text(json.dumps(summary | {"stages": {}}))
    assert rlhf(*of_sample) == 2
    assert "has no stage sample; run the configuration with a section sample" in capsys.readouterr().err


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).write_text('{"prompt_id": "p", "answers": []}\n')
    with pytest.raises(CorruptArtifact, match=r"answers\.jsonl cannot be read \('prompt'\)"):
        load_sampled_pairs(tmp_path / ANSWERS)
