"""The rules for the champion, each of them a test at a level.

- no champion below `min_win_rate` or with fewer than `min_prompts`; the first one must beat its SFT model
  significantly
- a match needs evidence of 1 / level, by the champion's reward model as well if that is another judge; the
  reason has both, and says if the policy was trained on the judge
- a regression set that failed stops the promotion, by name, and those that passed are in the reason
- with a margin for votes of people, a candidate without them or with a loss is refused, by name; without a
  margin they are only in the reason
- a first champion whose judge trained it is named as such, and refused with `independent_judge`
- every refusal ends with what to do, also with the number of prompts that are enough at this win rate and
  share of ties; the reason itself, which can be published, has no advice
- without a match, or without the champion's judge, the champion stays
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.evaluation.statistics import Verdicts
from rlhf_core.tracking.gate import Decision, Evaluation, Gate, Match, NoMatch, decide, log_evidence

GATE = Gate(0.5)
LEVEL = 0.0025


def record(wins: int = 80, prompts: int = 100, **fields: Any) -> Evaluation:
    return Evaluation(wins / prompts, wins, prompts - wins, **fields)


def match(wins: int, prompts: int = 100, **fields: Any) -> Match:
    """Return a match with the losses first."""
    outcomes = [-1] * (prompts - wins) + [1] * wins
    return Match(
        wins / prompts, 0.0, 1.0, prompts, wins, prompts - wins, log_evidence=log_evidence(outcomes), **fields
    )


@pytest.mark.parametrize(
    ("candidate", "becomes", "rule"),
    [
        (record(80), True, "first"),
        (record(51), False, "first"),
        (record(60), False, "first"),  # p = 0.028
        (record(61), True, "first"),  # p = 0.018
        (record(49), False, "min_win_rate"),
        (record(49, 49), False, "min_prompts"),
        (record(2, 2), False, "min_prompts"),
    ],
)
def test_the_first_champion_beats_its_sft_model_beyond_doubt(
    candidate: Evaluation, becomes: bool, rule: str
) -> None:
    decision = decide(candidate, None, gate=GATE, level=GATE.first_level(1))
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason


JUDGED = record(judge="gold", judge_digest="g")
GOLD: dict[str, Any] = {"judge": "gold", "judge_digest": "g"}
MODEL: dict[str, Any] = {"judge": "reward_model", "judge_digest": "ours"}


@pytest.mark.parametrize(
    ("result", "becomes", "rule"),
    [
        (match(72, **GOLD), True, "match"),  # evidence of 19,500 / 3 or more
        (match(65, **GOLD), False, "match"),
        (match(49, 49, **GOLD), False, "min_prompts"),
        (match(80, judge="gold", judge_digest="other"), False, "judge"),
        (match(80, judge="rules", judge_digest="g"), False, "judge"),
        (match(80, **MODEL), False, "judge"),
        (match(80, **MODEL, away_win_rate=0.72, away_log_evidence=7.0), True, "match"),
        (match(80, **MODEL, away_win_rate=0.55, away_log_evidence=1.0), False, "away"),
        (match(80, **MODEL, away_win_rate=0.5, away_log_evidence=7.0), False, "away"),
        (match(65, **MODEL, away_win_rate=0.72, away_log_evidence=7.0), False, "match"),
        (match(80, **MODEL, away_win_rate=0.72), False, "away"),  # a record of an older version
        (NoMatch("it has another tokenizer"), False, "no_match"),
        (None, False, "no_match"),
    ],
)
def test_a_match_needs_evidence_and_the_champions_judge(result: Any, becomes: bool, rule: str) -> None:
    decision = decide(record(), JUDGED, result, gate=GATE, level=LEVEL)
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason
    assert decision.tested == (rule in ("match", "away", "min_prompts"))
    assert decide(record(49), JUDGED, result, gate=GATE, level=LEVEL).rule == "min_win_rate"


def test_a_judge_that_the_policy_was_trained_on_is_named_or_refused() -> None:
    candidate = record(judge="reward_model", judge_digest="ours", judge_trained_on=True)
    first = decide(candidate, None, gate=GATE, level=0.02)
    judge = "(judge: reward model, which is not independent of the policy's training)"
    assert first.champion and judge in first.reason
    result = match(80, **MODEL, away_win_rate=0.55, away_log_evidence=1.0)
    later = decide(candidate, JUDGED, result, gate=GATE, level=LEVEL)
    assert f"{judge}, and 0.550 by the champion's" in later.reason
    words = "evidence 5.98e+06, and 2.72 by the champion's reward model, of the 400 needed"
    assert words in later.reason, later.reason
    strict, won = replace(GATE, independent_judge=True), match(80, **GOLD)
    for champion in (None, JUDGED):
        refusal = decide(candidate, champion, won, gate=strict, level=0.02)
        assert (refusal.champion, refusal.rule, refusal.tested) == (False, "judge", False)
        assert "register.independent_judge is true" in refusal.reason
    assert decide(replace(candidate, judge_trained_on=False), None, gate=strict, level=0.02).champion
    assert candidate.to_json() == replace(candidate, judge_trained_on=False).to_json()


FELL = {"math": {"mean": -0.11, "low": -0.2, "high": -0.05, "margin": 0.02}}
HELD = {"code": {"mean": -0.001, "low": -0.019, "high": 0.02, "margin": 0.02}}


@pytest.mark.parametrize(
    ("own", "against_champion", "rule", "reason"),
    [
        (HELD, HELD, "match", "; regression sets passed: code"),
        (
            HELD | FELL,
            HELD,
            "regression",
            "failed against the SFT model: math -0.110 [-0.200, -0.050] (margin",
        ),
        (
            HELD,
            HELD | FELL,
            "regression",
            "failed against the champion: math -0.110 [-0.200, -0.050] (margin",
        ),
    ],
)
def test_a_regression_set_that_fell_stops_the_promotion(
    own: Any, against_champion: Any, rule: str, reason: str
) -> None:
    result = match(80, **GOLD, regression=against_champion)
    candidate = record(regression=own)
    decision = decide(candidate, JUDGED, result, gate=GATE, level=LEVEL)
    assert (decision.champion, decision.rule) == (rule == "match", rule) and reason in decision.reason
    assert decision.tested == (own == HELD), "a candidate that is refused before the match spends no level"
    assert decide(candidate, None, gate=GATE, level=0.02).champion == (own == HELD)
    assert Evaluation.from_json(candidate.to_json()) == candidate
    assert Match(**json.loads(json.dumps(result.record()))).regression == against_champion


LIKED = {"mean": 0.6, "low": 0.45, "high": 0.75, "pairs": 40, "votes": 50}
DISLIKED = {"mean": 0.4, "low": 0.25, "high": 0.55, "pairs": 40, "votes": 50}


@pytest.mark.parametrize(
    ("own", "against_champion", "champion", "reason"),
    [
        (
            None,
            LIKED,
            True,
            "; 0.600 [0.450, 0.750] by 50 votes of people on 40 pairs (lower bound above 0.4",
        ),
        (LIKED, LIKED, True, "0.600 [0.450"),
        (None, None, False, "needs votes of people; run `rlhf review --against champion`"),
        (LIKED, None, False, "needs votes of people"),
        (None, DISLIKED, False, "; people may prefer the champion"),
        (DISLIKED, LIKED, False, "people may prefer the SFT model; 0.400 [0.250, 0.550] by 50 votes"),
    ],
)
def test_votes_of_people_can_stop_a_promotion(
    own: Any, against_champion: Any, champion: bool, reason: str
) -> None:
    gate = replace(GATE, votes_margin=0.1)
    candidate, result = record(votes=own), match(80, **GOLD, votes=against_champion)
    decision = decide(candidate, JUDGED, result, gate=gate, level=LEVEL)
    assert (decision.champion, decision.rule) == (champion, "match" if champion else "votes")
    assert reason in decision.text and decision.tested == (own != DISLIKED)
    shown = decide(candidate, JUDGED, result, gate=GATE, level=LEVEL)
    assert shown.champion and ("votes of people" in shown.reason) == bool(against_champion)
    assert Match(**json.loads(json.dumps(result.record()))).votes == against_champion


@pytest.mark.parametrize(
    ("votes", "becomes", "rule"),
    [(LIKED, True, "first"), (DISLIKED, False, "votes"), (None, False, "votes")],
)
def test_votes_of_people_can_stop_the_first_champion(votes: Any, becomes: bool, rule: str) -> None:
    candidate = record(votes=votes)
    decision = decide(candidate, None, gate=replace(GATE, votes_margin=0.1), level=LEVEL)
    assert (decision.champion, decision.rule) == (becomes, rule), decision.reason
    assert candidate.to_json() == record().to_json(), "votes begin no new test"


def test_records_without_regression_sets_have_the_text_of_earlier_versions() -> None:
    assert "regression" not in record().to_json()


def test_reasons_have_the_numbers_and_the_way_out() -> None:
    decision = decide(record(), JUDGED, match(65, **GOLD), gate=GATE, level=LEVEL)
    assert "of the 400 needed (level 0.0025, register.alpha=0.05 in a year)" in decision.reason
    why = decide(record(), JUDGED, NoMatch("it has another tokenizer"), gate=GATE, level=LEVEL).text
    assert "(it has another tokenizer)" in why and "`rlhf promote`" in why
    why = decide(record(), JUDGED, match(80, **MODEL), gate=GATE, level=LEVEL).reason
    assert "the champion was judged by another judge (gold), which did not judge this match" in why
    long = replace(match(80, **GOLD), log_evidence=5000.0)
    assert decide(record(), JUDGED, long, gate=GATE, level=LEVEL).champion


NEEDED = re.compile(r"at this win rate about ([0-9,]+) prompts are needed: raise data.eval_fraction")


@pytest.mark.parametrize("wins", [53, 55, 60, 65])
def test_a_refusal_names_the_prompts_that_are_enough_at_this_win_rate(wins: int) -> None:
    needed = needed_prompts(decide(record(), JUDGED, match(wins, **GOLD), gate=GATE, level=LEVEL))
    for prompts, is_enough in ((round(needed * 1.05), True), (round(needed * 0.7), False)):
        result = match(round(prompts * wins / 100), prompts, **GOLD)
        assert decide(record(), JUDGED, result, gate=GATE, level=LEVEL).champion is is_enough
    away: dict[str, Any] = {"away_win_rate": wins / 100, "away_log_evidence": 1.0}
    assert (
        needed_prompts(decide(record(), JUDGED, match(80, **MODEL, **away), gate=GATE, level=LEVEL)) == needed
    )

    needed = needed_prompts(decide(record(wins), None, gate=GATE, level=1e-4))
    enough = record(round(needed * wins / 100 + 1), needed)
    assert decide(enough, None, gate=GATE, level=1e-4).champion


def needed_prompts(decision: Decision) -> int:
    found = NEEDED.search(decision.text)
    assert not decision.champion and found, decision.text
    return int(found[1].replace(",", ""))


def with_ties(wins: int, losses: int, ties: int, **fields: Any) -> Match:
    """Return a match with the losses first and the ties last."""
    outcomes = [-1] * losses + [1] * wins + [0] * ties
    rate = (wins + ties / 2) / len(outcomes)
    return Match(rate, 0.0, 1.0, len(outcomes), wins, losses, log_evidence=log_evidence(outcomes), **fields)


def test_the_prompts_that_are_needed_follow_from_those_without_a_tie() -> None:
    """80 % of the prompts are ties, so that the win rate is 0.52, and 0.6 without them."""
    level = math.exp(-7.17)
    result = with_ties(180, 120, 1200, **GOLD)
    needed = needed_prompts(decide(record(), JUDGED, result, gate=GATE, level=level))
    # A bet of 0.2 gains 0.6 ln 1.2 + 0.4 ln 0.8 per decided prompt, and one of three bets has this capital.
    gain = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)
    assert needed == 5 * math.ceil((math.log(3) + 7.17) / gain)
    for share, is_enough in ((1.05, True), (0.7, False)):
        prompts = round(needed * share)
        wins, losses = round(prompts * 0.12), round(prompts * 0.08)
        more = with_ties(wins, losses, prompts - wins - losses, **GOLD)
        assert decide(record(), JUDGED, more, gate=GATE, level=level).champion is is_enough

    # By the champion's reward model 1,200 of 1,500 are ties as well, and by the own one none is.
    away: dict[str, Any] = {"away_win_rate": 0.52, "away_ties": 1200, "away_log_evidence": 6.2}
    result = match(1200, 1500, **MODEL, **away)
    assert needed_prompts(decide(record(), JUDGED, result, gate=GATE, level=level)) == needed
    result = replace(result, away_ties=1500, away_win_rate=0.5)
    assert "no number of prompts is enough" in decide(record(), JUDGED, result, gate=GATE, level=level).text

    first = Evaluation(0.52, 180, 120, 1200)
    needed = needed_prompts(decide(first, None, gate=GATE, level=1e-4))
    assert 1500 < needed < 2300 * 1.1, needed
    enough = Evaluation(0.52, round(needed * 0.12) + 1, round(needed * 0.08), round(needed * 0.8))
    assert decide(enough, None, gate=GATE, level=1e-4).champion


def test_every_refusal_ends_with_what_to_do() -> None:
    level: dict[str, Any] = {"gate": GATE, "level": LEVEL}
    low: dict[str, Any] = {"away_win_rate": 0.45, "away_log_evidence": 7.0}
    votes: dict[str, Any] = {"gate": replace(GATE, votes_margin=0.1), "level": LEVEL}
    for decision, end in (
        (decide(record(49), None, **level), "train a better policy, or lower it"),
        (decide(record(49, 49), None, **level), "until there are enough"),
        (decide(record(51), None, **level), "or train a better policy"),
        (decide(record(regression=FELL), None, **level), "or raise the margin (evaluate.regression)"),
        (decide(record(), JUDGED, match(50, **GOLD), **level), "prompts is enough; train a better policy"),
        (decide(record(), JUDGED, match(80, **MODEL, **low), **level), "as well; train a better policy"),
        (decide(record(), JUDGED, match(80, **GOLD, regression=FELL), **level), "(evaluate.regression)"),
        (decide(record(), JUDGED, match(80, **GOLD, votes=DISLIKED), **votes), "the rewards or the data"),
        (decide(record(), JUDGED, match(80, **GOLD), **votes), "then set register.votes"),
    ):
        assert "raise" not in decision.reason and "train a" not in decision.reason
        assert not decision.champion and decision.text.endswith(end), decision.text


def test_the_win_rate_with_answers_of_equal_length_is_in_the_reason() -> None:
    result = match(80, **GOLD, length_controlled={"mean": 0.45, "low": 0.4, "high": 0.5})
    decision = decide(record(), JUDGED, result, gate=GATE, level=LEVEL)
    assert decision.champion and ", length-controlled 0.450 [0.400, 0.500]" in decision.reason


def test_a_champion_of_older_code_has_no_judge_that_could_differ() -> None:
    assert decide(record(), record(), match(80, **GOLD), gate=GATE, level=LEVEL).champion
    assert decide(record(), record(), match(80, **MODEL), gate=GATE, level=LEVEL).rule == "judge"


def test_a_lost_match_promotes_no_policy() -> None:
    outcomes = [1] * 30 + [-1] * 70
    lost = replace(match(30, **GOLD), log_evidence=log_evidence(outcomes))
    assert lost.log_evidence > -math.log(LEVEL), "the first prompts are evidence enough"
    decision = decide(record(), JUDGED, lost, gate=GATE, level=LEVEL)
    assert (decision.champion, decision.rule, decision.tested) == (False, "match", True)
    words = "; the candidate must win more than half of the match; train a better policy"
    assert decision.text.endswith(words)


def test_evidence_at_the_level_is_enough() -> None:
    exact = replace(match(80, **GOLD), log_evidence=math.log(400))
    assert decide(record(), JUDGED, exact, gate=GATE, level=LEVEL).champion
    below = replace(exact, log_evidence=math.log(399.9))
    assert not decide(record(), JUDGED, below, gate=GATE, level=LEVEL).champion


def test_records_are_read_with_fields_of_other_versions() -> None:
    text = json.dumps({"win_rate": 0.7, "wins": 70, "losses": 30, "gold_reward": 1.0})
    assert Evaluation.from_json(text) == Evaluation(0.7, 70, 30)
    for other in ("", "[]", "3", "{}", "null"):
        assert Evaluation.from_json(other) is None


def test_the_levels_of_the_first_champion_add_up_to_alpha() -> None:
    assert GATE.first_level(1) == 0.025
    assert sum(map(GATE.first_level, range(1, 10_001))) == pytest.approx(0.05, abs=1e-5)


def test_the_sign_test_is_exact() -> None:
    assert Verdicts(61, 39, 0).p_value == pytest.approx(0.0176, abs=1e-4)
