"""The questions that a language model is asked about two answers, and what its replies mean.

    pair (a, b)  ->  question with a as A, b as B      ->  letter  \\
                     question with b as A, a as B      ->  letter  ->  a, b, or a tie

Each pair is asked in both orders. An answer wins if it wins in both; otherwise the pair is a tie. A judge
that prefers the first answer, regardless of its content, therefore finds ties only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.rewards.chat_service import last_line, read_rubric

FIELD = "evaluate.language_model"
RUBRIC, FOLDER = f"{FIELD}.rubric", f"{FIELD}.path"
"""Names of the judge's files in `StageContext.sources`."""
FORM = 1
"""Version of the texts below. Raise it if one of them changes."""
LETTERS = ("A", "B", "C")
"""The first answer, the second answer, neither."""
AGAIN = "\n\nYour last reply did not end with one of the letters A, B and C. Write only this letter."
"""Text that is added to a question whose reply has no letter."""

_RUBRIC = (
    "You compare two answers to a request. The better answer does what was asked, is correct and is easy to"
    " read. Neither the length of an answer nor its place makes it better."
)
_QUESTION = """{rubric}

### Request
{prompt}

### Answer A
{a}

### Answer B
{b}

### Verdict
Write A if answer A is better, B if answer B is better, and C if neither is better.
The last line of your reply must be this one letter."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    prompt: str
    a: str
    b: str


@dataclass(frozen=True)
class Judged:
    """Verdicts of the judge about n pairs."""

    preferences: tuple[float, ...]
    """(n,) 1 where `a` wins, 0.5 for a tie, 0 where `b` wins."""
    inconsistent: float
    """Share of the pairs whose verdict changes with the order of the answers."""
    first: float
    """Share of the first answer among the replies that prefer one; 0.5 if there are none."""
    unparsed: int
    """Replies without a letter. Their pairs are ties."""


def rubric_text(path: str | None) -> str:
    """Return the content of `evaluate.language_model.rubric`, or the general rubric for None.

    Raises ConfigError.
    """
    return _RUBRIC if path is None else read_rubric(path, RUBRIC)


def questions_of(rubric: str, pair: Pair) -> tuple[str, str]:
    """Return the question about a pair in both orders."""
    return (
        _QUESTION.format(rubric=rubric, prompt=pair.prompt, a=pair.a, b=pair.b),
        _QUESTION.format(rubric=rubric, prompt=pair.prompt, a=pair.b, b=pair.a),
    )


def letter_of(reply: str) -> str | None:
    """Return the letter on the last line of a reply, or None if there is something else.

    `Verdict: **A**`, `[[A]]`, `# A` and `tie` are accepted as well.
    """
    word = last_line(reply)[1].upper()
    if word == "TIE":
        return "C"
    return word if word in LETTERS else None


def judged(letters: Sequence[tuple[str | None, str | None] | None]) -> Judged:
    """Return the verdicts of (n,) pairs of letters, in the order of the pair and exchanged.

    None is a pair of equal answers, which is a tie without a question.
    """
    preferences: list[float] = []
    inconsistent = firsts = seconds = unparsed = 0
    for pair in letters:
        if pair is None:
            preferences.append(0.5)
            continue
        firsts += pair.count("A")
        seconds += pair.count("B")
        unparsed += pair.count(None)
        preference = {("A", "B"): 1.0, ("B", "A"): 0.0}.get((str(pair[0]), str(pair[1])), 0.5)
        preferences.append(preference)
        if preference == 0.5 and None not in pair and pair != ("C", "C"):
            inconsistent += 1
    decided = firsts + seconds
    return Judged(
        tuple(preferences),
        inconsistent / max(1, len(letters)),
        firsts / decided if decided else 0.5,
        unparsed,
    )
