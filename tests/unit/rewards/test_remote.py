"""The remote reward service, against a real HTTP server in this process.

- scores are in the order of the samples, for any order of the requests; the items follow the protocol
- slow, broken, truncated, huge, wrong or unreadable answers are retried, and each failure describes the
  answer
- a failing replica is avoided while others answer; without any, the failure comes in time
- an item without a score, or one that the service refuses, does not affect the other items
- with `needs_group` a request has all responses to one prompt, and one that is refused is not split
- redirects, wrong tokens and wrong paths end the step at once; redirects are not followed
- proxies of the environment are not used, and the certificate is checked against the name in the url
- the token is sent; the checks before the start refuse one that would be sent unencrypted to a public address
"""

import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.rewards import ChatServiceConfig, RemoteReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards import remote
from rlhf_core.rewards.chat_service import ask_service
from rlhf_core.rewards.check import check_rewards
from rlhf_core.rewards.failures import Failure, Outcome
from rlhf_core.rewards.post import MAX_ANSWER_BYTES, TOKEN_VARIABLE
from rlhf_core.rewards.remote import RemoteService, read_answer
from rlhf_core.types import RewardInput

Answer = Callable[["Handler", list[dict[str, Any]]], None]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)


class Service(ThreadingHTTPServer):
    """Answers each request with `answers`, one after the other and the last one for ever."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.seen: list[list[dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        with self.server.lock:
            self.server.seen.append(items)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        answer(self, items)

    def reply(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


def lengths(handler: Handler, items: list[dict[str, Any]]) -> None:
    """The score is the length of the response."""
    handler.reply(200, json.dumps({"scores": [len(item["response"]) for item in items]}).encode())


def sleepy(seconds: float) -> Answer:
    def answer(handler: Handler, items: list[dict[str, Any]]) -> None:
        time.sleep(seconds)
        lengths(handler, items)

    return answer


def with_status(status: int, **headers: str) -> Answer:
    return lambda handler, items: handler.reply(status, b"no", None, **headers)


def with_body(body: str) -> Answer:
    return lambda handler, items: handler.reply(200, body.encode())


def truncated(handler: Handler, items: list[dict[str, Any]]) -> None:
    handler.reply(200, b'{"scores": [1', length=100)
    handler.close_connection = True


def trickling(handler: Handler, items: list[dict[str, Any]]) -> None:
    """Every byte comes in time, the whole never."""
    handler.reply(200, b"", length=10_000)
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def refusing(text: str, status: int) -> Answer:
    """Refuses a request that holds a response `text`."""

    def answer(handler: Handler, items: list[dict[str, Any]]) -> None:
        if any(item["response"] == text for item in items):
            return handler.reply(status, b"what is that?")
        return lengths(handler, items)

    return answer


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    running: list[Service] = []

    def start(*answers: Answer) -> Service:
        running.append(Service(*answers))
        return running[-1]

    yield start
    for service in running:
        service.shutdown()
        service.server_close()


def ask(services: Sequence[Service | str], samples: Sequence[RewardInput], **fields: Any) -> Outcome:
    urls = tuple(service if isinstance(service, str) else service.url for service in services)
    quick = {
        "timeout": 10.0,
        "breaker_seconds": 0.05,
        "retries": 2,
    }
    service = RemoteService(RemoteReward(type="remote", urls=urls, **{**quick, **fields}))
    try:
        return service(samples)
    finally:
        service.close()
        service.close()


def batch(*responses: str) -> list[RewardInput]:
    return [
        RewardInput(f"p{i}", f"prompt {i}", text, (1, 2), (3, i), i != 1, {"answer": i})
        for i, text in enumerate(responses)
    ]


def test_scores_come_in_the_order_of_the_samples(serve: Any) -> None:
    services = serve(sleepy(0.1), lengths), serve(lengths)
    outcome = ask(services, batch(*("x" * n for n in range(20))), items_per_request=3)
    assert outcome == Outcome([float(n) for n in range(20)])
    assert sorted(len(items) for service in services for items in service.seen) == [2, *[3] * 6]
    assert all(service.seen for service in services)


def test_a_service_that_needs_the_group_gets_all_responses_to_a_prompt_in_a_request(serve: Any) -> None:
    def ranks(handler: Handler, items: list[dict[str, Any]]) -> None:
        lengths = [len(item["response"]) for item in items]
        is_bad = any(item["response"] == "bad" for item in items)
        scores = json.dumps({"scores": [max(lengths) - length for length in lengths]})
        handler.reply(422 if is_bad else 200, scores.encode())

    service = serve(ranks)
    samples = [
        RewardInput(prompt, "", response, (1,), (2,), True)
        for prompt, response in (("p", "a"), ("q", "bad"), ("p", "abc"), ("q", "abc"), ("r", "ab"))
    ]
    outcome = ask([service], samples, needs_group=True, items_per_request=1)
    assert [outcome.values[i] for i in (0, 2, 4)] == [2.0, 0.0, 0.0]
    assert list(outcome.reasons) == [1, 3], "a part of the group of q would get other values"
    asked = sorted([item["prompt_id"] for item in items] for items in service.seen)
    assert asked == [["p", "p"], ["q", "q"], ["r"]]


def test_no_samples_send_no_request(serve: Any) -> None:
    service = serve(lengths)
    assert ask([service], []) == Outcome([])
    assert service.seen == []


def test_an_item_follows_the_protocol(serve: Any) -> None:
    plain, with_tokens = serve(lengths), serve(lengths)
    ask([plain], batch("a", "b"))
    ask([with_tokens], batch("a", "b"), send_tokens=True)
    item = {
        "prompt": "prompt 1",
        "response": "b",
        "prompt_id": "p1",
        "meta": {"answer": 1},
        "finished": False,
    }
    assert plain.seen[0][1] == item
    assert with_tokens.seen[0][1] == item | {"prompt_ids": [1, 2], "response_ids": [3, 1]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sleepy(0.6), "gave no answer within 0.3 s"),
        (trickling, "gave no answer within 0.3 s"),
        (with_status(500), "answers with status 500: b'no'"),
        (with_status(503), "answers with status 503"),
        (with_status(429), "answers with status 429"),
        (truncated, "cannot be reached: peer closed connection"),
        (with_body(" " * (MAX_ANSWER_BYTES + 1)), f"longer than {MAX_ANSWER_BYTES} bytes"),
        (with_body('{"scores": [1.0, 2.0]}'), "gave 2 scores for 1 items"),
        (with_body("<html>"), "must answer {\"scores\": [...]} with numbers; got b'<html>'"),
    ],
)
def test_a_failure_is_tried_again_and_reports_the_answer(
    serve: Any, answer: Answer, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve(answer, lengths)
    timeout = 0.3 if "within" in message else 10.0
    assert ask([service], batch("abc"), timeout=timeout) == Outcome([3.0])
    assert message in caplog.text
    assert len(service.seen) == 2


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"[1.0]", "got b'[1.0]'"),
        (b"{}", "'scores'"),
        (b'{"scores": 1.0}', "must answer"),
        (b'{"scores": ["1.0"]}', "'1.0' is no number"),
        (b'{"scores": [true]}', "'True' is no number"),
        (b'{"scores": [[1.0]]}', "is no number"),
        (b"[" * 100_000, "must answer"),
        (b'{"scores": [1' + b"0" * 400 + b"]}", "must answer"),
        (b"\xff\xfe", "must answer"),
        (b"", "must answer"),
    ],
)
def test_an_answer_outside_the_protocol_is_a_failure(body: bytes, wrong: str) -> None:
    with pytest.raises(Failure) as failed:
        read_answer(body, 1, "h:1")
    assert wrong in str(failed.value)
    assert len(str(failed.value)) < 300


def test_null_or_non_finite_is_an_item_without_a_score() -> None:
    outcome = read_answer(
        b'{"scores": [1, null, NaN, 1e999], "errors": {"1": "too\\u001b[31m long"}}', 4, "h:1"
    )
    assert outcome.values[0] == 1.0
    assert outcome.reasons[1] == r"h:1 answers: 'too\x1b[31m long'"
    assert [outcome.reasons[i].split(",")[0] for i in (2, 3)] == ["it returned nan", "it returned inf"]


@pytest.mark.parametrize("status", [503, 422])
def test_scores_of_an_earlier_try_are_kept_if_the_last_one_fails(serve: Any, status: int) -> None:
    partial = with_body('{"scores": [1, null, 3], "errors": {"1": "too long"}}')
    service = serve(partial, partial, with_status(status))
    outcome = ask([service], batch("a", "b", "c"))
    assert len(service.seen) == 3
    assert list(outcome.reasons) == [1] and "too long" in outcome.reasons[1]
    assert outcome.values[0] == 1.0 and outcome.values[2] == 3.0


@pytest.mark.parametrize("status", [422, 413, 400, 500])
def test_an_item_that_is_refused_costs_no_other_its_score(serve: Any, status: int) -> None:
    service = serve(refusing("bad", status))
    outcome = ask([service], batch("a", "bb", "bad", "dddd", "eeeee"), items_per_request=4, on_error="mask")
    assert list(outcome.reasons) == [2]
    assert f"status {status}: b'what is that?'" in outcome.reasons[2]
    assert [v for v in outcome.values if not math.isnan(v)] == [1.0, 2.0, 4.0, 5.0]


def test_a_refusal_is_not_repeated(serve: Any) -> None:
    service = serve(with_status(422))
    ask([service], batch("a"))
    assert len(service.seen) == 1


def test_a_replica_that_fails_is_left_alone(serve: Any) -> None:
    good, bad = serve(lengths), serve(with_status(503))
    outcome = ask(
        [bad, good],
        batch(*"abcdefghij"),
        items_per_request=1,
        concurrency=1,
        breaker_failures=2,
        breaker_seconds=60,
    )
    assert outcome.values == [1.0] * 10
    assert len(bad.seen) == 2
    assert len(good.seen) == 10


def test_a_replica_that_is_down_is_passed_over(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert ask([f"http://127.0.0.1:{port}/score", serve(lengths)], batch("ab", "abc")).values == [2.0, 3.0]


def test_unreachable_replicas_fail_in_time(serve: Any) -> None:
    service = serve(with_status(503))
    began = time.monotonic()
    outcome = ask(
        [service], batch("a", "b", "c"), items_per_request=1, breaker_failures=1, timeout=0.2, retries=1
    )
    # Each of two tries waits at most 0.2 + 0.05 s for a replica and 0.2 s for its answer.
    assert time.monotonic() - began < 10
    assert len(outcome.reasons) == 3


def test_short_outage_is_survived(serve: Any) -> None:
    service = serve(*[with_status(503)] * 3, lengths)
    assert ask([service], batch("ab"), breaker_failures=2, retries=3).values == [2.0]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (302, "redirects are not followed"),
        (401, "RLHF_REWARD_TOKEN"),
        (403, "RLHF_REWARD_TOKEN"),
        (404, "path of the url"),
        (410, "path of the url"),
        (415, "application/json"),
    ],
)
def test_permanent_error_ends_the_step_at_once(serve: Any, status: int, words: str) -> None:
    elsewhere = serve(lengths)
    service = serve(with_status(status, Location=elsewhere.url))
    with pytest.raises(RewardError, match=f"status {status}, .*{words}"):
        ask([service], batch("a"), on_error="mask")
    assert (len(service.seen), len(elsewhere.seen)) == (1, 0)


def test_the_certificate_is_checked_against_the_name_of_the_url(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = serve(lengths)
    use_https(service, monkeypatch, self_signed(tmp_path / "both.pem", "localhost"))
    right = f"https://localhost:{service.server_port}/score"
    outcome = ask([right.replace("localhost", "127.0.0.1")], batch("a"), retries=0)
    assert "CERTIFICATE_VERIFY_FAILED" in outcome.reasons[0] and service.seen == []
    assert ask([right], batch("a")) == Outcome([1.0])


def use_https(service: Service, monkeypatch: pytest.MonkeyPatch, certificate: Path) -> None:
    """Serve over TLS with a trusted certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    service.socket = context.wrap_socket(service.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


def self_signed(file: Path, name: str) -> Path:
    """A certificate for `name` and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            own, own, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    file.write_bytes(key.private_bytes(pem, form, plain) + certificate.public_bytes(pem))
    return file


def test_proxies_of_the_environment_are_not_asked(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, proxy = serve(lengths), serve(lengths)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    ask([service], batch("a"))
    assert (len(service.seen), len(proxy.seen)) == (1, 0)


def test_the_token_goes_along(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(lengths)
    ask([service], batch("a"))
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    ask([service], batch("a"))
    assert [headers.get("authorization") for headers in service.headers] == [None, "Bearer s3cret"]


@pytest.mark.parametrize("value", ["s3cret-s3cret\n", " s3cret-s3cret", "\r\ns3cret-s3cret\r\n"])
def test_line_break_around_the_token_is_ignored(
    serve: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    service = serve(lengths)
    monkeypatch.setenv(TOKEN_VARIABLE, value)
    ask([service], batch("a"))
    assert service.headers[0].get("authorization") == "Bearer s3cret-s3cret"


@pytest.mark.parametrize("value", ["s3cret-s3\u00e9", "s3cret-\ns3", "s3cret s3", "\udcff-s3cret", " \n"])
def test_token_that_is_no_valid_header_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, value)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as refused:
        ask(["http://127.0.0.1:9/score"], batch("a"))
    assert "s3" not in str(refused.value)


@pytest.mark.parametrize(
    ("scheme", "address", "refused"),
    [
        ("http", "93.184.215.14", True),
        ("http", "2606:2800:21f::1", True),
        ("https", "93.184.215.14", False),
        ("http", "10.1.2.3", False),
        ("http", "fe80::1%eth0", False),
    ],
)
def test_a_token_is_not_sent_in_clear_text_to_a_public_address(
    monkeypatch: pytest.MonkeyPatch, scheme: str, address: str, refused: bool
) -> None:
    """Neither before the run, nor where the token is known on the cluster alone."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (address, 0))])
    url = f"{scheme}://a.example/x"
    config = config_from_tree({"ppo": {"rewards": [{"type": "remote", "urls": [url]}]}}, "test")
    found = [str(finding) for finding in check_rewards(config)]
    assert ["must be https where a token is sent" in text for text in found] == [True] * refused
    assert "s3cret" not in "".join(found)
    source = RemoteReward(type="remote", urls=(url,))
    if refused:
        with pytest.raises(ConfigError, match="reward remote: its url must be https where a token is sent"):
            RemoteService(source)
        judge = ChatServiceConfig(url=url, model="m", api_key_env=TOKEN_VARIABLE)
        with pytest.raises(ConfigError, match="judge: its url must be https where a token is sent"):
            ask_service("judge", judge, ["?"], lambda *_: None)
    else:
        RemoteService(source).close()
    monkeypatch.delenv(TOKEN_VARIABLE)
    RemoteService(source).close()
