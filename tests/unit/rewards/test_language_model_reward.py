"""`type: language_model`: grades by a scripted server on loopback.

- a grade is mapped linearly to 0 to 1, and equal questions are asked once
- an interrupted batch asks nothing twice and ends with the same rewards and usage
- an unusable reply is asked for once more, then it is a failure of its response only
- with `on_error: abort` it is asked for again by the next attempt
- a reply that was cut is no grade, and an odd number of tokens is no failure
- of two runs that ask at the same time, both use the first reply
- a status that may pass is retried, not before the server's Retry-After; a refused question fails alone, a
  wrong key and a refused parameter end the step
- a server that is down is not asked about every response, and with weight 0 it costs no score
- the rubric is part of the question, and may not change during the run
"""

import hashlib
import math
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.rewards import LanguageModelReward, WellFormedReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards import chat_service
from rlhf_core.rewards.chat_service import ModelReply, Replies
from rlhf_core.rewards.check import check_rewards
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.rewards.language_model import grade_of
from rlhf_core.types import RewardInput
from tests.support.chat_server import ChatServer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_service, "PAUSE_SECONDS", 0.01)


def source(server: ChatServer, **fields: Any) -> LanguageModelReward:
    quick = {"model": "m", "retries": 1}
    return LanguageModelReward(url=server.url, **{**quick, **fields})


def batch(*texts: str) -> list[RewardInput]:
    return [RewardInput(f"p{i}", "Tell me", text, (1,), (2,), True, {}) for i, text in enumerate(texts)]


def score(server: ChatServer, *texts: str, replies: Path | None = None, **fields: Any) -> RewardBatch:
    with RewardComposer((source(server, **fields),), replies=replies) as composer:
        return composer.score(batch(*texts), None)


def answer(question: str) -> str:
    return question.partition("### Answer\n")[2].partition("\n\n### Grade")[0]


def test_grades_are_mapped_and_equal_questions_are_asked_once() -> None:
    with ChatServer(answer) as server:
        found = score(server, "1", "10", "4", "4")
    assert found.total == [0.0, 1.0, 3 / 9, 3 / 9] and len(server.requests) == 3
    metrics = found.metrics()
    assert metrics["language_model/requests"] == 3 and metrics["language_model/unusable"] == 0.0
    assert metrics["language_model/prompt_tokens"] == 30 and metrics["language_model/completion_tokens"] == 6


def test_an_interrupted_batch_asks_nothing_twice(tmp_path: Path) -> None:
    with ChatServer(lambda q: 401 if answer(q) == "3" else answer(q)) as server:
        with pytest.raises(RewardError, match="status 401"):
            score(server, "1", "2", "3", replies=tmp_path, concurrency=1)
        server.respond = answer
        found = score(server, "1", "2", "3", replies=tmp_path)
        assert len(server.requests) == 4
        server.respond = lambda _: "9"
        assert score(server, "1", "2", "3", replies=tmp_path) == found
        assert len(server.requests) == 4
        assert score(server, "1", replies=tmp_path, model="n").total == [8 / 9]


def test_the_replies_of_a_model_that_is_not_pure_are_not_kept(tmp_path: Path) -> None:
    with ChatServer(answer) as server:
        for number in (1, 2):
            score(server, "1", replies=tmp_path, pure=False)
            assert len(server.requests) == number


@pytest.mark.parametrize("bad", ["Well.", "", "11", "0", "7.5"])
def test_an_unusable_reply_fails_its_response_only(bad: str, tmp_path: Path) -> None:
    with ChatServer(lambda q: bad if "odd" in q else answer(q)) as server:
        found = score(server, "odd", "10", on_error="mask", replies=tmp_path)
        assert math.isnan(found.total[0]) and found.total[1] == 1.0 and len(server.requests) == 3
        metrics = found.metrics()
        assert (metrics["language_model/failed"], metrics["language_model/unusable"]) == (1.0, 2 / 3)
        server.respond = lambda _: "5"
        assert math.isnan(score(server, "odd", "10", on_error="mask", replies=tmp_path).total[0])
        with pytest.raises(RewardError, match=r"1 of 2 responses .* prompt p0 .* its reply is no grade"):
            score(server, "odd", "10", replies=tmp_path)
        assert score(server, "odd", "10", replies=tmp_path).total == [4 / 9, 1.0]


def test_a_second_reply_counts() -> None:
    with ChatServer(lambda q: "10" if q.endswith("Write only this number.") else "Hm.") as server:
        found = score(server, "a")
    assert found.total == [1.0] and found.metrics()["language_model/unusable"] == 0.5


def test_a_reply_that_was_cut_is_no_grade() -> None:
    cut = {"choices": [{"message": {"content": "Reasons:\n1"}, "finish_reason": "length"}]}
    with ChatServer(lambda _: cut) as server:
        with pytest.raises(RewardError, match="cut at max_tokens=16; raise it"):
            score(server, "a")
        found = score(server, "a", on_error="mask")
    assert found.metrics()["language_model/unusable"] == 1.0


@pytest.mark.parametrize("count", [float("inf"), -3, "many", None, 1 << 80])
def test_an_odd_number_of_tokens_is_no_failure(count: Any) -> None:
    reply = {"choices": [{"message": {"content": "10"}}], "usage": {"prompt_tokens": count}}
    with ChatServer(lambda _: reply) as server:
        found = score(server, "a")
    assert found.total == [1.0] and found.metrics()["language_model/prompt_tokens"] == 0


@pytest.mark.parametrize("links", [True, False])
def test_two_runs_use_the_first_reply(links: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not links:
        request.getfixturevalue("no_hard_links")
    first, second = Replies(tmp_path, "judge"), Replies(tmp_path, "judge")
    assert first.keep("q", ModelReply("7", 1, 1, 0.1)).text == "7"
    assert second.keep("q", ModelReply("3", 1, 1, 0.1)).text == "7"
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.write_text('{"text": ')
    assert second.keep("q", ModelReply("3", 1, 1, 0.1)).text == "3"
    kept = first.find("q")
    assert kept is not None and kept.text == "3"


def with_status(status: int, _question: str) -> int:
    return status


def test_temporary_statuses_are_retried_and_statuses_of_every_question_end_the_step() -> None:
    passing = [503, 429]
    with ChatServer(lambda q: passing.pop() if passing else answer(q)) as server:
        assert score(server, "1", "10", retries=2).total == [0.0, 1.0]
        server.respond = lambda q: 400 if answer(q) == "long" else answer(q)
        found = score(server, "long", "10", on_error="mask")
        assert math.isnan(found.total[0]) and found.total[1] == 1.0
        for status, fix in (
            (302, "redirects are not followed"),
            (401, "key in api_key_env"),
            (404, "url or model"),
            (415, "application/json"),
        ):
            server.respond = partial(with_status, status)
            with pytest.raises(RewardError, match=rf"reward language_model: .* status {status}, .*{fix}"):
                score(server, "1", on_error="mask")


@pytest.mark.parametrize(("header", "seconds"), [("1", 1.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)])
def test_a_retry_waits_as_long_as_the_server_says(header: str, seconds: float) -> None:
    limited: list[dict[str, Any]] = [{"status": 429, "retry_after": header}]
    with ChatServer(lambda q: limited.pop() if limited else answer(q)) as server:
        began = time.monotonic()
        assert score(server, "10").total == [1.0]
        assert time.monotonic() - began >= seconds
        assert len(server.requests) == 2


@pytest.mark.parametrize("code", ["unsupported_parameter", "unsupported_value"])
def test_a_model_that_refuses_a_parameter_ends_the_step(code: str) -> None:
    """It would refuse every question."""
    error = {"message": "'max_tokens' is not supported", "param": "max_tokens", "code": code}
    with ChatServer(lambda _: {"status": 400, "error": error}) as server:
        with pytest.raises(
            RewardError, match=r"reward language_model: .* status 400: .*; name a model that takes"
        ):
            score(server, "1", on_error="mask")
        error["code"] = "context_length_exceeded"
        assert math.isnan(score(server, "1", on_error="mask").total[0])


def test_a_server_that_is_down_is_not_asked_about_every_response() -> None:
    with ChatServer(lambda _: 500) as server:
        found = score(server, *map(str, range(50)), on_error="mask", concurrency=2)
    assert all(map(math.isnan, found.total)) and len(server.requests) <= 8


def test_with_weight_zero_a_failure_costs_no_score() -> None:
    with (
        ChatServer(lambda _: 500) as server,
        RewardComposer((WellFormedReward(), source(server, weight=0.0))) as composer,
    ):
        found = composer.score(batch("One.", "Two"), None)
    assert found.total == found.by_source["well_formed"] == [1.0, 0.75]
    assert found.metrics()["language_model/failed"] == 2 and found.metrics()["language_model/requests"] == 0


def test_the_rubric_is_asked_with_and_may_not_change(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Shorter is better {here}.\n")
    digests = {"language_model": hashlib.sha256(rubric.read_bytes()).hexdigest()}
    with ChatServer(answer) as server:
        with RewardComposer((source(server, rubric=str(rubric)),), digests) as composer:
            composer.score(batch("5"), None)
        assert server.questions[0].startswith("Shorter is better {here}.\n\n### Request\nTell me\n")
        rubric.write_text("Longer is better.")
        with pytest.raises(ConfigError, match=r"rubric: .* was changed after the run began"):
            RewardComposer((source(server, rubric=str(rubric)),), digests)


def test_a_missing_key_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with ChatServer(answer) as server, pytest.raises(ConfigError, match="JUDGE_API_KEY is not set"):
        score(server, "1", api_key_env="JUDGE_API_KEY")
    assert not server.requests


def test_usage_of_batches_is_added() -> None:
    one = RewardBatch([], {}, {"a": {"requests": 2.0, "unusable": 1.0}})
    one.add_usage(RewardBatch([], {}, {"a": {"requests": 2.0, "unusable": 0.0}}))
    assert one.metrics() == {"a/requests": 4.0, "a/unusable": 0.25}


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("7", 7),
        ("Reasons.\n\nGrade: **7**", 7),
        ("[[10]]", 10),
        ("7/10", 7),
        ("Grade (1-10): 7", 7),
        ("Grade (1 to 10): **7**", 7),
        ("Reasons.\n# 7", 7),
        ("7\n\u200b", 7),
        ("7\ufeff", 7),
        ("Grade (1-5): 7", None),
        ("Grade (1-10) 3: 7", None),
        ("7/5", None),
        ("7\nok", None),
        ("The ratio is 3:2", None),
    ],
)
def test_the_grade_is_the_number_on_the_last_line_of_a_reply(reply: str, grade: int | None) -> None:
    assert grade_of(reply, 10) == grade


def test_preflight_checks_rubric_key_and_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: [(2, 1, 6, "", ("10.1.2.3", 0))])
    reward = {
        "type": "language_model",
        "url": "http://judge.example/v1",
        "model": "m",
        "api_key_env": "JUDGE_API_KEY",
        "rubric": str(tmp_path / "r"),
    }
    found = [str(f) for f in check_rewards(config_from_tree({"ppo": {"rewards": [reward]}}, "test"))]
    assert [text.partition(": ")[0] for text in found if "ppo.rewards.0" in text] == [
        "ppo.rewards.0.rubric",
        "ppo.rewards.0.api_key_env",
    ]
