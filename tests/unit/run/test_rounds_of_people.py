"""Rounds with votes of people (`sample.judge: people`), on runs that a function makes.

- after a round without votes the rounds end, with the page and the command that records votes
- the same call after that command reuses the finished round, and the next one has the rows of the votes as
  demonstrations and as pairs; the data stage reads them
- ties, votes of other pages and earlier files of the same page load do not count; files of several people are
  several sources
- the last round needs no votes
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.main import main
from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import check_consistency
from rlhf_core.config.data import Source
from rlhf_core.config.load import load_config
from rlhf_core.data.examples import to_record
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import Record
from rlhf_core.data.sources import read_rows
from rlhf_core.errors import ConfigError, InputError, VotesNeeded
from rlhf_core.evaluation.sampled import AnswersToPrompt, SampledAnswer
from rlhf_core.run.review import open_review
from rlhf_core.run.rounds import round_overrides, run_rounds
from tests.support.sampled_run import made_run, save_votes

DEMO = "deployments/configs/demo.yaml"
ANSWERS = tuple(SampledAnswer(word, None, True) for word in ("red", "blue", "green"))
PROMPTS = [AnswersToPrompt(f"p{number}", f"Prompt {number}", ANSWERS) for number in range(3)]


class Rounds:
    """Runs of which each is made once. Its name has the number of its sources of demonstrations."""

    def __init__(self, home: Path, *overrides: str) -> None:
        self.home = home
        self.config = load_config(DEMO, ["sample.judge=people", f"run.home={home}", *overrides])
        self.made: dict[str, PipelineConfig] = {}
        self._summaries: dict[str, dict[str, Any]] = {}

    def run(self, number: int) -> list[str]:
        """Return the names of the finished rounds."""
        return [summary["run"] for summary in run_rounds(self.config, number, run=self._run_pipeline)]

    def _run_pipeline(self, config: PipelineConfig, *, tags: Any) -> dict[str, Any]:
        number = len(config.data.sft)
        name = f"small-{number}"
        if name not in self.made:
            self.made[name] = config
            self._summaries[name] = made_run(self.home, name, PROMPTS, f"{number:016x}")
        return self._summaries[name]

    def needed(self, number: int) -> str:
        """Run, and return the message about votes that are needed."""
        with pytest.raises(VotesNeeded) as caught:
            self.run(number)
        return caught.value.message

    def vote(self, run: str, choices: list[str | None], saved: int = 1, pairs: int | None = None) -> Path:
        """Return a file of votes on the samples of a run."""
        shown = open_review(run, str(self.home), "sample").pairs[:pairs]
        return save_votes(self.home / f"votes-{saved}.json", shown, choices, saved)


def record(command: str, votes: Path) -> None:
    """Run the command of a message with a file of votes."""
    assert command.startswith("rlhf ") and command.endswith(" --votes FILE")
    assert main([*shlex.split(command)[1:-1], str(votes)]) == 0


def records(source: Source, kind: Any) -> list[Record]:
    read = [to_record(row, source, kind, "a") for row in read_rows(source) if isinstance(row, Row)]
    return [each.record for each in read if not isinstance(each, BadRow)]


def test_the_rounds_end_where_votes_are_needed_and_go_on_when_they_are_recorded(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path / "a home")
    message = rounds.needed(3)
    page = rounds.home / "runs" / "small-1" / "review" / "of-sample.html"
    assert f"round 2 needs votes of people on 3 pairs: open {page} in" in message and page.is_file()
    assert rounds.needed(3) == message and list(rounds.made) == ["small-1"]

    command = message.split("`")[1]
    record(command, rounds.vote("small-1", ["1", "tie", "2"]))
    assert "round 3 needs votes of people" in rounds.needed(3)
    assert list(rounds.made) == ["small-1", "small-2"], "the first round was reused"

    data = rounds.made["small-2"].data
    assert [source.path for source in data.preference] == ["synthetic", data.sft[1].path]
    assert (data.preference[1].labelled_by, data.sft[1].labelled_by) == (None, None)
    first, _, third = open_review("small-1", str(rounds.home), "sample").pairs
    liked = [(pair.prompt, text) for pair, text in ((first, first.first), (third, third.second))]
    demonstrations = records(data.sft[1], "sft")
    assert [(each.prompt_text, each.response) for each in demonstrations] == liked
    pairs = records(data.preference[1], "preference")
    assert [(each.prompt_text, each.response) for each in pairs] == liked
    assert [each.rejected for each in pairs] == [first.second, third.first]

    record(command.replace("small-1", "small-2"), rounds.vote("small-2", ["1", None, None], saved=2))
    assert rounds.run(3) == ["small-1", "small-2", "small-3"], "the last round needs no votes"
    assert [source.path for source in rounds.made["small-3"].data.sft[:2]] == ["synthetic", data.sft[1].path]


def test_ties_and_votes_on_the_evaluation_are_no_labels(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    command = rounds.needed(2).split("`")[1]
    record(command, rounds.vote("small-1", ["tie"] * 3))
    review = open_review("small-1", str(tmp_path), "sample")
    other = list(reversed(review.pairs))
    save_votes(review.folder / "votes-00000000.json", other, ["1"] * 3)
    (review.folder / "preferences-00000000.jsonl").write_text('{"prompt": "held out"}\n')
    assert "round 2 needs votes of people" in rounds.needed(2)


def test_every_person_counts_once_and_pages_of_any_size_count(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    command = rounds.needed(2).split("`")[1]

    def saved_again(saved: int, choices: list[str | None]) -> Path:
        file = rounds.vote("small-1", choices, saved)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"session": "first person"}))
        return file

    record(command, saved_again(30, ["1", "1", None]))
    record(command, saved_again(20, ["1", None, None]))
    record(command, rounds.vote("small-1", ["2", "2"], saved=10, pairs=2))
    assert rounds.run(2) == ["small-1", "small-3"], "two sources more"
    other, first = rounds.made["small-3"].data.preference[1:]
    assert len(records(other, "preference")) == len(records(first, "preference")) == 2
    shown = open_review("small-1", str(tmp_path), "sample").pairs[:2]
    assert [each.response for each in records(first, "preference")] == [pair.first for pair in shown]
    assert [each.response for each in records(other, "preference")] == [pair.second for pair in shown]


def test_without_pairs_the_votes_are_demonstrations_only(tmp_path: Path) -> None:
    rounds = Rounds(
        tmp_path, "ppo.rewards=[{type: well_formed}]", "reward.enabled=false", "data.preference=[]"
    )
    record(rounds.needed(2).split("`")[1], rounds.vote("small-1", ["1", "1", "1"]))
    assert rounds.run(2) == ["small-1", "small-2"]
    assert rounds.made["small-2"].data.preference == ()


def test_answers_that_nobody_could_compare_end_the_rounds(tmp_path: Path) -> None:
    config = Rounds(tmp_path).config
    equal = AnswersToPrompt("p", "Prompt", (ANSWERS[0], ANSWERS[0]))
    summary = made_run(tmp_path, "small-1", [equal])
    with pytest.raises(InputError, match="no prompt with two different answers"):
        round_overrides(config, [summary])


def test_people_give_no_scores() -> None:
    config = load_config(DEMO, ["sample={judge: people, min_score: 1}"])
    errors = [str(each) for each in check_consistency(config) if isinstance(each, ConfigError)]
    assert errors == [
        "sample.min_score: people give no scores; got 1 with sample.judge=people; leave one of them out"
    ]
