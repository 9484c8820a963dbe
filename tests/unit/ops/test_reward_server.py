"""`rlhf serve-reward`.

- a served reward model gives each item the normalised score that `models.scoring` gives its tokens
- texts are tokenised as in the data stage; an empty response is its EOS, an unfinished one has none
- texts and tokens of a rollout get the same score under a template that puts a blank before answers
- an invalid item does not affect the others; an invalid request gets a status
- an item beyond a limit of the run (positions of type longrope, a sliding window) is invalid
- a request whose client has gone gets no forward pass
- a failed forward pass is a 500, and the next one works
- beyond loopback a strong token is needed; with a token, only /health is answered without it
- encoding and forward passes never run at the same time
- an artifact's address gives the model and the template of its data; a folder is used as it is
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
import uvicorn

from rlhf_core.config.rewards import RemoteReward
from rlhf_core.data.messages import Message, tools_of
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import load_decoder, load_tokenizer, train_tokenizer, write_response_prefix
from rlhf_core.errors import ConfigError, InputError, ModelError, RewardError
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import sequence_scores, single_process_batches
from rlhf_core.ops import serve
from rlhf_core.ops.serve import listen, locate, make_server
from rlhf_core.rewards.compose import reward_inputs
from rlhf_core.rewards.post import TOKEN_VARIABLE
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.rewards.scorer import ItemError, Scorer
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from rlhf_core.types import PromptAndResponse, PromptExample, RewardInput, Rollout
from tests.support.tiny_llama import save_tiny_llama

SECRET = "s3cret-s3cret-s3cret"
LONGROPE = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 24,
    },
}
HH_CHAT = Path(__file__).resolve().parents[3] / "deployments" / "configs" / "hh-chat.jinja"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a trained tokenizer, as stage `reward` leaves it."""
    causal = tmp_path_factory.mktemp("causal")
    tokenizer = train_tokenizer(
        ["Tell me about the small cat.", "It is kind and warm, and it sleeps."] * 4, 300
    )
    save_tiny_llama(causal, vocab_size=304, pad_token_id=tokenizer.pad_token_id)
    model = load_score_model(causal, dtype="float32", attention="sdpa", device="cpu")
    model.statistics = ScoreStatistics(mean=0.25, std=0.5)
    out = tmp_path_factory.mktemp("reward") / "model"
    model.save(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Scorer:
    return Scorer(folder)


def expected(folder: Path, pairs: Sequence[PromptAndResponse]) -> list[float]:
    model = load_score_model(folder, dtype="float32", attention="sdpa", device="cpu").eval()
    return sequence_scores(
        model, ScoreStatistics(mean=0.25, std=0.5), single_process_batches(model, pairs, 1000, 0)
    )


Start = Callable[..., str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Serves on a free port of loopback; the base url."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def run(scorer: Any) -> str:
        bound, token = listen("127.0.0.1", 0)
        serving = make_server(scorer, token)
        thread = threading.Thread(target=serving.run, args=([bound],))
        thread.start()
        running.append((serving, thread))
        while not serving.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    yield run
    for serving, thread in running:
        serving.should_exit = True
        thread.join(10)


class Scripted:
    """A token per character of `text`; the score is their number, and one of 13 is not finite."""

    micro_batch_tokens = 10

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.hold = threading.Event()
        self.hold.set()

    def encode(self, item: Any) -> PromptAndResponse:
        if "text" not in item:
            raise ItemError("no text")
        return (), tuple(range(len(item["text"])))

    def scores(self, pairs: Sequence[PromptAndResponse]) -> list[float]:
        self.hold.wait(10)
        lengths = [len(response) for _, response in pairs]
        self.passes.append(lengths)
        if 666 in lengths:
            raise RuntimeError("out of memory")
        return [math.nan if length == 13 else float(length) for length in lengths]


def post(url: str, items: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/score", json={"items": items}, trust_env=False, **options)


def texts(*lengths: int) -> list[dict[str, str]]:
    return [{"text": "x" * length} for length in lengths]


# -- the model --


def test_a_served_model_gives_the_scores_of_the_pipeline(folder: Path, scorer: Scorer, start: Start) -> None:
    encoder = Encoder(scorer._encoder.tokenizer, "chat")
    texts = [("Tell me about the cat.", "It sleeps."), ("Tell me.", "It is warm </s> <eos>"), ("Who?", "")]
    pairs = [encoder.response([Message("user", p)], r) if r else (encoder.prompt([Message("user", p)]),
        (encoder.eos_id,))
             for p, r in texts]  # fmt: skip
    samples = [RewardInput(str(i), p, r, *pairs[i], True) for i, (p, r) in enumerate(texts)]
    # The policy may have written the same text in other tokens: then only the tokens tell.
    samples.append(RewardInput("t", "Tell me.", "It", (1, 5, 9), (40, 41, 42, 43), False))
    url = f"{start(scorer)}/score"
    for send_tokens, count in ((True, 4), (False, 3)):
        source = RemoteReward(
            type="remote",
            urls=(url,),
            send_tokens=send_tokens,
            items_per_request=2,
        )
        service = RemoteService(source)
        outcome = service(samples)
        service.close()
        assert outcome.reasons == {}
        right = expected(folder, [(s.prompt_ids, s.response_ids) for s in samples])
        assert outcome.values[:count] == pytest.approx(right[:count], abs=1e-5)
    assert len({round(value, 4) for value in outcome.values}) == 4, "the scores tell the samples apart"


def test_text_mode_scores_equal_the_model_reward(folder: Path, tmp_path: Path, start: Start) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = HH_CHAT.read_text(encoding="utf-8")
    served = tmp_path / "model"
    shutil.copytree(folder, served)
    tokenizer.save_pretrained(served)
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    encoder = Encoder(tokenizer, "chat")
    write_response_prefix(tmp_path / "data", encoder.response_prefix)
    decoder = load_decoder(tmp_path / "data")

    texts = [("Tell me about the cat.", "It sleeps."), ("Tell me.", "It is warm and kind")]
    prompts, rollouts = [], []
    for index, (prompt, response) in enumerate(texts):
        prompt_ids, response_ids = encoder.response([Message("user", prompt)], response)
        prompts.append(PromptExample(str(index), prompt, prompt_ids))
        rollouts.append(Rollout(str(index), 0, prompt_ids, response_ids, (0.0,) * len(response_ids), True, 0))
    samples = reward_inputs(decoder.response, prompts, rollouts)
    assert [sample.response for sample in samples] == [response for _, response in texts]

    url = f"{start(Scorer(served))}/score"
    service = RemoteService(RemoteReward(type="remote", urls=(url,), send_tokens=False))
    outcome = service(samples)
    service.close()
    by_tokens = expected(served, [(sample.prompt_ids, sample.response_ids) for sample in samples])
    assert outcome.values == pytest.approx(by_tokens, abs=1e-5)
    # The blank that the template puts there, twice, is another text to the model.
    twice = [encoder.response([Message("user", prompt)], " " + response) for prompt, response in texts]
    assert outcome.values != pytest.approx(expected(served, twice), abs=1e-3)


def test_a_response_that_the_limit_cut_has_no_eos(scorer: Scorer) -> None:
    item = {"prompt": "Tell me.", "response": "It is kind"}
    prompt_ids, whole = scorer.encode(item)
    assert whole[-1] == scorer._encoder.eos_id
    assert scorer.encode({**item, "finished": False}) == (prompt_ids, whole[:-1])
    with pytest.raises(ItemError, match="the response has no tokens"):
        scorer.encode({**item, "response": "", "finished": False})


def test_a_conversation_is_a_prompt(scorer: Scorer) -> None:
    messages = [("user", "Who?"), ("assistant", "A cat."), ("user", "And now?")]
    item = {"prompt": [{"role": role, "content": text} for role, text in messages], "response": "It sleeps."}
    right = scorer._encoder.response([Message(*message) for message in messages], "It sleeps.")
    assert scorer.encode(item) == right


def test_an_earlier_answer_of_the_prompt_can_have_thoughts(scorer: Scorer) -> None:
    talk = [("user", "Who?"), ("assistant", "<think>\nHm.\n</think>\n\nA cat."), ("user", "And now?")]
    item = {"prompt": [{"role": role, "content": text} for role, text in talk], "response": "It sleeps."}
    right = scorer._encoder.response([Message(*message) for message in talk], "It sleeps.")
    assert scorer.encode(item) == right


@pytest.mark.parametrize("response", ["It sleeps.", ""])
def test_an_item_has_the_tools_of_its_prompt(folder: Path, tmp_path: Path, response: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + tokenizer.chat_template
    served = shutil.copytree(folder, tmp_path / "model")
    tokenizer.save_pretrained(served)
    item = {"prompt": "Who?", "response": response, "tools": [{"name": "tell"}]}
    encoder, tools = Encoder(tokenizer, "chat"), tools_of(item["tools"])
    scorer = Scorer(served)
    prompt_ids, _ = scorer.encode(item)
    assert prompt_ids == encoder.prompt([Message("user", "Who?")], tools)
    assert len(prompt_ids) > len(scorer.encode({**item, "tools": None})[0])
    with pytest.raises(ItemError, match="leaves the tool 'tell' out"):
        Scorer(folder).encode(item)
    with pytest.raises(ItemError, match="lone surrogates"):
        scorer.encode({**item, "tools": [{"name": "\ud800"}]})


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("text", "must be an object; got str"),
        ({}, "response must be a string"),
        ({"prompt": "a", "response": 3}, "response must be a string"),
        ({"prompt": "a", "response": "b", "finished": "yes"}, "finished true or false"),
        ({"response": "b"}, "'prompt' is missing"),
        ({"prompt": "  ", "response": "b"}, "'prompt' is blank"),
        (
            {"prompt": [{"role": "root", "content": "x"}], "response": "b"},
            "must be system, user, assistant or tool",
        ),
        ({"prompt": "a", "response": "b " * 60}, "tokens, but the model takes 64"),
        ({"prompt": "a", "response": "b" * 10**6}, "do not fit the 64 tokens"),
        (
            {"prompt_ids": [1, 2], "response_ids": [304]},
            "response_ids must be a list of token ids from 0 to 303",
        ),
        ({"prompt_ids": [1, 2], "response_ids": [-1]}, "response_ids must be"),
        ({"prompt_ids": [1, True], "response_ids": [3]}, "prompt_ids must be"),
        ({"prompt_ids": [1, 2]}, "response_ids must be"),
        ({"prompt_ids": [1, 2], "response_ids": []}, "the response has no tokens"),
        ({"prompt_ids": [1] * 40, "response_ids": [1] * 25}, "have 65 tokens, but the model takes 64"),
    ],
)
def test_an_item_that_cannot_be_scored_gives_the_reason(scorer: Scorer, item: Any, reason: str) -> None:
    with pytest.raises(ItemError) as error:
        scorer.encode(item)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("kind", "shape", "attention", "limit"),
    [
        ("Mistral", {"sliding_window": 24}, "sdpa", "24 (sliding_window)"),
        ("Mistral", {"sliding_window": 24}, "eager", "64 (max_position_embeddings)"),
        ("Phi3", LONGROPE, "sdpa", "24 (original_max_position_embeddings)"),
        ("Phi3", LONGROPE, "eager", "24 (original_max_position_embeddings)"),
    ],
)
def test_an_item_beyond_a_limit_of_the_run_costs_no_other_its_score(
    folder: Path, tmp_path: Path, start: Start, kind: str, shape: dict[str, Any], attention: Any, limit: str
) -> None:
    sizes = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "max_position_embeddings", "pad_token_id")  # fmt: skip
    causal = transformers.AutoConfig.for_model(
        kind.lower(), **{name: sizes[name] for name in kept}, num_key_value_heads=2, **shape
    )
    transformers.AutoModelForCausalLM.from_config(causal).save_pretrained(tmp_path / "causal")
    model = load_score_model(tmp_path / "causal", dtype="float32", attention="sdpa", device="cpu")
    model.save(tmp_path / "reward")
    load_tokenizer(str(folder)).save_pretrained(tmp_path / "reward")

    url = start(Scorer(tmp_path / "reward", attention=attention))
    most = int(limit.partition(" ")[0])
    short, longest, too_long = (
        {"prompt_ids": [1, 5], "response_ids": list(range(3, count + 1))} for count in (8, most, most + 1)
    )
    (alone,) = post(url, [short]).json()["scores"]
    answer = post(url, [short, too_long, longest]).json()
    reason = f"prompt and response have {most + 1} tokens, but the model takes {limit}"
    assert answer["errors"] == {"1": reason}
    assert answer["scores"][0] == pytest.approx(alone, abs=1e-5)
    assert answer["scores"][2] is not None


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        Scorer(tmp_path)
    with pytest.raises(ModelError, match="got one that generates text"):
        Scorer(save_tiny_llama(tmp_path))


# -- requests --


def test_a_bad_item_costs_no_other_its_score(start: Start) -> None:
    answer = post(start(Scripted()), [*texts(3), {}, *texts(13, 4)])
    assert answer.json() == {
        "scores": [3.0, None, None, 4.0],
        "errors": {"1": "no text", "2": "the model's score is not finite"},
    }
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (b'{"items": []}', "text/plain", 415, "application/json"),
        (b"{", "application/json", 400, '{"items": [...]}'),
        (b"[]", "application/json", 400, '{"items": [...]}'),
        (b"[" * 100_000, "application/json", 400, '{"items": [...]}'),
        (b'{"items": 3}', "application/json", 400, "items must be a list"),
        (b" " * 2000, "application/json; charset=utf-8", 413, "at most 1000 bytes"),
        (b'{"items": [' + b"{}," * 10_000 + b"{}]}", "application/json", 413, "at most 10000 items"),
    ],
)
def test_a_bad_request_is_its_status(
    start: Start, monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str, status: int, words: str
) -> None:
    if "bytes" in words:
        monkeypatch.setattr(serve, "MAX_BYTES", 1000)
    url = start(Scripted())
    answer = httpx.post(f"{url}/score", content=content, headers={"Content-Type": kind}, trust_env=False)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True)
    assert post(url, []).json() == {"scores": [], "errors": {}}


def test_encoding_and_forward_passes_take_turns(start: Start) -> None:
    class Watched(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.busy: list[str] = []
            self.met: list[list[str]] = []

        def during(self, what: str) -> None:
            self.busy.append(what)
            time.sleep(0.01)
            self.met.append(list(self.busy))
            self.busy.remove(what)

        def encode(self, item: Any) -> PromptAndResponse:
            self.during("encode")
            return super().encode(item)

        def scores(self, pairs: Sequence[PromptAndResponse]) -> list[float]:
            self.during("score")
            return super().scores(pairs)

    watched = Watched()
    url = start(watched)
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda n: post(url, texts(n, n)).json()["scores"], range(1, 9)))
    assert answers == [[float(n)] * 2 for n in range(1, 9)]
    assert {tuple(met) for met in watched.met} == {("encode",), ("score",)}


def test_invalid_unicode_affects_only_its_item(scorer: Scorer, start: Start) -> None:
    good = {"prompt": "Tell me.", "response": "It is kind"}
    bad: list[dict[str, Any]] = [{**good, name: "a\ud800b"} for name in ("prompt", "response")]
    bad.append({**good, "prompt": [{"role": "\ud800", "content": "x"}]})
    content = json.dumps({"items": [good, *bad, good]})
    url = start(scorer)
    answer = httpx.post(
        f"{url}/score", content=content, headers={"Content-Type": "application/json"}, trust_env=False
    )
    scores = answer.json()["scores"]
    assert [score is None for score in scores] == [False, True, True, True, False]
    assert scores[0] == scores[-1]
    assert set(answer.json()["errors"]) == {"1", "2", "3"}


def test_clients_that_give_up_and_come_again_cost_no_forward_pass(start: Start) -> None:
    scripted = Scripted()
    url = start(scripted)

    def give_up(number: int) -> None:
        for _ in range(3):
            with pytest.raises(httpx.TimeoutException):
                post(url, texts(10), timeout=0.3)

    scripted.hold.clear()
    with ThreadPoolExecutor(20) as clients:
        list(clients.map(give_up, range(20)))
        scripted.hold.set()
        assert post(url, texts(3), timeout=60).json()["scores"] == [3.0]
    assert sum(map(len, scripted.passes)) < 20, "60 were given up"


def test_failed_forward_pass_is_a_500(start: Start) -> None:
    url = start(Scripted())
    assert post(url, texts(666)).status_code == 500
    assert post(url, texts(2)).json()["scores"] == [2.0]


# -- who may ask --


def test_with_a_token_nothing_else_is_answered_but_health(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    url = start(Scripted())
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": SECRET}):
        assert post(url, texts(1), headers=headers).status_code == 401
    assert post(url, texts(1), headers={"Authorization": f"Bearer {SECRET}"}).json()["scores"] == [1.0]
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}


def test_a_client_without_the_token_gets_the_reason(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    url = start(Scripted())
    monkeypatch.delenv(TOKEN_VARIABLE)
    service = RemoteService(RemoteReward(type="remote", urls=(f"{url}/score",)))
    with pytest.raises(RewardError, match=r"status 401, .* RLHF_REWARD_TOKEN"):
        service([RewardInput("p", "a", "b", (1,), (2,), True)])
    service.close()


def test_without_a_token_no_web_page_from_elsewhere_is_answered(start: Start) -> None:
    """A page whose name was pointed to 127.0.0.1 (DNS rebinding) may send JSON, and has its own
    name as Host.
    """
    scripted = Scripted()
    url = start(scripted)
    port = url.rpartition(":")[2]
    rebound = {"Host": f"evil.example:{port}"}
    for headers in (
        rebound,
        {"Origin": "https://evil.example"},
        {**rebound, "Origin": f"http://evil.example:{port}"},
    ):
        assert post(url, texts(1), headers=headers).status_code == 403
        assert httpx.get(f"{url}/health", headers=headers, trust_env=False).status_code == 403
    assert scripted.passes == []
    assert post(url, texts(1), headers={"Host": f"localhost:{port}"}).status_code == 200


def test_beyond_loopback_it_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"got 0\.0\.0\.0; set RLHF_REWARD_TOKEN"):
        listen("0.0.0.0", 0)
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    bound, token = listen("0.0.0.0", 0)
    bound.close()
    assert token == SECRET


@pytest.mark.parametrize(
    "token", ["a", " ", "fifteen-letters", "s3cret-s3cret-s3 cret", "s3cret-s3cret-s3cr\u00e9t", "a\nb" * 9]
)
def test_weak_or_unsendable_token_is_refused(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as error:
        listen("0.0.0.0", 0)
    assert token.strip() in ("", "a") or token not in str(error.value)


def test_line_break_around_the_token_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, f"{SECRET}\r\n")
    bound, token = listen("127.0.0.1", 0)
    bound.close()
    assert token == SECRET


def test_an_address_that_cannot_be_used_is_one_message() -> None:
    bound, _ = listen("127.0.0.1", 0)
    with bound, pytest.raises(ConfigError, match="must be a free address"):
        bound.listen()
        listen("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(ConfigError, match="must be a free address"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="from 0 to 65535; got 99999"):
        listen("127.0.0.1", 99999)


# -- what is served --


def test_artifact_address_gives_model_and_template(folder: Path, tmp_path: Path) -> None:
    store, key = tmp_path / "store", "0123456789abcdef"
    made = tmp_path / "made"
    (made / "model").mkdir(parents=True)
    for file in folder.iterdir():
        (made / "model" / file.name).write_bytes(file.read_bytes())
    artifacts = ArtifactStore(Store(str(store)), tmp_path / "cache")
    config: dict[str, Any] = {"data": {"template": "plain"}, "model": {}, "ppo": {}, "run": {}}
    ref = artifacts.publish("reward", key, made, Provenance(config=config))
    for address in (f"{store}/artifacts/reward/{key}", f"{store}/artifacts/reward/{key}/", ref.uri):
        model, template = locate(address, Home.of(tmp_path), None)
        assert (model / "config.json").is_file()
        assert template == "plain"
    with pytest.raises(InputError, match="no reward artifact ffffffffffffffff"):
        locate(f"{store}/artifacts/reward/{'f' * 16}", Home.of(tmp_path), None)


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    assert locate(str(folder), Home.of(folder), None) == (folder, None)
    assert locate(str(folder.parent), Home.of(folder), None) == (folder, None)


def test_the_template_decides_the_tokens(folder: Path) -> None:
    item = {"prompt": "Tell me.", "response": " It sleeps."}
    assert Scorer(folder, template="plain").encode(item) != Scorer(folder).encode(item)
