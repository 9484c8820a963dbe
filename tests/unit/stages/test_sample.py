"""The stage `sample` with scripted answers and scores. An integration test samples a real policy.

- the best answer is a demonstration, and the best and the worst are a pair; both files are read by the data
  stage; a third file has all answers with their scores
- answers that were cut, are blank or have no score take no part; equal scores or texts give no pair
- only training prompts are sampled, all or some at equal distances, with a seed of their own
- a prompt that is a conversation is left out and counted
- the scores are those of PPO's rewards with their weights, or of the second reward model, which must exist
- with labels by people no answer has a score, and all that can be data are kept for them
- the same run gives the same bytes
- the record has all answers with their scores
- answers of several engines come back in the order of the prompts
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import check_consistency
from rlhf_core.config.data import Source
from rlhf_core.config.keys import is_enabled, stage_inputs
from rlhf_core.data.dataset import load_prompts, write
from rlhf_core.data.examples import to_record
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.messages import Message
from rlhf_core.data.sources import read_rows
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation import generate
from rlhf_core.evaluation.generate import SamplingSettings
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.evaluation.review import ANSWERS, SampledAnswer, read_answers
from rlhf_core.record.reader import read_rollouts
from rlhf_core.seeds import derive_seed
from rlhf_core.stages import sample
from rlhf_core.stages.sample import ScoredAnswer, select
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine, scripted_engines
from rlhf_core.types import PromptExample, RewardInput, Rollout, StageContext
from tests.support.known_models import save_last_token_scorer

PROMPTS = ["Name a colour.", "Name an animal.", "Name a town.", "Name a fruit."]
TOKENIZER = train_tokenizer(PROMPTS, 300)
LENGTH = [{"type": "length", "target": 4, "tolerance": 4}]
"""A reward of 1 for four tokens, and less for fewer."""


def config_of(
    settings: dict[str, Any] | None = None, rewards: Sequence[Any] = LENGTH, **sections: Any
) -> PipelineConfig:
    tree: dict[str, Any] = {
        "run": {"device": "cpu", "seed": 5},
        "reward": {"enabled": False},
        "ppo": {"rewards": list(rewards)},
        "sample": {"answers": 3, **(settings or {})},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree | sections))


def answer(text: str, score: float, *, finished: bool = True) -> ScoredAnswer:
    return ScoredAnswer(RewardInput("p", "Name a colour.", text, (1,), (2,), finished), score)


# -- the choice --


def test_the_best_answer_and_the_pair_of_best_and_worst() -> None:
    group = [answer("red", 0.5), answer("blue", 2.0), answer("a dog", -1.0), answer("green", 2.0)]
    [best], [pair] = select([group])
    assert best is group[1]
    assert pair == (group[1], group[2])


@pytest.mark.parametrize(
    "bad",
    [answer("cut", 9.0, finished=False), answer("failed", math.nan), answer(" \n", 9.0), answer("\x00", 9.0)],
    ids=["cut", "without a score", "blank", "not a valid row"],
)
def test_an_answer_that_cannot_be_data_takes_no_part(bad: ScoredAnswer) -> None:
    one, two = answer("red", 1.0), answer("blue", 0.0)
    assert select([[bad, one, two]]) == ([one], [(one, two)])
    assert select([[bad, one]]) == ([one], [])
    assert select([[bad, bad]]) == ([], [])


def test_equal_scores_and_equal_texts_are_no_pair() -> None:
    assert select([[answer("red", 1.0), answer("blue", 1.0)]])[1] == []
    assert select([[answer("red", 1.0), answer("red", 0.5)]])[1] == []


def test_a_low_best_answer_is_no_demonstration() -> None:
    group = [answer("red", 0.5), answer("blue", 0.0)]
    assert select([group], min_score=0.5) == ([group[0]], [(group[0], group[1])])
    assert select([group], min_score=0.6) == ([], [(group[0], group[1])])


# -- the stage --


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    inputs = {name: tmp_path / name for name in ("data", "sft", "ppo")}
    for folder in inputs.values():
        folder.mkdir()
    TOKENIZER.save_pretrained(inputs["data"] / "tokenizer")
    encoder = Encoder(TOKENIZER, "chat", "test")
    examples = [
        PromptExample(f"p{i}", text, encoder.prompt([Message("user", text)]), {}, "a")
        for i, text in enumerate(PROMPTS)
    ]
    write(inputs["data"], "prompts", "train", examples)
    held_out = PromptExample("h", "Held out?", (1, 2), {}, "a")
    write(inputs["data"], "prompts", "eval", [held_out])
    return stage_context(tmp_path, inputs=inputs)


WORDS = ("A", "AB", "ABC", "ABCD")
"""Each letter is a token."""
LETTERS = TOKENIZER.convert_tokens_to_ids(list("ABCD"))


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """The answers to prompt n have n % 2 + 1, n % 2 + 2, ... tokens."""

    def respond(request: Request) -> Reply:
        first = int(request.prompt.prompt_id.removeprefix("p")) % 2 + 1
        return Reply(LETTERS[: first + request.sample_index])

    with scripted_engines(respond) as started:
        yield started


def rows(context: StageContext, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (context.output / file).read_text().splitlines()]


def test_files_and_metrics(engines: list[ScriptedEngine], context: StageContext) -> None:
    result = sample.run(config_of(), context)
    best, pairs = rows(context, "best.jsonl"), rows(context, "pairs.jsonl")
    assert [row["prompt"] for row in best] == [row["prompt"] for row in pairs] == PROMPTS
    assert [row["completion"] for row in best] == [WORDS[2], WORDS[3]] * 2
    assert [row["score"] for row in best] == [0.75, 1.0] * 2
    assert pairs[0] == {
        "prompt": PROMPTS[0], "chosen": WORDS[2], "rejected": WORDS[0], "margin": 0.5
    }  # fmt: skip
    answers = read_answers(context.output / ANSWERS)
    assert [(each.prompt_id, each.prompt) for each in answers] == [(f"p{i}", PROMPTS[i]) for i in range(4)]
    assert answers[1].answers == tuple(
        SampledAnswer(text, score, True) for text, score in zip(WORDS[1:], (0.5, 0.75, 1.0), strict=True)
    )
    assert result.metrics == {
        "prompts": 4.0, "prompts_left_out": 0.0, "best": 4.0, "pairs": 4.0, "usable": 1.0, "eos_rate": 1.0,
        "score_mean": 0.625, "score_best": 0.875,
    }  # fmt: skip
    tracker = context.metrics
    assert isinstance(tracker, RecordingMetrics)
    assert tracker.last == {f"sample/{name}": value for name, value in result.metrics.items()}


@pytest.mark.parametrize(("file", "name"), [("best.jsonl", "sft"), ("pairs.jsonl", "preference")])
def test_the_data_stage_reads_both_files(
    file: str, name: Any, engines: list[ScriptedEngine], context: StageContext
) -> None:
    sample.run(config_of(), context)
    source = Source(path=str(context.output / file))
    read = list(read_rows(source))
    assert len(read) == 4 and all(isinstance(row, Row) for row in read)
    records = [to_record(row, source, name, "a") for row in read if isinstance(row, Row)]
    assert not any(isinstance(record, BadRow) for record in records)
    kinds = {record.record.kind for record in records if not isinstance(record, BadRow)}
    assert kinds == {"completion" if name == "sft" else "preference"}


def test_answers_have_the_group_of_their_prompt(engines: list[ScriptedEngine], context: StageContext) -> None:
    data = context.inputs["data"]
    first, *others = load_prompts(data, "train")
    write(data, "prompts", "train", [replace(first, meta={"group": "a document"}), *others])
    sample.run(config_of(), context)
    for file in ("best.jsonl", "pairs.jsonl"):
        assert [row.get("group") for row in rows(context, file)] == ["a document", None, None, None]


def test_only_training_prompts_with_seeds_of_their_own(
    engines: list[ScriptedEngine], context: StageContext
) -> None:
    sample.run(config_of({"prompts": 2, "temperature": 0.5}), context)
    [engine] = engines
    assert [request.prompt.prompt_id for request in engine.requests] == ["p0"] * 3 + ["p2"] * 3
    assert {request.temperature for request in engine.requests} == {0.5}
    assert engine.requests[0].seed == derive_seed(5, "sample", "p0", 0)
    assert engine.requests[0].seed != derive_seed(5, "evaluate", "p0", 0)
    assert engine.requests[0].model == context.inputs["ppo"] / "policy"


def test_copies_that_a_weight_makes_are_sampled_once(
    engines: list[ScriptedEngine], context: StageContext
) -> None:
    data = context.inputs["data"]
    every = load_prompts(data, "train")
    write(data, "prompts", "train", [*every, *every[:2]])
    result = sample.run(config_of(), context)
    assert result.metrics["prompts"] == 4.0
    assert [row["prompt"] for row in rows(context, "best.jsonl")] == PROMPTS


def test_the_record_has_every_answer_with_its_score(
    engines: list[ScriptedEngine], context: StageContext
) -> None:
    sample.run(config_of(), context)
    recorded = read_rollouts(context.output).to_pylist()
    [engine] = engines
    for index, (row, request) in enumerate(zip(recorded, engine.requests, strict=True)):
        assert (row["kind"], row["step"], row["index"], row["group"]) == ("sample", 0, index, index // 3)
        assert (row["model"], row["prompt_set"], row["source"]) == ("ppo", "training", "a")
        assert (row["prompt_id"], row["seed"]) == (request.prompt.prompt_id, request.seed)
        assert row["prompt_ids"] == list(request.prompt.input_ids)
    texts = [TOKENIZER.decode(row["response_ids"], skip_special_tokens=True) for row in recorded]
    answers = [each for prompt in read_answers(context.output / ANSWERS) for each in prompt.answers]
    assert list(zip(texts, (row["score"] for row in recorded), strict=True)) == [
        (each.text, each.score) for each in answers
    ]
    without = context.output / "without"
    without.mkdir()
    sample.run(config_of(record={"level": "none"}), replace(context, output=without))
    assert {file.name for file in without.iterdir()} == {"best.jsonl", "pairs.jsonl", ANSWERS}


def test_the_same_run_gives_the_same_bytes(engines: list[ScriptedEngine], context: StageContext) -> None:
    found = []
    for _ in range(2):
        sample.run(config_of(), context)
        names = ("best.jsonl", "pairs.jsonl", "answers.jsonl", "record/sample-00000000.parquet")
        found.append([(context.output / name).read_bytes() for name in names])
    assert found[0] == found[1]


def test_a_conversation_is_left_out(engines: list[ScriptedEngine], context: StageContext) -> None:
    data = context.inputs["data"]
    encoder = Encoder(TOKENIZER, "chat", "test")
    plain = PromptExample("p0", PROMPTS[0], encoder.prompt([Message("user", PROMPTS[0])]))
    ids = encoder.prompt([Message("system", "Be brief."), Message("user", PROMPTS[1])])
    conversation = PromptExample("p1", f"Be brief.\n\n{PROMPTS[1]}", ids)
    write(data, "prompts", "train", [plain, conversation])
    result = sample.run(config_of(), context)
    assert (result.metrics["prompts"], result.metrics["prompts_left_out"]) == (1.0, 1.0)
    write(data, "prompts", "train", [conversation])
    with pytest.raises(DataError, match="1 of 1 training prompts are conversations"):
        sample.run(config_of(), context)


def test_a_conversation_without_a_template_is_left_out(
    engines: list[ScriptedEngine], context: StageContext
) -> None:
    encoder = Encoder(TOKENIZER, "plain", "test")
    single = PromptExample("p0", PROMPTS[0], encoder.prompt([Message("user", PROMPTS[0])]))
    # The messages are joined without a blank, and the text of the prompt has empty lines between them.
    ids = encoder.prompt([Message("system", "Be brief."), Message("user", PROMPTS[1])])
    conversation = PromptExample("p1", f"Be brief.\n\n{PROMPTS[1]}", ids)
    write(context.inputs["data"], "prompts", "train", [single, conversation])
    result = sample.run(config_of(data={"template": "plain"}), context)
    assert (result.metrics["prompts"], result.metrics["prompts_left_out"]) == (1.0, 1.0)


def test_scores_are_those_of_all_rewards_or_of_the_judge(
    engines: list[ScriptedEngine], context: StageContext, tmp_path: Path
) -> None:
    """The reward model gives a point for each letter, and the judge takes one."""
    for name, point in (("reward", 1.0), ("judge", -1.0)):
        scores = {letter: point * number for number, letter in enumerate(LETTERS, start=1)}
        save_last_token_scorer(tmp_path / name / "model", scores, len(TOKENIZER))
    inputs = {**context.inputs, "reward": tmp_path / "reward", "judge": tmp_path / "judge"}
    context = replace(context, inputs=inputs)
    rewards = [*LENGTH, {"type": "model", "weight": -0.1}]
    both = {"reward": {"enabled": True, "judge": {}}}
    sample.run(config_of(rewards=rewards, **both), context)
    assert rows(context, "best.jsonl")[0] == {
        "prompt": PROMPTS[0], "completion": WORDS[2], "score": pytest.approx(0.75 - 0.3, rel=1e-4)
    }  # fmt: skip
    sample.run(config_of({"judge": "judge_model"}, rewards, **both), context)
    assert rows(context, "best.jsonl")[0] == {
        "prompt": PROMPTS[0], "completion": WORDS[0], "score": pytest.approx(-1.0, rel=1e-4)
    }  # fmt: skip


def test_people_label_after_the_stage(engines: list[ScriptedEngine], context: StageContext) -> None:
    result = sample.run(config_of({"judge": "people"}), context)
    assert rows(context, "best.jsonl") == rows(context, "pairs.jsonl") == []
    answers = read_answers(context.output / ANSWERS)
    assert answers[1].answers == tuple(SampledAnswer(text, None, True) for text in WORDS[1:])
    assert result.metrics == {
        "prompts": 4.0, "prompts_left_out": 0.0, "best": 0.0, "pairs": 0.0, "usable": 1.0, "eos_rate": 1.0
    }  # fmt: skip


def test_the_judge_must_exist() -> None:
    errors = [str(each) for each in check_consistency(config_of({"judge": "judge_model"}))]
    assert any(error.startswith("sample.judge: judge_model needs reward.judge; got none") for error in errors)
    assert not [each for each in check_consistency(config_of()) if isinstance(each, ConfigError)]


def test_the_stage_exists_only_with_its_section() -> None:
    config = config_of()
    assert is_enabled(config, "sample") and "sample" in stage_inputs(config, "register")
    assert not is_enabled(PipelineConfig(), "sample")
    assert stage_inputs(config, "sample") == ("data", "sft", "ppo")


def test_answers_of_several_engines_are_in_the_order_of_the_prompts() -> None:
    prompts = [PromptExample(f"p{i}", "", (1,)) for i in range(5)]
    with scripted_engines(lambda request: Reply((request.sample_index,))):
        shares = [
            generate._sample_here(
                generate._Request(
                    config_of(), [PolicyFiles(Path("policy"))],
                    [prompts[rank::2]], SamplingSettings(1.0, 2, "sample"), "cpu",
                ),
                lambda count: None,
            )[0][0]
            for rank in range(2)
        ]  # fmt: skip
    found: list[Rollout] = generate._in_order(shares, 5, 2)
    assert [(each.prompt_id, each.sample_index) for each in found] == [
        (f"p{i}", index) for i in range(5) for index in range(2)
    ]
