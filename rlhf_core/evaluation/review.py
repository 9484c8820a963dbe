"""Blind pairs for people, and the votes of people on them.

The samples of an evaluation or of a match, or answers of the stage `sample`, are shown in a random order,
each pair with its two answers in a random order, which only the reader of the votes can undo.

answers.jsonl   all answers of the stage `sample`, for people and for other tools:
                {"prompt_id", "prompt", "answers": [{"text", "score", "usable"}, ...]}
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation.measures import flat_name
from rlhf_core.evaluation.statistics import win_rate
from rlhf_core.evaluation.votes import FORMAT, VoteFile, newest_files, voters
from rlhf_core.pipeline import PolicyStage
from rlhf_core.seeds import derive_seed
from rlhf_core.system.files import write_jsonl

Opponent = Literal["sft", "champion", "sample"]
"""Who wrote the other answer. `sample`: the policy as well, in the stage `sample`."""
ANSWERS = "answers.jsonl"
"""Name of the file in the artifact of the stage `sample`."""


@dataclass(frozen=True)
class BlindPair:
    """One sample as it is shown."""

    sample: Mapping[str, Any]
    """Row of `samples.jsonl` or `match_samples.jsonl`, or of the same form with two answers of the policy."""
    policy_first: bool
    opponent: Opponent = "sft"
    policy: str = "ppo"
    """Name of the policy in the row, as an answer and as the winner."""

    @property
    def prompt(self) -> str:
        return str(self.sample["prompt"])

    @property
    def first(self) -> str:
        return str(self.sample[self.policy if self.policy_first else self.opponent])

    @property
    def second(self) -> str:
        return str(self.sample[self.opponent if self.policy_first else self.policy])


@dataclass(frozen=True)
class Vote:
    """The vote of a person on one sample."""

    pair: BlindPair
    preference: float
    """1 if the policy's answer is better, 0.5 for a tie, 0 if the opponent's is."""


def load_blind_pairs(file: Path, opponent: Opponent, policy: PolicyStage = "ppo") -> list[BlindPair]:
    """Return the samples in `file` in random orders, which its content determines.

    Args:
        file: Samples of an evaluation or of a match.
        opponent: The other model.
        policy: The stage that trained the policy.

    Raises:
        CorruptArtifact: The file cannot be read, or has no samples of this policy.
    """
    content = file.read_bytes()
    try:
        samples = list(map(json.loads, content.decode().splitlines()))
    except ValueError as error:
        raise CorruptArtifact(f"{file} cannot be read ({error}); run the evaluation again") from error
    winner = flat_name("winner", policy) if opponent == "sft" else "winner"
    if any(policy not in sample or winner not in sample for sample in samples):
        raise CorruptArtifact(f"{file} has no samples of {policy.upper()}'s policy; run the evaluation again")
    samples = [{**sample, "winner": sample[winner]} for sample in samples]
    return blind_pairs(samples, hashlib.sha256(content).hexdigest(), opponent, policy)


def blind_pairs(
    samples: Sequence[Mapping[str, Any]], digest: str, opponent: Opponent = "sft", policy: str = "ppo"
) -> list[BlindPair]:
    """Return the samples in random orders, which their digest determines. Samples name their answers
    `opponent` and `policy`.
    """
    # Without the run's seed: the reader of the votes has the samples only.
    rng = random.Random(derive_seed(0, "review", digest))
    # If these draws change, the pages of earlier runs have other digests, and their votes are refused.
    pairs = [BlindPair(sample, rng.random() < 0.5, opponent, policy) for sample in samples]
    rng.shuffle(pairs)
    return pairs


def page_digest(pairs: Sequence[BlindPair]) -> str:
    """Return the digest of what the page shows, which its votes contain."""
    shown = [[pair.prompt, pair.first, pair.second] for pair in pairs]
    # With the format: votes of a page that counts them in another way must not fit.
    return hashlib.sha256(json.dumps([FORMAT, shown]).encode()).hexdigest()


def read_votes(file: VoteFile, pairs: Sequence[BlindPair]) -> list[Vote]:
    """Return the votes of a file about the pairs of its page. The list is empty if nobody voted.

    Raises:
        InputError: The file is of another page, or has another number of votes than the page has pairs.
    """
    page = page_digest(pairs)
    if file.page != page:
        raise InputError(
            f"{file.name}: the file has the votes of the page {file.page[:8]}, but the page of this run is"
            f" {page[:8]}; name the run whose page was reviewed, with the same --of and --against"
        )
    if len(file.choices) != len(pairs):
        raise InputError(
            f"{file.name}: must have {len(pairs)} votes, one for each pair of its page; got"
            f" {len(file.choices)}; the file is damaged, save it again"
        )
    votes = []
    for pair, choice in zip(pairs, file.choices, strict=True):
        if choice is None:
            continue
        won = float((choice == "1") == pair.policy_first)
        if choice == "tie":
            won = 0.5
        votes.append(Vote(pair, won))
    return votes


def groups(pairs: Sequence[BlindPair]) -> list[str]:
    """Return the group of each pair: that of its prompt if it has one, else the pair itself."""
    return [str(pair.sample.get("group", number)) for number, pair in enumerate(pairs)]


def win_rate_by_people(
    files: Sequence[VoteFile], pairs: Sequence[BlindPair], *, confidence: float
) -> dict[str, float] | None:
    """Return the win rate of the policy by all votes on a page: `mean`, `low` and `high` over the pairs that
    have votes (`statistics.win_rate`), and the numbers of `pairs` and `votes`. None if there are none.

    Several votes on one pair, which several people gave, count as their mean.

    Args:
        files: Files of votes. Those that do not count (`newest_files`) and those of other pages are ignored.
        pairs: What the page shows.
        confidence: Level of the interval.

    Raises:
        InputError: A file of this page has another number of votes.
    """
    page = page_digest(pairs)
    by_pair = votes_by_pair(files, lambda file: pairs if file.page == page else [])
    if not by_pair:
        return None
    voted = [pair for pair in pairs if id(pair) in by_pair]
    means = [fmean(by_pair[id(pair)].values()) for pair in voted]
    # Not a bootstrap: without a loss its lower bound is at least 0.5 for any number of votes, so two votes
    # would pass each `register.votes_margin` (decision 37).
    rate = win_rate(means, confidence=confidence, groups=groups(voted))
    return rate.to_json() | {"pairs": len(by_pair), "votes": sum(map(len, by_pair.values()))}


def votes_by_pair(
    files: Iterable[VoteFile], pairs_of: Callable[[VoteFile], Sequence[BlindPair]]
) -> dict[int, dict[str, float]]:
    """Return the preferences that count: by `id` of the pair, and by person (`voters`). Of several votes of a
    person on a pair the one that was saved last counts.

    Args:
        files: Files of votes. Those that do not count (`newest_files`) are ignored.
        pairs_of: Returns what the page of a file shows; nothing for a page that does not count.

    Raises:
        InputError: A file has another number of votes than its page has pairs.
    """
    files = list(files)
    keys = voters(files)
    by_pair: dict[int, dict[str, float]] = {}
    # In the order of time: a later vote of the same person replaces an earlier one.
    for file in sorted(newest_files(files), key=lambda file: (file.saved, file.digest)):
        if pairs := pairs_of(file):
            for vote in read_votes(file, pairs):
                # By identity, because a pair contains a dict and has no hash.
                by_pair.setdefault(id(vote.pair), {})[keys[file.digest]] = vote.preference
    return by_pair


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the policy."""

    text: str
    score: float | None
    """Score by `sample.judge`; None if it has none."""
    usable: bool
    """Whether it can be a row of data: it ended with EOS, has a score, and its text is valid."""


@dataclass(frozen=True)
class AnswersToPrompt:
    """The answers to one training prompt."""

    prompt_id: str
    prompt: str
    answers: tuple[SampledAnswer, ...]

    @property
    def different(self) -> list[SampledAnswer]:
        """The usable answers with different texts; of equal ones the first."""
        by_text: dict[str, SampledAnswer] = {}
        for answer in self.answers:
            if answer.usable:
                by_text.setdefault(answer.text, answer)
        return list(by_text.values())


def write_answers(folder: Path, prompts: Iterable[AnswersToPrompt]) -> None:
    """Write the answers to (n,) prompts into `folder`."""
    write_jsonl(folder / ANSWERS, map(asdict, prompts))


def read_answers(file: Path) -> list[AnswersToPrompt]:
    """Return the answers to each prompt. Raises CorruptArtifact."""
    try:
        found = []
        for line in file.read_bytes().decode().splitlines():
            row = json.loads(line)
            answers = tuple(SampledAnswer(**answer) for answer in row["answers"])
            found.append(AnswersToPrompt(row["prompt_id"], row["prompt"], answers))
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{file} cannot be read ({error}); run the stage sample again") from error
