"""`rlhf review`: answers of a run as a page for people, and what their votes say.

{folder of the run}/review/  against-sft.html  votes-<digest>.json  labels-<digest>.jsonl

The page has samples of the evaluation or of the match, or pairs of answers of the stage `sample`. The files
of votes are the only record: results and preference rows follow from all of them. The digests are those of
the contents, so that several people can vote, and the same file counts once.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from jinja2 import PackageLoader
from markupsafe import Markup

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.messages import Message
from rlhf_core.data.prompt_sets import load_encoder
from rlhf_core.errors import InputError
from rlhf_core.evaluation.report import environment
from rlhf_core.evaluation.review import (
    ANSWERS,
    BlindPair,
    Opponent,
    SampledAnswer,
    Vote,
    blind_pairs,
    groups,
    load_blind_pairs,
    page_digest,
    read_answers,
    read_votes,
    votes_by_pair,
)
from rlhf_core.evaluation.statistics import Interval, win_rate
from rlhf_core.evaluation.votes import MAX_BYTES, VoteFile, parse_votes
from rlhf_core.ops.finished_run import FinishedRun, find_run
from rlhf_core.pipeline import StageName
from rlhf_core.seeds import derive_seed
from rlhf_core.system.files import read_bounded, write_atomic, write_jsonl
from rlhf_core.tracking.champions import registry_errors
from rlhf_core.tracking.mlflow_client import Mlflow, Point
from rlhf_core.tracking.tracker import open_tracking, public_uri


class _Samples(NamedTuple):
    """The samples of a page."""

    stage: StageName
    file: str
    page: str
    """Name of the page."""
    options: str
    """Options of `rlhf review` that choose the page."""


_SAMPLES: dict[Opponent, _Samples] = {
    "sft": _Samples("evaluate", "samples.jsonl", "against-sft", ""),
    "champion": _Samples("register", "match_samples.jsonl", "against-champion", " --against champion"),
    "sample": _Samples("sample", ANSWERS, "of-sample", " --of sample"),
}
_PAIRS = 50
"""Pairs on a page of the stage `sample`: ten minutes for a person."""


@dataclass(frozen=True)
class Review:
    """Samples of a run, for people."""

    run: FinishedRun
    folder: Path
    """Folder of the files of the review."""
    opponent: Opponent
    pairs: list[BlindPair]
    """Pairs in the order of the page. With `sample`, a page has the first ones only."""
    config: PipelineConfig
    """Configuration of the run."""

    def write_page(self, path: Path | None, pairs: int | None = None) -> tuple[Path, int]:
        """Write the page, and return its path and the number of its pairs.

        Args:
            path: Default: a file in the folder.
            pairs: Number of pairs with `sample`, or all if there are fewer. Default: 50.

        Raises:
            InputError: `pairs` is less than 1, or is given for another page, whose samples are all shown; or
                the file cannot be written.
        """
        shown = self.pairs
        if self.opponent == "sample":
            if pairs is not None and pairs < 1:
                raise InputError(f"--pairs: must be at least 1; got {pairs}; leave it out for {_PAIRS}")
            shown = self.pairs[: pairs or _PAIRS]
        elif pairs is not None:
            raise InputError(
                f"--pairs: is for --of sample; got {pairs} for another page, which has evaluate.samples"
                " pairs; leave it out"
            )
        samples = _SAMPLES[self.opponent]
        path = path or self.folder / f"{samples.page}.html"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, render_page(self.run.name, shown, samples.options))
        except OSError as error:
            raise InputError(
                f"--output: the page {path} cannot be written ({error.strerror}); name another file"
            ) from error
        return path, len(shown)

    def pairs_of(self, file: VoteFile) -> list[BlindPair]:
        """Return the pairs of the page that saved a file of votes, if it was one of this run."""
        if self.opponent == "sample":
            return self.pairs[: len(file.choices)]
        return self.pairs

    def result(self) -> Result:
        """Return what all recorded votes say. Raises InputError if a recorded file cannot be read."""
        files = list(self._recorded())
        by_pair = votes_by_pair(files, self.pairs_of)
        voted = []
        for pair in self.pairs:
            if preferences := by_pair.get(id(pair)):
                # Exact for votes of 0, 0.5 and 1: `preference_rows` compares the mean of a draw with 0.5.
                voted.append(Vote(pair, math.fsum(preferences.values()) / len(preferences)))
        rate = None
        # Both answers of the stage `sample` are of the policy, so nobody wins.
        if voted and self.opponent != "sample":
            rate = win_rate(
                [vote.preference for vote in voted],
                confidence=self.config.evaluate.confidence,
                groups=groups([vote.pair for vote in voted]),
            )
        return Result(
            voted=voted,
            files=len(files),
            people=len(set(chain.from_iterable(by_pair.values()))),
            votes=sum(map(len, by_pair.values())),
            win_rate=rate,
            judge_agreement=agreement_with_judge(voted),
            agreement=agreement_of_people(by_pair),
            shared=sum(len(votes) > 1 for votes in by_pair.values()),
            saved=max((file.saved for file in files), default=0),
        )

    def rows(self) -> list[dict[str, str]]:
        """Return the recorded votes as rows for `data.preference`: of each pair one row with the answer that
        more people preferred, in the order of the page. A pair that is tied has none.

        Raises InputError if a recorded file cannot be read.
        """
        return preference_rows(_with_one_message(self, self.result().voted))

    def write_rows(self, rows: list[dict[str, str]]) -> Path:
        """Write preference rows to a file with their digest in its name, and return it."""
        # The path is a source of the next round: the same rows must have the same one, and others another.
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        file = self.folder / f"labels-{digest[:8]}.jsonl"
        write_jsonl(file, rows)
        return file

    def _recorded(self) -> Iterator[VoteFile]:
        """Yield the files of votes that `record_votes` has written for pages of these samples."""
        for path in sorted(self.folder.glob("votes-*.json")):
            content = _read(path)
            if path.name != _name(content):
                continue  # such as a copy with the name of the download
            # `replace`, because a file with another encoding must end with the message of the parser.
            file = parse_votes(content.decode("utf-8", "replace"), str(path))
            # The folder also has votes on the other pages of this run, and on samples that were made again.
            if file.page == page_digest(self.pairs_of(file)):
                yield file


def _name(content: bytes) -> str:
    """Return the name of a recorded file of votes."""
    return f"votes-{hashlib.sha256(content).hexdigest()[:8]}.json"


@dataclass(frozen=True)
class Result:
    """What all recorded files of votes on one page say."""

    voted: list[Vote]
    """The pairs that have votes, each with the mean of its votes, in the order of the page."""
    files: int
    people: int
    votes: int
    """Number of votes. If a person has several files, the last vote on each pair counts."""
    win_rate: Interval | None
    """Win rate of the policy over `voted`; ties count half. None for the stage `sample`."""
    judge_agreement: float | None
    """`agreement_with_judge`."""
    agreement: float | None
    """`agreement_of_people`."""
    shared: int
    """Number of pairs with votes of two or more people."""
    saved: int
    """Time when the last file was saved, in milliseconds since 1970."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers for MLflow."""
        numbers = {"people": float(self.people), "votes": float(self.votes)}
        if self.judge_agreement is not None:
            numbers["judge_agreement"] = self.judge_agreement
        if self.agreement is not None:
            numbers["agreement_of_people"] = self.agreement
        if self.win_rate is not None:
            for part, value in self.win_rate.to_json().items():
                numbers[f"win_rate/{part}"] = value
        return numbers


@dataclass(frozen=True)
class Recorded:
    """What `record_votes` did."""

    result: Result
    """All recorded votes, with those of this file."""
    rows: int
    """Number of preference rows of all recorded votes."""
    file: Path
    """The preference rows."""
    mlflow_run_id: str | None
    """The run in MLflow that has the votes; None if the pipeline ran without MLflow."""


def votes_command(run: str, home: str, opponent: Opponent, endpoint: str | None) -> str:
    """Return the command, for a shell, that records the votes of a page. Arguments as for `open_review`."""
    words = ["rlhf", "review", run, "--home", home]
    if endpoint is not None:
        words += ["--endpoint", endpoint]
    return f"{shlex.join(words)}{_SAMPLES[opponent].options} --votes FILE"


def open_review(run: str, home: str, opponent: Opponent = "sft", endpoint: str | None = None) -> Review:
    """Find the samples of a finished run.

    Args:
        run: Name of the run, or the path of its folder or of its `summary.json`.
        home: Folder of the runs.
        opponent: `sft`: samples of the evaluation; `champion`: those of the match; `sample`: pairs of answers
            of the stage `sample`.
        endpoint: URL of an S3-compatible server.

    Raises:
        InputError: There is no such run, or it has no evaluation, match or stage `sample`, or the stage has
            no pair of different answers.
        CorruptArtifact: The samples are damaged.
    """
    finished = find_run(run, home, endpoint)
    stage, samples_name, _, _ = _SAMPLES[opponent]
    if stage == "sample" and stage not in finished.stages:
        raise InputError(f"{finished.file} has no stage sample; run the configuration with a section sample")
    artifacts, ref = finished.artifact(stage)
    samples_file = artifacts.fetch(ref) / samples_name
    if not samples_file.is_file():  # the stage `register` without a match; the others always write it
        raise InputError(f"{ref.uri} has no {samples_name}: there was no match; use --against sft")
    if opponent == "sample":
        pairs = load_sampled_pairs(samples_file)
        if not pairs:
            raise InputError(
                f"{ref.uri} has no prompt with two different answers that can be data; raise sample.answers,"
                " sample.temperature or ppo.max_new_tokens"
            )
    else:
        pairs = load_blind_pairs(samples_file, opponent, finished.summary.get("policy", "ppo"))
    return Review(finished, finished.file.parent / "review", opponent, pairs, finished.config(stage))


def record_votes(review: Review, path: Path) -> Recorded:
    """Keep the votes of a file with the run, and write all recorded votes as preference rows.

    The same file again writes the same files and adds nothing to MLflow.

    Raises InputError if the file has no votes of this run's page, and InfrastructureError if MLflow does not
    accept them.
    """
    content = _read(path, "--votes: ")
    file = parse_votes(content.decode("utf-8", "replace"), f"--votes: {path}")
    if not read_votes(file, review.pairs_of(file)):
        raise InputError(f"{file.name}: the file has no vote; vote on the page and save again")
    review.folder.mkdir(parents=True, exist_ok=True)
    kept = review.folder / _name(content)
    # Before all that follows from it: after an interruption, the same command does the rest.
    write_atomic(kept, content)
    result, rows = review.result(), review.rows()
    labels = review.write_rows(rows)
    run_id = review.run.summary.get("mlflow_run_id")
    if run_id is not None:
        _log(review, run_id, result, [kept, labels])
    return Recorded(result, len(rows), labels, run_id)


def _read(path: Path, option: str = "") -> bytes:
    """Return the content of a file of votes. Raises InputError, whose message begins with `option`."""
    try:
        return read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise InputError(f"{option}cannot read {path}: {error.strerror or error}") from error


def _log(review: Review, run_id: str, result: Result, files: list[Path]) -> None:
    mlflow = _tracker(review)
    prefix = f"review/{_SAMPLES[review.opponent].page.replace('-', '_')}"
    # The number of files is the step, so that the last value is that of most files for any clock of a person.
    points = []
    for name, value in result.metrics().items():
        points.append(Point(f"{prefix}/{name}", value, result.files, result.saved))
    with registry_errors(mlflow, f"record the votes in the run {run_id}"):
        mlflow.log_points(run_id, points)
        for file in files:
            mlflow.log_file(run_id, file, "review")


def _tracker(review: Review) -> Mlflow:
    """Return the tracker of the run. A reused evaluation can be of a run that another tracker has."""
    uri = review.run.summary["tracking_uri"] or f"sqlite:///{review.run.home.mlflow_database}"
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given and uri == public_uri(given):
        uri = None  # the variable can have credentials, which the summary has not
    tracking = {"uri": uri, "experiment": review.config.experiment}
    tree = {"run": {"home": str(review.run.home.path)}, "tracking": tracking}
    return open_tracking(PipelineConfig.model_validate(tree)).mlflow


def _with_one_message(review: Review, votes: list[Vote]) -> list[Vote]:
    """Return the votes whose prompt is a single message: samples have the text of a prompt only, which is not
    the prompt of a conversation or of one with a system message. The stage `sample` has no others.
    """
    if review.config.data.template == "plain" or review.opponent == "sample":
        return votes
    folder = review.run.data()
    encoder = load_encoder(review.config, folder)
    tokens = {prompt.prompt_id: prompt.input_ids for prompt in load_prompts(folder, "eval")}

    def has_one_message(vote: Vote) -> bool:
        alone = encoder.prompt([Message("user", vote.pair.prompt)])
        return tokens.get(vote.pair.sample["prompt_id"]) == alone

    return list(filter(has_one_message, votes))


def load_sampled_pairs(file: Path) -> list[BlindPair]:
    """Return a pair of two different answers to each prompt in `answers.jsonl` that has them. The choice and
    the orders are random, and the content of the file determines them.

    Raises CorruptArtifact.
    """
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    # Seeded by the content: the votes are read with the order that the page had.
    rng = random.Random(derive_seed(0, "review of samples", digest))
    samples = []
    for prompt in read_answers(file):
        different = prompt.different
        if len(different) < 2:
            continue
        # Not the best and the worst by score: the labels would then depend on the judge that they are to
        # correct (decision 48).
        one, other = rng.sample(different, 2)
        sample: dict[str, str | None] = {"prompt_id": prompt.prompt_id, "prompt": prompt.prompt}
        samples.append(sample | {"policy": one.text, "sample": other.text, "winner": _winner(one, other)})
    return blind_pairs(samples, digest, "sample", "policy")


def _winner(one: SampledAnswer, other: SampledAnswer) -> str | None:
    """Return which answer has the higher score; None if they have none."""
    if one.score is None or other.score is None:
        return None
    difference = one.score - other.score
    if difference == 0:
        return "tie"
    if difference > 0:
        return "policy"
    return "sample"


def render_page(name: str, pairs: Sequence[BlindPair], options: str = "") -> str:
    """Return the HTML document. The same arguments always give the same bytes.

    Prompts and answers are untrusted text (see `evaluation.report`). The one script of the page is allowed by
    its digest, and the content security policy blocks all requests.

    `options` are those of the command that reads the votes, such as ` --of sample`.
    """
    templates = environment().overlay(loader=PackageLoader("rlhf_core.ops", package_path=""))
    script = templates.get_template("review.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = templates.get_template("review.html.j2")
    document = page.render(
        name=name,
        pairs=pairs,
        digest=page_digest(pairs),
        options=options,
        # Not escaped, because the digest is that of the text as it is.
        script=Markup(script),
        script_digest=f"sha256-{digest}",
    )
    return document.strip() + "\n"


def agreement_with_judge(votes: Sequence[Vote]) -> float | None:
    """Return the share of votes that agree with the judge of the run; half where one of both is a tie. None
    if no judge has scored the answers.
    """
    same: list[float] = []
    for vote in votes:
        winner = vote.pair.sample["winner"]
        if winner is not None:
            by_judge = {vote.pair.policy: 1.0, "tie": 0.5}.get(winner, 0.0)
            same.append(1 - abs(vote.preference - by_judge))
    return _mean(same)


def agreement_of_people(by_pair: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return the mean agreement of two people who voted on the same pair, over all such people and pairs: 1
    for the same vote, 0.5 if one of both is a tie. None if no pair has votes of two people.
    """
    same: list[float] = []
    for votes in by_pair.values():
        same += [1 - abs(one - other) for one, other in itertools.combinations(votes.values(), 2)]
    return _mean(same)


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.fsum(values) / len(values)


def preference_rows(votes: Sequence[Vote]) -> list[dict[str, str]]:
    """Return the votes as rows for `data.preference`. Ties, and answers with the same text, have none."""
    rows = []
    for vote in votes:
        sample, policy, opponent = vote.pair.sample, vote.pair.policy, vote.pair.opponent
        better, worse = (policy, opponent) if vote.preference > 0.5 else (opponent, policy)
        if vote.preference != 0.5 and sample[better] != sample[worse]:
            rows.append({"prompt": sample["prompt"], "chosen": sample[better], "rejected": sample[worse]})
    return rows
