"""A language model as judge, with a scripted server on loopback, or scripted engines.

- a judge that prefers the first answer finds ties only, agrees by one half, and is refused
- a good judge passes, and an unreliable one is refused with figure, interval and field
- an interrupted run asks nothing twice and ends with the same numbers, also if the model changed its mind
- a reply without a verdict is asked for once more and counted
- equal answers are a tie without a question
- the server's errors end or repeat a request, and its key is in no file or message
- a local model chooses among the letters, and another model, rubric or address is another judge
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import write
from rlhf_core.data.sources import model_digest
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ConfigError, DataError, GateFailed, ModelError, RewardError
from rlhf_core.evaluation.language_model import LanguageModelJudge
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.rewards import chat_service
from rlhf_core.rewards.questions import AGAIN, FOLDER
from rlhf_core.stages.gates import check_gate
from rlhf_core.testing import stage_context
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.testing.engines import Reply, Request, scripted_engines
from rlhf_core.types import PairExample, RewardInput, StageContext
from tests.support.chat_server import ChatServer, Respond, answers_of, prefer_first, prefer_longer

KEY = "sk-canary-7d1f0c"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_service, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """40 held-out pairs of equal prompts, whose chosen answers are longer."""
    tokenizer = train_tokenizer([], 0)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    pairs = [
        PairExample(f"p{i}", "Tell me", (1,), ids(f"Answer {i}, which is longer"), ids(f"Answer {i}"), "a")
        for i in range(40)
    ]
    data = write_data_artifact(tmp_path / "data", eval_pairs=pairs, tokenizer=tokenizer)
    return stage_context(tmp_path, inputs={"data": data})


def config_of(folder: Path, url: str | None = None, **settings: Any) -> PipelineConfig:
    if url is not None:
        settings = {
            "url": url,
            "model": "judge-1",
        } | settings
    tree = {
        "run": {"device": "cpu", "home": str(folder / "home")},
        "evaluate": {"bootstrap": 200, "language_model": settings},
    }
    return PipelineConfig.model_validate_json(json.dumps(tree))


def agreement(config: PipelineConfig, context: StageContext) -> dict[str, float]:
    return LanguageModelJudge(config, context, "cpu").measure_agreement()


def samples(*texts: str) -> list[RewardInput]:
    return [RewardInput(f"p{i}", "Tell me", text, (1,), (2,), True, {}) for i, text in enumerate(texts)]


def test_a_judge_of_the_first_answer_finds_ties_and_is_refused(context: StageContext, tmp_path: Path) -> None:
    with ChatServer(prefer_first) as server:
        config = config_of(tmp_path, server.url)
        found = agreement(config, context)
    assert found["language_model/agreement/mean"] == 0.5
    assert found["language_model/pair_verdicts/ties"] == 40
    assert (found["language_model/pairs_inconsistent"], found["language_model/pairs_first"]) == (1.0, 1.0)
    with pytest.raises(
        GateFailed,
        match=r"judge-1 agrees with 0\.500 \[0\.3\d+, 0\.6\d+\] of 40 held-out pairs .* below"
        r" evaluate\.language_model\.min_agreement=0\.6\. .* on 100% of the pairs, and 100%",
    ):
        check_gate(config, "evaluate", found)


def test_order_bias_is_cancelled(context: StageContext, tmp_path: Path) -> None:
    """This judge prefers the first answer unless one is twice as long."""

    def biased(question: str) -> str:
        a, b = answers_of(question)
        return "B" if len(b) > 2 * len(a) else "A"

    with ChatServer(biased) as server:
        config = config_of(tmp_path, server.url)
        judge = LanguageModelJudge(config, context, "cpu")
        ours, theirs = (
            samples("good " * 9, "a", "equal 1", "same"),
            samples("b", "bad " * 9, "equal 2", "same"),
        )
        comparison = judge.compare(ours, theirs, Intervals(config))
    assert comparison.preferences == (1.0, 0.0, 0.5, 0.5)
    assert judge.to_json()["inconsistent"] == 0.25
    assert len(server.requests) == 6  # two for each pair of different answers


@pytest.mark.parametrize(
    ("respond", "limit", "passes"),
    [
        (prefer_longer, 0.9, True),
        (lambda question: "ABC"[len(question) % 3], 0.6, False),
        (lambda _: "C", 0.6, False),
    ],
    ids=["good", "arbitrary", "undecided"],
)
def test_only_a_judge_that_agrees_passes(
    context: StageContext, tmp_path: Path, respond: Respond, limit: float, passes: bool
) -> None:
    with ChatServer(respond) as server:
        config = config_of(tmp_path, server.url, min_agreement=limit)
        found = agreement(config, context)
    if passes:
        check_gate(config, "evaluate", found)
        assert found["language_model/agreement/mean"] == 1.0
        return
    with pytest.raises(GateFailed, match=r"min_agreement=0\.6"):
        check_gate(config, "evaluate", found)


def test_few_pairs_prove_no_agreement() -> None:
    config = config_of(Path(), "http://127.0.0.1/v1")
    numbers = {"pairs": 4.0, "pairs_inconsistent": 0.0, "pairs_first": 0.5}
    numbers |= {"agreement/mean": 0.75, "agreement/low": 0.25, "agreement/high": 1.0}
    metrics = {f"language_model/{name}": value for name, value in numbers.items()}
    with pytest.raises(GateFailed, match=r"0\.750 .* not significantly more often than by chance .*\.pairs"):
        check_gate(config, "evaluate", metrics)


def test_an_interrupted_run_asks_nothing_twice(context: StageContext, tmp_path: Path) -> None:
    asked = 0

    def dying(question: str) -> str | int:
        nonlocal asked
        asked += 1
        return prefer_longer(question) if asked <= 30 else 400

    with ChatServer(dying) as server:
        config = config_of(tmp_path, server.url, concurrency=1)
        with pytest.raises(RewardError, match="status 400"):
            agreement(config, context)
        server.respond = prefer_longer
        found = agreement(config, context)
        assert len(set(server.questions)) == 80
        assert len(server.questions) == 81  # the refused one again
        server.respond = prefer_first
        assert agreement(config, context) == found
        assert len(server.questions) == 81
    assert found["language_model/requests"] == 80 and found["language_model/prompt_tokens"] == 800


def test_a_damaged_reply_is_asked_for_again(context: StageContext, tmp_path: Path) -> None:
    with ChatServer(prefer_longer) as server:
        config = config_of(tmp_path, server.url)
        found = agreement(config, context)
        file = next((tmp_path / "home" / "judge").glob("*/*.json"))
        file.write_text('{"text": ')
        again = agreement(config, context)
        assert len(server.requests) == 81
    assert again["language_model/agreement/mean"] == found["language_model/agreement/mean"]


def test_a_reply_without_a_verdict_is_asked_for_once_more(context: StageContext, tmp_path: Path) -> None:
    def talkative(question: str) -> str:
        if "Answer 0" in question:
            return "Both have their merits."
        return prefer_longer(question.removesuffix(AGAIN)) if question.endswith(AGAIN) else "Hm."

    with ChatServer(talkative) as server:
        found = agreement(config_of(tmp_path, server.url), context)
    assert (found["language_model/unparsed"], found["language_model/requests"]) == (2, 160)
    assert found["language_model/agreement/mean"] == 39.5 / 40


def test_passing_failures_are_repeated(context: StageContext, tmp_path: Path) -> None:
    statuses = [429, 503]
    with ChatServer(lambda question: statuses.pop() if statuses else prefer_longer(question)) as server:
        found = agreement(config_of(tmp_path, server.url), context)
        assert len(server.requests) == 82
    assert found["language_model/requests"] == 80

    with (
        ChatServer(lambda _: 500) as server,
        pytest.raises(RewardError, match=r"status 500: .*, after 2 tries"),
    ):
        agreement(config_of(tmp_path, server.url, retries=1, concurrency=1), context)


def test_the_key_is_sent_and_written_nowhere(
    context: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", f"{KEY}\n")
    with ChatServer(prefer_longer) as server:
        config = config_of(tmp_path, server.url, api_key_env="JUDGE_API_KEY")
        agreement(config, context)
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    written = b"".join(
        file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and os.access(file, os.R_OK)
    )
    assert b"prompt_tokens" in written and KEY.encode() not in written + config.model_dump_json().encode()
    monkeypatch.setenv("JUDGE_API_KEY", "clé")
    with pytest.raises(ConfigError, match="JUDGE_API_KEY must hold printable ASCII") as refused:
        LanguageModelJudge(
            config_of(tmp_path, server.url, api_key_env="JUDGE_API_KEY", model="2"), context, "cpu"
        ).measure_agreement()
    assert "cl" not in str(refused.value).replace("clear", "")


def test_without_held_out_pairs_there_is_no_judge(context: StageContext, tmp_path: Path) -> None:
    write(context.inputs["data"], "pairs", "eval", [])
    with pytest.raises(DataError, match=r"that people labelled; got 0; raise data\.eval_fraction"):
        agreement(config_of(tmp_path, "http://127.0.0.1/v1"), context)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_a_local_model_chooses_among_the_letters(context: StageContext, tmp_path: Path, chat: bool) -> None:
    folder = tmp_path / "judge"
    tokenizer = train_tokenizer(["ABC Answer which is longer"], 300)
    if not chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')

    def respond(request: Request) -> Reply:
        letter = prefer_longer(tokenizer.decode(request.prompt.input_ids, skip_special_tokens=True))
        return Reply(tokenizer(letter, add_special_tokens=False)["input_ids"])

    config = config_of(tmp_path, path=str(folder))
    with scripted_engines(respond) as engines:
        found = agreement(config, context)
        assert agreement(config, context) == found
    assert found["language_model/agreement/mean"] == 1.0
    assert found["language_model/completion_tokens"] == 80
    assert len(engines) == 1 and len(engines[0].requests) == 80 and engines[0].is_shut_down

    for settings in ('{"max_position_embeddings": 64}', '{"text_config": {"max_position_embeddings": 64}}'):
        (folder / "config.json").write_text(settings)
        with pytest.raises(ModelError, match=r"language_model\.path: the longest question has \d+ tokens"):
            agreement(config_of(tmp_path / "other", path=str(folder)), context)


def test_another_model_rubric_or_address_is_another_judge(context: StageContext, tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Shorter is better.")
    url = "http://127.0.0.1/v1"
    configs = [
        config_of(tmp_path, url),
        config_of(tmp_path, url, model="judge-2"),
        config_of(tmp_path, "http://127.0.0.1:81/v1"),
        config_of(tmp_path, url, rubric=str(rubric)),
        config_of(tmp_path, url, max_tokens=200),
        config_of(tmp_path, path=str(tmp_path)),
    ]
    digests = {LanguageModelJudge(config, context, "cpu").digest for config in configs}
    assert len(digests) == 6
    same = config_of(tmp_path, url, pairs=50, min_agreement=0.7, retries=0)
    assert LanguageModelJudge(same, context, "cpu").digest in digests
    folders = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"name": name}))
        folders.append((str(folder), model_digest(str(folder), None)))
    found = [
        LanguageModelJudge(
            config_of(tmp_path, path=folder), stage_context(tmp_path, sources={FOLDER: digest}), "cpu"
        )
        for folder, digest in folders
    ]
    assert found[0].digest != found[1].digest
    swapped = stage_context(tmp_path, sources={FOLDER: folders[1][1]})
    with pytest.raises(ConfigError, match=r"path: .*/a was changed after the run began"):
        LanguageModelJudge(config_of(tmp_path, path=folders[0][0]), swapped, "cpu")
    changed = stage_context(tmp_path, sources={"evaluate.language_model.rubric": "0" * 64})
    with pytest.raises(ConfigError, match=r"rubric\.txt was changed after the run began"):
        LanguageModelJudge(configs[3], changed, "cpu")
