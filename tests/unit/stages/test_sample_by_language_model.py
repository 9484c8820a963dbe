"""The stage `sample` with a language model as judge: a scripted server on loopback, or scripted engines.

- each answer is compared with the first one that can be data, in both orders: a win, a tie or a loss is its
  score
- ties only are no pair, and the first answer is the best
- answers that cannot be data are not asked about, and neither are equal ones
- a judge that agrees too little is refused before anything is sampled
- the same run again asks nothing and gives the same bytes
- a local model is run by the engines of the evaluation
- the judge is part of the stage's key only if it labels
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import sources_read, stage_key
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation import scoring
from rlhf_core.evaluation.review import ANSWERS, read_answers
from rlhf_core.pipeline import STAGES
from rlhf_core.stages import sample
from rlhf_core.stages.gates import check_gate
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, Request, scripted_engines
from rlhf_core.types import PairExample, PromptExample, StageContext
from tests.support.chat_server import ChatServer, Respond, answers_of, prefer_first, prefer_longer

PROMPTS = ("Name a colour.", "Name an animal.", "Name a town.")
ANSWERS_TO = {
    "p0": ("red", "light blue", "bl", "tan"),  # the first one, a win, a loss, a tie
    "p1": ("a cut answer", "dog", "dog", "cat"),
    "p2": ("Rome", "Lima", "Oslo", "Bonn"),
}
PAIRS = 40
TOKENIZER = train_tokenizer([], 0)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def answer(request: Request) -> Reply:
    text = ANSWERS_TO[request.prompt.prompt_id][request.sample_index]
    return Reply(ids(text), finished=text != "a cut answer")


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """40 held-out pairs whose chosen answers are longer, and three training prompts."""
    encoder = Encoder(TOKENIZER, "chat", "test")
    prompts = [
        PromptExample(f"p{i}", text, encoder.prompt([Message("user", text)]))
        for i, text in enumerate(PROMPTS)
    ]
    pairs = [
        PairExample(f"h{i}", "Held out?", (1,), ids(f"Answer {i}, which is longer"), ids(f"Answer {i}"))
        for i in range(PAIRS)
    ]
    data = write_data_artifact(tmp_path / "data", prompts=prompts, eval_pairs=pairs, tokenizer=TOKENIZER)
    (tmp_path / "ppo").mkdir()
    (tmp_path / "sft").mkdir()
    inputs = {"data": data, "ppo": tmp_path / "ppo", "sft": tmp_path / "sft"}
    return stage_context(tmp_path, inputs=inputs)


def config_of(folder: Path, sample_settings: dict[str, Any] | None = None, **judge: Any) -> PipelineConfig:
    tree = {
        "run": {"device": "cpu", "home": str(folder / "home")},
        "reward": {"enabled": False},
        "ppo": {"rewards": [{"type": "repetition"}]},
        "sample": {"answers": 4, "judge": "language_model", **(sample_settings or {})},
        "evaluate": {"bootstrap": 200, "language_model": judge},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree))


def at(server: ChatServer) -> dict[str, Any]:
    return {"url": server.url, "model": "judge-1"}


def rows(context: StageContext, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (context.output / file).read_text().splitlines()]


def test_wins_ties_and_losses_are_the_scores(context: StageContext, tmp_path: Path) -> None:
    with ChatServer(prefer_longer) as server, scripted_engines(answer):
        result = sample.run(config_of(tmp_path, **at(server)), context)
    colour, animal, _ = read_answers(context.output / ANSWERS)
    assert [each.score for each in colour.answers] == [0.5, 1.0, 0.0, 0.5]
    assert [(each.score, each.usable) for each in animal.answers] == [
        (None, False), (0.5, True), (0.5, True), (0.5, True)
    ]  # fmt: skip
    assert rows(context, "best.jsonl") == [
        {"prompt": PROMPTS[0], "completion": "light blue", "score": 1.0},
        {"prompt": PROMPTS[1], "completion": "dog", "score": 0.5},
        {"prompt": PROMPTS[2], "completion": "Rome", "score": 0.5},
    ]
    assert rows(context, "pairs.jsonl") == [
        {"prompt": PROMPTS[0], "chosen": "light blue", "rejected": "bl", "margin": 1.0}
    ]
    # Two questions for each pair: three of colours, one of different animals, three of towns.
    assert len(server.requests) == 2 * PAIRS + 2 * (3 + 1 + 3)
    assert not any("a cut answer" in question for question in server.questions)
    assert result.metrics["language_model/agreement/mean"] == 1.0
    assert result.metrics["language_model/requests"] == len(server.requests)
    assert result.attributes == {"judge": "language model judge-1", "rl_algorithm": "PPO"}
    check_gate(config_of(tmp_path, **at(server)), "sample", result.metrics)


def test_a_demonstration_can_be_required_to_win(context: StageContext, tmp_path: Path) -> None:
    with ChatServer(prefer_longer) as server, scripted_engines(answer):
        sample.run(config_of(tmp_path, {"min_score": 1.0}, **at(server)), context)
    assert [row["completion"] for row in rows(context, "best.jsonl")] == ["light blue"]


def test_a_preference_for_the_first_answer_is_no_pair(context: StageContext, tmp_path: Path) -> None:
    """This judge knows the held-out pairs. Of other answers it names the first one."""

    def biased(question: str) -> str:
        return prefer_longer(question) if "Held out?" in question else prefer_first(question)

    with ChatServer(biased) as server, scripted_engines(answer):
        result = sample.run(config_of(tmp_path, **at(server)), context)
    assert rows(context, "pairs.jsonl") == []
    assert [row["completion"] for row in rows(context, "best.jsonl")] == ["red", "dog", "Rome"]
    # One of the eight pairs has equal answers and is not asked about.
    assert result.metrics["language_model/inconsistent"] == 7 / 8
    assert result.metrics["language_model/first"] == 1.0


@pytest.mark.parametrize("respond", [prefer_first, lambda question: "C"], ids=["first", "undecided"])
def test_a_refused_judge_costs_no_samples(context: StageContext, tmp_path: Path, respond: Respond) -> None:
    with (
        ChatServer(respond) as server,
        scripted_engines(answer) as engines,
        pytest.raises(
            GateFailed, match=r"^sample: the language model judge-1 agrees with 0\.500 .* sample\.judge$"
        ),
    ):
        sample.run(config_of(tmp_path, **at(server)), context)
    assert engines == []


def test_the_same_run_asks_nothing_again(context: StageContext, tmp_path: Path) -> None:
    found = []
    with ChatServer(prefer_longer) as server, scripted_engines(answer):
        for _ in range(2):
            sample.run(config_of(tmp_path, **at(server)), context)
            files = [(context.output / name).read_bytes() for name in ("best.jsonl", "pairs.jsonl", ANSWERS)]
            found.append((files, len(server.requests)))
            server.respond = prefer_first
    assert found[0] == found[1]


def test_a_local_model_judges_with_the_engines_of_the_evaluation(
    context: StageContext, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    tokenizer = train_tokenizer(["ABC Answer which is longer"], 300)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')

    def respond(request: Request) -> Reply:
        if request.model != folder:
            return answer(request)
        letter = prefer_longer(tokenizer.decode(request.prompt.input_ids, skip_special_tokens=True))
        return Reply(tokenizer(letter, add_special_tokens=False)["input_ids"])

    with scripted_engines(respond) as engines:
        result = sample.run(config_of(tmp_path, path=str(folder)), context)
    assert [engine.options["max_model_len"] > 0 and engine.is_shut_down for engine in engines] == [True] * 3
    assert [engine.requests[0].model for engine in engines] == [
        folder,
        context.inputs["ppo"] / "policy",
        folder,
    ]
    assert [row["chosen"] for row in rows(context, "pairs.jsonl")] == ["light blue"]
    assert result.attributes == {"judge": "language model judge", "rl_algorithm": "PPO"}


def keys_of(change: Callable[[dict[str, Any]], None], judge: str) -> tuple[str, str]:
    """Return the keys of the stage `sample` before and after a change of the judge's settings."""
    found = []
    for changed in (False, True):
        settings = {"url": "http://one/v1", "model": "m"}
        if changed:
            change(settings)
        config = config_of(Path("home"), {"judge": judge}, **settings)
        found.append(stage_key(config, "sample", {}, {}))
    return found[0], found[1]


def test_the_judge_is_in_the_key_only_if_it_labels() -> None:
    def other_model(settings: dict[str, Any]) -> None:
        settings["model"] = "other"

    def other_limit(settings: dict[str, Any]) -> None:
        settings["min_agreement"] = 0.9

    before, after = keys_of(other_model, "language_model")
    assert before != after
    for change, judge in ((other_limit, "language_model"), (other_model, "reward")):
        before, after = keys_of(change, judge)
        assert before == after
    rubric = "evaluate.language_model.rubric"
    labels = config_of(Path("home"), path="judge")
    assert rubric.startswith(sources_read(labels, "sample"))
    assert not rubric.startswith(
        sources_read(config_of(Path("home"), {"judge": "reward"}, path="j"), "sample")
    )
    assert sources_read(labels, "evaluate") == STAGES["evaluate"].sources


@pytest.mark.parametrize("field", ["sft", "preference"])
def test_a_judge_that_labelled_training_data_is_not_independent(field: str) -> None:
    for judge, trained in (("reward", False), ("judge_model", False), ("language_model", True)):
        source = {"path": "synthetic", "labelled_by": judge}
        config = PipelineConfig.model_validate_json(json.dumps({"data": {field: [source]}}))
        assert scoring.trained_on(config, "language_model") is trained


def test_the_question_has_the_answers_in_both_orders(context: StageContext, tmp_path: Path) -> None:
    with ChatServer(prefer_longer) as server, scripted_engines(answer):
        sample.run(config_of(tmp_path, **at(server)), context)
    asked = {answers_of(question) for question in server.questions if PROMPTS[0] in question}
    assert asked == {(a, b) for one in ("light blue", "bl", "tan") for a, b in (("red", one), (one, "red"))}
