"""Blind pairs for people: one HTML page, and the votes that it saves.

The samples of an evaluation or of a match, or answers of the stage `sample`, are shown in a random order,
each pair with its two answers in a random order, which only the reader of the votes can undo. Prompts and
answers are untrusted text (see `report`). The one script of the page is allowed by its digest, and the
content security policy blocks all requests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from markupsafe import Markup

from rlhf_core.config.register import PolicyStage
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation.policy_results import own_name
from rlhf_core.evaluation.report import environment
from rlhf_core.evaluation.sampled_answers import SampledAnswer, read_answers
from rlhf_core.evaluation.statistics import Interval, Verdicts, win_rate
from rlhf_core.evaluation.votes import FORMAT, VoteFile, newest_files, voters
from rlhf_core.seeds import derive_seed

Opponent = Literal["sft", "champion", "sample"]
"""Who wrote the other answer. `sample`: the policy as well, in the stage `sample`."""


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


@dataclass(frozen=True)
class ReviewResult:
    """What the votes of one file say."""

    win_rate: Interval
    """Win rate of the policy over its opponent; ties count half."""
    verdicts: Verdicts
    judge_agreement: float | None
    """Share of votes that agree with the judge of the run; half where one of both is a tie. None if no judge
    has scored the answers.
    """


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
        samples = [json.loads(line) for line in content.decode().splitlines()]
    except ValueError as error:
        raise CorruptArtifact(f"{file} cannot be read ({error}); run the evaluation again") from error
    named: str = policy
    if opponent == "sft":
        winner = own_name("winner", policy)
        if any(policy not in sample or winner not in sample for sample in samples):
            raise CorruptArtifact(
                f"{file} has no samples of {policy.upper()}'s policy; run the evaluation again"
            )
        samples = [{**sample, "winner": sample[winner]} for sample in samples]
    elif any(policy not in sample for sample in samples):
        named = "ppo"  # the name of any policy in a match of earlier releases
    return blind_pairs(samples, hashlib.sha256(content).hexdigest(), opponent, named)


def load_sampled_pairs(file: Path) -> list[BlindPair]:
    """Return a pair of two different answers to each prompt in `answers.jsonl` that has them. The choice and
    the orders are random, and the content of the file determines them.

    Raises CorruptArtifact.
    """
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    rng = random.Random(derive_seed(0, "review of samples", digest))
    samples = []
    for prompt in read_answers(file):
        different = prompt.different
        if len(different) < 2:
            continue
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
    return "policy" if difference > 0 else "sample"


def blind_pairs(
    samples: Sequence[Mapping[str, Any]], digest: str, opponent: Opponent = "sft", policy: str = "ppo"
) -> list[BlindPair]:
    """Return the samples in random orders, which their digest determines. Samples name their answers
    `opponent` and `policy`.
    """
    rng = random.Random(derive_seed(0, "review", digest))
    # If these draws change, the pages of earlier runs have other digests, and their votes are refused.
    pairs = [BlindPair(sample, rng.random() < 0.5, opponent, policy) for sample in samples]
    rng.shuffle(pairs)
    return pairs


def page_digest(pairs: Sequence[BlindPair]) -> str:
    """Return the digest of what the page shows, which its votes contain."""
    shown = [[pair.prompt, pair.first, pair.second] for pair in pairs]
    return hashlib.sha256(json.dumps([FORMAT, shown]).encode()).hexdigest()


def render_page(name: str, pairs: Sequence[BlindPair], options: str = "") -> str:
    """Return the HTML document. The same arguments always give the same bytes.

    `options` are those of the command that reads the votes, such as ` --of sample`.
    """
    script = environment().get_template("review.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment().get_template("review.html.j2")
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
        won = 1.0 if (choice == "1") == pair.policy_first else 0.0
        votes.append(Vote(pair, 0.5 if choice == "tie" else won))
    return votes


def count_votes(votes: Sequence[Vote], *, confidence: float) -> ReviewResult:
    """Return the win rate by the votes (n,), at least one."""
    preferences = [vote.preference for vote in votes]
    rate = win_rate(preferences, confidence=confidence, groups=_groups([vote.pair for vote in votes]))
    return ReviewResult(rate, Verdicts.of(preferences), _agreement_with_judge(votes))


def _groups(pairs: Sequence[BlindPair]) -> list[str]:
    """Return the group of each pair: that of its prompt if it has one, else the pair itself."""
    return [str(pair.sample.get("group", number)) for number, pair in enumerate(pairs)]


def _agreement_with_judge(votes: Sequence[Vote]) -> float | None:
    """Return `ReviewResult.judge_agreement`."""
    same = []
    for vote in votes:
        winner = vote.pair.sample["winner"]
        if winner is not None:
            by_judge = {vote.pair.policy: 1.0, "tie": 0.5}.get(winner, 0.0)
            same.append(1 - abs(vote.preference - by_judge))
    if not same:
        return None
    return sum(same) / len(same)


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
    rate = win_rate(means, confidence=confidence, groups=_groups(voted))
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
    for file in sorted(newest_files(files), key=lambda file: (file.saved, file.digest)):
        if pairs := pairs_of(file):
            for vote in read_votes(file, pairs):
                # By identity, because a pair contains a dict and has no hash.
                by_pair.setdefault(id(vote.pair), {})[keys[file.digest]] = vote.preference
    return by_pair


def agreement_of_people(by_pair: Mapping[int, Mapping[str, float]]) -> float | None:
    """Return the mean agreement of two people who voted on the same pair, over all such people and pairs: 1
    for the same vote, 0.5 if one of both is a tie. None if no pair has votes of two people.
    """
    same = [
        1 - abs(one - other)
        for votes in by_pair.values()
        for one, other in itertools.combinations(votes.values(), 2)
    ]
    return math.fsum(same) / len(same) if same else None


def preference_rows(votes: Sequence[Vote]) -> list[dict[str, str]]:
    """Return the votes as rows for `data.preference`. Ties, and answers with the same text, have none."""
    rows = []
    for vote in votes:
        sample, policy, opponent = vote.pair.sample, vote.pair.policy, vote.pair.opponent
        better, worse = (policy, opponent) if vote.preference > 0.5 else (opponent, policy)
        if vote.preference != 0.5 and sample[better] != sample[worse]:
            rows.append({"prompt": sample["prompt"], "chosen": sample[better], "rejected": sample[worse]})
    return rows
