"""The HTML page of `rlhf review`, and what is computed from votes.

Prompts and answers are untrusted text (see `evaluation.report`). The one script of the page is allowed by its
digest, and the content security policy blocks all requests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import PackageLoader
from markupsafe import Markup

from rlhf_core.evaluation.report import environment
from rlhf_core.evaluation.review import BlindPair, Vote, blind_pairs, page_digest
from rlhf_core.evaluation.sampled_answers import SampledAnswer, read_answers
from rlhf_core.seeds import derive_seed


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
    if difference > 0:
        return "policy"
    return "sample"


def render_page(name: str, pairs: Sequence[BlindPair], options: str = "") -> str:
    """Return the HTML document. The same arguments always give the same bytes.

    `options` are those of the command that reads the votes, such as ` --of sample`.
    """
    templates = environment().overlay(loader=PackageLoader("rlhf_core.ops.review", package_path=""))
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
