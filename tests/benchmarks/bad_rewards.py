"""What `rlhf check-reward` says of bad rewards and of sound ones.

    python -m tests.benchmarks.bad_rewards
    python -m tests.benchmarks.bad_rewards --only substring,novelty --cards

Each bad reward is a bug that users of another project have reported, or a planted hack
(`tests/support/rewards`). It is checked with a configuration of a small task, as by a user. It counts as
flagged if one of the expected findings names it. A sound reward must have no finding. `LATE` were written
after the checks were finished.

The exit code is 1 if fewer bad rewards are flagged than `LEAST`, or a sound one is flagged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_core.config.yaml import dump
from rlhf_core.ops.check_reward import check_reward, show

REWARDS = Path(__file__).parents[1] / "support" / "rewards"
_TAGS = r"<think>.*?</think>\s*<answer>.*?</answer>"
ROWS = 60
LEAST = 23
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A reward with a task."""

    name: str
    """Function in the file of rewards."""
    task: str
    findings: frozenset[str] = frozenset()
    """Each of them is right; none for a sound reward."""
    report: str = ""
    """Where the bug was reported, or that it was planted."""
    rewards: tuple[Row, ...] = ()
    """Sources; none: the Python function `name`."""


def bad(name: str, task: str, findings: str, report: str) -> Case:
    return Case(name, task, frozenset(findings.split()), report)


BAD = (
    bad("one_if_gold_is_unreadable", "figures", "junk wrong", "open-r1#293, #86"),
    bad("nothing_equals_nothing", "sums", "constant junk unused", "verl-omni#643"),
    bad("substring", "sums", "wrong hedge", "verifiers#763"),
    bad("last_300_characters", "sums", "text_around", "verl#7274"),
    bad("cosine_without_clamp", "sums", "length", "open-r1#312, trl#6066"),
    bad("two_scores_for_a_failure", "sums", "fails", "NeMo-RL#3635"),
    bad("nan_without_number", "sums", "fails", "ms-swift#8123"),
    bad("evaluates_the_answer", "sums", "fails", "Math-Verify#65, NeMo-Gym#1354"),
    bad("in_order_of_completion", "sums", "repeatable batch", "swarms#1896"),
    bad("all_of_nothing", "sums", "junk", "NeMo-Gym#2142"),
    bad("any_number_counts", "sums", "hedge", "planted"),
    bad("shorter_than_the_batch", "sums", "batch", "open-r1#360"),
    bad("exact_text", "words", "whitespace", "reasoning-gym#129"),
    bad("overlap_of_ascii_words", "words", "gold script", "adk-python#6476"),
    bad("errors_pass", "code", "junk", "verl#7853"),
    bad("reads_its_reward_from_the_answer", "sums", "gameable junk", "OpenEnv#1199"),
    bad("dot_without_newlines", "tags", "constant gameable", "open-r1#237"),
    bad("newline_at_the_end", "tags", "whitespace constant", "dllm#118"),
    bad("reads_the_prompt", "sums", "constant", "EasyR1#26"),
    bad("penalty_of_the_whole_text", "tags", "whitespace gameable", "dllm#118"),
    bad("each_tag_counts", "tags", "gameable", "open-r1#418"),
    bad("distance_from_20", "prose", "gameable length", "trl#2777"),
    bad("repeated_words", "prose", "script", "minimind#832, open-r1#516"),
    bad("kind_words", "prose", "gameable", "planted"),
    bad("exclamation_marks", "prose", "gameable", "planted"),
    bad("novelty", "prose", "repeatable", "planted"),
    bad("noise", "prose", "repeatable", "planted"),
    bad("ascii_only", "prose", "fails", "planted"),
    bad("first_word", "prose", "fails", "planted"),
    bad("standardised", "prose", "batch", "planted"),
    bad("bonus_for_the_limit", "prose", "cut", "planted"),
    bad("reversed_preference", "prose", "pairs", "LlamaFactory#5161"),
)
LATE = (
    bad("first_character", "sums", "wrong", "NeMo-RL#3635"),
    bad("one_score_for_each_prompt", "sums", "batch repeatable unused", "planted"),
    bad("believes_the_answer", "sums", "junk gameable", "planted"),
    bad("close_enough", "sums", "wrong", "planted"),
    bad("reasoning_steps", "prose", "gameable", "open-r1#144"),
)
SOUND = (
    Case("answer", "sums", rewards=({"type": "answer"},)),
    Case("marked_number", "sums"),
    Case("partial_credit", "sums"),
    Case(
        "answer and format", "tags",
        rewards=({"type": "answer"}, {"type": "format", "pattern": _TAGS}),
    ),
    Case("bounded_length_penalty", "prose"),
    Case("gold", "prose", rewards=({"type": "gold"},)),
    Case("gold and repetition", "prose", rewards=({"type": "gold"}, {"type": "repetition", "weight": 0.5})),
    Case("same_words", "words"),
    Case("json_of_schema", "json"),
    Case("tests_pass", "code"),
    Case("shortest_of_its_group", "sums"),
)  # fmt: skip


# -- tasks: rows of prompts, and a right and a wrong response to each --


def _sums(rng: random.Random, tags: bool = False) -> tuple[Row, str, str]:
    first, second = rng.randint(3, 89), rng.randint(3, 89)
    noun = rng.choice(("hens", "coins", "books", "apples", "cards"))
    prompt = (
        f"Ann has {first} {noun} and buys {second}. How many does she have? End with #### and the number."
    )
    answer, wrong = first + second, first + second + rng.choice((-10, -1, 1, 9, 10))

    def solution(value: int) -> str:
        steps = f"Ann has {first} {noun}.\nShe buys {second}, so {first} + {second} = {value}."
        if tags:
            return f"<think>\n{steps}\n</think>\n<answer>{value}</answer>"
        return f"{steps}\n#### {value}"

    return {"prompt": prompt, "answer": str(answer)}, solution(answer), solution(wrong)


_WORDS = (
    ("lotus", "rose", "tulip", "lily"),
    ("कमल", "गुलाब", "चमेली", "गेंदा"),
    ("莲花", "玫瑰", "郁金香", "百合"),
    ("ดอกบัว", "กุหลาบ", "ทิวลิป", "มะลิ"),
    ("زهرة اللوتس", "وردة", "زنبق", "ياسمين"),
    ("лотос", "роза", "тюльпан", "лилия"),
)


def _words(rng: random.Random) -> tuple[Row, str, str]:
    names = rng.choice(_WORDS)
    index = rng.randrange(len(names))
    prompt = (
        f"Flower {rng.randint(1, 99_999)} of a list is {names[index]}. Repeat its name, and nothing else."
    )
    return {"prompt": prompt, "answer": names[index]}, names[index], names[index - 1]


def _code(rng: random.Random) -> tuple[Row, str, str]:
    number, factor = rng.randint(2, 99), rng.randint(2, 99)
    prompt = f"Write a Python function f that multiplies its argument by {factor} and adds {number}."
    tests = f"assert f(1) == {factor + number}\nassert f(-2) == {number - 2 * factor}"

    def block(value: int) -> str:
        return f"```python\ndef f(x):\n    return x * {factor} + {value}\n```"

    return {"prompt": prompt, "tests": tests}, block(number), block(number + 1)


def _json(rng: random.Random) -> tuple[Row, str, str]:
    name, age = rng.choice(("Ann", "Bo", "Cy", "Dee", "Eve", "Finn")), rng.randint(18, 99)
    prompt = (
        f"Case {rng.randint(1, 99_999)}: {name} is {age} years old. Write this as JSON with name and age."
    )
    wanted = {"name": name, "age": age}
    wrong = f"{name} is {age}." if rng.random() < 0.5 else json.dumps({"name": name, "age": str(age)})
    return {"prompt": prompt, "wanted": wanted}, json.dumps(wanted), wrong


TASKS: dict[str, Callable[[random.Random], tuple[Row, str, str]]] = {
    "sums": _sums,
    "figures": _sums,
    "tags": lambda rng: _sums(rng, tags=True),
    "words": _words,
    "code": _code,
    "json": _json,
}
"""`prose` is the task of the demo. In `figures`, the answers of some rows of `sums` cannot be read."""


def data_of(task: str, folder: Path) -> Row:
    """Return the section `data` of a task, and write its files."""
    if task == "prose":
        sizes = {"sft_examples": 200, "pairs": 200, "prompts": ROWS, "label_temperature": 0.25}
        return {
            **{name: [{"path": "synthetic"}] for name in ("sft", "preference", "prompts")},
            "synthetic": sizes,
        }
    rng = random.Random(0)
    rows = [TASKS[task](rng) for _ in range(ROWS)]
    if task == "figures":
        for row, _, _ in rows[::12]:
            row["answer"] += " (see figure 2)"
    sets = {
        "sft": [{"prompt": row["prompt"], "completion": right} for row, right, _ in rows],
        "preference": [
            {"prompt": row["prompt"], "chosen": right, "rejected": wrong} for row, right, wrong in rows
        ],
        "prompts": [row for row, _, _ in rows],
    }
    for name, lines in sets.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    data: Row = {name: [{"path": str(folder / f"{name}.jsonl")}] for name in sets}
    return {**data, "thoughts": "keep"} if task == "tags" else data


def configuration(case: Case, folder: Path, kind: str) -> Path:
    """Write the configuration of a case, and return its file."""
    function = {
        "type": "python",
        "file": str(REWARDS / f"{kind}.py"),
        "function": f"rewards:{case.name}",
        "timeout": 3,
        "needs_group": case.name == "shortest_of_its_group",
    }
    file = folder / "check.yaml"
    tree = {
        "run": {"name": "check", "home": str(folder / "home")},
        "model": {"tiny": {"vocab_size": 1024}},
        "data": data_of(case.task, folder),
        "ppo": {"rewards": list(case.rewards) or [function]},
    }
    file.write_text(dump(tree), encoding="utf-8")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """Check the rewards, print a table, and return the exit code."""
    from rich.console import Console

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--cards", action="store_true", help="print each score card")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",") if arguments.only else None
    flagged = wrongly = count = 0
    for kind, cases in (("bad", (*BAD, *LATE)), ("sound", SOUND)):
        for case in cases:
            if wanted is not None and case.name not in wanted:
                continue
            start = time.monotonic()
            with TemporaryDirectory() as folder:
                card = check_reward(configuration(case, Path(folder), kind))
            found = sorted({row.check for row in card.findings})
            seconds = time.monotonic() - start
            if kind == "bad":
                count += 1
                flagged += (good := bool(case.findings & set(found)))
                verdict = "flagged" if good else "MISSED"
            else:
                wrongly += bool(found)
                verdict = "FLAGGED" if found else "passes"
            print(
                f"{kind:5} {case.name:34} {case.task:6} {seconds:5.1f} s  {verdict:8} {' '.join(found)}",
                flush=True,
            )
            if arguments.cards:
                show(card, Console(width=160))
    print(f"{flagged} of {count} bad rewards flagged; {wrongly} sound ones flagged")
    return int(wrongly > 0 or (wanted is None and flagged < LEAST))


if __name__ == "__main__":
    sys.exit(main())
