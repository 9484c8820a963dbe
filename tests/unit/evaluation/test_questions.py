"""Questions to a language model that judges, and its verdicts.

- each pair is asked in both orders, and braces in answers and rubrics are text
- only a letter on the last line is a verdict
- an answer wins if it wins in both orders; a change with the order is a tie and counted
- a rubric that cannot be read is refused with its field
"""

from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.questions import Pair, judged, letter_of, questions_of, rubric_text
from tests.support.chat_server import answers_of


def test_a_pair_is_asked_in_both_orders() -> None:
    in_order, exchanged = questions_of("Judge {a}.", Pair("Say {b}", "one {x}", "two"))
    assert answers_of(in_order) == ("one {x}", "two") and answers_of(exchanged) == ("two", "one {x}")
    assert in_order.startswith("Judge {a}.\n\n### Request\nSay {b}\n")


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A", "A"),
        (" b\n", "B"),
        ("C", "C"),
        ("Answer A is vague.\n\nVerdict: **B**", "B"),
        ("[[A]]", "A"),
        ("tie", "C"),
        ("# A", "A"),
        ("A\n\u200b", "A"),
        ("", None),
        ("A or B", None),
        ("A\nbecause it is shorter", None),
        ("D", None),
        ("Apple", None),
    ],
)
def test_only_a_letter_on_the_last_line_is_a_verdict(reply: str, letter: str | None) -> None:
    assert letter_of(reply) == letter


@pytest.mark.parametrize(
    ("letters", "preference", "inconsistent", "unparsed"),
    [
        (("A", "B"), 1.0, 0.0, 0),
        (("B", "A"), 0.0, 0.0, 0),
        (("C", "C"), 0.5, 0.0, 0),
        (("A", "A"), 0.5, 1.0, 0),
        (("B", "B"), 0.5, 1.0, 0),
        (("A", "C"), 0.5, 1.0, 0),
        (("A", None), 0.5, 0.0, 1),
        ((None, None), 0.5, 0.0, 2),
        (None, 0.5, 0.0, 0),
    ],
)
def test_an_answer_wins_if_it_wins_in_both_orders(
    letters: tuple[str | None, str | None] | None, preference: float, inconsistent: float, unparsed: int
) -> None:
    found = judged([letters])
    assert found.preferences == (preference,)
    assert (found.inconsistent, found.unparsed) == (inconsistent, unparsed)


def test_the_share_of_the_first_answer_leaves_ties_out() -> None:
    assert judged([("A", "A"), ("A", "B"), ("C", None)]).first == 0.75
    assert judged([("C", "C")]).first == 0.5


def test_a_rubric_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "good").write_text("Shorter is better.\n")
    assert rubric_text(str(tmp_path / "good")) == "Shorter is better."
    for name, words in (("empty", "is empty"), ("latin", "UTF-8"), ("missing", "does not exist")):
        with pytest.raises(ConfigError, match=rf"evaluate\.language_model\.rubric: .*{words}"):
            rubric_text(str(tmp_path / name))
