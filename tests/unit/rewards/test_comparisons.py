"""`type: language_model` with `compare`: a scripted server compares the responses to one prompt.

- pairs, rankings and scores give the mean of both orders, from 0 to 1; other prompts are not in the question
- a judge that always prefers the first answer gives ties, and its bias is a metric
- equal responses are one text, and one response alone is not compared, but can have a grade
- a verdict that is missing in one order counts in neither, and fails only what has no other
- with `opponents` each response has as many comparisons, the same ones in each attempt
- an interrupted batch asks nothing twice, and a repeated one has the same values
- the configuration names too few samples, tokens for reasons, and too many questions
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.rewards.language_model import ranking_of, scores_of
from rlhf_core.types import RewardInput
from tests.support.chat_server import ChatServer, answers_of, listed_answers, prefer_first, prefer_longer

NAME = "language_model"


def source(url: str, **fields: Any) -> LanguageModelReward:
    quick = {"model": "m", "retries": 0, "compare": "pairs", "max_tokens": 64}
    return LanguageModelReward(url=url, **{**quick, **fields})


def batch(**texts: list[str]) -> list[RewardInput]:
    samples = []
    for prompt, responses in texts.items():
        samples += [RewardInput(prompt, f"Tell me {prompt}", each, (1,), (2,), True) for each in responses]
    return samples


def score(server: ChatServer, replies: Path | None = None, /, *, of: Any, **fields: Any) -> RewardBatch:
    with RewardComposer((source(server.url, **fields),), replies=replies) as composer:
        return composer.score(of, None)


def order_by_length(question: str) -> str:
    answers = listed_answers(question)
    by_length = sorted(range(len(answers)), key=lambda i: -len(answers[i]))
    return "The longest is the best.\n" + " > ".join(str(i + 1) for i in by_length)


def grade_by_length(question: str) -> str:
    return "Reasons.\nGrades: " + ", ".join(str(len(answer)) for answer in listed_answers(question))


@pytest.mark.parametrize(
    ("compare", "judge", "values", "asked"),
    [
        ("pairs", prefer_longer, [0.0, 1.0, 0.5, 1.0, 0.0], 8),
        ("ranking", order_by_length, [0.0, 1.0, 0.5, 1.0, 0.0], 4),
        ("scores", grade_by_length, [0.0, 4 / 9, 2 / 9, 3 / 9, 0.0], 4),
    ],
)
def test_the_responses_to_a_prompt_are_compared_in_both_orders(
    compare: str, judge: Any, values: list[float], asked: int
) -> None:
    samples = batch(p=["a", "aaaaa", "aaa"], q=["bbbb", "b"])
    with ChatServer(judge) as server:
        found = score(server, of=samples, compare=compare)
        metrics = found.metrics()
        assert all("reasons first" in question for question in server.questions)
        assert not any("a\n" in question and "b\n" in question for question in server.questions)
    assert found.total == pytest.approx(values)
    assert metrics[f"{NAME}/requests"] == asked and metrics[f"{NAME}/comparisons"] == 4
    assert metrics[f"{NAME}/inconsistent"] == 0 and metrics[f"{NAME}/order_bias"] == 0


@pytest.mark.parametrize(
    ("compare", "judge"),
    [
        ("pairs", prefer_first),
        ("ranking", lambda question: " > ".join(map(str, range(1, len(listed_answers(question)) + 1)))),
        ("scores", lambda question: ", ".join(str(9 - i) for i in range(len(listed_answers(question))))),
    ],
)
def test_a_preference_for_the_first_answer_cancels_and_is_a_metric(compare: str, judge: Any) -> None:
    with ChatServer(judge) as server:
        found = score(server, of=batch(p=["a", "bb", "ccc"]), compare=compare)
    metrics = found.metrics()
    assert len(set(found.total)) == 1, "all are equal"
    assert metrics[f"{NAME}/inconsistent"] == 1 and metrics[f"{NAME}/order_bias"] == 1


def test_equal_responses_are_one_text_and_one_alone_is_not_compared() -> None:
    samples = batch(p=["a", "bb", "a"], q=["c", "c"], r=["d"])
    with ChatServer(prefer_longer) as server:
        found = score(server, of=samples, on_error="mask")
        assert len(server.requests) == 2
        with pytest.raises(RewardError, match="it is the only response to its prompt here"):
            score(server, of=samples)
        assert found.total[:5] == [0.0, 1.0, 0.0, 0.5, 0.5] and math.isnan(found.total[5])
        equal = score(server, of=batch(q=["c", "c"]))
        equal.add_usage(found)
        assert equal.metrics()[f"{NAME}/requests"] == 2
        server.respond = grade_by_length
        assert score(server, of=batch(r=["dd"]), compare="scores").total == [0.111111111111], (
            "a grade needs no other"
        )


def test_a_verdict_that_is_missing_in_one_order_counts_in_neither(tmp_path: Path) -> None:
    def judge(question: str) -> str:
        return "Hm." if answers_of(question) == ("bb", "a") else prefer_longer(question)

    with ChatServer(judge) as server:
        found = score(server, of=batch(p=["a", "bb", "ccc"]), on_error="mask")
        assert found.total == [0.0, 0.0, 1.0], "of the two others each"
        assert found.metrics()[f"{NAME}/comparisons"] == 2
        found = score(server, of=batch(p=["a", "bb"], q=["a", "ccc"]), on_error="mask")
        assert list(map(math.isnan, found.total)) == [True, True, False, False]
        assert found.metrics()[f"{NAME}/failed"] == 2
        with pytest.raises(RewardError, match=r"2 of 2 responses .* its reply is no verdict: 'Hm\.'"):
            score(server, tmp_path, of=batch(p=["a", "bb"]))
        server.respond = prefer_longer
        assert score(server, tmp_path, of=batch(p=["a", "bb"])).total == [0.0, 1.0], "it is asked again"


def test_a_reply_without_a_verdict_is_kept_if_the_step_goes_on(tmp_path: Path) -> None:
    samples = batch(p=["a", "bb", "ccc"])
    with ChatServer(lambda q: "Hm." if answers_of(q) == ("bb", "a") else prefer_longer(q)) as server:
        found = score(server, tmp_path, of=samples)
        assert found.total == [0.0, 0.0, 1.0], "with on_error=abort, because each has a comparison"
        server.respond = prefer_longer
        # An attempt that continues after a kill gets the same rewards.
        assert score(server, tmp_path, of=samples) == found


@pytest.mark.parametrize(
    ("compare", "shown", "judge"),
    [("pairs", 2, prefer_longer), ("ranking", 2, order_by_length), ("scores", 1, grade_by_length)],
)
def test_a_grade_is_that_of_a_response_without_its_opponent(compare: str, shown: int, judge: Any) -> None:
    with (
        ChatServer(judge) as server,
        RewardComposer((source(server.url, compare=compare),)) as composer,
    ):
        found = composer.score(batch(p=["bbb"]), None, batch(p=["a"]))
        texts = answers_of if compare == "pairs" else listed_answers
        assert {len(texts(question)) for question in server.questions} == {shown}
    assert found.total == [pytest.approx(2 / 9) if compare == "scores" else 1.0]


@pytest.mark.parametrize(("responses", "opponents", "each"), [(8, 3, 3), (8, 4, 4), (7, 3, 4), (5, 9, 4)])
def test_each_response_has_as_many_opponents(responses: int, opponents: int, each: int) -> None:
    texts = [f"text {i}" for i in range(responses)]
    asked = []
    for given in (texts, texts[::-1]):
        with ChatServer(prefer_first) as server:
            score(server, of=batch(p=given), opponents=opponents)
            asked.append(set(server.questions))
            of_text = Counter(text for question in server.questions for text in answers_of(question))
            assert set(of_text.values()) == {2 * each}, "twice, because of the two orders"
            assert len(server.requests) == source(server.url, opponents=opponents).questions(responses)
    assert asked[0] == asked[1], "they depend on the texts, and not on their order"


def test_equal_responses_do_not_raise_the_number_of_questions_above_the_limit_of_a_step() -> None:
    texts = [f"text {i}" for i in range(7)]
    with ChatServer(prefer_first) as server:
        score(server, of=batch(p=[*texts, texts[0]]), opponents=3)
        reward = source(server.url, opponents=3)
        config = config_from_tree(
            {"ppo": {"samples_per_prompt": 8, "prompts_per_step": 1, "rewards": [reward.model_dump()]}}
        )
        assert len(server.requests) == 28 == config.ppo.most_questions(reward)


def test_an_interrupted_batch_asks_nothing_twice(tmp_path: Path) -> None:
    def last_is_refused(question: str) -> str | int:
        return 401 if listed_answers(question) == ["dddd", "c"] else order_by_length(question)

    samples = batch(p=["a", "bb"], q=["c", "dddd"])
    with ChatServer(last_is_refused) as server:
        with pytest.raises(RewardError, match="status 401"):
            score(server, tmp_path, of=samples, compare="ranking", concurrency=1)
        server.respond = order_by_length
        found = score(server, tmp_path, of=samples, compare="ranking")
        assert len(server.requests) == 5 and found.total == [0.0, 1.0, 0.0, 1.0]
        assert score(server, tmp_path, of=samples, compare="ranking") == found
        assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Because.\n2 > 3 > 1", (0.0, 1.0, 0.5)),
        ("**Ranking: 2>1=3**", (0.25, 1.0, 0.25)),
        ("[1 = 2 = 3]", (0.5, 0.5, 0.5)),
        ("2 > 1", None),
        ("2 > 1 > 1", None),
        ("2 > 1 > 4", None),
        ("2 > 3 > 1\nThis is my order.", None),
        ("", None),
    ],
)
def test_a_ranking_is_the_last_line(reply: str, verdict: tuple[float, ...] | None) -> None:
    assert ranking_of(reply, 3) == verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [("x\n1, 5,3", (0.0, 1.0, 0.5)), ("[5, 5, 5]", (1.0, 1.0, 1.0)), ("1, 2", None), ("1, 2, 6", None),
     ("0, 2, 3", None), ("1, 2, 3.5", None)],
)  # fmt: skip
def test_scores_are_the_last_line(reply: str, verdict: tuple[float, ...] | None) -> None:
    assert scores_of(reply, 3, 5) == verdict


@pytest.mark.parametrize(
    ("fields", "ppo", "problem"),
    [
        ({}, {}, r"rewards\.0\.compare compares the .*samples_per_prompt must be at least 2; got 1"),
        ({"max_tokens": 16}, {}, "max_tokens must be at least 64 with compare"),
        ({"compare": "ranking", "opponents": 2}, {}, "opponents needs compare=pairs; got ranking"),
        (
            {"max_questions": 100},
            {"samples_per_prompt": 4, "prompts_per_step": 16, "algorithm": "grpo"},
            r"max_questions: a step asks up to 192 questions; got 100; use a smaller opponents",
        ),
        (
            {"max_questions": 100, "compare": "ranking"},
            {"samples_per_prompt": 4, "prompts_per_step": 16, "algorithm": "grpo", "dynamic_filtering": {}},
            "a step asks up to",
        ),
    ],
)
def test_the_configuration_names_what_cannot_be_compared(
    fields: dict[str, Any], ppo: dict[str, Any], problem: str
) -> None:
    reward = {
        "type": NAME,
        "url": "http://127.0.0.1:1/v1",
        "model": "m",
        "compare": "pairs",
        "max_tokens": 64,
    }
    tree = {"ppo": {"rewards": [{**reward, **fields}], **ppo}}
    with pytest.raises(ConfigError, match=problem):
        config_from_tree(json.loads(json.dumps(tree)))
