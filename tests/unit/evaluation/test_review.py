"""The page of blind pairs and its votes.

- untrusted text never becomes markup, and the one script is allowed by its digest; nothing is requested
- the page does not contain which model wrote an answer; order and sides follow from the samples
- votes are counted for the model that wrote the answer; those of another page or a damaged file are refused
- votes of several people are pooled by pair, and those of other pages are ignored
- of the files that one person saved, known by name or session, the last one counts
- few votes with ties and no loss have a wide interval
- people agree by the same vote, half by a tie, over all two people on a pair
- votes are rows for `data.preference`, without ties and equal answers
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.formats import normalise
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation.review import (
    BlindPair,
    Vote,
    blind_pairs,
    load_blind_pairs,
    page_digest,
    read_votes,
    win_rate_by_people,
)
from rlhf_core.evaluation.statistics import wilson, win_rate
from rlhf_core.evaluation.votes import FORMAT, VoteFile, newest_files, parse_votes, voters
from rlhf_core.ops.review import agreement_of_people, agreement_with_judge, preference_rows, render_page
from rlhf_core.tracking.gate import Gate
from tests.unit.evaluation.test_report import HOSTILE

SAMPLES = [
    {"prompt_id": f"p{i}", "prompt": f"Prompt {i}", "sft": f"left {i}", "ppo": f"right {i}", "winner": "ppo"}
    for i in range(40)
]
PAIRS = blind_pairs(SAMPLES, "d" * 64)


class Tags(HTMLParser):
    def __init__(self, document: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.mark.parametrize("text", HOSTILE)
def test_untrusted_text_never_becomes_markup(text: str) -> None:
    sample = {"prompt_id": "p", "prompt": text, "sft": text, "ppo": f"{text}!", "winner": "tie"}
    document = render_page(text, [BlindPair(sample, True)])
    harmless = render_page("x", [BlindPair(sample | {"prompt": "x", "sft": "x", "ppo": "y"}, True)])
    assert [tag for tag, _ in Tags(document).seen] == [tag for tag, _ in Tags(harmless).seen]
    assert not any(name.startswith("on") for _, attributes in Tags(document).seen for name in attributes)
    assert not re.search("[\u202a-\u202e\x00\x1b\ud800]", document)


def test_the_policy_of_the_page_allows_its_script_and_no_request() -> None:
    document = render_page("demo", PAIRS)
    [script] = re.findall("<script>(.*?)</script>", document, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [
        attributes["content"] for tag, attributes in Tags(document).seen if "http-equiv" in attributes
    ]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # The script checks a file of votes that is loaded as `parse_votes` and `read_votes` do.
    assert f'content.format === "{FORMAT}" && content.page === page' in script
    assert "http://" not in document and "https://" not in document and "src=" not in document


def test_the_page_is_blind_and_its_orders_follow_from_the_digest() -> None:
    document = render_page("demo", PAIRS)
    assert "ppo" not in document.lower() and "sft" not in document.lower() and "policy_first" not in document
    assert document == render_page("demo", blind_pairs(SAMPLES, "d" * 64))
    assert page_digest(PAIRS) != page_digest(blind_pairs(SAMPLES, "e" * 64))
    assert 10 < sum(pair.policy_first for pair in PAIRS) < 30
    assert [pair.sample for pair in PAIRS] != SAMPLES
    assert sorted(pair.prompt for pair in PAIRS) == sorted(str(sample["prompt"]) for sample in SAMPLES)


def file_of(votes: Any, **changes: Any) -> str:
    content = {"format": "rlhf-review-1", "page": page_digest(PAIRS), "saved": 1, "votes": votes}
    return json.dumps(content | changes)


def parsed(votes: list[Any], **changes: Any) -> VoteFile:
    return parse_votes(file_of(votes, **changes), "--votes: file")


def test_votes_count_for_the_model_that_wrote_the_answer() -> None:
    """The person prefers the policy on all pairs but three, of which one is a tie and one has no vote."""
    choices: list[str | None] = ["1" if pair.policy_first else "2" for pair in PAIRS]
    choices[5] = "2" if PAIRS[5].policy_first else "1"
    choices[6:8] = ["tie", None]
    file = parsed(choices)
    votes = read_votes(file, PAIRS)
    assert file.saved == 1 and len(votes) == 39
    assert Counter(vote.preference for vote in votes) == {1.0: 37, 0.0: 1, 0.5: 1}
    assert agreement_with_judge(votes) == pytest.approx(37.5 / 39)  # the judge prefers the policy everywhere
    rows = preference_rows(votes)
    assert len(rows) == 38 and sum(row["chosen"].startswith("right") for row in rows) == 37
    lost = PAIRS[5].sample
    assert {"prompt": lost["prompt"], "chosen": lost["sft"], "rejected": lost["ppo"]} in rows
    assert {normalise(row).kind for row in rows} == {"preference"}


def test_the_policy_of_dpo_has_a_page_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    rows = [dict(sample) | {"dpo": f"other {i}", "winner_dpo": "sft"} for i, sample in enumerate(SAMPLES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo, dpo = load_blind_pairs(file, "sft"), load_blind_pairs(file, "sft", "dpo")
    assert page_digest(ppo) != page_digest(dpo)
    assert all(other in (pair.first, pair.second) for pair in dpo if (other := pair.sample["dpo"]))
    votes = [Vote(pair, 1.0) for pair in dpo]
    assert agreement_with_judge(votes) == 0.0
    assert all(row["chosen"].startswith("other") for row in preference_rows(votes))
    # Without PPO, and in a match.
    others = [{name: value for name, value in row.items() if name not in ("ppo", "winner")} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in others))
    alone = load_blind_pairs(file, "sft", "dpo")
    assert {pair.sample["dpo"] for pair in alone} == {pair.sample["dpo"] for pair in dpo}
    match = [{"prompt": "p", "champion": "old", "dpo": f"new {i}", "winner": "dpo"} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in match))
    votes = [Vote(pair, 1.0) for pair in load_blind_pairs(file, "champion", "dpo")]
    assert agreement_with_judge(votes) == 1.0
    assert all(row["chosen"].startswith("new") for row in preference_rows(votes))
    file.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    with pytest.raises(CorruptArtifact, match="no samples of DPO's policy"):
        load_blind_pairs(file, "sft", "dpo")


def test_votes_of_several_people_are_pooled_by_pair(tmp_path: Path) -> None:
    nothing: list[str | None] = [None] * len(PAIRS)
    ours = ["1" if pair.policy_first else "2" for pair in PAIRS]
    theirs = ["2" if pair.policy_first else "1" for pair in PAIRS]
    one = parsed([*ours[:3], *nothing[3:]])
    two = parsed([ours[0], theirs[1], *nothing[2:]])
    lines = "".join(json.dumps(sample) + "\n" for sample in SAMPLES)
    (tmp_path / "samples.jsonl").write_text(lines)
    other = load_blind_pairs(tmp_path / "samples.jsonl", "sft")
    assert win_rate_by_people([one, two], other, confidence=0.95) is None
    found = win_rate_by_people([one, one, two], PAIRS, confidence=0.95)
    assert found is not None and (found["pairs"], found["votes"]) == (3, 5)
    assert found["mean"] == pytest.approx((1 + 0.5 + 1) / 3) and found["low"] < found["mean"] < found["high"]


def test_of_the_files_of_one_session_the_last_one_counts() -> None:
    ours = ["1" if pair.policy_first else "2" for pair in PAIRS]
    theirs = ["2" if pair.policy_first else "1" for pair in PAIRS]
    nothing: list[str | None] = [None] * len(PAIRS)
    first = parsed([*theirs[:2], *nothing[2:]], session="a", saved=1)
    last = parsed([ours[0], theirs[1], *nothing[2:]], session="a", saved=2)
    for files in ([first, last], [last, first], [last, first, last]):
        found = win_rate_by_people(files, PAIRS, confidence=0.95)
        assert found is not None and (found["mean"], found["votes"]) == (0.5, 2)
    others = [parsed(ours, session="b", saved=1), parsed(ours, saved=1), parsed(ours, saved=2)]
    found = win_rate_by_people([first, last, *others], PAIRS, confidence=0.95)
    assert found is not None and found["votes"] == 2 + 3 * len(PAIRS), "files without a session are distinct"


def test_the_agreement_of_people_is_over_all_two_people_on_a_pair() -> None:
    assert agreement_of_people({1: {"a": 1.0}, 2: {}}) is None
    # Three pairs of people voted on pair 1: one agrees, and two agree by half. Two people disagree on pair 2.
    votes = {1: {"a": 1.0, "b": 1.0, "c": 0.5}, 2: {"a": 0.0, "b": 1.0}, 3: {"c": 1.0}}
    assert agreement_of_people(votes) == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)


def test_a_person_is_known_by_session_and_name() -> None:
    ours: list[str | None] = ["1" if pair.policy_first else "2" for pair in PAIRS]
    few: list[str | None] = [*ours[:2], *[None] * (len(PAIRS) - 2)]
    early = parsed(few, session="a", saved=1)
    named = parsed(few, session="b", person="Ann", saved=2)
    again = parsed(ours, session="c", person=" ann ", saved=3)
    other = parsed(few, session="c", person="Bob", saved=4)
    assert newest_files([named, again]) == [again], "the same name on two machines"
    assert newest_files([early, named]) == [early, named]
    assert newest_files([replace(early, session="b"), named]) == [named], "the name was given later"
    # A session is one list of votes, also if its name changes.
    unnamed = parsed(few, session="c", saved=1)
    assert newest_files([again, other, unnamed]) == [other]
    assert len(set(voters([again, other, unnamed]).values())) == 1
    found = win_rate_by_people([again, other], PAIRS, confidence=0.95)
    assert found is not None and found["votes"] == 2, "one list of votes is no second person"


@pytest.mark.parametrize(("wins", "ties"), [(1, 1), (1, 10), (2, 2), (1, 0), (0, 1), (0, 12)])
def test_few_votes_without_a_loss_do_not_pass_a_margin(wins: int, ties: int) -> None:
    choices: list[str | None] = [None] * len(PAIRS)
    for i in range(wins):
        choices[i] = "1" if PAIRS[i].policy_first else "2"
    choices[wins : wins + ties] = ["tie"] * ties
    found = win_rate_by_people([parsed(choices)], PAIRS, confidence=0.95)
    assert found is not None and found["mean"] == pytest.approx((wins + ties / 2) / (wins + ties))
    assert found["low"] < 0.4 and Gate(0.5, votes_margin=0.1).lost(found)


def test_votes_on_related_prompts_count_once() -> None:
    """They are of two groups, and all for the policy."""
    samples = [{**sample, "group": f"g{index % 2}"} for index, sample in enumerate(SAMPLES)]
    pairs = blind_pairs(samples, "d" * 64)
    choices = ["1" if pair.policy_first else "2" for pair in pairs]
    content = {"format": "rlhf-review-1", "page": page_digest(pairs), "saved": 1, "votes": choices}
    file = parse_votes(json.dumps(content), "--votes")
    found = win_rate_by_people([file], pairs, confidence=0.95)
    assert found is not None and (found["mean"], found["pairs"]) == (1.0, len(pairs))
    assert found["low"] == wilson(1.0, 2, 0.95).low


def test_only_a_loss_of_every_pair_fails_the_largest_margin_of_votes() -> None:
    assert win_rate([1, 0.5], confidence=0.95).low == pytest.approx(0.1979, abs=1e-4)
    assert win_rate([1, 1, 1], confidence=0.95).low == pytest.approx(0.4385, abs=1e-4)
    for n in range(1, 100):  # the largest margin refuses exactly the loss of every pair
        lost = win_rate([0.0] * n, confidence=0.95)
        tied = win_rate([0.5] + [0.0] * (n - 1), confidence=0.95)
        assert Gate(0.5, votes_margin=0.5).lost(lost.to_json()), n
        assert not Gate(0.5, votes_margin=0.5).lost(tied.to_json()), n


def test_the_opponent_can_be_the_champion() -> None:
    samples = [{**sample, "champion": "before", "winner": "champion"} for sample in SAMPLES]
    pairs = blind_pairs(samples, "d" * 64, "champion")
    votes = ["2" if pair.policy_first else "1" for pair in pairs]
    content = {"format": "rlhf-review-1", "page": page_digest(pairs), "saved": 1, "votes": votes}
    read = read_votes(parse_votes(json.dumps(content), "--votes"), pairs)
    assert {vote.preference for vote in read} == {0.0} and agreement_with_judge(read) == 1.0
    assert {row["chosen"] for row in preference_rows(read)} == {"before"}


def test_equal_answers_are_no_preference() -> None:
    pairs = [BlindPair(SAMPLES[0] | {"sft": "same", "ppo": "same"}, True)]
    text = json.dumps({"format": "rlhf-review-1", "page": page_digest(pairs), "saved": 1, "votes": ["1"]})
    assert preference_rows(read_votes(parse_votes(text, "--votes"), pairs)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a file that a review page saved"),
        ("[" * 100_000, "must be a file that a review page saved"),
        ("[]", "must be a file that a review page saved"),
        (file_of(["1"] * 40, page="0" * 64), "has the votes of the page 00000000"),
        (file_of(["1"] * 39), "must have 40 votes, one for each pair of its page; got 39"),
        (file_of(["1"] * 40, saved="x"), "saved must be a time"),
        (file_of(["1"] * 40, saved=True), "saved must be a time"),
        (file_of(["1"] * 40, page=None), "page, session and person must be texts"),
        (file_of(["1"] * 40, person=1), "page, session and person must be texts"),
        (file_of(["1"] * 40, session=1), "page, session and person must be texts"),
        (file_of("1"), "votes must be a list"),
        (file_of(["1", "3"] + ["1"] * 38), "vote 2 must be 1, 2, tie or null; got '3'"),
        (file_of([["1"]] * 40), "vote 1 must be 1, 2, tie or null"),
    ],
)
def test_files_that_are_no_votes_of_this_page_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^--votes: a file: .*{message}"):
        read_votes(parse_votes(text, "--votes: a file"), PAIRS)
