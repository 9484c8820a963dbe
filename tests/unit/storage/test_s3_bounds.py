"""Whatever an S3 server does, each call of the store ends in bounded time and memory, with an error that
names it. So does the listing of a data source.

The real client against a server on loopback that misbehaves; a sound one is in
`tests/integration/test_store_s3.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.data import sources
from rlhf_core.errors import ConfigError, RLHFError, StoreError, StoreUnavailable
from rlhf_core.storage.s3 import S3Limits, S3Objects
from rlhf_core.storage.store import Store

Answer = Callable[[BaseHTTPRequestHandler], None]
PIECE = b"x" * 2**16


def _head(handler: BaseHTTPRequestHandler, length: int) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


def nothing(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(20)


def byte_by_byte(handler: BaseHTTPRequestHandler) -> None:
    _head(handler, 10_000)
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.1)


def without_end(handler: BaseHTTPRequestHandler) -> None:
    _head(handler, 10**13)
    while True:
        handler.wfile.write(PIECE)


def empty_pages(handler: BaseHTTPRequestHandler) -> None:
    """A page of a listing without objects, and with a token for another page."""
    more = (
        f"<IsTruncated>true</IsTruncated><NextContinuationToken>{time.monotonic_ns()}</NextContinuationToken>"
    )
    body = f"<ListBucketResult><Name>b</Name>{more}</ListBucketResult>".encode()
    _head(handler, len(body))
    handler.wfile.write(body)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], str]]:
    """Start a server that gives one answer to all requests, and return its address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                with suppress(OSError):
                    answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = respond

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture
def bucket(serve: Callable[[Answer], str]) -> Callable[[Answer], Store]:
    def start(answer: Answer) -> Store:
        # Where size is the limit, a busy machine must not reach that of time first.
        seconds = 30.0 if answer is without_end else 1.5
        limits = S3Limits(request_seconds=seconds, least_seconds=seconds, small_bytes=2**20)
        return Store("s3://bucket/x", serve(answer), retry_seconds=0.2, s3_limits=limits)

    return start


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (nothing, StoreUnavailable, "could not read s3://bucket/x/a"),
        (byte_by_byte, StoreUnavailable, "could not read s3://bucket/x/a"),
        (without_end, StoreError, "more than 1048576 bytes for an object that must be small"),
    ],
)
def test_reading_a_small_object_ends_in_time_and_memory(
    answer: Answer, error: type[RLHFError], words: str, bucket: Callable[[Answer], Store]
) -> None:
    store = bucket(answer)
    started = time.monotonic()
    with pytest.raises(error, match=words):
        store.read_bytes("a")
    assert time.monotonic() - started < 15


def test_a_file_of_any_size_has_at_most_as_many_parts_as_s3_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Client:
        def put_file(self, source: str, key: str, *, chunksize: int, digest: object) -> None:
            seen.append(chunksize)

    bucket = S3Objects("bucket", "", None, 1.0)
    monkeypatch.setitem(vars(bucket), "_fs", Client())
    for size in (1, 200 * 2**30):
        with (tmp_path / "x").open("wb") as file:
            file.truncate(size)
        bucket.put_file(tmp_path / "x", "a", link=False)
    assert seen[0] == S3Limits().part_bytes
    assert 200 * 2**30 / 10_000 <= seen[1] < 2 * S3Limits().part_bytes


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (byte_by_byte, StoreUnavailable, "could not read s3://bucket/x/a"),
        (without_end, StoreError, "10000000000000 bytes or more, where 5 were expected"),
    ],
)
def test_a_file_that_is_downloaded_ends_in_time_and_size(
    answer: Answer, error: type[RLHFError], words: str, bucket: Callable[[Answer], Store], tmp_path: Path
) -> None:
    store = bucket(answer)
    started = time.monotonic()
    with pytest.raises(error, match=words):
        store.get_file("a", tmp_path / "a", 5 if answer is without_end else None)
    assert time.monotonic() - started < 15
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (empty_pages, StoreUnavailable, "could not list s3://bucket/x/a"),
        (nothing, StoreUnavailable, "could not list s3://bucket/x/a.*no whole answer within 2 s"),
        (byte_by_byte, StoreUnavailable, "could not list s3://bucket/x/a"),
    ],
    ids=["empty pages without end", "nothing", "byte by byte"],
)
def test_a_listing_ends(
    answer: Answer, error: type[RLHFError], words: str, bucket: Callable[[Answer], Store]
) -> None:
    store = bucket(answer)
    started = time.monotonic()
    with pytest.raises(error, match=words):
        store.list("a")
    assert time.monotonic() - started < 15


def test_a_listing_of_a_data_source_ends(serve: Callable[[Answer], str]) -> None:
    def folder_without_end(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "HEAD":  # no object has this name
            handler.send_error(404)
        else:
            empty_pages(handler)

    store = StoreConfig(endpoint=serve(folder_without_end), retry_seconds=0.2)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"cannot list s3://bucket/data.*no whole answer within 2 s"):
        sources._objects(Source(path="s3://bucket/data"), store, least_seconds=1.5)
    assert time.monotonic() - started < 15


def test_a_machine_without_credentials_is_told_to_set_them(
    bucket: Callable[[Answer], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match=r"NoCredentialsError: .*; set AWS_ACCESS_KEY_ID and AWS_SECRET"):
        bucket(nothing).check()


@pytest.mark.parametrize("answer", [nothing, byte_by_byte])
def test_the_check_before_the_start_ends_soon(answer: Answer, bucket: Callable[[Answer], Store]) -> None:
    store = bucket(answer)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"store\.url='s3://bucket/x' cannot be used now"):
        store.check(0.2)
    assert time.monotonic() - started < 15
