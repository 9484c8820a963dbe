r"""Verifiable answers.

- the answer is found where people and models put it: after `####`, in the last \boxed{}, or as the last
  number
- a sign belongs to a number if nothing is between them, and no number before it
- numbers are equal whatever their separators, signs, currency, decimals or fractions; texts without their
  decoration
- a response without an answer scores 0; a row without one is an error that names the field
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.rewards import AnswerReward
from rlhf_core.errors import RewardError
from rlhf_core.rewards.answers import boxed, final_number, same_answer
from rlhf_core.rewards.rules import evaluate_rule
from rlhf_core.types import RewardInput


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She makes 9 * 2 = $18 every day.", "$18"),
        ("Half of 10 is 5.", "5"),
        ("It costs 1,234.50 dollars", "1,234.50"),
        ("The change is -3", "-3"),
        ("The change is -$ 3", "-$ 3"),
        ("Answer:\n- 18", "18"),
        ("Answer:\n- $18", "$18"),
        ("5 - 3", "3"),
        ("5-3", "3"),
        ("so 3/4 of it", "3/4"),
        ("The probability is .25.", ".25"),
        ("#### -.5 or so", "-.5"),
        ("It costs $.50", "$.50"),
        ("about 1e5", "1e5"),
        ("6.02E+23 of them", "6.02E+23"),
        ("5east of 1e5f", "1"),
        ("first 7, then\n#### 42 apples in 3 boxes", "42"),
        ("no number here", None),
        ("v2x is a name", None),
        ("#### none", None),
    ],
)
def test_the_final_number_is_found(response: str, number: str | None) -> None:
    found = final_number(response)
    assert (None if found is None else found.strip()) == number


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"Thus \boxed{18}.", "18"),
        (r"\boxed{1} and then \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{x^{2}+1}", "x^{2}+1"),
        (r"\boxed{cut off", None),
        ("none", None),
    ],
)
def test_the_last_whole_box_is_found(response: str, content: str | None) -> None:
    assert boxed(response) == content


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("$1,234.50", "1234.5"),
        ("18.0", "18"),
        ("−3", "-3"),
        ("3/4", "0.75"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{1}{2}", "-0.5"),
        ("25%", "25"),
        ("25\\%", "25"),
        ("18.", "18"),
        (".5", "1/2"),
        ("0.00001", str(0.00001)),
        ("20000000000000000", str(2e16)),
        ("-1.5e3", "-1500"),
        (r"\text{Monday}", "monday"),
        ("x = 2", "x=2"),
        ("(1, 2)", "(1,2)"),
    ],
)
def test_answers_are_equal_whatever_their_decoration(given: str, wanted: str) -> None:
    assert same_answer(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("18", "81"), ("1.5", "15"), ("1/0", "1"), ("-3", "3"), ("x=2", "x=3"), ("1e5", "1")],
)
def test_different_answers_are_not_the_same(given: str, wanted: str) -> None:
    assert not same_answer(given, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is " + "9" * 5000,
        r"\boxed{" + "1" * 5000 + "}",
        "#### 1/" + "9" * 5000,
        r"\boxed{\frac{" + "1" * 5000 + "}{2}}",
        "1,000" * 2000,
    ],
)
def test_an_endless_number_is_a_wrong_answer(text: str) -> None:
    assert _score(text, {"answer": "#### 18"}) == 0.0


def _score(response: str, meta: dict[str, Any], **settings: Any) -> float:
    sample = RewardInput("p", "q", response, (1,), (2,), True, meta)
    return evaluate_rule(AnswerReward(**settings), sample)


def test_right_answer_scores_one_and_others_zero() -> None:
    meta = {"answer": "Janet sells 9 eggs.\n#### 18"}
    assert _score("9 * 2 = 18", meta) == 1.0
    assert _score(r"so \boxed{18}, not 19", meta) == 1.0
    assert _score("it is 19", meta) == 0.0
    assert _score("I do not know", meta) == 0.0
    assert _score("it is 18", meta, extract="boxed") == 0.0
    assert _score("18", {"result": 18}, field="result") == 1.0


def test_a_row_without_the_field_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match=r"no field 'answer'.*it has result"):
        _score("18", {"result": 18})
