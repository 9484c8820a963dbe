"""A call of MLflow's client ends soon, within bounded memory, and reports its error, whatever the server
does.

The real client runs against a misbehaving server on loopback; `tests/integration/test_tracking_server.py`
uses a real server.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from urllib3.connection import HTTPConnection

from rlhf_cli.app import Stopped
from rlhf_core.errors import InfrastructureError
from rlhf_core.tracking import bounded_http
from rlhf_core.tracking.champions import registered_models
from rlhf_core.tracking.mlflow_client import Mlflow, UnusableAnswer
from rlhf_core.tracking.tracker import Tracking

Serve = Callable[[socket.socket], None]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Serve], str]]:
    """Start a server that answers every connection by the function given; its address. One try of a second
    each.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))

    def start(serve: Serve) -> str:
        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                _take_request(connection)
                serve(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    listener.close()


def _take_request(connection: socket.socket) -> None:
    data = b""
    while (head := data.partition(b"\r\n\r\n"))[1] == b"" or len(head[2]) < _length(head[0]):
        if not (part := connection.recv(65536)):
            raise ConnectionError
        data += part


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)content-length: (\d+)", head)
    return int(found[1]) if found else 0


def _whole(status: str, body: bytes, *headers: str) -> Serve:
    head = "\r\n".join(
        [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    )
    return lambda connection: connection.sendall(head.encode() + body)


def _forever(start: bytes, piece: bytes, pause: float) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            time.sleep(pause)

    return serve


HANGS: dict[str, Serve] = {
    "says nothing": lambda connection: time.sleep(30),
    "a body that comes byte by byte": _forever(OK + b"Content-Length: 9999\r\n\r\n", b" ", 0.2),
    "a chunked body that comes byte by byte": _forever(
        OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 0.2
    ),
    "headers without an end": _forever(OK, b"X-More: 1\r\n", 0.2),
    "a status line that comes byte by byte": _forever(b"HTTP/1.1 200 ", b"O", 0.2),
    "informational answers without an end": _forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.2),
}


@pytest.mark.parametrize("what", HANGS)
def test_slow_answer_ends_at_the_time_limit(what: str, server: Callable[[Serve], str]) -> None:
    mlflow = Mlflow(server(HANGS[what]), "e")
    _ = mlflow._client  # its import takes seconds
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)no whole answer within 1 s|timed out"):
        mlflow.ping()
    assert time.monotonic() - started < 15


def test_no_answer_is_read_if_the_time_ends_while_connecting(
    server: Callable[[Serve], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = HTTPConnection._new_conn

    def connect_slowly(connection: HTTPConnection) -> socket.socket:
        time.sleep(1.2)
        return connect(connection)

    def serve_slowly(connection: socket.socket) -> None:
        connection.sendall(OK + b"Content-Length: 200\r\n\r\n")
        for _ in range(200):
            time.sleep(0.2)
            connection.sendall(b" ")

    mlflow = Mlflow(server(serve_slowly), "e")
    _ = mlflow._client
    monkeypatch.setattr(HTTPConnection, "_new_conn", connect_slowly)
    started = time.monotonic()
    with pytest.raises(Exception, match="no whole answer within 1 s"):
        mlflow.ping()
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Stopped])
def test_interrupt_is_not_replaced_by_a_timeout(
    raised: type[BaseException], server: Callable[[Serve], str]
) -> None:
    mlflow = Mlflow(server(HANGS["says nothing"]), "e")
    _ = mlflow._client

    def interrupt(number: int, frame: object) -> None:
        raise raised(signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(raised):
            mlflow.ping()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests"])
def test_retry_after_is_not_waited_for(
    status: str, server: Callable[[Serve], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    mlflow = Mlflow(server(_whole(status, b"", "Retry-After: 3600")), "e")
    _ = mlflow._client
    started = time.monotonic()
    with pytest.raises(Exception, match="too many"):
        mlflow.ping()
    assert time.monotonic() - started < 60  # and not 3600


def test_an_answer_that_does_not_end_is_not_kept_in_memory(
    server: Callable[[Serve], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # the limit of the size comes first
    endless = _forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 2**16 + b"\r\n", 0.0)
    with pytest.raises(Exception, match="larger than 67108864 bytes"):
        Mlflow(server(endless), "e").ping()


def test_a_file_is_given_the_time_that_its_size_needs(server: Callable[[Serve], str]) -> None:
    from requests import Request, Session

    adapter = bounded_http.BoundedAdapter()
    small, large = (
        Session().prepare_request(Request("PUT", "http://h", data=b"x" * size)) for size in (1, 5_000_000)
    )
    assert 10 <= adapter._seconds(small, 10) < 10.1 and adapter._seconds(large, 10) == 60


CALLS: dict[str, Callable[[Mlflow], object]] = {
    "the experiment": lambda mlflow: mlflow.experiment_id,
    "a new run": lambda mlflow: mlflow.create_run("r", {}),
    "a version": lambda mlflow: mlflow.create_version("m", source="s", run_id=None, tags={}, description=""),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_success_is_none(call: str, server: Callable[[Serve], str]) -> None:
    mlflow = Mlflow(server(_whole("200 OK", b"{}", "Content-Type: application/json")), "e")
    if call == "a new run":
        mlflow.__dict__["experiment_id"] = "1"
    with pytest.raises(UnusableAnswer, match="the answer names no"):
        CALLS[call](mlflow)
    assert not mlflow.has_run("0" * 32)


def test_points_are_kept_if_the_answer_is_unusable(
    server: Callable[[Serve], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = Tracking(Mlflow(server(_whole("200 OK", b"{}")), "e"), tmp_path / "spool")
    run = tracking.stage_run(None, "ppo", "k")
    run.log_metrics({"loss": 1.0}, 0)
    run.finish("FINISHED")
    assert (
        run.unsent == 1
        and "does not take this (UnusableAnswer: the answer names no experiment" in caplog.text
    )


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        ("401 Unauthorized", b"You are not authenticated", "refuses these credentials"),
        (
            "403 Forbidden",
            b'{"error_code": "PERMISSION_DENIED", "message": "no"}',
            "refuses these credentials",
        ),
        (
            "400 Bad Request",
            b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "no"}',
            "does not take this",
        ),
        ("502 Bad Gateway", b"<html>", "does not answer"),
        ("200 OK", b"<html>", "does not answer"),
    ],
)
def test_error_of_a_server_is_quoted(
    status: str, body: bytes, words: str, server: Callable[[Serve], str], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    tracking = Tracking(Mlflow(server(_whole(status, body)), "e"), tmp_path / "spool")
    assert tracking.parent_run("p", "demo") is None
    assert words in caplog.text
    with pytest.raises(InfrastructureError, match=f"did not list its models: it {words}") as failed:
        registered_models(tracking.mlflow)
    if "credentials" in words:
        assert "MLFLOW_TRACKING_TOKEN" in caplog.text
        assert "MLFLOW_TRACKING_TOKEN" in failed.value.message


def test_a_sound_answer_is_read_whole_over_one_connection(server: Callable[[Serve], str]) -> None:
    body = json.dumps({"experiments": [{"experiment_id": "1", "name": "x" * 200_000}]}).encode()
    seen: list[int] = []

    def serve(connection: socket.socket) -> None:
        for _ in range(3):
            seen.append(connection.fileno())
            connection.sendall(OK + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            _take_request(connection)

    mlflow = Mlflow(server(serve), "e")
    assert mlflow.ping() and mlflow.ping()
    assert len(seen) == 2 and len(set(seen)) == 1
