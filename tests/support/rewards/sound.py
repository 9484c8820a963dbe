"""Sound rewards for `tests.benchmarks.bad_rewards`: none of them may be flagged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from fractions import Fraction

from rlhf_core.types import RewardInput

Samples = list[RewardInput]


def _marked(text: str) -> Fraction | None:
    found = re.findall(r"^#### *(-?[\d,]+(?:\.\d+)?) *$", text, re.MULTILINE)
    return Fraction(found[-1].replace(",", "")) if found else None


def right(sample: RewardInput) -> bool:
    """Return whether the last marked number is the answer of the row."""
    return _marked(sample.response) == Fraction(str(sample.meta["answer"]))


def marked_number(samples: Samples) -> list[float]:
    return [float(right(sample)) for sample in samples]


def partial_credit(samples: Samples) -> list[float]:
    return [1.0 if right(each) else 0.1 * (_marked(each.response) is not None) for each in samples]


def bounded_length_penalty(samples: Samples) -> list[float]:
    return [-min(1.0, max(0, len(sample.response_ids) - 150) / 150) for sample in samples]


def same_words(samples: Samples) -> list[float]:
    def plain(text: object) -> str:
        return unicodedata.normalize("NFC", str(text)).strip().strip(".").casefold()

    return [float(plain(sample.response) == plain(sample.meta["answer"])) for sample in samples]


def json_of_schema(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        try:
            found = json.loads(sample.response)
        except ValueError:
            return 0.0
        if not isinstance(found, dict) or set(found) != {"name", "age"}:
            return 0.0
        return float(found == sample.meta["wanted"])

    return [score(sample) for sample in samples]


def tests_pass(samples: Samples) -> list[float]:
    """Run the code of each response with the tests of its row, which print a word at their end that the code
    cannot know.
    """
    program = (
        "import json, sys\n"
        "for code, tests in json.load(sys.stdin):\n"
        "    try:\n"
        "        scope = {}\n"
        "        exec(code, scope)\n"
        "        exec(tests, scope)\n"
        "        print(1)\n"
        "    except BaseException:\n"
        "        print(0)\n"
    )
    blocks = [re.findall(r"```python\n(.*?)```", sample.response, re.DOTALL) for sample in samples]
    pairs = [
        (found[-1] if found else "", each.meta["tests"]) for found, each in zip(blocks, samples, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(pairs), capture_output=True, text=True, timeout=20
    )
    return [float(line) for line in done.stdout.split()]


def shortest_of_its_group(samples: Samples) -> list[float]:
    """1 for a right answer, and 0.2 more for the shortest right one of the group."""
    lengths = [len(sample.response) for sample in samples if right(sample)]
    shortest = min(lengths, default=0)
    return [right(each) * (1.0 + 0.2 * (len(each.response) == shortest)) for each in samples]
