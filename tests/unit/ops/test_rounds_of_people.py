"""Rounds with votes of people (`sample.judge: people`), on runs that a function makes.

- after a round without votes the rounds end, with the page and the command that records votes
- the same call after that command reuses the finished round, and the next one has the rows of the votes as
  demonstrations and as pairs; the data stage reads them
- ties, votes of other pages and earlier files of the same page load do not count
- several people give one row for each pair, that of the majority; the same votes give the same file
- files that `rlhf review` has not recorded do not count, and cannot hide the recorded ones
- another machine for the stage `data` is refused, because it has not the rows
- the last round needs no votes
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
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
from rlhf_core.data.messages import Message
from rlhf_core.data.sources import read_rows
from rlhf_core.errors import ConfigError, InputError, VotesNeeded
from rlhf_core.evaluation.review import AnswersToPrompt, BlindPair, SampledAnswer, page_digest
from rlhf_core.ops.review import open_review, record_votes
from rlhf_core.ops.rounds import round_overrides, run_rounds
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

    def _run_pipeline(self, config: PipelineConfig, *, tags: Any, until: str) -> dict[str, Any]:
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


def said(answer: Message | None) -> str:
    assert answer is not None
    return answer.content


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
    assert [(each.prompt_text, said(each.response)) for each in demonstrations] == liked
    pairs = records(data.preference[1], "preference")
    assert [(each.prompt_text, said(each.response)) for each in pairs] == liked
    assert [said(each.rejected) for each in pairs] == [first.second, third.first]

    record(command.replace("small-1", "small-2"), rounds.vote("small-2", ["1", None, None], saved=2))
    assert rounds.run(3) == ["small-1", "small-2", "small-3"], "the last round needs no votes"
    assert [source.path for source in rounds.made["small-3"].data.sft[:2]] == ["synthetic", data.sft[1].path]


def test_ties_and_votes_on_the_evaluation_are_no_labels(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    command = rounds.needed(2).split("`")[1]
    record(command, rounds.vote("small-1", ["tie"] * 3))
    review = open_review("small-1", str(tmp_path), "sample")
    other = replace(review, pairs=review.pairs[::-1])
    record_votes(other, save_votes(tmp_path / "votes.json", other.pairs, ["1"] * 3))
    assert len(list(review.folder.glob("votes-*.json"))) == 2
    assert "round 2 needs votes of people" in rounds.needed(2)


def in_session(file: Path, session: str) -> Path:
    """Write the file of votes as one of a page load."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"session": session}))
    return file


def test_the_majority_of_all_votes_on_a_pair_is_its_label(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    command = rounds.needed(2).split("`")[1]
    record(command, in_session(rounds.vote("small-1", ["1", "1", "2"], saved=30), "first person"))
    record(command, in_session(rounds.vote("small-1", ["2", "1", "2"], saved=20), "first person"))
    record(command, in_session(rounds.vote("small-1", ["1", "2", "1"], saved=10), "second person"))
    review = open_review("small-1", str(tmp_path), "sample")
    first, second, _ = review.pairs

    def label(text: str, other: str, pair: BlindPair) -> dict[str, str]:
        return {"prompt": pair.prompt, "chosen": text, "rejected": other}

    agreed = label(first.first, first.second, first)
    assert review.rows() == [agreed], "both prefer the first answer, and disagree on the others"
    record(command, in_session(rounds.vote("small-1", ["2", "1"], saved=40, pairs=2), "third person"))
    # The same page load again, on a smaller page: its last votes on these pairs count, once.
    for saved in (50, 51):
        record(command, in_session(rounds.vote("small-1", ["1", "2"], saved, pairs=2), "second person"))
    rows = [agreed, label(second.first, second.second, second)]
    assert review.rows() == rows

    assert rounds.run(2) == ["small-1", "small-2"], "one source more"
    file = review.write_rows(rows)
    data = rounds.made["small-2"].data
    assert [data.sft[1].path, data.preference[1].path] == [str(file)] * 2
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    record(command, in_session(rounds.vote("small-1", ["tie", "tie", "tie"], saved=60), "fourth person"))
    assert rounds.run(2) == ["small-1", "small-2"]
    assert review.write_rows(review.rows()) == file, "the same rows are the same file"


def test_only_recorded_files_count(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    command = rounds.needed(2).split("`")[1]
    votes = in_session(rounds.vote("small-1", ["1", "1", "1"]), "first person")
    later = in_session(rounds.vote("small-1", ["2", "2", "2"], saved=2), "first person")
    review = open_review("small-1", str(tmp_path), "sample")
    download = review.folder / f"votes-{page_digest(review.pairs)[:8]}.json"
    shutil.copy(later, download)
    (review.folder / "votes-notes.json").write_text("not of a page")
    assert "round 2 needs votes of people" in rounds.needed(2)
    record(command, votes)
    liked = [pair.first for pair in review.pairs]
    assert [row["chosen"] for row in review.rows()] == liked


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


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (["run.executor=slurm"], "slurm"),
        (["run.resources.data.executor=ray"], "ray"),
        (["run.executor=slurm", "run.resources.data.executor=local"], None),
        (["run.executor=slurm", "sample.judge=reward"], None),
    ],
)
def test_the_stage_data_must_have_the_votes(settings: list[str], refused: str | None) -> None:
    config = load_config(DEMO, ["sample.judge=people", *settings])
    errors = [str(each) for each in check_consistency(config) if isinstance(each, ConfigError)]
    expected = (
        "sample.judge: people needs the stage data on this machine, because votes are recorded in its"
        f" run.home; got run.executor={refused}; set run.resources.data.executor=local"
    )
    assert errors == ([] if refused is None else [expected])
