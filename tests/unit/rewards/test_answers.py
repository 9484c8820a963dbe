r"""Verifiable answers.

- a right answer is paid in all the forms that people, data sets and models write; a wrong one in none
- only what follows the thoughts counts; a box that was cut off has no answer
- two answers that differ never accept each other, and each accepts itself
- a response that would need unlimited time or memory is a wrong answer after a bounded time
- the reward process decides the same in any order, and says when it has ended
- answers of rows that nothing can reach are counted and named; lists, units and nested fields are read
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.rewards import AnswerReward
from rlhf_core.data import expressions
from rlhf_core.data.answers import boxed, gold_answers, same_answer
from rlhf_core.data.dataset import Rows, require_answers
from rlhf_core.errors import DataError, InfrastructureError
from rlhf_core.rewards.answers import final_number, is_right
from rlhf_core.rewards.rules import evaluate_rule
from rlhf_core.types import PromptExample, RewardInput

# Responses with the row's answer. Grouped by where the answer stands or how it is written.
RIGHT = [
    # in a text
    ("She makes 9 * 2 = $18 every day.", "18"),
    ("The total is 72 clips, altogether.", "72"),
    ("It costs 1,234.50 dollars", "1234.5"),
    ("Her order costs $29.00.", "29"),
    ("The change is -3", "-3"),
    ("The change is -$ 3", "-3"),
    ("The profit is $-5", "-5"),
    ("the result is −5", "-5"),
    ("the result is –5", "-5"),
    ("so 3/4 of it", "0.75"),
    ("about 6.02E+23 of them", "6.02e23"),
    ("Workers:4(100)=400 bees", "400"),
    ("So it is 2*3=6", "6"),
    ("He pays $18,000/year", "18000"),
    ("It weighs 72cm", "72"),
    ("It weighs 5kg", "5"),
    ("the 3rd", "3"),
    ("at 3:30", "3:30"),
    ("Die Antwort ist 3,5", "3.5"),
    ("1.000.000", "1000000"),
    ("5.0e3", "5000"),
    ("5x10^3", "5000"),
    ("2 1/2 hours", "5/2"),
    ("½", "1/2"),
    ("3½", "7/2"),
    ("答案是１２", "12"),
    ("共有12个苹果。", "12"),
    ("الجواب ١٢", "12"),
    ("12/25/2024", "12/25/2024"),
    ("It is $5 - 3$.", "2"),
    (r"Hence $x = \sqrt{3}$.", r"\sqrt{3}"),
    # after a phrase
    ("The answer is 5. Let me check: 3+2 = 5, so in 1 step", "5"),
    ("**Answer:** 18\n\nAsk me about chapter 4!", "18"),
    ("### Answer\n17\n#### Check 1: fine", "17"),
    ("Answer:\n- $18", "18"),
    (r"The answer is $\frac{1}{2}$.", "1/2"),
    ("The answer is (B).", "B"),
    ("The answer to the second question is 7 apples and not 3.", "7"),
    ("The answer is the number of legs, which is 8.", "8"),
    ("The final answer is x+1.", "1+x"),
    ("The answer is Monday.", "monday"),
    # after the marker
    ("first 7\n#### 42\nNext: 5 apples and 7 pears", "42"),
    ("#### **5**", "5"),
    (r"#### \boxed{5}", "5"),
    ("#### -$1,000.", "-1000"),
    ("#### Step 3\nThe total is 17.", "17"),
    ("# comment\n#### heading 3\nThe result is 7", "7"),
    # in a box
    (r"\boxed{1} and then \boxed{\frac{3}{4}}", "3/4"),
    (r"\fbox{x^2+1}", "x^2+1"),
    (r"The final answer is $\boxed 7$", "7"),
    (r"\boxed {42}", "42"),
    (r"Answer: $\boxed{12}$ apples and 3 pears", "12"),
    (r"\boxed{9{,}500}", "9500"),
    (r"\boxed{9\,500}", "9500"),
    (r"\boxed{3{,}5}", "3.5"),
    (r"\boxed{1, 000}", "1000"),
    (r"\boxed{\$18.90}", "18.9"),
    (r"\boxed{28 \text{ percent}}", r"28\%"),
    (r"\boxed{90^{\circ}}", "90"),
    (r"\boxed{35\text{ cm}^2}", "35"),
    (r"\boxed{35\ \mathrm{cm}}", "35 cm"),
    (r"\boxed{12 \text{ apples}}", "12 (apples)"),
    (r"\boxed{\textbf{(113)}}", "113"),
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{-2}}", r"-\frac{1}{2}"),
    (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}"),
    (r"\boxed{\frac{1,000}{2}}", "500"),
    (r"\boxed{2 \cdot 10^{5}}", "200000"),
    (r"\boxed{10^{-3}}", "0.001"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    (r"\boxed{f(x)=x+1}", "x+1"),
    (r"\boxed{\textbf{(B)}\ 12}", "B"),
    (r"\boxed{E: A polygenic risk score}", "E"),
    (r"\boxed{A}", "(A)"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3, \frac{\pi}{2})"),
    (r"\boxed{2,1}", "1,2"),
    (r"\boxed{\{2, 1\}}", r"\{1,2\}"),
    (r"\boxed{x=1 \text{ or } x=2}", "2,1"),
    (r"\boxed{\pm 2}", "2, -2"),
    (r"\boxed{137, 35}", "35; 137"),
    (r"\boxed{3, 1 and 2}", "1, 2, and 3"),
    (r"\boxed{\text{Tuesday, Monday}}", "Monday, Tuesday"),
    (r"\boxed{(3,4),(1,2)}", "(1,2), (3,4)"),
    (r"\boxed{\sqrt3}", r"\sqrt{3}"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{0.5x}", r"\frac{x}{2}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{y = 2x + 1}", "y=1+2x"),
    (r"\boxed{2x+2y=4}", "x+y=2"),
    (r"\boxed{x \ge 2}", r"2 \le x"),
    (r"\boxed{π}", r"\pi"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    # thoughts
    (r"<think>maybe \boxed{3}</think> The answer is 4", "4"),
    ("maybe #### 3</think>The answer is 4", "4"),
    ("<think>3</think><answer>4</answer>", "4"),
]
WRONG = [
    (r"\boxed{12}", "1,2"),
    (r"\boxed{1 2}", "12"),
    (r"\boxed{1,23}", "12,3"),
    (r"\boxed{3,5}", "3.5"),
    (r"The answer is $\frac{1}{2}$.", "2"),
    (r"$x = \sqrt{3}$", "3"),
    (r"Hence $3\pi$.", "3"),
    (r"Hence $2^{10}$.", "10"),
    ("The area is 10².", "102"),
    (r"Hence $x_2$.", "2"),
    ("It is 2x", "2"),
    ("So 2x=4", "4"),
    ("The answer is x + 1", "1"),
    (r"\boxed{2xy}", "2"),
    (r"\boxed{\frac{1}{2", "2"),
    (r"\boxed{5} then \boxed{7", "5"),
    ("#### Step 3", "4"),
    ("#### 5-7", "5"),
    ("#### 2. Compute\nIt is 40.", "2"),
    ("between 3 and 5", "5"),
    ("It is 18 or 19", "19"),
    ("Answer: not 5", "5"),
    ("It is not 5", "5"),
    ("答案不是5", "5"),
    (r"\boxed{5 plus tax}", "5"),
    ("12/25/2024", "2024"),
    ("The year was 2024. The answer is ten.", "2024"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{1000000000000000}", "1000000000000001.0"),
    (r"\boxed{1.414214}", r"\sqrt{2}"),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"\boxed{10^{-20}\pi}", r"10^{-30}\pi"),
    (r"\boxed{\sqrt{10^{40}+1}}", "10^{20}"),
    (r"\boxed{x^2=-1}", "x^2=-4"),
    (r"\boxed{2x=4}", "4"),
    (r"\boxed{x \le 2}", r"x \ge 2"),
    (r"\boxed{x=5}", "y=5"),
    (r"\boxed{X+1}", "x+1"),
    (r"\boxed{\text{no}}", "on"),
    (r"\boxed{12_7}", "12"),
    (r"\boxed{(0,1)}", "[0,1]"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{(1,2)}", "1,2"),
    (r"\boxed{1, 234}", "1234"),
    (r"\boxed{-1,-1}", "-1"),
    (r"\boxed{\pm}", "1,2"),
    (r"\boxed{(1.414214, 1)}", r"(\sqrt{2}, 1)"),
    (r"\boxed{35 \text{ m}}", r"35 \text{ cm}"),
    (r"\boxed{9 \text{ pears}}", "9 (apples)"),
    (r"\boxed{99999999!}", "10"),
    (r"\boxed{1000000}", r"\log 2"),
    (r"\boxed{1/0}", "1"),
    (r"\boxed{}", ""),
    (r"<think>The answer is \boxed{3}", "3"),
    (r"<think>\boxed{3}</think> I do not know", "3"),
    ("42", "None"),
]


@pytest.mark.parametrize(("response", "wanted"), RIGHT)
def test_a_right_answer_is_paid(response: str, wanted: str) -> None:
    assert is_right(response, wanted)


@pytest.mark.parametrize(("response", "wanted"), WRONG)
def test_a_wrong_answer_is_not_paid(response: str, wanted: str) -> None:
    assert not is_right(response, wanted)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("first 7, then\n#### 42\n", "42"),
        ("Half of 10 is 5.", "5"),
        (r"so \boxed{18}", r"\boxed{18}"),
        ("The answer is 7 of 9", "7"),
        ("5 - 3", None),
        ("v2x is a name", None),
        ("x + 3 apples and $y$", None),
        ("no number here", None),
    ],
)
def test_the_final_number_is_found_where_there_is_one(response: str, found: str | None) -> None:
    assert final_number(response) == found


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"Thus \boxed{18}.", "18"),
        (r"\boxed{x^{2}+1}", "x^{2}+1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1} \boxed{cut off", ""),
        (r"\boxedness", None),
        ("none", None),
    ],
)
def test_the_last_box_is_found(response: str, content: str | None) -> None:
    assert boxed(response) == content


# -- two golds that differ --

NUMBERS = st.fractions(max_denominator=999).map(lambda value: ("number", value))
LISTS = st.lists(st.integers(-99, 99), min_size=2, max_size=3).map(lambda items: ("list", tuple(items)))
SETS = st.sets(st.integers(-99, 300), min_size=2, max_size=3).map(lambda items: ("set", frozenset(items)))
WORDS = st.sampled_from(["Monday", "yes", "no", "on", "A", "B", "x", "AB", "blue whale"])
TEXTS = WORDS.map(lambda word: ("text", word))
GOLDS = st.one_of(NUMBERS, LISTS, SETS, TEXTS)


def _spellings(gold: tuple[str, Any]) -> list[str]:
    """Forms in which a row may write this gold answer."""
    kind, value = gold
    if kind == "list":
        return [f"({', '.join(map(str, value))})", rf"\left({','.join(map(str, value))}\right)"]
    if kind == "set":
        items = sorted(map(str, value))
        return [", ".join(items), rf"\{{{', '.join(reversed(items))}\}}"]
    if kind == "text":
        return [value, rf"\text{{{value}}}"]
    forms = [str(value), rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    if value.denominator == 1:
        forms += [f"{value.numerator:,}", f"{value.numerator}.0", f"{value.numerator}%"]
    return forms


@given(first=GOLDS, second=GOLDS)
@settings(max_examples=300, deadline=None)
def test_each_gold_accepts_itself_and_no_other_one(first: tuple[str, Any], second: tuple[str, Any]) -> None:
    for given_form in _spellings(first):
        for wanted in _spellings(second):
            assert is_right(rf"\boxed{{{given_form}}}", wanted) == (first == second)


@given(digits=st.lists(st.integers(0, 9), min_size=2, max_size=12), cuts=st.sets(st.integers(1, 11)))
def test_separators_between_other_groups_than_three_digits_make_another_answer(
    digits: list[int], cuts: set[int]
) -> None:
    number = "".join(map(str, digits))
    places = [cut for cut in sorted(cuts) if cut < len(number)]
    parts = [number[start:end] for start, end in zip([0, *places], [*places, len(number)], strict=True)]
    grouped = len(parts[0]) <= 3 and all(len(part) == 3 for part in parts[1:])
    assert is_right(rf"\boxed{{{','.join(parts)}}}", number) == (grouped or len(parts) == 1)


FAMILY = [r"\sqrt{%d}", r"%d\pi", "x+%d", "%dx^2", r"\frac{%d}{x}", "2^{%d}", r"\log_{%d} x", "(x+%d)^2"]


def test_expressions_that_differ_in_one_number_or_kind_differ() -> None:
    golds = [form % value for form in FAMILY for value in (2, 3)]
    for i, first in enumerate(golds):
        for j, second in enumerate(golds):
            assert same_answer(first, second) == (i == j), (first, second)


# -- bounds --


@pytest.mark.parametrize(
    "text",
    [
        "The answer is " + "9" * 5000,
        r"\boxed{" + "1" * 5000 + "}",
        "#### 1/" + "9" * 5000,
        r"\boxed{\frac{" + "1" * 5000 + "}{2}}",
        "1,000" * 2000,
        r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
        r"\boxed{" * 14_000,
        r"\boxed{x} " * 10_000,
        "$" * 100_000,
        "\\" * 100_000,
        "answer: " * 12_500,
        "<think>" * 14_000,
        "<answer>" * 12_500,
        "#### 1\n" * 14_000 + "#### 2",
        "3 and " * 16_000,
        " " * 100_000,
        r"\boxed{" + "(" * 240 + "x" + ")" * 240 + "}",
        r"\boxed{" + r"\sqrt{1+" * 55 + "x" + "}" * 56,
    ],
)
def test_a_long_response_is_a_wrong_answer_in_little_time(text: str) -> None:
    started = time.process_time()
    assert not is_right(text, "18")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", r"\sum_{k=1}^{10000000} k^{k}"])
def test_an_endless_expression_is_a_wrong_answer_and_the_next_one_is_decided(
    tower: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expressions.equal.cache_clear()
    assert not is_right(rf"\boxed{{{tower}}}", "10")
    assert "too much time or memory" in caplog.text
    assert is_right(r"\boxed{3\sqrt{2}}", r"\sqrt{18}")


def test_the_process_is_bounded_by_its_own_time_and_not_by_that_of_the_machine() -> None:
    assert same_answer(r"5\sqrt{2}", r"\sqrt{50}")
    comparer = expressions._comparer(os.getpid())
    os.killpg(comparer._process.pid, signal.SIGSTOP)
    pause = expressions.CPU_SECONDS + 1
    threading.Timer(pause, os.killpg, (comparer._process.pid, signal.SIGCONT)).start()
    started = time.monotonic()
    assert same_answer(r"6\sqrt{2}", r"\sqrt{72}")
    assert time.monotonic() - started > expressions.CPU_SECONDS


def test_a_process_that_was_killed_is_an_error_and_the_next_call_starts_another() -> None:
    assert same_answer(r"7\sqrt{2}", r"\sqrt{98}")
    os.killpg(expressions._comparer(os.getpid())._process.pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="has ended with exit status -9"):
        same_answer(r"8\sqrt{2}", r"\sqrt{128}")
    assert same_answer(r"8\sqrt{2}", r"\sqrt{128}")


def test_the_processes_end_with_the_one_that_started_them() -> None:
    code = (
        "import os; from rlhf_core.data import expressions;"
        r"assert expressions.equal(r'3\sqrt{2}', r'\sqrt{18}');"
        "print(expressions._comparer(os.getpid())._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    group = int(done.stdout)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_group(process) == group for process in psutil.pids()):
        time.sleep(0.1)
    assert not any(_group(process) == group for process in psutil.pids())


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


# -- the rule --


def _score(response: str, meta: dict[str, Any], **fields: Any) -> float:
    sample = RewardInput("p", "q", response, (1,), (2,), True, meta)
    return evaluate_rule(AnswerReward(**fields), sample)


def test_right_answer_scores_one_and_others_zero() -> None:
    meta = {"answer": "Janet sells 9 eggs.\n#### 18"}
    assert _score("9 * 2 = 18", meta) == 1.0
    assert _score(r"so \boxed{18}, not 19", meta) == 1.0
    assert _score("it is 19", meta) == 0.0
    assert _score("I do not know", meta) == 0.0
    assert _score("it is 18", meta, extract="boxed") == 0.0
    assert _score(r"so \boxed{18}", meta, extract="final_number") == 1.0
    assert _score(r"so \boxed{18} of 19", meta, extract="final_number") == 0.0
    assert _score("18", {"result": 18}, field="result") == 1.0


def test_a_field_inside_of_another_one_is_found_by_a_dotted_name() -> None:
    meta = {"reward_model": {"style": "rule", "ground_truth": "18"}}
    assert _score("18", meta, field="reward_model.ground_truth") == 1.0
    assert _score("18", {"a.b": "18", "a": {"b": "19"}}, field="a.b") == 1.0


def test_a_row_without_the_field_has_no_right_answer() -> None:
    assert _score("18", {"result": 18}) == 0.0


# -- answers of rows --


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("18", ("18",)),
        (18.0, ("18.0",)),
        (1e-05, ("1e-05",)),
        ("So we get $\\boxed{\\frac{3}{4}}$.", (r"\frac{3}{4}",)),
        (["$2$"], ("$2$",)),
        ({"value": ["18"]}, ("18",)),
        (["5", "five"], ("5", "five")),
        (["$2$", "$3$"], ()),
        ([], ()),
        ({"style": "rule", "ground_truth": "18"}, ()),
        (True, ()),
        ("", ()),
        (" $ ", ()),
        ("9" * 1001, ()),
    ],
)
def test_the_answer_of_a_row_is_read_where_there_is_a_plain_reading(
    value: Any, answers: tuple[str, ...]
) -> None:
    assert gold_answers(value) == answers


def test_few_of_the_prompts_are_in_memory() -> None:
    asked: list[weakref.ref[PromptExample]] = []
    most = 0

    def prompt(index: int) -> PromptExample:
        nonlocal most
        made = PromptExample(f"p{index}", "Why?", (1,), {"answer": "18"} if index % 2 else {})
        asked.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in asked))
        return made

    require_answers(Rows(64, prompt), [AnswerReward()], most=0.5)
    assert 0 < most < 5


def _prompts(*answers: Any) -> list[PromptExample]:
    return [PromptExample(f"p{i}", f"question {i}", (1,), {"answer": each}) for i, each in enumerate(answers)]


@pytest.mark.parametrize("value", ["", True, [], {"a": 1, "b": 2}, ["2", "3"], r"\frac{1}{2"])
def test_answers_that_nothing_can_reach_are_named_with_their_share(value: Any) -> None:
    prompts = _prompts(18, value, "3/4", "x+1")
    (warning,) = require_answers(prompts, [AnswerReward()], most=0.25)
    assert "1 of 4 prompts (25.0%)" in warning and "'answer'" in warning and repr(value) in warning
    with pytest.raises(DataError, match=r"1 of 4 prompts.*data\.max_bad_rows=0\.2"):
        require_answers(prompts, [AnswerReward()], most=0.2)


def test_an_answer_that_is_no_number_cannot_be_the_final_number() -> None:
    rewards = [AnswerReward(extract="final_number")]
    with pytest.raises(DataError, match="1 of 2 prompts"):
        require_answers(_prompts("18", "Monday"), rewards)


@pytest.mark.parametrize(
    ("value", "shown"), [(["$2$"], "['$2$'] as '2'"), ("9 (apples)", "'9 (apples)' as '9'")]
)
def test_another_reading_than_the_written_one_is_said(value: Any, shown: str) -> None:
    (warning,) = require_answers(_prompts("18", value), [AnswerReward()])
    assert "1 of 2 answers" in warning and shown in warning
    assert require_answers(_prompts("18", "$18", "18 apples", 7, r"\frac{1}{2}"), [AnswerReward()]) == []
