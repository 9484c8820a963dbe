"""Agreement of a language model that grades with people, before PPO, with a scripted server on loopback.

- a grader that prefers the chosen answers passes, and one that grades all the same is refused with the figure
- one that compares sees both answers of a pair in both orders, and one that prefers the first is refused
- pairs that a model has labelled are left out; without others nothing is measured, and the log says so
- sources of weight 0, and those without `min_agreement`, are not asked
- without grades for most pairs the agreement is not known
- the judge of the evaluation is measured with pairs of people, too
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import DataError, GateFailed, RewardError
from rlhf_core.evaluation.language_model import LanguageModelJudge, held_out_pairs_of_people
from rlhf_core.stages.agreement import check_language_model_rewards
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PairExample, StageContext
from tests.support.chat_server import ChatServer, listed_answers, prefer_first, prefer_longer

OF_MODEL = {"field": "data.preference[1]", "name": "model", "labelled_by": "reward"}


def context_of(folder: Path, *sources: str) -> StageContext:
    """20 held-out pairs of each source, whose chosen answers are longer in `people`, shorter in `model`."""
    tokenizer = train_tokenizer([], 0)

    def pair(source: str, number: int) -> PairExample:
        long, short = (
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for text in (f"Answer {number}, which is longer", f"Answer {number}")
        )
        better, worse = (long, short) if source == "people" else (short, long)
        return PairExample(f"{source} {number}", "Tell me", (1,), better, worse, source)

    pairs = [pair(source, number) for source in sources for number in range(20)]
    data = write_data_artifact(folder / "data", eval_pairs=pairs, tokenizer=tokenizer, sources=[OF_MODEL])
    return stage_context(folder, inputs={"data": data}, metrics=RecordingMetrics())


def config_of(folder: Path, url: str, **settings: Any) -> PipelineConfig:
    server = {"url": url, "model": "grader-1", "retries": 0}
    tree = {
        "run": {"device": "cpu", "home": str(folder / "home")},
        "ppo": {
            "rewards": [{"type": "model"}, {"type": "language_model", **server, **settings}],
            "samples_per_prompt": 2,
        },
        "evaluate": {"bootstrap": 200, "language_model": server},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree))


def by_length(question: str) -> str:
    return "9" if "longer" in question else "3"


def test_a_grader_that_agrees_with_people_passes(tmp_path: Path) -> None:
    context = context_of(tmp_path, "model", "people")
    with ChatServer(by_length) as server:
        found = check_language_model_rewards(config_of(tmp_path, server.url), context, "ppo")
        assert len(server.requests) == 40, "the pairs that a model has labelled are not asked about"
    assert isinstance(context.metrics, RecordingMetrics)
    assert context.metrics.column("reward_agreement/language_model/mean") == [1.0]
    assert context.metrics.column("reward_agreement/language_model/pairs") == [20.0]
    assert {name.rpartition("/")[2] for name in found} == {"mean", "low", "high", "pairs"}
    assert found["reward_agreement/language_model/mean"] == 1.0


def test_a_grader_that_is_not_pure_is_asked_again(tmp_path: Path) -> None:
    context = context_of(tmp_path, "people")
    with ChatServer(by_length) as server:
        for asked in (40, 80):
            check_language_model_rewards(config_of(tmp_path, server.url, pure=False), context, "ppo")
            assert len(server.requests) == asked


@pytest.mark.parametrize(("reply", "share"), [("5", "0.500"), ("", "0.000")])
def test_a_grader_that_does_not_agree_is_refused(reply: str, share: str, tmp_path: Path) -> None:
    context = context_of(tmp_path, "people")

    def respond(question: str) -> str:
        return reply or ("2" if "longer" in question else "8")

    text = rf"reward language_model \(grader-1\) agrees with {share} \[.*\] of 20 .* below min_agreement=0.6"
    with ChatServer(respond) as server:
        with pytest.raises(GateFailed, match=text):
            check_language_model_rewards(config_of(tmp_path, server.url), context, "ppo")
        asked = len(server.requests)
        for settings in ({"weight": 0.0}, {"min_agreement": None}):
            check_language_model_rewards(config_of(tmp_path, server.url, **settings), context, "ppo")
        if not reply:  # the lower grade is the better one; the replies are kept
            check_language_model_rewards(config_of(tmp_path, server.url, weight=-1.0), context, "ppo")
        assert len(server.requests) == asked


@pytest.mark.parametrize("compare", ["pairs", "ranking", "scores"])
def test_a_judge_that_compares_sees_both_answers_of_a_pair(compare: str, tmp_path: Path) -> None:
    def by_length_of(question: str) -> str:
        if compare == "pairs":
            return prefer_longer(question)
        lengths = [len(answer) for answer in listed_answers(question)]
        if compare == "scores":
            return ", ".join("9" if length == max(lengths) else "3" for length in lengths)
        return "1 > 2" if lengths[0] > lengths[1] else "2 > 1"

    context = context_of(tmp_path, "people")
    with ChatServer(by_length_of) as server:
        config = config_of(tmp_path, server.url, compare=compare, max_tokens=64)
        found = check_language_model_rewards(config, context, "ppo")
        assert len(server.requests) == 40, "one for each order"
    name = "reward_agreement/language_model"
    assert found[f"{name}/mean"] == 1.0 and found[f"{name}/comparisons"] == 20
    assert found[f"{name}/inconsistent"] == 0 and found[f"{name}/order_bias"] == 0


def test_a_judge_that_prefers_the_first_answer_is_refused_with_its_bias(tmp_path: Path) -> None:
    text = (
        r"agrees with 0\.500 \[.*\] of 20 .* below min_agreement=0\.6\. Its preference changes with the order"
        r" of the answers on 100% of the pairs \(order bias \+1\.00; \+1: always the first one\)"
    )
    with ChatServer(prefer_first) as server, pytest.raises(GateFailed, match=text):
        config = config_of(tmp_path, server.url, compare="pairs", max_tokens=64)
        check_language_model_rewards(config, context_of(tmp_path, "people"), "ppo")


def test_without_pairs_of_people_nothing_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(tmp_path, "model")
    with ChatServer(by_length) as server, caplog.at_level(logging.WARNING):
        config = config_of(tmp_path, server.url)
        check_language_model_rewards(config, context, "ppo")
        assert "agreement of language_model with people was not measured" in caplog.text
        assert "(20 by models)" in caplog.text
        with pytest.raises(DataError, match="all 20 are of sources with `labelled_by`; raise"):
            LanguageModelJudge(config, context, "cpu").measure_agreement()
        assert not server.requests


def test_without_grades_the_agreement_is_not_known(tmp_path: Path) -> None:
    context = context_of(tmp_path, "people")
    with ChatServer(lambda question: "no number") as server:
        config = config_of(tmp_path, server.url, on_error="mask")
        with pytest.raises(
            RewardError, match=r"20 of 20 held-out pairs have no grade, .* its reply is no grade"
        ):
            check_language_model_rewards(config, context, "ppo")


def test_at_most_the_given_number_of_pairs_of_people_is_taken(tmp_path: Path) -> None:
    context = context_of(tmp_path, "model", "people")
    pairs, groups, of_models = held_out_pairs_of_people(context.inputs["data"], 5)
    assert (len(pairs), of_models) == (5, 20) and all("longer" in pair.a for pair in pairs)
    assert len(set(groups)) == 5, "they are of different prompts"
