"""The demo task and its true reward.

Rules:
- rows are a function of the seed alone, and row i does not depend on the number asked for;
- the reward of a response is the documented sum (worked out by hand), and each fault costs;
- degenerate texts do not pay; the best response is far above the demonstrations, whose rewards are 0 +- 1;
- annotators agree with the truth in 95 to 98 %, or always at temperature 0;
- in about a third of the pairs, the responses differ only in the words of the topic, and the preferred one
  has the animal of the prompt;
- prompts are enough, distinct, and all of the task.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from typing import Any

import pytest

from rlhf_core.config.data import SyntheticConfig
from rlhf_core.data import synthetic
from rlhf_core.data.synthetic import generate, gold_reward, parse_prompt
from rlhf_core.errors import DataError

PROMPT = "Tell me about a small fox in the garden."
BEST = (
    "The small fox plays in the garden. It is kind and gentle. It has a warm heart. It is happy and brave. "
)
BEST = BEST.replace("It has a warm heart. ", "People love its warm heart. ").strip() + " It has a sweet song."


def raw(response: str, finished: bool = True) -> float:
    """The sum before shift and scale."""
    return gold_reward(PROMPT, response, finished) * synthetic._RAW_STD + synthetic._RAW_MEAN


def test_the_reward_is_the_documented_sum() -> None:
    good = "The small fox plays in the garden. It is kind and plain. It has a warm heart."
    # Subject 0.9, place 0.7, adjective 0.3, two kind words 2 x 0.4, a proper end 0.4; three sentences cost
    # nothing.
    assert raw(good) == pytest.approx(3.1)
    # Not ended by EOS: -0.6 in place of +0.4.
    assert raw(good, finished=False) == pytest.approx(2.1)
    # Another animal -0.4, one rude word -0.6, kind 0.4, place 0.7, adjective 0.3, end 0.4, two sentences
    # -0.3.
    assert raw("The small bear sits in the garden. It is kind and nasty.") == pytest.approx(0.5)
    # Words of a broken sentence earn nothing: three kind words 1.2, end 0.4, the broken sentence -0.5.
    assert raw(
        "small fox the in the garden. It is kind and dry. It is calm and dry. It is warm and dry."
    ) == pytest.approx(1.1)
    # Empty: no end -0.6, three sentences missing -0.9.
    assert raw("") == pytest.approx(-1.5)


@pytest.mark.parametrize(
    "worse",
    [
        BEST.replace("gentle", "nasty"),
        BEST.replace("fox", "bear"),
        BEST.replace("in the garden", "on the hill"),
        BEST.replace("small", "tall"),
        BEST.replace("It is kind and gentle", "is It kind and gentle"),
        BEST.removesuffix("."),
        BEST + " It has a sweet song.",
        BEST + " " + "It is plain and dry. It is dry and plain.",
    ],
)
def test_each_fault_costs(worse: str) -> None:
    assert worse != BEST
    assert raw(worse) < raw(BEST) - 0.25


@pytest.mark.parametrize(
    "degenerate",
    [
        "",
        "kind " * 20 + ".",
        "It is kind and kind. " * 8,
        "kind. gentle. happy. warm. bright. sweet.",
        PROMPT,
        "." * 30,
        "fox garden small.",
    ],
)
def test_degenerate_texts_do_not_pay(degenerate: str) -> None:
    assert gold_reward(PROMPT, degenerate) < 0


def test_demonstrations_score_about_zero_with_room_above() -> None:
    rewards = [
        gold_reward(row["prompt"], row["completion"])
        for row in generate(SyntheticConfig(sft_examples=2000), 3, "sft")
    ]
    assert abs(statistics.mean(rewards)) < 0.1
    assert 0.9 < statistics.pstdev(rewards) < 1.1
    assert gold_reward(PROMPT, BEST) > 2
    assert max(rewards) <= 2.5


def test_annotators_are_mostly_right_and_never_wrong_at_temperature_zero() -> None:
    def agreement(temperature: float) -> float:
        rows = list(generate(SyntheticConfig(pairs=1500, label_temperature=temperature), 1, "preference"))
        return statistics.mean(
            gold_reward(r["prompt"], r["chosen"]) > gold_reward(r["prompt"], r["rejected"]) for r in rows
        )

    assert 0.95 < agreement(0.25) < 0.985
    assert agreement(0.0) == 1


@pytest.mark.parametrize("kind", ["sft", "preference", "prompts"])
def test_rows_are_a_function_of_the_seed(kind: Any) -> None:
    few, many = (
        SyntheticConfig(sft_examples=5, pairs=5, prompts=5),
        SyntheticConfig(sft_examples=9, pairs=9, prompts=9),
    )
    assert list(generate(few, 0, kind)) == list(generate(many, 0, kind))[:5]
    assert list(generate(few, 0, kind)) != list(generate(few, 1, kind))


def test_prompts_are_distinct_and_parse() -> None:
    prompts = [row["prompt"] for row in generate(SyntheticConfig(prompts=1440), 0, "prompts")]
    assert len(set(prompts)) == len(prompts) == 1440
    topic = parse_prompt(prompts[0])
    assert topic is not None and topic.subject in prompts[0]
    assert parse_prompt("Tell me a joke.") is None


def test_a_foreign_prompt_has_no_gold_reward() -> None:
    with pytest.raises(DataError, match=r"synthetic task only; got 'Tell me a joke\.'"):
        gold_reward("Tell me a joke.", "No.")


def test_the_gold_reward_imports_nothing_heavy() -> None:
    code = (
        "import sys, rlhf_core.data.synthetic; print([m for m in ('torch', 'transformers', 'pyarrow') if m in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_third_of_the_pairs_differ_only_in_the_topic() -> None:
    config = SyntheticConfig(pairs=600, label_temperature=0.0)
    topic_words = re.compile("|".join([*synthetic.SUBJECTS, *synthetic.ADJECTIVES, *synthetic.PLACES]))
    about_another_animal = []
    for row in generate(config, 0, "preference"):
        texts = [topic_words.sub("_", row[name]) for name in ("chosen", "rejected")]
        if texts[0] == texts[1]:
            about_another_animal.append(row)
    assert 0.25 * 600 <= len(about_another_animal) <= 0.42 * 600
    for row in about_another_animal:
        topic = parse_prompt(row["prompt"])
        assert topic is not None
        assert topic.subject in row["chosen"] or topic.subject not in row["rejected"]
